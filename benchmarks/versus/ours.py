"""stalewise's side: rollouts for the learners, the learner alone, the learning phase under the profiler, whole runs."""

from __future__ import annotations

import contextlib
import getpass
import importlib
import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stalewise.api import generate, run
from stalewise.config import RunConfig
from stalewise.models.loading import load_model
from stalewise.store import Batch, RolloutColumns, batch_directories, open_batch, rollouts_of_updates
from stalewise.store.json_lines import read_jsonl
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.trainer.pending_update import PendingUpdate, updates_ahead
from stalewise.trainer.trainer import Trainer
from stalewise.types import NullCallback

from .clock import device_allocations, highest, matmul_rate, model_shape, peak, reset_peak, set_up, synchronised
from .figures import ModelShape, journal_clock, shared_prompt_flops, training_flops
from .profiling import begin_profile, device_figures, keep_profile, traced
from .settings import Settings, our_config

STAGE = "stage"  # the run whose rollouts both learners learn from


# ---------------------------------------------------------------- rollouts for both learners


def stage_config(settings: Settings, work: Path) -> RunConfig:
    updates = settings.learner_warmup + settings.learner_updates
    return our_config(settings, work, STAGE, changes={"schedule": {"updates": updates, "stages": 1}})


def base_checkpoint(work: Path) -> Path:
    """The policy that everything starts from: an ordinary Hugging Face directory with float32 weights."""
    return checkpoint_directory(work / "runs" / STAGE, 0)


def stage_batch(work: Path) -> Batch:
    return open_batch(batch_directories(work / "runs" / STAGE / "rollouts")[0], verify=False)


def prepare(settings: Settings, work: Path) -> dict[str, Any]:
    """Write the base policy and one generation batch, sampled from it."""
    set_up(settings.device, settings.threads)
    (manifest,) = generate(stage_config(settings, work))
    lengths = np.concatenate([rows.response_lengths for rows in stage_batch(work).iter_rows()])
    return {
        "rollouts": manifest.rows,
        "prompt_tokens": manifest.prompt_tokens,
        "response_tokens": manifest.tokens,
        "response_length_quantiles": np.quantile(lengths, [0, 0.25, 0.5, 0.75, 1]).tolist(),
        "truncated": manifest.truncated,
        "reward_mean": manifest.reward_mean,
    }


def with_mixed_rewards(rows: RolloutColumns) -> RolloutColumns:
    """The same tokens, each second rollout of a group right: no group is left out for want of variance by anyone."""
    reward = np.arange(len(rows)) % 2
    return replace(rows, reward=reward.astype(np.float64))


def stage_rows(settings: Settings, work: Path) -> list[RolloutColumns]:
    """The rollouts of each update, warm-up first."""
    batch, per_update = stage_batch(work), stage_config(settings, work).batch.prompts
    return [with_mixed_rewards(batch.take(ids)) for ids in rollouts_of_updates(batch, per_update)]


def tokens_of(rows: RolloutColumns) -> int:
    """Prompt and response tokens without padding."""
    return int(rows.prompt_offsets[-1] + rows.response_offsets[-1])


def groups_of(rows: RolloutColumns) -> Iterator[tuple[int, list[int]]]:
    """Length of each group's prompt, and of its responses."""
    for group in np.unique(rows.group):
        members = rows.group == group
        yield int(rows.prompt_lengths[members][0]), rows.response_lengths[members].tolist()


# ---------------------------------------------------------------- the learner alone


def learn(held: Trainer, parts: Iterable[RolloutColumns]) -> tuple[list[float], dict[str, float]]:
    """Take updates as the conductor does: on a GPU the next ones are enqueued before the last one's numbers are read.

    The one place here that knows how updates are asked for. Returns when each was over, and the numbers of the last.
    """
    marks: list[float] = []
    metrics: dict[str, float] = {}
    waiting: deque[PendingUpdate] = deque()
    ahead = updates_ahead(held.device)

    def wait() -> None:
        nonlocal metrics
        metrics = waiting.popleft().metrics()
        marks.append(time.perf_counter())

    for part in parts:
        waiting.append(held.enqueue(part))
        if len(waiting) > ahead:
            wait()
    while waiting:
        wait()
    return marks, metrics


