"""AdamW, its learning-rate schedule, its state as named tensors, and operations on lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stalewise.config import OptimizerSection

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Operations on many tensors in few launches, as torch's optimizers use them; its type stubs leave them out.
_foreach: Any = torch


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor."""
    return list(_foreach._foreach_mul(tensors, 1.0))


def distance(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """‖after − before‖ over all numbers; overwrites `before`."""
    subtract_from(before, after)
    return torch.linalg.vector_norm(torch.stack(_foreach._foreach_norm(before, 2, dtype=torch.float32)).double())


def subtract_from(totals: Sequence[Tensor], amounts: Sequence[Tensor]) -> None:
    """Subtract each amount from its total, in place."""
    _foreach._foreach_sub_(totals, amounts)


def copy_to(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, converting its dtype."""
    _foreach._foreach_copy_(targets, sources)


def add_to(totals: Sequence[Tensor], amounts: Sequence[Tensor]) -> None:
    """Add each amount to its total, in place, in the dtype of the total."""
    pairs = zip(totals, amounts, strict=True)
    low = [index for index, (total, amount) in enumerate(pairs) if total.dtype != amount.dtype]
    same = list(amounts)
    widened = [torch.empty_like(totals[index]) for index in low]
    copy_to(widened, [amounts[index] for index in low])
    for index, amount in zip(low, widened, strict=True):
        same[index] = amount
    _foreach._foreach_add_(totals, same)


def adamw(parameters: Iterable[Tensor], settings: OptimizerSection) -> torch.optim.AdamW:
    """The optimizer of a config."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate(
    update: int,
    *,
    peak: float,
    updates: int,
    warmup_updates: int = 0,
    schedule: Literal["constant", "cosine", "linear"] = "constant",
) -> float:
    """Learning rate of an update: linear warm-up, then constant or decaying to 0 at the end of the run.

    >>> [round(learning_rate(u, peak=1.0, updates=8, warmup_updates=4, schedule="linear"), 3) for u in range(8)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    done = (update - warmup_updates) / (updates - warmup_updates)
    return peak * (0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done)


def moments_by_file(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], full_tensor: Callable[[str, Tensor], Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by file and tensor name, one file for each moment; `full_tensor` gathers over ranks."""
    return {
        f"optimizer_{moment}.safetensors": {
            f"{moment}.{names[parameter]}": full_tensor(names[parameter], state[moment]).contiguous()
            for parameter, state in optimizer.state.items()
        }
        for moment in _MOMENTS
    }


def read_moments(checkpoint: Path, load: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all files of `moments_by_file`."""
    files = checkpoint.glob("optimizer*.safetensors")
    return {name: tensor for file in files for name, tensor in load(file).items()}


def restore_moments(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor], steps: int
) -> None:
    """Restore the state of an optimizer after `steps` steps."""
    for parameter, name in names.items():
        if f"{_MOMENTS[0]}.{name}" not in tensors:  # it never had a gradient
            continue
        state: dict[str, Any] = {"step": torch.tensor(float(steps), device=parameter.device)}
        for moment in _MOMENTS:
            state[moment] = tensors[f"{moment}.{name}"].to(parameter.device)
        optimizer.state[parameter] = state
