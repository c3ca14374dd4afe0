"""The cards of an exported policy and of exported rollouts: what a run directory says, for whoever meets the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stalewise import __version__
from stalewise.config import RunConfig
from stalewise.config.template import toml
from stalewise.integrations.hub.provenance import Base, explicit_settings
from stalewise.reporting.read import Run
from stalewise.reporting.render import ending
from stalewise.reporting.summary import counted, duration, findings, interval, shares, shown, verdict_of
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import versions

MOST_ROWS = 16  # of a table of stages
ENVIRONMENT = ("stalewise", "python", "torch", "transformers", "device", "threads")
OPTIMIZER = ("learning_rate", "schedule", "warmup_updates", "weight_decay", "max_grad_norm", "step_control")
SAMPLER = ("engine", "temperature", "top_p", "top_k", "max_new_tokens", "weights")


@dataclass(frozen=True, slots=True)
class StageRow:
    """A generation batch and what was learned from it."""

    number: int
    version: int
    rollouts: int
    reward: str
    updates: int
    ages: str
    ended: str


def model_card(run: Run, config: RunConfig, version: int, base: Base, *, adapter: bool, config_name: str) -> str:
    """The card of one version of a run, with metadata that a hub reads."""
    from huggingface_hub import ModelCard, ModelCardData

    from stalewise.objectives import get_objective

    seen = up_to(run, version)
    evaluation = next((record for record in run.evaluations if record["version"] == version), None)
    has_base = base.name and (base.is_itself or not adapter)
    metadata = ModelCardData(
        base_model=base.name if has_base else None,
        base_model_relation=("adapter" if adapter else "finetune") if has_base else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        license=base.license or None,
        datasets=[name] if (name := hub_dataset(config)) else None,
        tags=["stalewise", "reinforcement-learning", "rlvr", config.objective.name, *(["lora"] if adapter else [])],
        model_name=config.name,
        eval_results=_results(evaluation, config) if evaluation is not None else [],
    )
    verdict, sentence = verdict_of(seen)
    body = _template("model_card.md").render(
        **_common(run, config, base, config_name),
        version=version,
        adapter=adapter,
        trains_adapters=config.model.trains_adapters,
        verdict=verdict,
        sentence=sentence,
        evaluations=seen.evaluations,
        pass_at=_largest_k(seen.evaluations),
        parameters=get_objective(config.objective.name).settings(config.objective.params),
        optimizer={key: getattr(config.optimizer, key) for key in OPTIMIZER},
        schedule=schedule_in_words(seen, config),
        stages=stage_rows(seen),
        most_rows=MOST_ROWS,
        budget=budget_in_words(seen, config),
        seconds=_seconds(run),
        environment={key: run.environment[key] for key in ENVIRONMENT if key in run.environment},
        limits=limits(run, seen, config, version, base, adapter=adapter),
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


def dataset_card(run: Run, config: RunConfig, base: Base, *, config_name: str) -> str:
    """The card of a run's rollouts, with the table by which `datasets` finds the shards."""
    from huggingface_hub import DatasetCard, DatasetCardData

    rows = sum(batch.rows for batch in run.batches)
    files = [{"split": "train", "path": "rollouts/*/*.parquet"}]
    metadata = DatasetCardData(
        pretty_name=f"Rollouts of {config.name}",
        task_categories=["text-generation"],
        size_categories=size_category(rows),
        tags=["stalewise", "rollouts", "reinforcement-learning"],
        configs=[{"config_name": "default", "data_files": files}],
    )
    body = _template("dataset_card.md").render(
        **_common(run, config, base, config_name),
        rows=rows,
        tokens=sum(batch.tokens for batch in run.batches),
        batches=run.batches,
        limits=[text for text in findings(run) if text not in run.notes],
    )
    return str(DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


def _common(run: Run, config: RunConfig, base: Base, config_name: str) -> dict[str, Any]:
    sources = [Path(str(batch.get("directory", "unknown"))) for batch in run.sources]
    return {
        "config": config,
        "base": base,
        "release": run.environment.get("stalewise", __version__),
        "config_name": config_name,
        "said": {key: toml(value) for key, value in explicit_settings(config).items()},
        "sampler": {key: getattr(config.sampler, key) for key in SAMPLER},
        "task_options": said_options(config),
        "sources": ["/".join(path.parts[-3:]) for path in sources],
        "planned": run.planned_updates,
        "rollouts_per_update": config.batch.prompts * config.batch.group_size,
    }


@cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, made of the run's own config and numbers
    )
    environment.filters |= {"interval": interval, "shown": shown, "cell": _cell}
    return environment.get_template(name)


def _cell(value: Any) -> str:
    return shown(value).replace("|", "\\|").replace("\n", " ")


def up_to(run: Run, version: int) -> Run:
    """What had happened when this version was there."""
    taken = run.column("update") < version
    metrics = {key: values[taken] for key, values in run.metrics.items()}
    used = set(metrics.get("generation_batch", np.empty(0)).tolist())
    return replace(
        run,
        metrics=metrics,
        evaluations=[record for record in run.evaluations if record["version"] <= version],
        batches=[batch for batch in run.batches if batch.generation_batch in used],
    )


def hub_dataset(config: RunConfig) -> str:
    """The name on a hub of the data that was trained on; empty where it has none."""
    path = str(config.task.options.get("path", ""))
    is_name = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
    return path if config.task.name == "hf" and is_name else ""


def said_options(config: RunConfig) -> dict[str, Any]:
    """The task's options as they may be shown."""
    prefix = "task.options."
    return {
        key.removeprefix(prefix): value for key, value in explicit_settings(config).items() if key.startswith(prefix)
    }


