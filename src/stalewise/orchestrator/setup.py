"""The start of a run: its engine and learning rate, its drift limits, and version 0."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stalewise import store
from stalewise.config import RunConfig, make_config
from stalewise.config.run import held_out_warning, stages_warning
from stalewise.config.run_directory import (
    LIMITS_FILE,
    LIMITS_FORMAT,
    OF_TRAINING,
    RESOLVED,
    REWARD_FUNCTION,
    all_changes,
    changed_settings,
    is_started,
    read_config,
    read_fork,
)
from stalewise.config.sections import ModelSection, SamplerSection, ScheduleSection
from stalewise.errors import CalibrationError, ConfigError, StoreError
from stalewise.models import pick_device, pick_precision, resolve_model
from stalewise.models.loading import encode_prompts, load_model, load_tokenizer, pick_weights_dtype
from stalewise.orchestrator.run_log import RunLog
from stalewise.planning.grid import rate_name
from stalewise.planning.memory import GIB, estimate
from stalewise.planning.planner import budget_limits, law_learning_rate, rests_on_collapses, rounded_down
from stalewise.reporting.verification import OF_A_PROGRAM, check_run
from stalewise.rollout.factory import pick_engine
from stalewise.store import atomic, checkpoints
from stalewise.store.json_lines import truncate_jsonl
from stalewise.store.records import LIMITS, read_record
from stalewise.tasks import Task
from stalewise.tasks.options import named_files
from stalewise.trainer.execution import check_trainable
from stalewise.trainer.lora import save_first

TASK_FILES = "task_files"  # in environment.json
LEAST_ROOM = 0.05  # share of a GPU below which vLLM there is not advised
SMALL_MODEL = 100_000_000  # parameters below which a learning rate may be large
LARGE_RATE = 2e-5  # the default, for small models, is larger; the configs for models from 0.5B up have 1e-6 to 4e-6


@contextlib.contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Exclusive use of a run directory. A run that fails before its version 0 leaves nothing new there."""
    with atomic.remove_if_failed(directory), atomic.RunLock(directory) as lock:
        before = set(directory.iterdir())
        try:
            yield
        except BaseException:
            if not (lock.is_gone or is_started(directory)):
                for path in set(directory.iterdir()) - before:
                    _remove(path)
                lock.release_and_remove()
            raise


def _remove(path: Path) -> None:
    """Remove a file or a directory. Errors are ignored, so that they do not hide the error that led here."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def verify_before(directory: Path, newest: Callable[[], Path], updates: int, log: Callable[[str], object]) -> None:
    """Refuse to continue from damaged records or weights, and log how many of the `updates` are made.

    `newest` compares the checksums of the newest checkpoint and returns its directory.
    """
    start = time.perf_counter()
    checked = check_run(directory)
    checkpoint = newest()
    version = int(checkpoint.name[1:])
    size = checked.bytes + sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    cost = f"{size / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s"
    uncovered = sum(not text.endswith(OF_A_PROGRAM) for text in checked.not_covered)
    files = f"{uncovered} files have no checksum" if uncovered > 1 else "1 file has no checksum"
    note = f"; {files} (see `stalewise verify`)" if uncovered else ""
    log(f"checked version {version} and the records ({cost}): no damage{note}")
    end = ": there is nothing left to train" if version >= updates else ""
    log(f"{version} of {updates} updates are made{end}")


def log_move(directory: Path, here: Mapping[str, Any], log: Callable[[str], object]) -> None:
    """Log if a run continues on another device or with other threads: numbers round differently there."""
    path = directory / "environment.json"
    if not is_started(directory) or not path.is_file():
        return
    with contextlib.suppress(StoreError):  # a damaged file is about to be replaced
        before = _describe_device(atomic.read_json(path))
        now = _describe_device(here)
        if before != now:
            log(f"this run was on {before} and continues on {now}: from here on its numbers round differently")


def log_changed_files(
    options: Mapping[str, Any], run_log: RunLog, updates: int, log: Callable[[str], object]
) -> dict[str, dict[str, str]]:
    """Digests of the files that the task's options name; tells and records which changed since the run last started.

    A run that has made all its `updates` takes nothing from them any more.
    """
    path, files = run_log.directory / "environment.json", file_digests(options)
    newest = max(checkpoints.versions(run_log.directory), default=0)
    if not is_started(run_log.directory) or newest >= updates or not path.is_file():
        return files
    before: Mapping[str, Any] = {}
    with contextlib.suppress(StoreError):  # a damaged file is about to be replaced
        before = atomic.read_json(path)
    changed = changed_files(before.get(TASK_FILES), files)
    if changed:
        record = {f"content of task.options.{name}": list(digests) for name, digests in changed.items()}
        run_log.log_event("config", 0.0, version=newest, changes=record)
        named = " and ".join(f"{files[name]['file']} (task.options.{name})" for name in changed)
        forked = ", or the run that it was forked from," if read_fork(run_log.directory) else ""
        log(
            f"{named} changed since this run{forked} last started: from here on prompts, rewards and evaluations are "
            "those of the changed file"
        )
    return files


def file_digests(options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What each option that names a file says, and the SHA-256 of that file, by the option's dotted name."""
    found: dict[str, dict[str, str]] = {}
    for name, (text, path) in named_files(options).items():
        with contextlib.suppress(OSError):  # the task itself tells what it cannot read
            found[name] = {"file": text, "sha256": atomic.sha256_file(path)}
    return found


