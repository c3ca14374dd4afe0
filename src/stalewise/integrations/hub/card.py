"""Fills in the cards of exported policies and rollouts (model_card.md, dataset_card.md) from the run directory."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stalewise import __version__
from stalewise.config import RunConfig
from stalewise.config.run_directory import EXPORT_FORMAT, EXPORT_RECORD, flatten, read_config
from stalewise.config.template import toml
from stalewise.errors import StoreError, visible
from stalewise.models import embedded_policies, is_hub_name
from stalewise.models.gguf import SMOLLM2, is_gguf
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
from stalewise.store import atomic
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions
from stalewise.store.schema import EPISODE_SCHEMA, EPISODES

RECORD = EXPORT_RECORD
SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
MOST_ANCESTORS = 16  # length of a chain of runs that each started from a checkpoint of the one before


@contextlib.contextmanager
def new_folder(directory: Path, record: Mapping[str, Any], *, force: bool) -> Iterator[Path]:
    """Yield a temporary directory to fill; it becomes `directory`, with `record` and the checksums of its files.

    An existing directory is an error, unless it is an earlier export and `force` is given.
    """
    _check_free(directory, force)
    temporary = atomic.temporary_name(directory)
    try:
        with atomic.explain_write_errors(directory, 0):
            atomic.make_directory(temporary)
            yield temporary
        files = {
            path.relative_to(temporary).as_posix(): {"bytes": path.stat().st_size, "sha256": atomic.sha256_file(path)}
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        head = {"format": EXPORT_FORMAT, "stalewise": __version__}
        atomic.write_json_atomic(temporary / RECORD, {**head, **record, "files": files})
        if not os.path.lexists(directory):
            return atomic.commit_directory(temporary, directory)
        _check_free(directory, force)
        before = atomic.temporary_name(directory)
        directory.rename(before)  # not removed yet: at any moment one of the two is complete
        atomic.commit_directory(temporary, directory)
        shutil.rmtree(before)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def place_file(source: Path, target: Path, *, link: bool) -> None:
    """Copy or link one file. The run may continue meanwhile and remove old checkpoints."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source.resolve(strict=True)) if link else shutil.copyfile(source, target)
    except FileNotFoundError:
        raise StoreError(f"{source} was removed while it was copied: the run goes on; name a newer version") from None


def _check_free(directory: Path, force: bool) -> None:
    if not os.path.lexists(directory) or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not force:
        raise StoreError(f"{directory} exists and is not overwritten: name another directory, or use --force")
    if not _export_record(directory):  # only earlier exports are ever removed
        raise StoreError(f"{directory} is not an earlier export, so --force does not replace it: choose another")


def _export_record(directory: Path) -> dict[str, Any] | None:
    record = atomic.read_json(directory / RECORD) if (directory / RECORD).is_file() else {}
    return record if record.get("format") == EXPORT_FORMAT else None


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """The model that training started from."""

    words: str  # a description
    name: str = ""  # on a hub; empty if it is on none
    license: str = ""
    is_itself: bool = True  # False: `name` is an ancestor of the model that was trained


def base_of(model: str, task: str, depth: int = 0) -> BasePolicy:
    """The base model of `model.path` and `task.name`. A model trained by stalewise is traced to its own base."""
    path = task if model == "auto" else model
    if path in embedded_policies():
        return BasePolicy(f"the small policy `{path}` that comes with stalewise", license="apache-2.0")
    if path == SMOLLM2:
        words = f"[{SMOLLM2_ON_HUB}](https://huggingface.co/{SMOLLM2_ON_HUB}), dequantized from 4 bits (Q4_1)"
        return BasePolicy(words, SMOLLM2_ON_HUB, "apache-2.0")
    directory = Path(path).expanduser()
    if is_gguf(path):
        return BasePolicy(f"a model in a GGUF file called `{directory.name}`")
    if not directory.is_dir():
        return BasePolicy(f"[{path}](https://huggingface.co/{path})", path)
    if record := _export_record(directory):
        return _descendant(record["run"], record["version"], BasePolicy(**record["base"]))
    run = directory.resolve().parent.parent
    if depth < MOST_ANCESTORS and (directory / "state.json").is_file() and (run / "config.resolved.json").is_file():
        config = read_config(run)
        base = base_of(config.model.path, config.task.name, depth + 1)
        return _descendant(run.name, read_state(directory)["version"], base)
    return BasePolicy(f"a model in a directory called `{directory.resolve().name}`")


def _descendant(run: str, version: int, base: BasePolicy) -> BasePolicy:
    words = f"version {version} of the run {run}, which started from {base.words}"
    return BasePolicy(words, base.name, base.license, is_itself=False)


