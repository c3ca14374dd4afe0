"""Fills in the cards of exported policies and rollouts (model_card.md, dataset_card.md) from the run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stalewise import __version__
from stalewise.config import RunConfig
from stalewise.config.template import toml
from stalewise.integrations.hub.provenance import BasePolicy, explicit_settings, without_paths
from stalewise.reporting.read import Run
from stalewise.reporting.render import describe_stage_end
from stalewise.reporting.summary import (
    count_noun,
    describe_lineage,
    findings,
    format_interval,
    format_value,
    time_shares,
    verdict_of,
)
from stalewise.statistics import format_duration
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory, versions

MOST_ROWS = 16  # of a table of stages
ENVIRONMENT = ("stalewise", "python", "torch", "transformers", "device", "threads")
OPTIMIZER = ("learning_rate", "schedule", "warmup_updates", "weight_decay", "max_grad_norm", "step_control")
SAMPLER = ("engine", "temperature", "top_p", "top_k", "max_new_tokens", "weights")


def model_card(run: Run, config: RunConfig, version: int, base: BasePolicy, *, adapter: bool, config_name: str) -> str:
    """The card of one version of a run, with metadata for the hub."""
    from huggingface_hub import ModelCard, ModelCardData

    from stalewise.objectives import get_objective

    seen = up_to(run, version)
    evaluation = next((record for record in run.evaluations if record["version"] == version), None)
    dataset = hub_dataset(config.task.name, str(config.task.options.get("path", "")))
    has_base = base.name and (base.is_itself or not adapter)
    metadata = ModelCardData(
        base_model=base.name if has_base else None,
        base_model_relation=("adapter" if adapter else "finetune") if has_base else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        license=base.license or None,
        datasets=[dataset] if dataset else None,
        tags=["stalewise", "reinforcement-learning", "rlvr", config.objective.name, *(["lora"] if adapter else [])],
        model_name=config.name,
        eval_results=_results(evaluation, dataset) if evaluation is not None else [],
    )
    verdict, sentence = verdict_of(seen)
    known_time = f"{format_duration(run.total_seconds)} ({time_shares(run.seconds)})" if run.total_seconds > 0 else ""
    body = _template("model_card.md").render(
        **_common(run, config, base, config_name),
        version=version,
        adapter=adapter,
        adapted=adapted_matrices(run.directory, version),
        verdict=verdict,
        sentence=sentence,
        evaluations=seen.evaluations,
        pass_at=_largest_k(seen.evaluations),
        # An objective of a program is known to that program alone; the config has what was set.
        parameters=config.objective.params
        if "@" in config.objective.name
        else get_objective(config.objective.name).settings(config.objective.params),
        optimizer={key: getattr(config.optimizer, key) for key in OPTIMIZER},
        schedule=describe_schedule(seen, config.schedule.kind),
        stages=stage_rows(seen),
        most_rows=MOST_ROWS,
        budget=describe_drift(seen, is_planned=config.plan.learning_rate != "given"),
        seconds=known_time or "unknown",
        environment={key: run.environment[key] for key in ENVIRONMENT if key in run.environment},
        limits=limitations(run, seen, version, base, seed=config.seed, adapter=adapter),
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


def dataset_card(run: Run, config: RunConfig, base: BasePolicy, *, config_name: str) -> str:
    """The card of a run's rollouts; its metadata tells `datasets` where the shards are."""
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
        batches=run.batches,
        limits=[text for text in findings(run) if text not in run.notes],
    )
    return str(DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


def _common(run: Run, config: RunConfig, base: BasePolicy, config_name: str) -> dict[str, Any]:
    sources = [Path(str(batch.get("directory", "unknown"))) for batch in run.sources]
    settings, prefix = explicit_settings(config), "task.options."
    return {
        "config": config,
        "base": base,
        "release": run.environment.get("stalewise", __version__),
        "config_name": config_name,
        "settings": {key: toml(value) for key, value in settings.items()},
        "sampler": {key: getattr(config.sampler, key) for key in SAMPLER},
        "task_options": {key.removeprefix(prefix): settings[key] for key in settings if key.startswith(prefix)},
        "sources": ["/".join(path.parts[-3:]) for path in sources],
        "planned": run.planned_updates,
        "lineage": describe_lineage(_without_places(run)),
    }


def _without_places(run: Run) -> Run:
    """The run with the names of the runs it was forked from, instead of their paths on this machine."""

    def named(record: Mapping[str, Any]) -> dict[str, Any]:
        shared = {
            key: value for key, value in record["changes"].items() if not key.startswith(("storage.", "sampler.server"))
        }
        return {**record, "run": f"the run {Path(record['run']).name}", "changes": without_paths(shared)}

    fork = {**named(run.fork), "ancestors": list(map(named, run.fork["ancestors"]))} if run.fork else {}
    return replace(run, fork=fork, config_changes=[])


@cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"interval": format_interval, "value": format_value}
    environment.filters["cell"] = lambda value: format_value(value).replace("|", "\\|").replace("\n", " ")
    return environment.get_template(name)


def adapted_matrices(run: Path, version: int) -> list[str]:
    """What a version's adapter was put on, by the names in PEFT's config; none without an adapter."""
    path = checkpoint_directory(run, version) / "adapter" / "adapter_config.json"
    record = read_json(path) if path.is_file() else {}
    modules = record.get("target_modules") or []  # a pattern, in adapters that others made
    return [*([modules] if isinstance(modules, str) else modules), *(record.get("target_parameters") or [])]


def up_to(run: Run, version: int) -> Run:
    """The run as it was when this version was made."""
    taken = run.column("update") < version
    metrics = {key: values[taken] for key, values in run.metrics.items()}
    used = set(metrics.get("generation_batch", np.empty(0)).tolist())
    return replace(
        run,
        metrics=metrics,
        evaluations=[record for record in run.evaluations if record["version"] <= version],
        batches=[batch for batch in run.batches if batch.generation_batch in used],
    )