def changed_files(before: Any, files: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
    """Digests before and now of the files that changed.

    Options that name another file than before are left out: a changed option is reported by itself. So are options
    without a digest of before, as in runs of earlier releases.
    """
    known: dict[str, str] = {}
    for name, now in files.items():
        entry = before.get(name) if isinstance(before, Mapping) else None
        if isinstance(entry, Mapping) and entry.get("file") == now["file"] and isinstance(entry.get("sha256"), str):
            known[name] = entry["sha256"]
    return {name: (old, files[name]["sha256"]) for name, old in known.items() if old != files[name]["sha256"]}


def _describe_device(record: Mapping[str, Any]) -> str:
    device = str(record.get("device", "an unknown device"))
    return f"cpu with {record.get('threads')} thread(s)" if device == "cpu" else device


def engine_of_run(
    directory: Path, section: SamplerSection, model: ModelSection, schedule: ScheduleSection, source: str
) -> tuple[str, str]:
    """The engine that `auto` picks for this run, and the reason."""
    first_engine = read_config(directory).sampler.engine if is_started(directory) else "auto"
    if first_engine == "auto":
        return pick_engine(section, model, schedule, source)
    return first_engine, "with which the run began"


def resolve_settings(config: RunConfig, log: Callable[[str], object] = lambda text: None) -> RunConfig:
    """The config with the engine that `auto` picks, and the learning rate that `plan.learning_rate` asks for.

    A run that has begun keeps both, whatever was calibrated or installed since.
    """
    if not is_started(config.directory) and (warning := stages_warning(config.schedule)):
        log(warning)
    if config.sampler.engine == "auto":
        source = resolve_model(config.model.path, config.task.name)
        engine, why = engine_of_run(config.directory, config.sampler, config.model, config.schedule, source)
        log(f"sampler.engine auto: {engine}, {why}")
        config = config.model_copy(update={"sampler": config.sampler.model_copy(update={"engine": engine})})
    if config.plan.learning_rate == "given":
        return config
    record = config.model_dump(mode="json")
    given = config.optimizer.learning_rate
    if is_started(config.directory):
        record["optimizer"]["learning_rate"] = read_config(config.directory).optimizer.learning_rate
        return make_config(record, source="plan")
    try:
        rate = law_learning_rate(config)
    except CalibrationError as error:
        if config.plan.learning_rate == "planned":
            raise
        log(f"optimizer.learning_rate stays {given:g}, as given: {error}")
        return config
    if config.plan.learning_rate != "planned" and rate < given and not rests_on_collapses(config):
        log(
            f"optimizer.learning_rate stays {given:g}: the sweep shows that rates up to {rounded_down(rate)} are safe, "
            "but no collapsed run sets this limit, so higher rates are untested or unresolved"
        )
        return config
    log(f"plan: optimizer.learning_rate is {rate:.3g}, the largest that is safe")
    record["optimizer"]["learning_rate"] = rate
    return make_config(record, source="plan")


def adopt_changes(record: dict[str, Any], run_log: RunLog, log: Callable[[str], object]) -> bool:
    """Log the settings that a config changes in a run that has begun, and drop records that no longer apply.

    Records are dropped only where nothing was trained yet, or nothing since a fork. Returns whether any were.
    `check_identity` has refused changes that a run cannot take.
    """
    directory = run_log.directory
    if not (directory / RESOLVED).is_file() or not is_started(directory):
        return False
    recorded = atomic.read_json(directory / RESOLVED)
    changes = all_changes(record, recorded)
    identity = changed_settings(record, recorded)
    if not changes:
        return False
    newest = checkpoints.versions(directory)[-1:]
    run_log.log_event("config", 0.0, version=newest[0] if newest else 0, changes=changes)
    shown = [f"{key} was {before!r} and is {after!r}" for key, (before, after) in changes.items()]
    log(f"changed in place: {'; '.join(shown[:3])}{f'; {len(shown) - 3} more' if len(shown) > 3 else ''}")
    if not identity:
        return False
    # With rollouts, training may still change before the first update, and a fork takes objects of a program.
    is_begun = any(newest) or any(map(store.committed_shards, store.batch_directories(directory / "rollouts")))
    if kept := read_fork(directory).get("rollouts") if is_begun and REWARD_FUNCTION in identity else ():
        log(f"{', '.join(kept)} came with the fork: their rollouts keep the rewards of the function before")
    if not is_begun or any(key.startswith(OF_TRAINING) for key in identity):
        (directory / LIMITS_FILE).unlink(missing_ok=True)
    of_rollouts = [key for key in identity if not key.startswith(OF_TRAINING)]
    if of_rollouts and not is_begun:  # then no batch was generated either
        truncate_jsonl(run_log.stages_path, lambda line: False)
    if any(not key.startswith(("schedule.", "batch.")) for key in of_rollouts):
        run_log.forget_evaluations()
    if any(key.startswith("model.") or key == "seed" for key in of_rollouts):
        checkpoints.remove_after(directory, -1)  # version 0 is a copy of model.path, with new adapters
    return True


def drift_limits(config: RunConfig) -> tuple[float, float] | None:
    """Limits of the drift within a batch and over the run; None if both are unknown.

    They are written to the run directory when training begins, so that a later calibration does not change the run.
    """
    path = config.directory / LIMITS_FILE
    if not path.is_file():
        atomic.write_json_atomic(path, {"format": LIMITS_FORMAT, "limits": budget_limits(config)}, sealed=True)
    limits = read_record(path, LIMITS).get("limits")
    return None if limits is None else (limits[0], limits[1])


def rate_warning(rate: float, parameters: int) -> str:
    """A warning about a learning rate far above the usual rates of large models; empty if there is none."""
    if parameters < SMALL_MODEL or rate <= LARGE_RATE:
        return ""
    return (
        f"optimizer.learning_rate is {rate_name(rate)}, which suits adapters and small models: a full model of "
        f"{parameters / 1e6:,.0f} M parameters is usually trained with 1e-6 to 4e-6"
    )


def write_first_checkpoint(config: RunConfig, source: str, task: Task, log: Callable[[str], object]) -> dict[str, Any]:
    """Write the model at `source` as version 0 of the run; return the trainer's state in it."""
    model = load_model(source, device=torch.device("cpu"), dtype=pick_weights_dtype(config.model.precision))
    check_trainable(model, config.learner)  # before a whole stage is generated
    if not config.model.trains_adapters and (
        warning := rate_warning(config.optimizer.learning_rate, model.num_parameters())
    ):
        log(warning)
    prompts = config.evaluation.prompts
    if warning := held_out_warning(task.name, len(task.evaluation_prompts(prompts)), prompts):
        log(warning)
    tokenizer = load_tokenizer(source)
    # Raises if the tokenizer lacks the chat template that the task needs: version 0 would keep it.
    encode_prompts(task.prompts(0, 1), tokenizer)

    def save(directory: Path) -> None:
        save_first(config.model, config.seed, model, source, directory, log)
        tokenizer.save_pretrained(directory)

    state = {"steps": 0, "drift": 0.0, "source": config.model.path}
    checkpoints.write_checkpoint(config.directory, 0, save=save, state=state)
    return {"version": 0, **state}


def check_vllm_room(config: RunConfig, source: str, world: int = 1) -> None:
    """Refuse a trainer and a vLLM that do not fit on one GPU together.

    The trainer's memory stays taken while vLLM samples, unless one process offloads it to host memory
    (`learner.offload`). vLLM itself would fail only when it wakes up after the first stage. A vLLM that keeps its share
    while the trainer works leaves less for that. A share of the GPU that does not hold the weights is refused as well:
    vLLM would fail only after it was started.
    """
    device = pick_device(config.model.device)
    section = config.sampler.vllm
    if config.sampler.engine != "vllm" or device.type != "cuda":
        return
    needed = estimate(config, source, alone=world == 1)
    _, total = torch.cuda.mem_get_info(device)
    if needed is None:
        return
    share, stays = section.gpu_memory_utilization, section.while_learning == "stay"
    beside = needed.least - needed.waits  # of the trainer while vLLM samples
    held = needed.total if stays else beside
    weights = needed.shape.parameters * pick_precision(config.model.precision, device).itemsize
    if weights > share * total * section.tensor_parallel:
        raise ConfigError(
            f"{source} does not fit for sampling: its weights take {weights / GIB:.2f} GiB, and sampler.vllm "
            f"{share:.0%} of the {total / GIB:.2f} GiB of {section.tensor_parallel} GPU(s): "
            f"raise sampler.vllm.gpu_memory_utilization (the trainer leaves {max(0.0, 1 - held / total):.0%}) "
            "or tensor_parallel, or choose a smaller model"
        )
    if held + share * total <= total:
        return
    advice, fitting = list[str](), int(100 * (1 - held / total)) / 100
    if fitting >= LEAST_ROOM and weights <= fitting * total * section.tensor_parallel:
        advice.append(f"set sampler.vllm.gpu_memory_utilization to {fitting:g} or less")
    sleep, offload = 'sampler.vllm.while_learning = "sleep"', 'learner.offload = "always"'
    if not stays and needed.may_wait:
        advice.append(f"set {offload}")
    elif stays and needed.total <= total and (needed.may_wait or beside + share * total <= total):
        advice.append(f"set {sleep}" + ("" if beside + share * total <= total else f" with {offload}"))
    what = f"needs {held / GIB:.1f} GiB of them while it learns, when vLLM keeps its share (while_learning = stay)"
    raise ConfigError(
        f"sampler.vllm takes {share:.0%} of the {total / GIB:.1f} GiB of {device}, and the trainer "
        f"{what if stays else f'holds {held / GIB:.1f} GiB of them while vLLM samples'}: "
        f"{', '.join([*advice, 'train adapters (model.lora.rank)'])}, or choose a smaller model or a larger device"
    )
