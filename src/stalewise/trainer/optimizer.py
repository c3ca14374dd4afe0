"""AdamW, its learning-rate schedule, its state as named tensors, and operations on lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stalewise.config import OptimizerSection

_MOMENTS = ("exp_avg", "exp_avg_sq")
foreach: Any = torch  # its `_foreach_…` operations on many tensors in few launches, which the type stubs leave out


def add_to(totals: Sequence[Tensor], amounts: Sequence[Tensor]) -> None:
    """Add each amount to its total, in place, in the dtype of the total."""
    pairs = zip(totals, amounts, strict=True)
    low = [index for index, (total, amount) in enumerate(pairs) if total.dtype != amount.dtype]
    same = list(amounts)
    widened = [torch.empty_like(totals[index]) for index in low]
    if low:  # torch refuses empty lists
        foreach._foreach_copy_(widened, [amounts[index] for index in low])
    for index, amount in zip(low, widened, strict=True):
        same[index] = amount
    foreach._foreach_add_(totals, same)


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


def learning_rate(update: int, section: OptimizerSection, updates: int) -> float:
    """Learning rate of an update: linear warm-up, then constant or decaying to 0 at the end of the run.

    >>> section = OptimizerSection(learning_rate=1.0, warmup_updates=4, schedule="linear")
    >>> [round(learning_rate(update, section, updates=8), 3) for update in range(8)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    peak, warmup = section.learning_rate, section.warmup_updates
    if update < warmup:
        return peak * (update + 1) / warmup
    if section.schedule == "constant":
        return peak
    done = (update - warmup) / (updates - warmup)
    return peak * (0.5 * (1 + math.cos(math.pi * done)) if section.schedule == "cosine" else 1 - done)


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


def restore_moments(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    checkpoint: Path,
    load: Callable[[Path], dict[str, Tensor]],
    steps: int,
) -> None:
    """Restore the state of an optimizer after `steps` steps from the files of a checkpoint."""
    files = checkpoint.glob("optimizer*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load(file).items()}
    for parameter, name in names.items():
        if f"{_MOMENTS[0]}.{name}" not in tensors:  # it never had a gradient
            continue
        moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(steps), device=parameter.device), **moments}
