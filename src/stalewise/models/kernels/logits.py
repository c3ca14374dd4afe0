"""Statistics of logits and their gradient as Triton kernels of one pass each; in torch, each takes a dozen passes.

Axes: C rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 4096  # tokens of the vocabulary at a time


def statistics_on_device(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, log-probability of the target and entropy, each [C] in float32."""
    rows, vocabulary = logits_CV.shape
    lse_C, logp_C, entropy_C = (torch.empty(rows, dtype=torch.float32, device=logits_CV.device) for _ in range(3))
    if rows:
        _statistics[(rows,)](  # pyright: ignore[reportIndexIssue]
            logits_CV.contiguous(), target_C, lse_C, logp_C, entropy_C, VOCABULARY=vocabulary, SIZE=BLOCK, num_warps=8
        )
    return lse_C, logp_C, entropy_C


def gradient_on_device(logits_CV: Tensor, lse_C: Tensor, target_C: Tensor, gradient_C: Tensor) -> Tensor:
    """Gradient of the logits, in place: (1 at the target − softmax) · gradient of the log-probability."""
    rows, vocabulary = logits_CV.shape
    logits_CV = logits_CV.contiguous()
    if rows:
        _gradient[(rows, triton.cdiv(vocabulary, BLOCK))](  # pyright: ignore[reportIndexIssue]
            logits_CV, lse_C, target_C, gradient_C.contiguous(), VOCABULARY=vocabulary, SIZE=BLOCK, num_warps=8
        )
    return logits_CV


@triton.jit
def _statistics(logits, target, lse, logp, entropy, VOCABULARY: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    highest = -3.0e38  # so far; finite, since excluded tokens are −inf
    total = 0.0  # Σ exp(x − highest)
    moment = 0.0  # Σ (x − highest) · exp(x − highest)
    for start in range(0, VOCABULARY, SIZE):
        is_there = start + place < VOCABULARY
        x = tl.load(logits + row * VOCABULARY + start + place, mask=is_there, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        # Rescale the sums so far.
        shift = highest - higher
        moment = (moment + shift * total) * tl.exp(shift)
        total *= tl.exp(shift)
        highest = higher
        below = x - highest
        mass = tl.exp(below)
        total += tl.sum(mass, axis=0)
        moment += tl.sum(tl.where(below > float("-inf"), below * mass, 0.0), axis=0)
    log_total = tl.log(total)
    chosen = tl.load(logits + row * VOCABULARY + tl.load(target + row)).to(tl.float32)
    tl.store(lse + row, highest + log_total)
    tl.store(logp + row, chosen - (highest + log_total))
    tl.store(entropy + row, log_total - moment / total)


@triton.jit
def _gradient(logits, lse, target, gradient, VOCABULARY: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_there = place < VOCABULARY
    x = tl.load(logits + row * VOCABULARY + place, mask=is_there, other=0.0).to(tl.float32)
    is_target = (place == tl.load(target + row)).to(tl.float32)
    value = (is_target - tl.exp(x - tl.load(lse + row))) * tl.load(gradient + row)
    tl.store(logits + row * VOCABULARY + place, value.to(logits.dtype.element_ty), mask=is_there)
