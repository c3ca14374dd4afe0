"""GPU kernels, and what they share with their counterparts in torch.

Modules that import Triton are imported only where it is installed. Axes: S slots of a decoder, R rows of a step, B
blocks of a slot, N new tokens.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import Tensor
from torch.utils._triton import has_triton


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a decoder keeps of its slots on the device; decoding steps read it and write to it."""

    numbers: Tensor  # [6, S]: last token, count of tokens, seed, length of the prompt, limit, count of given tokens
    alive_S: Tensor
    block_SB: Tensor  # the blocks of the prompt, then those of the response
    all_ids: Tensor  # [S, N + 1]; the last column is for rows that have ended, which compute on
    all_logp: Tensor
    stop_ids: Tensor
    block_size: int
    prompt_blocks: int

    @property
    def new_tokens(self) -> int:
        """The most tokens of a response."""
        return self.all_ids.shape[1] - 1


class StepRows(NamedTuple):
    """What a decoding step needs to know of its rows, all in int64."""

    token_R: Tensor
    position_R: Tensor
    count_R: Tensor  # of the response's tokens so far
    seed_R: Tensor
    prefix_R: Tensor  # length of the prompt
    length_R: Tensor  # keys that it attends to
    place_R: Tensor  # of its new key in the cache
    limit_R: Tensor
    forced_R: Tensor  # tokens up to here are given, not sampled
    alive_R: Tensor  # 0 or 1


@cache
def can_compile() -> bool:
    """Whether kernels can be compiled: needs Triton, which comes with torch for GPUs, and a C compiler."""
    return has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


def warm_up_triton() -> threading.Thread:
    """Let Triton checksum its own files in a thread, which it does before its first kernel."""
    thread = threading.Thread(target=_read_triton, daemon=True)
    thread.start()
    return thread


def _read_triton() -> None:
    if not can_compile():
        return
    with contextlib.suppress(ImportError):  # its place may change; nothing depends on it
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingImports]

        triton_key()
