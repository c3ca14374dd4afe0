"""Queries and keys to be rotated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
plain_rotation: Any = modeling_llama.apply_rotary_pos_emb


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def one_token(rows: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries and keys as attention makes them, and angles; halves of the angles differ, to tell them apart."""
    query, key = (random(rows, 1, n, width, dtype=dtype, seed=n).transpose(1, 2) for n in (heads, kv_heads))
    angle = random(rows, 1, width, seed=99)
    return [query, key, angle.cos().to(dtype), angle.sin().to(dtype)]
