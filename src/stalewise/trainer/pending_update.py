"""Updates that are enqueued on the device: their metrics once they are done, and how far updates run ahead."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from stalewise.errors import ModelError, StalewiseError
from stalewise.models import transfer
from stalewise.objectives import Tokens
from stalewise.objectives.diagnostics import TokenSums, drift_statistics
from stalewise.store import TokenRecord
from stalewise.trainer.batch import RankBatch

Item = TypeVar("Item")
Made = TypeVar("Made")
Read = Callable[[], Tensor]


class NonFiniteUpdate(StalewiseError, ArithmeticError):
    """An update whose gradient or ratios are not finite. It changed nothing."""

    exit_code = 4


def out_of_memory(token_budget: int) -> ModelError:
    """The error for a device that is too small for the token budget."""
    return ModelError(
        f"out of memory with {token_budget} tokens a micro-batch: lower learner.tokens_per_micro_batch, or set "
        'learner.gradient_checkpointing or optimizer.moments = "int8"'
    )


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An enqueued update. Read metrics in order; on a GPU read them after the next update is enqueued."""

    statistics: dict[str, float]  # of the rollouts
    finish: Callable[[], dict[str, float]] | None  # None: there was nothing to learn from
    record: Callable[[], TokenRecord] | None = None  # None: token values are not recorded

    def metrics(self) -> dict[str, float]:
        """Wait for the update and return its metrics; raises NonFiniteUpdate where it changed nothing."""
        if self.finish is None:
            return self.statistics | {"taken": 0.0}
        metrics = self.finish()
        # At age 0 policy and behaviour have the same weights, so log-probabilities differ only by their engines.
        fresh = self.statistics["age_max"] == 0
        mismatch = {
            "mismatch_mean": metrics["log_ratio_mean_abs"] if fresh else math.nan,
            "mismatch_max": metrics["log_ratio_max_abs"] if fresh else math.nan,
        }
        return self.statistics | {"taken": 1.0} | metrics | mismatch

    def tokens(self) -> TokenRecord | None:
        """Wait for the update and return its token values; None where they are not recorded."""
        return None if self.record is None else self.record()


def to_host(vector: Tensor) -> Read:
    """Enqueue a copy to the host; calling the result waits for it, and for nothing enqueued after it."""
    if vector.device.type != "cuda":
        return lambda: vector
    copy = transfer.to_host(vector)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return copy

    return read


def first_nonfinite(tokens: Tokens) -> Tensor:
    """Index into the flattened [B, T] of the first token whose ratio is not finite, −1 where there is none."""
    log_ratio_BT = tokens.log_ratio_BT.detach()
    bad = (tokens.mask_BT & ~(log_ratio_BT.isfinite() & log_ratio_BT.exp().isfinite())).flatten()
    return torch.where(bad.any(), bad.int().argmax(), -1)


def step_metrics(
    scalars: Tensor, update: int, rate: float, ranks: Sequence[RankBatch], *, drift_before: float
) -> dict[str, float]:
    """Metrics of a step from its scalars on the host.

    `scalars` holds loss, gradient norm, step factor and ‖Δθ‖, then `first_nonfinite` of all micro-batches, then the
    token sums.
    """
    count = len(ranks) * ranks[0].most_micro_batches
    first, nonfinite, packed = scalars.tensor_split([4, 4 + count])
    loss, grad_norm, factor, norm = first.tolist()
    sums = TokenSums.unpack(packed).summary()
    if sums["nonfinite"] or not (math.isfinite(grad_norm) and math.isfinite(loss)):
        raise NonFiniteUpdate(
            f"update {update}: {int(sums['nonfinite'])} tokens with a non-finite ratio"
            f"{_name_tokens(ranks, nonfinite.tolist())}, gradient norm {grad_norm:g}, loss {loss:g}; nothing "
            "was changed: start a new run with a lower optimizer.learning_rate or more stages"
        )
    if not math.isfinite(norm):
        raise NonFiniteUpdate(
            f"update {update} at learning rate {rate * factor:g} made weights that are not finite; "
            "the last checkpoint is whole: start a new run with a lower optimizer.learning_rate"
        )
    return {
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": rate,
        "step_factor": factor,
        **sums,
        **drift_statistics(norm, rate * factor, drift_before),
    }


def _name_tokens(ranks: Sequence[RankBatch], nonfinite: list[float]) -> str:
    """Rollout and token of the first non-finite ratio of each micro-batch."""
    named = []
    for number, index in enumerate(nonfinite):
        if index >= 0:
            rank, micro_batch = divmod(number, ranks[0].most_micro_batches)
            rollout, token = ranks[rank].token_at(micro_batch, int(index))
            named.append(f"rollout {rollout} token {token}")
    return f" ({', '.join(named[:3])})" if named else ""


def updates_ahead(device: torch.device, *, may_end_early: bool = False) -> int:
    """How many updates are enqueued beyond the one whose metrics are read; fewer if metrics may end the stage."""
    # With none a GPU would be idle; with one, whenever the host is late.
    return 0 if device.type != "cuda" else 1 if may_end_early else 2


def prefetch(make: Callable[[Item], Made], items: Iterable[Item], device: torch.device) -> Iterator[Made]:
    """Apply `make` to each item; on a GPU in a thread, one item ahead."""
    if device.type != "cuda":
        yield from map(make, items)
        return
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as thread:
        yield from _prefetch(make, items, thread)


def _prefetch(make: Callable[[Item], Made], items: Iterable[Item], thread: ThreadPoolExecutor) -> Iterator[Made]:
    pending: deque[Future[Made]] = deque()
    for number, item in enumerate(items):
        pending.append(thread.submit(make, item))
        if number == 1:  # now: later it would slow down the thread that enqueues the first update
            wait(pending)
        if len(pending) > 1:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
