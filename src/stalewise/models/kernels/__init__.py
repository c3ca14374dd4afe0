"""GPU kernels, and the data types that they share with their counterparts in torch.

Modules that import Triton are imported only if it is installed.

- `decode_attention`: attention of one new token per row against a cache in blocks
- `rope`: rotation of queries and keys, writes of keys and values to a cache
- `logits`: statistics of log-softmax and their gradient, token sampling, the state of decoder slots
- `elementwise`: norms, gated products, sums of gradients over the copies of a key
- `gather`: copies of keys and values for each segment
- `low_precision_step`: AdamW

Axes: S slots of a decoder, R rows of a step, B blocks of a slot, N new tokens.
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
    """The state of a decoder's slots on the device, which decoding steps read and write."""

    # [6, S]: last token, number of tokens, seed, length of the prompt, token limit, number of tokens that are given.
    numbers: Tensor
    alive_S: Tensor
    block_SB: Tensor  # the blocks of the prompt, then those of the response
    all_ids: Tensor  # [S, N + 1]; ended rows, which are still computed, write to the last column
    all_logp: Tensor
    stop_ids: Tensor
    block_size: int
    prompt_blocks: int

    @property
    def new_tokens(self) -> int:
        """The maximal number of tokens of a response."""
        return self.all_ids.shape[1] - 1


class StepRows(NamedTuple):
    """The inputs of a decoding step for each of its rows, all in int64."""

    token_R: Tensor
    position_R: Tensor
    count_R: Tensor  # tokens of the response so far
    seed_R: Tensor
    prefix_R: Tensor  # length of the prompt
    length_R: Tensor  # number of keys that the row attends to
    place_R: Tensor  # position of the new key in the cache
    limit_R: Tensor  # maximal number of tokens of the response
    forced_R: Tensor  # the first so many tokens of the response are given, not sampled
    alive_R: Tensor  # 0 or 1


@cache
def can_compile() -> bool:
    """Whether kernels can be compiled. This needs Triton, which torch for GPUs includes, and a C compiler."""
    return has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


def warm_up_triton() -> threading.Thread:
    """Compute the checksum of Triton's own files in a thread: Triton needs it before its first kernel."""
    thread = threading.Thread(target=_compute_checksum, daemon=True)
    thread.start()
    return thread


def _compute_checksum() -> None:
    if not can_compile():
        return
    with contextlib.suppress(ImportError):  # another release may have it elsewhere; then the first kernel waits
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingImports]

        triton_key()
