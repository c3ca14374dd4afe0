"""Merging sums over ranks. The pure rooms know no collectives: this is where they meet."""

from __future__ import annotations

from functools import reduce
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stalewise.objectives.batch_statistics import Mergeable

MergeableT = TypeVar("MergeableT", bound=Mergeable)


def merge_over_ranks(sums: MergeableT) -> MergeableT:
    """The sums of all ranks together, the same on each; `sums` itself where there is one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sums
    parts = [type(sums).unpack(packed) for packed in _gather(sums.pack())]
    return reduce(lambda merged, part: merged.merge(part), parts)


def _gather(mine: Tensor) -> list[Tensor]:
    """The flat tensors of all ranks, which may differ in length, in the order of ranks."""
    length = torch.tensor([len(mine)], device=mine.device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(int(n) for n in lengths)
    padded = mine.new_zeros(longest)
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return [part[: int(n)] for part, n in zip(gathered, lengths, strict=True)]
