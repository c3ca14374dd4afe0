"""AdamW, its learning-rate schedule, its state as named tensors, and operations on lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from stalewise.config import OptimizerSection
from stalewise.trainer import moments as moments_in_fewer_bits
from stalewise.trainer.moments import StepNumbers

_MOMENTS = ("exp_avg", "exp_avg_sq")
LARGE = 1 << 20  # size from which a tensor is added by itself, so that no copy in another precision is made
BUCKET = 1 << 26  # numbers of weights that are copied at a time, to measure how far a step moves them
foreach: Any = torch  # its `_foreach_…` operations on many tensors in few launches, which the type stubs leave out


def add_to(totals: Sequence[Tensor], amounts: Sequence[Tensor]) -> None:
    """Add each amount to its total, in place, in the dtype of the total."""
    same: list[tuple[Tensor, Tensor]] = []
    low: list[tuple[Tensor, Tensor]] = []
    for total, amount in zip(totals, amounts, strict=True):
        if total.dtype == amount.dtype:
            same.append((total, amount))
        elif amount.numel() >= LARGE:
            total.add_(amount)
        else:
            low.append((total, amount))
    if low:  # many small ones in few launches, which need one dtype
        widened = [torch.empty_like(total) for total, _ in low]
        foreach._foreach_copy_(widened, [amount for _, amount in low])
        same += zip((total for total, _ in low), widened, strict=True)
    if same:
        foreach._foreach_add_([total for total, _ in same], [amount for _, amount in same])


class AdamW:
    """AdamW with moments in float32 or in fewer bits; a step also measures how far the weights moved.

    A step works on one bucket of weights after the other, so only one bucket is ever copied.
    """

    def __init__(self, parameters: Iterable[Tensor], settings: OptimizerSection, seed: int = 0) -> None:
        self.parameters, self.settings, self.seed = list(parameters), settings, seed
        self.state: dict[Tensor, dict[str, Tensor]] = {}  # of weights that had a gradient

    def make_moments(self) -> None:
        """Make the moments of weights that have a gradient for the first time: all that a step allocates for good."""
        for weight in self.parameters:
            if weight.grad is None or weight in self.state:
                continue
            if self._is_rounded(weight):
                self.state[weight] = moments_in_fewer_bits.new_moments(weight.detach(), self.settings.moments)
            else:
                moments = {name: torch.zeros_like(weight.detach()) for name in _MOMENTS}
                self.state[weight] = {"step": weight.new_zeros((), dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(self, rate: float | Tensor, unusable: Tensor, number: int) -> Tensor:
        """Take the step with this number, none where `unusable`; returns ‖Δθ‖, float64."""
        self.make_moments()
        reached = [(index, weight) for index, weight in enumerate(self.parameters) if weight.grad is not None]
        plain = [weight for _, weight in reached if not self._is_rounded(weight)]
        lengths = [self._float32_step(bucket, rate, unusable.float()) for bucket in buckets(plain, BUCKET)]
        rounded = [(index, weight) for index, weight in reached if self._is_rounded(weight)]
        if rounded:
            lengths.append(self._rounded_steps(rounded, rate, unusable, number))
        return torch.linalg.vector_norm(torch.cat(lengths)) if lengths else torch.zeros((), dtype=torch.float64)

    def _is_rounded(self, weight: Tensor) -> bool:
        """Whether its moments have fewer bits. Those of vectors do not: they are few numbers that move much."""
        return self.settings.moments != "float32" and weight.ndim > 1

    def _float32_step(self, weights: list[Tensor], rate: float | Tensor, unusable: Tensor) -> Tensor:
        """torch's own step; returns ‖Δ‖ of each weight."""
        before = list(foreach._foreach_mul([weight.detach() for weight in weights], 1.0))
        beta1, beta2 = self.settings.betas
        torch_adamw(
            weights,
            [weight.grad for weight in weights if weight.grad is not None],
            [self.state[weight][_MOMENTS[0]] for weight in weights],
            [self.state[weight][_MOMENTS[1]] for weight in weights],
            [],
            [self.state[weight]["step"] for weight in weights],
            fused=True,
            found_inf=unusable,  # by which torch's gradient scaler makes a fused optimizer skip a step
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=self.settings.weight_decay,
            eps=self.settings.epsilon,
            maximize=False,
        )
        foreach._foreach_sub_(before, [weight.detach() for weight in weights])
        return torch.stack(foreach._foreach_norm(before, 2, dtype=torch.float32)).double()

    def _rounded_steps(
        self, weights: list[tuple[int, Tensor]], rate: float | Tensor, unusable: Tensor, number: int
    ) -> Tensor:
        """Steps with moments in fewer bits; returns ‖Δ‖ of each weight."""
        lengths = []
        (beta1, beta2), settings = self.settings.betas, self.settings
        # On the device, which alone knows whether the step is taken; filled there, since a copy would wait for it.
        values = [rate, 1 - beta1**number, math.sqrt(1 - beta2**number), ~unusable.bool()]
        scalars = torch.stack(
            [
                value.float() if isinstance(value, Tensor) else torch.full_like(unusable, value, dtype=torch.float32)
                for value in values
            ]
        )
        for index, weight in weights:
            key = moments_in_fewer_bits.step_key(self.seed, number, index)
            numbers = StepNumbers(beta1, beta2, settings.epsilon, settings.weight_decay, scalars, key)
            assert weight.grad is not None
            lengths.append(
                moments_in_fewer_bits.step(weight.detach(), weight.grad.contiguous(), self.state[weight], numbers)
            )
        return torch.stack(lengths).sqrt()

    def restore(self, weight: Tensor, moments: dict[str, Tensor], steps: int) -> None:
        """Set the moments of a weight after so many steps."""
        here = {name: moment.to(weight.device) for name, moment in moments.items()}
        number = {} if self._is_rounded(weight) else {"step": torch.tensor(float(steps), device=weight.device)}
        self.state[weight] = {**number, **here}


def buckets(tensors: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    """Consecutive tensors with at most `most` numbers together, or one larger tensor."""
    found: list[list[Tensor]] = []
    count = 0
    for tensor in tensors:
        if not found or count + tensor.numel() > most:
            found.append([])
            count = 0
        found[-1].append(tensor)
        count += tensor.numel()
    return found


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
    optimizer: AdamW, names: Mapping[Tensor, str], full_tensor: Callable[[str, Tensor], Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state by file and tensor name, one file for each moment; `full_tensor` gathers over ranks."""
    return {
        f"optimizer_{moment}.safetensors": {
            f"{part}.{names[parameter]}": full_tensor(names[parameter], state[part]).contiguous()
            for parameter, state in optimizer.state.items()
            for part in (moment, f"{moment}_scale")
            if part in state
        }
        for moment in _MOMENTS
    }


def restore_moments(
    optimizer: AdamW,
    names: Mapping[Tensor, str],
    checkpoint: Path,
    load: Callable[[Path], dict[str, Tensor]],
    steps: int,
) -> None:
    """Restore the state of an optimizer after `steps` steps from the files of a checkpoint."""
    files = checkpoint.glob("optimizer*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load(file).items()}
    parts = [f"{moment}{end}" for moment in _MOMENTS for end in ("", "_scale")]
    for parameter, name in names.items():
        if f"{_MOMENTS[0]}.{name}" in tensors:  # else it never had a gradient
            found = {part: tensors[f"{part}.{name}"] for part in parts if f"{part}.{name}" in tensors}
            optimizer.restore(parameter, found, steps)