def trainer(settings: Settings, work: Path, whole: bool = False) -> dict[str, Any]:
    """Time updates on rollouts that lie in memory, in chunks of as many as TRL takes on one generation batch.

    With `whole`, an update passes through the model in one piece: for the memory at equal tokens at once.
    """
    place = set_up(settings.device, settings.threads)
    rows = stage_rows(settings, work)
    padded = max(len(part) * int((part.prompt_lengths + part.response_lengths).max()) for part in rows)
    budget = {"tokens_per_micro_batch": padded} if whole else {}
    schedule = {"updates": settings.steady_updates or settings.updates}
    config = our_config(settings, work, "learner", changes={"learner": budget, "schedule": schedule})
    start = synchronised()
    held = Trainer(config, base_checkpoint(work))
    loading = synchronised() - start
    start = synchronised()
    learn(held, rows[: settings.learner_warmup])
    warming = synchronised() - start
    warm = peak()
    reset_peak()
    timed = rows[settings.learner_warmup :]
    start, working = synchronised(), time.process_time()
    marks, last = learn(held, timed)
    seconds, working = synchronised() - start, time.process_time() - working
    memory = highest(warm, peak())
    ends = [start, *marks[settings.trl_mu - 1 : -1 : settings.trl_mu], start + seconds]
    tokens = sum(map(tokens_of, timed))
    shape = model_shape(held.model)
    once = sum(shared_prompt_flops(ModelShape(**shape), groups_of(part)) for part in timed)
    each = sum(training_flops(ModelShape(**shape), part.prompt_lengths, part.response_lengths) for part in timed)
    precision, budget_left = held.precision, held.token_budget
    del held
    rate = matmul_rate(place, precision, settings.matmul_size)
    return {
        "config": config.model_dump(mode="json"),
        "load_seconds": loading,
        "warmup_seconds": warming,
        "chunk_updates": settings.trl_mu,
        "chunk_seconds": [after - before for before, after in itertools.pairwise(ends)],
        "seconds": seconds,
        "cpu_seconds": working,  # of all threads: on a busy machine the clock says less
        "updates": len(timed),
        "rollouts_per_update": len(timed[0]),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        **memory,
        "token_budget": budget_left,  # less than the config's where the device ran out of memory
        "precision": str(precision),
        "shape": shape,
        "flops": once,
        "flops_prompts_each": each,
        "matmul_flops_per_second": rate,
        "mfu": once / seconds / rate,
        "mfu_prompts_each": each / seconds / rate,
        "last_metrics": last,
    }


# ---------------------------------------------------------------- idle share


class Enough(BaseException):
    """Everything was seen; the run need not go on. Nobody's `except Exception` is to keep it going."""


# By the second, nearly every size of an update has come up, and has its CUDA graphs.
PHASES = ("warm-up", "warm-up", "plain", "profiler's warm-up", "profiled")