def hub_dataset(task: str, path: str) -> str:
    """The hub name of the training data; empty if it has none."""
    is_name = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
    return path if task == "hf" and is_name else ""


def _results(evaluation: Mapping[str, Any], dataset: str) -> list[Any]:
    from huggingface_hub import EvalResult

    samples, prompts = evaluation["samples"], evaluation["prompts"]
    how = {"confidence": 0.95, "interval": "bootstrap over prompts", "prompts": prompts, "samples": samples}
    metrics = {f"avg@{samples}": ("accuracy", evaluation["accuracy"])}
    metrics |= {f"pass@{k}": ("pass@k", values) for k, values in evaluation.get("pass_at", {}).items() if int(k) > 1}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset or str(evaluation["task"]),
            dataset_name=f"{evaluation['task']}, {count_noun(prompts, 'held-out prompt')}",
            metric_type=kind,
            metric_name=name,
            metric_value=round(values["value"], 4),
            metric_args={**how, "low": round(values["low"], 4), "high": round(values["high"], 4)},
        )
        for name, (kind, values) in metrics.items()
        if math.isfinite(values["value"])
    ]


def _largest_k(evaluations: list[dict[str, Any]]) -> str:
    """The largest k above 1 for which all evaluations have pass@k; empty if there is none."""
    known = [set(map(str, record.get("pass_at", {}))) for record in evaluations]
    common = sorted(set.intersection(*known), key=int) if known else []
    return common[-1] if common and common[-1] != "1" else ""


def stage_rows(run: Run) -> list[dict[str, Any]]:
    """One row per generation batch of the run itself."""
    batch, age = run.column("generation_batch"), run.column("age_max")
    rows: list[dict[str, Any]] = []
    for manifest in run.batches:
        number = manifest.generation_batch
        ages = age[batch == number] if len(age) == len(batch) else age[:0]
        rows.append(
            {
                "number": number,
                "version": manifest.version,
                "rollouts": manifest.rows,
                "reward": "unknown" if manifest.reward_mean is None else f"{manifest.reward_mean:.3f}",
                "updates": int((batch == number).sum()),
                "ages": f"{ages.min():.0f} to {ages.max():.0f}" if len(ages) else "unknown",
                "ended": describe_stage_end(run.stages.get(number + 1, {}).get("ended")) if run.stages else "",
            }
        )
    return rows


def describe_schedule(run: Run, kind: str) -> str:
    """When rollouts were generated and how old they got."""
    schedule, worst = run.schedule, run.finite("age_max").max(initial=0.0)
    ages = f"Rollouts were at most {worst:.0f} updates old when they were used."
    if run.sources:
        return f"Nothing was generated: the run learned once from existing rollouts. {ages}"
    if run.is_open_ended:
        how = f"in {count_noun(len(run.batches), 'stage')}, each of which ended when its rollouts were spent"
    else:
        lag = f", generation {schedule.lag} batches ahead" if schedule.lag else ""
        size = f"µ = {schedule.updates_per_generation} updates on each generation batch{lag}"
        how = f"{kind}, {size}, {schedule.generation_batches} batches in all"
    return f"{count_noun(schedule.updates, 'update')}, {how}. {ages}"


def describe_drift(run: Run, *, is_planned: bool) -> str:
    """The drift limits of the calibration, and how much of them was used."""
    path = run.directory / "limits.json"
    limits = read_json(path).get("limits") if path.is_file() else None
    if limits is None:
        return "The staleness–learning-rate law was not calibrated for this run: its distance from collapse is unknown."
    used = [run.finite(key).max(initial=0.0) for key in ("batch_budget", "horizon_budget")]
    return (
        f"A calibration of this model and task gives drift limits of R_batch = {limits[0]:.3g} within one generation "
        f"batch and R_crit = {limits[1]:.3g} over a run (lower ends of their intervals). At most {used[0]:.0%} and "
        f"{used[1]:.0%} of these were used.{' The learning rate was planned from them.' if is_planned else ''}"
    )


def limitations(run: Run, seen: Run, version: int, base: BasePolicy, *, seed: int, adapter: bool) -> list[str]:
    """What the numbers of the card do not say."""
    newest = max([version, *versions(run.directory)])
    is_evaluated = version in {record["version"] for record in run.evaluations}
    done = f"{run.updates} of {run.planned_updates} updates"
    texts = [
        f"This is version {version}; the run has continued to version {newest}." if newest > version else "",
        "" if run.is_complete else f"The run was not finished: {done} were made.",
        "" if is_evaluated else "This version was not evaluated.",
        *(text for text in findings(seen) if text not in run.notes),
        f"One run with one seed ({seed}): the variation between seeds was not measured.",
        "It was evaluated only on held-out prompts of its training task: the effect of training on other abilities of "
        "the model is unknown.",
        "Rewards came from a program that scores answers: what the verifier does not read was not judged, and there "
        "was no safety training.",
    ]
    if adapter and not (base.name and base.is_itself):
        texts.append("The base model of the adapter is not on a hub: the adapter cannot be used without it.")
    if base.name and not base.license:
        texts.append(f"The licence is that of {base.name}.")
    return [text for text in texts if text]


def size_category(rows: int) -> str:
    """The hub's name for a number of rows."""
    names = ["1K", "10K", "100K", "1M", "10M", "100M", "1B"]
    size = len(str(max(rows, 1))) - 3
    if size < 1:
        return "n<1K"
    return f"{names[size - 1]}<n<{names[size]}" if size < len(names) else "n>1T"
