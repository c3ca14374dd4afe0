"""Draws a token of each row, with its log-probability, as one Triton kernel. Axes: R rows, V vocabulary.

In torch, a draw writes and reads the probabilities of the whole vocabulary several times. Here each row of logits is
read once, and then only the chunk and the block that hold the token.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

CHUNK = 4096  # tokens of the vocabulary at a time
BLOCK = 64  # tokens of a chunk whose probabilities are summed before one of them is chosen


def draw_on_device(logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Token of each row by inversion, [R] in int64, and its log-probability, [R] in float32, as `token_sampling.draw`.

    Rows that are not finite, or without any token left, give some token and NaN.
    """
    rows, vocabulary = logits_RV.shape
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    logp_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    if rows:
        size = min(CHUNK, triton.next_power_of_2(vocabulary))
        _draw[(rows,)](  # pyright: ignore[reportIndexIssue]
            logits_RV.contiguous(),
            uniform_R.double().contiguous(),
            token_R,
            logp_R,
            VOCABULARY=vocabulary,
            SIZE=size,
            CHUNKS=triton.next_power_of_2(triton.cdiv(vocabulary, size)),
            WIDTH=min(BLOCK, size),
            num_warps=4,
        )
    return token_R, logp_R


@triton.jit
def _draw(
    logits,
    uniform,
    token,
    logp,
    VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    index, place = tl.arange(0, CHUNKS), tl.arange(0, SIZE)
    highest_of = tl.full([CHUNKS], float("-inf"), tl.float32)
    mass_of = tl.zeros([CHUNKS], tl.float32)  # Σ exp(x − the chunk's own maximum): chunks are independent
    for start in range(0, VOCABULARY, SIZE):
        x = tl.load(logits + start + place, mask=start + place < VOCABULARY, other=float("-inf")).to(tl.float32)
        highest = tl.max(x, axis=0)
        # Non-finite logits give NaN here, even if the maximum ignores them.
        mass = tl.sum(tl.exp(x - _origin(highest)), axis=0)
        highest_of = tl.where(index * SIZE == start, highest, highest_of)
        mass_of = tl.where(index * SIZE == start, mass, mass_of)
    largest = _origin(tl.max(highest_of, axis=0))
    scaled_of = mass_of.to(tl.float64) * tl.exp(highest_of - largest).to(tl.float64)
    chunk, share = _invert(scaled_of, tl.load(uniform + row), CHUNKS)
    # Relative to the chunk's own maximum: its mass must not underflow.
    origin = _origin(tl.sum(tl.where(index == chunk, highest_of, 0.0), axis=0))

    column = tl.arange(0, WIDTH)
    nearby = chunk * SIZE + tl.arange(0, SIZE // WIDTH)[:, None] * WIDTH + column[None, :]
    x = tl.load(logits + nearby, mask=nearby < VOCABULARY, other=float("-inf")).to(tl.float32)
    block, share = _invert(tl.sum(tl.exp(x - origin), axis=1).to(tl.float64), share, SIZE // WIDTH)
    within = chunk * SIZE + block * WIDTH + column
    x = tl.load(logits + within, mask=within < VOCABULARY, other=float("-inf")).to(tl.float32)
    offset, _ = _invert(tl.exp(x - origin).to(tl.float64), share, WIDTH)

    drawn = chunk * SIZE + block * WIDTH + offset
    below = tl.load(logits + drawn).to(tl.float64) - largest.to(tl.float64)
    tl.store(token + row, drawn.to(tl.int64))
    tl.store(logp + row, (below - tl.log(tl.sum(scaled_of, axis=0))).to(tl.float32))


@triton.jit
def _origin(highest):
    """The offset of exponents: the maximum, or 0 if there is none, since −inf − −inf is NaN."""
    return tl.where(highest > float("-inf"), highest, 0.0)


@triton.jit
def _invert(mass, share, PLACES: tl.constexpr):
    """First place whose cumulative mass exceeds that share of the total, and the remainder of the share there.

    A parallel scan may round so that sums fall from one place to the next. So only places with mass are chosen: the
    last of them if rounding leaves none above the target, the first place of all if none has mass or one is NaN. The
    remainder may be slightly below 0 or above 1.
    """
    place = tl.arange(0, PLACES)
    target = share * tl.sum(mass, axis=0)
    last = tl.max(tl.where(mass > 0.0, place, 0), axis=0)
    is_above = (tl.cumsum(mass, axis=0) > target) & (mass > 0.0)
    chosen = tl.min(tl.where(is_above, place, last), axis=0)
    before = tl.sum(tl.where(place < chosen, mass, 0.0), axis=0)
    return chosen, (target - before) / tl.sum(tl.where(place == chosen, mass, 0.0), axis=0)