class PhaseWatcher(NullCallback):
    """Times learning phases of a run, each from its `begin` to the advance that ends it; profiles the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.allocations: list[int] = []  # how often the driver had been asked for memory when each phase was over
        self.profiler: Any = None
        self._left = 0
        self._start = 0.0

    def begin(self, what: str, total: int) -> None:
        """A learning phase: the profiler first, the clock last."""
        self._left = total if what == "learn" else 0
        if what != "learn":
            return
        phase = PHASES[len(self.seconds)]
        if torch.cuda.is_available() and phase == "profiler's warm-up":
            self.profiler = begin_profile()
        elif self.profiler is not None and phase == "profiled":
            keep_profile(self.profiler)
        self._start = synchronised()

    def advance(self, amount: int, note: str = "") -> None:
        """The last update of the phase stops the clock, then the profiler."""
        if not self._left or not amount:
            return
        self._left -= amount
        if self._left <= 0:
            self.seconds.append(synchronised() - self._start)
            self.allocations.append(device_allocations())
            if len(self.seconds) == len(PHASES):
                if self.profiler is not None:
                    self.profiler.stop()
                raise Enough


def idle(settings: Settings, work: Path) -> dict[str, Any]:
    """Learning phases of a real run, one of them profiled; rows from the store, ledger and metrics."""
    set_up(settings.device, settings.threads)
    each = settings.idle_updates
    # A long run, since a short one would not be compiled; it is left after its first stage.
    stage = len(PHASES) * each
    stages = -(-(settings.steady_updates or settings.updates) // stage)
    changes = {
        "schedule": {"updates": stages * stage, "stages": stages},
        "checkpoints": {"every": each, "keep": 1},
    }
    callback = PhaseWatcher()
    with tempfile.TemporaryDirectory(dir=work) as runs:
        config = our_config(settings, Path(runs), "idle", model=str(base_checkpoint(work)), changes=changes)
        with contextlib.suppress(Enough):
            run(config, callback)
        batch = open_batch(batch_directories(config.directory / "rollouts")[0], verify=False)
        tokens = [tokens_of(batch.take(ids)) for ids in rollouts_of_updates(batch, config.batch.prompts)]
    if len(callback.seconds) != len(PHASES):
        raise RuntimeError(
            f"expected {len(PHASES)} learning phases, saw {len(callback.seconds)}: has the callback changed?"
        )
    phases = [
        {"seconds": seconds, "tokens": sum(tokens[place * each : (place + 1) * each]), "allocations": asked}
        for place, (seconds, asked) in enumerate(zip(callback.seconds, callback.allocations, strict=True))
    ]
    found: dict[str, Any] = {"config": config.model_dump(mode="json"), "updates": each, "phases": phases}
    if callback.profiler is None:
        return {**found, "idle_share": None}
    figures = device_figures(traced(callback.profiler, work), phases[-1]["seconds"])
    # With the plain phase's clock, too, since the profiler itself takes time.
    plain, profiled = phases[PHASES.index("plain")], phases[-1]
    share = 1 - (figures["busy_seconds"] / profiled["tokens"]) / (plain["seconds"] / plain["tokens"])
    return {**found, **figures, "idle_share_plain_clock": share}


# ---------------------------------------------------------------- whole runs


def train(settings: Settings, work: Path, seed: int, name: str) -> dict[str, Any]:
    """One staged run from base policy to the last update, with a checkpoint wherever accuracy is to be measured."""
    set_up(settings.device, settings.threads)
    # Imports are in no one's clock. pyarrow looks for pandas when it first writes; TRL's side has it from `datasets`.
    load_model(str(base_checkpoint(work)), device=torch.device("cpu"))
    with contextlib.suppress(ImportError):
        importlib.import_module("pandas")
    total = settings.updates_of("stalewise")
    changes = {
        "checkpoints": {"every": settings.evaluate_every, "keep": total + 1},
        "schedule": {"updates": total, "stages": settings.stages + settings.extra_stages},
    }
    config = our_config(settings, work, name, model=str(base_checkpoint(work)), seed=seed, changes=changes)
    compiled_before = _kernels_are_cached()
    start = time.time()
    run(config)
    wall = time.time() - start
    journal = read_jsonl(config.directory / "journal.jsonl")
    schedule = config.schedule.schedule()
    ends = [schedule.updates_of(g).stop for g in range(schedule.generation_batches)]
    clock = journal_clock(journal, start, ends)
    updates = settings.evaluated("stalewise")
    return {
        "config": config.model_dump(mode="json"),
        "seconds": clock["at"][settings.updates],
        "by_event": clock["spent"][settings.updates],
        "run_seconds": wall,
        "compiled_before": compiled_before,
        "excluded_seconds": clock["excluded"],
        "journal": journal,
        "updates": updates,
        "times": [0.0, *(clock["at"][update] for update in updates[1:])],
    }


def _kernels_are_cached() -> bool:
    """Whether an earlier process left compiled kernels, which then need not be compiled within the clock."""
    directory = (
        os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    )
    return any(Path(directory).glob("*"))
