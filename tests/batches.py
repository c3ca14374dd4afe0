"""Batches that several test files share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stalewise.objectives import OBJECTIVES

# Every objective in every variant that has a code path of its own.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OBJECTIVES if name not in ("m2po", "mu_grpo")),
    *(("m2po", {"variant": variant}) for variant in ("paper", "released")),
    *(("mu_grpo", {"scope": scope}) for scope in ("suffix", "post", "trigger", "sequence")),
]
SETTING_IDS = [f"{name}-{'-'.join(map(str, params.values()))}".rstrip("-") for name, params in SETTINGS]


def random_batch(
    *, sequences: int = 16, tokens: int = 12, drift: float = 0.3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Drifted log-probabilities of responses of different lengths, with a few tokens that the policy has given up."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behaviour = -normal(sequences, tokens).abs() - 0.05
    logp = behaviour + drift * normal(sequences, tokens)
    given_up = torch.rand(sequences, tokens, generator=generator) < 0.03
    logp = torch.where(given_up, behaviour - 12.0, logp).clamp(max=-1e-3)
    lengths = torch.randint(1, tokens + 1, (sequences,), generator=generator)
    batch = {
        "logp": logp,
        "behaviour_logp": behaviour,
        "proximal_logp": behaviour + 0.5 * drift * normal(sequences, tokens),
        "advantage": normal(sequences),
    }
    batch = {name: value.to(dtype) for name, value in batch.items()}
    return batch | {"mask": torch.arange(tokens) < lengths[:, None]}