def shareable(config: RunConfig) -> dict[str, Any]:
    """The config as nested tables, without nulls, addresses of servers and stores, and paths of this machine.

    A planned learning rate is marked as given, since another machine has no calibration.
    """
    record = config.model_dump(mode="json")
    record |= {"runs": "runs", "trackers": [], "storage": {}}
    record["plan"] |= {"learning_rate": "given", "calibration": ""}
    server = record["sampler"]["server"]
    server |= {"urls": [f"http://localhost:{8000 + i}" for i in range(len(server["urls"]))], "paths": {}}
    return _without_paths(record)


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and not any(map(str.isspace, value))
    return Path(value).name if is_path else value


def config_file(config: RunConfig) -> str:
    """All settings of a run as TOML."""
    record = shareable(config)
    tables = {"": {key: value for key, value in record.items() if not isinstance(value, dict)}}
    tables |= {f"[{key}]\n": value for key, value in record.items() if isinstance(value, dict)}
    lines = {head: [f"{key} = {toml(value)}\n" for key, value in table.items()] for head, table in tables.items()}
    return "\n".join(head + "".join(settings) for head, settings in lines.items())


def explicit_settings(config: RunConfig) -> dict[str, Any]:
    """Settings that differ from the defaults, with dotted keys."""
    defaults, settings = flatten(shareable(RunConfig())), flatten(shareable(config))
    return {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}


MOST_ROWS = 16  # rows of a table of stages
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
        # Only the program knows the defaults of its own objective; the config has the parameters that were set.
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
    has_episodes = any(batch.format == EPISODES for batch in run.batches)
    metadata = DatasetCardData(
        pretty_name=f"Rollouts of {config.name}",
        task_categories=["text-generation"],
        size_categories=size_category(rows),
        tags=["stalewise", "rollouts", "reinforcement-learning"],
        configs=[{"config_name": "default", "data_files": files}],
        # In a run with episodes only some shards have the column `segments`: `datasets` needs the full schema.
        dataset_info={"features": hub_features(EPISODE_SCHEMA)} if has_episodes else None,
    )
    body = _template("dataset_card.md").render(
        **_common(run, config, base, config_name),
        batches=run.batches,
        has_episodes=has_episodes,
        limits=[text for text in findings(run) if text not in run.notes],
    )
    return str(DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}"))


_HUB_NAMES = {"double": "float64", "float": "float32"}


def hub_features(fields: Iterable[pa.Field]) -> list[dict[str, Any]]:
    """Columns as the metadata of a dataset repository describes them.

    >>> hub_features([pa.field("ids", pa.list_(pa.int32())), pa.field("text", pa.string())])
    [{'name': 'ids', 'list': 'int32'}, {'name': 'text', 'dtype': 'string'}]
    """

    def inner(kind: pa.DataType) -> Any:
        return hub_features(kind) if pa.types.is_struct(kind) else _HUB_NAMES.get(str(kind), str(kind))

    def described(kind: pa.DataType) -> dict[str, Any]:
        if pa.types.is_list(kind):
            return {"list": inner(kind.value_type)}
        return {"struct" if pa.types.is_struct(kind) else "dtype": inner(kind)}

    return [{"name": field.name, **described(field.type)} for field in fields]


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
        "played_in": str(config.task.options.get("environment", "")),
        "lineage": describe_lineage(_without_places(run)),
    }


def _without_places(run: Run) -> Run:
    """The run with the names of its ancestors in place of their paths on this machine."""

    def named(record: Mapping[str, Any]) -> dict[str, Any]:
        shared = {
            key: value for key, value in record["changes"].items() if not key.startswith(("storage.", "sampler.server"))
        }
        return {**record, "run": f"the run {Path(record['run']).name}", "changes": _without_paths(shared)}

    fork = {**named(run.fork), "ancestors": list(map(named, run.fork["ancestors"]))} if run.fork else {}
    return replace(run, fork=fork, config_changes=[])


class _Code(str):
    """Text that a card shows as code, where `<` is not a tag."""

    __slots__ = ()


def _plain(value: Any) -> Any:
    """Make text of a config or run safe for a card: no tag, no control character, no end of a code block."""
    if isinstance(value, _Code):
        return visible(value).replace("`", "'")
    return visible(value).replace("&", "&amp;").replace("<", "&lt;") if isinstance(value, str) else value


@cache
def _template(name: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_plain,
    )
    environment.filters |= {"interval": format_interval, "value": format_value, "code": _Code}
    environment.filters["cell"] = lambda value: format_value(value).replace("|", "\\|").replace("\n", " ")
    return environment.get_template(name)


def adapted_matrices(run: Path, version: int) -> list[str]:
    """The matrices that a version's adapter adapts, by their names in PEFT's config; empty without an adapter."""
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
    return path if task == "hf" and is_hub_name(path) and not Path(path).exists() else ""


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
    """Limitations of the results in the card."""
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
