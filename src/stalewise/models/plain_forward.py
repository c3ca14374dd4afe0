"""A plain forward pass, with which every other way of running a policy is compared, and how much these may differ.

Plain means: one sequence, no padding, no cache, no packing, attention as the model's authors wrote it. Axes: N response
tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

EAGER_BYTES = 1 << 30  # of attention weights in one layer; longer sequences use the model's own attention
LEAST_TOLERANCE = 1e-3  # nats: a ratio of 1.001
# Measured on an H200 in bfloat16, with 2 to 24 layers: at most 3 times ε and the spread, 7 with weights in 8 bits.
ROUNDING_FACTOR = 12.0
SHALLOW = 16  # layers; in deeper models rounding grows as a sum of random errors


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far one way of running a policy is from plain forward passes, in nats."""

    what: str
    largest: float  # of all tokens; NaN where it failed
    mean: float  # over the tokens of the sequence that is farthest off, which one flipped expert does not decide
    tolerance: float  # of that mean
    error: str = ""  # why it failed

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the difference; NaN is never right."""
        return not self.error and self.mean <= self.tolerance

    def __str__(self) -> str:
        if self.error:
            return f"{self.what} fails: {self.error}"
        return f"{self.what} differs by up to {self.largest:.2g} nats"


def tolerance(dtype: torch.dtype, layers: int, spread: float) -> float:
    """Nats that rounding explains, for logits of this standard deviation.

    >>> [round(tolerance(dtype, 16, 2.5), 4) for dtype in (torch.float32, torch.bfloat16)]
    [0.001, 0.2344]
    """
    growth = math.sqrt(max(1.0, layers / SHALLOW))
    return max(LEAST_TOLERANCE, ROUNDING_FACTOR * torch.finfo(dtype).eps * spread * growth)


def compare(what: str, values: Sequence[np.ndarray], expected: Sequence[np.ndarray], allowed: float) -> Agreement:
    """Compare the log-probabilities of the same sequences."""
    off = [np.abs(one - other) for one, other in zip(values, expected, strict=True)]
    return Agreement(what, float(max(x.max() for x in off)), float(max(x.mean() for x in off)), allowed)


def failure(what: str, error: Exception) -> Agreement:
    """A way of running the policy that raised an error."""
    first = next(iter(str(error).strip().splitlines()), "")
    return Agreement(what, math.nan, math.nan, math.nan, f"{type(error).__name__}: {first}")


@torch.no_grad()
def plain_logits(model: Any, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
    """The logits [N, V], in float32, that predict each token of the response."""
    ids = torch.tensor([[*prompt_ids, *response_ids]], device=model.device)
    keep = len(response_ids) + 1
    # The logits of a long prompt would take gigabytes.
    options = {"logits_to_keep": keep} if "logits_to_keep" in signature(model.forward).parameters else {}
    with _eager(model, ids.shape[1]):
        logits = model(input_ids=ids, use_cache=False, **options).logits[0]
    return logits[-keep:-1].float()


@contextlib.contextmanager
def _eager(model: Any, tokens: int) -> Iterator[None]:
    before = model.config._attn_implementation
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or 1
    if heads * tokens**2 * 4 > EAGER_BYTES:
        yield
        return
    try:
        with contextlib.suppress(ValueError):  # an architecture that has one kind of attention alone
            model.set_attn_implementation("eager")
        yield
    finally:
        model.set_attn_implementation(before)


def layer_count(model: Any) -> int:
    """The number of layers; 1 if the config does not have it."""
    return int(getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1)
