"""An update as far as the host can take it before the one before it is over: dealt out, laid out, on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from stalewise.trainer.micro_batch import Layout, MicroBatch, lay_out
from stalewise.trainer.rank_batch import RankBatch, RankBatches

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """The micro-batches of an update, for a layout."""

    layout: Layout
    dealt: RankBatches
    parts: list[MicroBatch]  # of this rank's share


def lay_out_share(share: RankBatch, layout: Layout, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of one rank."""
    of_rows = {"advantage": share.batch.advantage.numpy(), "keep": share.batch.keep.numpy()}
    return [lay_out(share.batch.rows, chosen, layout, device, of_rows) for chosen in share.plan]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The rollouts of one update, ready to be learned from."""

    described: dict[str, float]  # what is known of the rollouts alone
    version_first: np.ndarray  # of each rollout, [B]
    laid_out: LaidOut | None  # None: there is nothing to learn from


def one_ahead(make: Callable[[Item], Made], items: Iterable[Item], device: torch.device) -> Iterator[Made]:
    """`make` of each item; on a GPU in a thread of its own, while whoever asks is busy with the one before."""
    if device.type != "cuda":
        yield from map(make, items)
        return
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as thread:
        yield from _one_ahead(make, items, thread)


def _one_ahead(make: Callable[[Item], Made], items: Iterable[Item], thread: ThreadPoolExecutor) -> Iterator[Made]:
    coming: deque[Future[Made]] = deque()
    for place, item in enumerate(items):
        coming.append(thread.submit(make, item))
        if place == 1:  # made beside the first update, it would take the interpreter from whoever enqueues that one
            wait(coming)
        if len(coming) > 1:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()