def _results(evaluation: Mapping[str, Any], config: RunConfig) -> list[Any]:
    from huggingface_hub import EvalResult

    samples, prompts = evaluation["samples"], evaluation["prompts"]
    found = {f"avg@{samples}": ("accuracy", evaluation["accuracy"])}
    found |= {f"pass@{k}": ("pass@k", values) for k, values in evaluation.get("pass_at", {}).items() if int(k) > 1}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=hub_dataset(config) or str(evaluation["task"]),
            dataset_name=f"{evaluation['task']}, {counted(prompts, 'held-out prompt')}",
            metric_type=kind,
            metric_name=name,
            metric_value=round(values["value"], 4),
            metric_args={
                "confidence": 0.95,
                "low": round(values["low"], 4),
                "high": round(values["high"], 4),
                "interval": "bootstrap over prompts",
                "prompts": prompts,
                "samples": samples,
            },
        )
        for name, (kind, values) in found.items()
        if math.isfinite(values["value"])
    ]


def _largest_k(evaluations: list[dict[str, Any]]) -> str:
    """The largest k that pass@k is known for in all evaluations; empty where that is only 1."""
    known = [set(map(str, record.get("pass_at", {}))) for record in evaluations]
    common = sorted(set.intersection(*known), key=int) if known else []
    return common[-1] if common and common[-1] != "1" else ""


def stage_rows(run: Run) -> list[StageRow]:
    """What was generated and learned, batch by batch; empty for a run that learned from others' rollouts."""
    batch, age = run.column("generation_batch"), run.column("age_max")
    rows: list[StageRow] = []
    for manifest in run.batches:
        ages = age[batch == manifest.generation_batch] if len(age) == len(batch) else age[:0]
        reward = "unknown" if manifest.reward_mean is None else f"{manifest.reward_mean:.3f}"
        after = run.stages.get(manifest.generation_batch + 1, {}).get("ended")
        rows.append(
            StageRow(
                number=manifest.generation_batch,
                version=manifest.version,
                rollouts=manifest.rows,
                reward=reward,
                updates=int((batch == manifest.generation_batch).sum()),
                ages=f"{ages.min():.0f} to {ages.max():.0f}" if len(ages) else "unknown",
                ended=ending(after) if run.stages else "",
            )
        )
    return rows


def schedule_in_words(run: Run, config: RunConfig) -> str:
    """When rollouts were made and how old they got."""
    schedule, worst = run.schedule, run.finite("age_max").max(initial=0.0)
    ages = f"Rollouts were at most {worst:.0f} updates old when they were learned from."
    if run.sources:
        return f"Nothing was generated: the run learned once through rollouts that existed. {ages}"
    if run.is_open_ended:
        how = f"in {counted(len(run.batches), 'stage')}, each of which ended when its rollouts were spent"
    else:
        size = f"µ = {schedule.updates_per_generation} updates on each generation batch"
        lag = f", generation {schedule.lag} batches ahead" if schedule.lag else ""
        how = f"{config.schedule.kind}, {size}{lag}, {schedule.generation_batches} batches in all"
    return f"{counted(schedule.updates, 'update')}, {how}. {ages}"


def budget_in_words(run: Run, config: RunConfig) -> str:
    """What the law said this run bears, and how much of it was used."""
    path = run.directory / "limits.json"
    limits = read_json(path).get("limits") if path.is_file() else None
    if limits is None:
        return (
            "The staleness–learning-rate law was not calibrated for this run: how near it was to collapse is not known."
        )
    used = [run.finite(key).max(initial=0.0) for key in ("batch_budget", "horizon_budget")]
    planned = " The learning rate is the planned one." if config.plan.learning_rate != "given" else ""
    return (
        f"By a calibration of this model and task, the policy bears a drift of R_batch = {limits[0]:.3g} within one "
        f"generation batch and of R_crit = {limits[1]:.3g} over a run (lower ends of their intervals). At most "
        f"{used[0]:.0%} and {used[1]:.0%} of these were used.{planned}"
    )


def _seconds(run: Run) -> str:
    if run.total_seconds <= 0:
        return "unknown"
    return f"{duration(run.total_seconds)} ({shares(run.seconds)})"


def limits(run: Run, seen: Run, config: RunConfig, version: int, base: Base, *, adapter: bool) -> list[str]:
    """What a reader must not take the numbers for."""
    newest = max([version, *versions(run.directory)])
    evaluated = {record["version"] for record in run.evaluations}
    found = [
        f"This is version {version}; the run has gone on to version {newest}." if newest > version else "",
        ""
        if run.is_complete
        else f"The run was not finished: {run.updates} of {run.planned_updates} updates were made.",
        "" if version in evaluated else "This very version was not evaluated.",
        *(text for text in findings(seen) if text not in run.notes),
        f"One run with one seed ({config.seed}): how much another seed would differ was not measured.",
        "It was evaluated on held-out prompts of the task that it was trained on and on nothing else: what training "
        "did to anything else that the model can do is not known.",
        "Its only teacher was a program that scores answers: what the verifier does not read was not judged, and "
        "nothing was done about safety.",
    ]
    if adapter and not (base.name and base.is_itself):
        found.append("The model beneath the adapter is not on a hub: the adapter is of no use without it.")
    if base.name and not base.license:
        found.append(f"The licence is that of {base.name}.")
    return [text for text in found if text]


def size_category(rows: int) -> str:
    """How a hub calls a number of rows.

    >>> size_category(999), size_category(20_000), size_category(3_000_000)
    ('n<1K', '10K<n<100K', '1M<n<10M')
    """
    names = ["1K", "10K", "100K", "1M", "10M", "100M", "1B"]
    place = len(str(max(rows, 1))) - 3
    if place < 1:
        return "n<1K"
    return f"{names[place - 1]}<n<{names[place]}" if place < len(names) else "n>1T"
