"""AdamW's moments in fewer bits: bfloat16, or 8 bits with a scale for each block of 256 numbers.

Numbers are rounded stochastically: up or down, so that the mean is the number itself. Rounded to the nearest, a moving
average that gives new values a weight of 1/1000 would stand still. The random bits are a hash of seed, step, tensor and
index, so a run that is repeated or resumed draws the same ones.

Matrices are handled as rows × columns, blocks along a row: a matrix that is split over ranks by rows has its scales
split alike. Axes: R rows, C columns, J blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from stalewise.models.kernels import can_compile

BLOCK = 256
# A number in 8 bits is scale · (code / most)^power: codes are dense near 0, where most numbers are. The second moment
# spans more orders of magnitude, and a positive one never becomes 0, by which the step would be divided.
FIRST_MOST, FIRST_POWER = 127, 2
SECOND_MOST, SECOND_POWER = 255, 4
PIECE = 1 << 24  # numbers per piece of a step in plain torch
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What a step of AdamW needs besides its tensors."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    scalars: Tensor  # [4] float32: learning rate, 1 − β₁ᵗ, √(1 − β₂ᵗ), and 0 where the step is not to be taken
    key: int  # of the random bits of this step


def new_moments(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """Both moments of a weight that has taken no step."""
    if kind == "bfloat16":
        return {name: torch.zeros_like(weight, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
    rows, columns = as_matrix(weight).shape
    blocks = -(-columns // BLOCK)
    return {
        "exp_avg": torch.zeros_like(weight, dtype=torch.int8),
        "exp_avg_scale": weight.new_zeros(rows, blocks, dtype=torch.float32),
        "exp_avg_sq": torch.zeros_like(weight, dtype=torch.uint8),
        "exp_avg_sq_scale": weight.new_zeros(rows, blocks, dtype=torch.float32),
    }


def as_matrix(tensor: Tensor) -> Tensor:
    """[R, C]: the first axis, and all others."""
    return tensor.flatten(1)


def step_key(seed: int, step: int, tensor: int) -> int:
    """32 bits that differ for every step and tensor of a run."""
    mixed = seed & _MASK
    for number in (step, tensor):
        mixed = _mix_number((mixed * 0x9E3779B1 + number + 1) & _MASK)
    return mixed


def _mix_number(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


@torch.no_grad()
def step(weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], numbers: StepNumbers) -> Tensor:
    """One step of AdamW in place; returns ‖Δ weight‖², float64."""
    if weight.is_cuda and can_compile():
        from stalewise.models.kernels.low_precision_step import step_on_device  # Triton comes with torch for GPUs alone

        return step_on_device(as_matrix(weight), as_matrix(gradient), moments, numbers, BLOCK)
    square = torch.zeros((), dtype=torch.float64, device=weight.device)
    for rows in _pieces(as_matrix(weight)):
        parts = {name: as_matrix(tensor)[rows] for name, tensor in moments.items()}
        square += _step_rows(as_matrix(weight)[rows], as_matrix(gradient)[rows], parts, numbers, rows.start)
    return square


def _pieces(matrix_RC: Tensor) -> Iterator[slice]:
    rows, columns = matrix_RC.shape
    at_once = max(1, PIECE // max(1, columns))
    return (slice(start, min(start + at_once, rows)) for start in range(0, rows, at_once))


def _step_rows(
    weight_RC: Tensor, gradient_RC: Tensor, moments: dict[str, Tensor], numbers: StepNumbers, first_row: int
) -> Tensor:
    rate, correction1, root_correction2, usable = numbers.scalars
    gradient = gradient_RC.float()
    first, second = _widened(moments)
    first = numbers.beta1 * first + (1 - numbers.beta1) * gradient
    second = numbers.beta2 * second + (1 - numbers.beta2) * (gradient * gradient)
    before = weight_RC.float()
    after = before * (1 - rate * numbers.weight_decay)
    after = after - (rate / correction1) * first / (second.sqrt() / root_correction2 + numbers.epsilon)
    take = usable != 0
    after = torch.where(take, after, before).to(weight_RC.dtype)
    square = (after.float() - before).double().square().sum()
    weight_RC.copy_(after)  # `before` is the same tensor in float32
    for name, new in _narrowed(first, second, moments, _random_bits(first, numbers.key, first_row)).items():
        moments[name].copy_(torch.where(take, new, moments[name]))
    return square


def _widened(moments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both moments as float32."""
    first, second = moments["exp_avg"], moments["exp_avg_sq"]
    if "exp_avg_scale" not in moments:
        return first.float(), second.float()
    root = first.float() / FIRST_MOST
    fourth = second.float() / SECOND_MOST
    square = fourth * fourth
    return (
        _by_block(root * root.abs(), moments["exp_avg_scale"]),
        _by_block(square * square, moments["exp_avg_sq_scale"]),
    )


def _by_block(numbers_RC: Tensor, scale_RJ: Tensor) -> Tensor:
    return numbers_RC * scale_RJ.repeat_interleave(BLOCK, dim=1)[:, : numbers_RC.shape[1]]


def _narrowed(first: Tensor, second: Tensor, moments: dict[str, Tensor], bits: Tensor) -> dict[str, Tensor]:
    """Both moments in their own precision; `bits` are 16 random bits for the second, 16 for the first."""
    low, high = bits & 0xFFFF, bits >> 16
    if "exp_avg_scale" not in moments:
        return {"exp_avg": to_bfloat16(first, high), "exp_avg_sq": to_bfloat16(second, low)}
    first_scale, second_scale = _largest(first.abs()), _largest(second)
    code = to_codes(first.abs(), first_scale, high, FIRST_MOST, FIRST_POWER)
    signed = torch.where(first < 0, -code, code).to(torch.int8)
    second_code = to_codes(second, second_scale, low, SECOND_MOST, SECOND_POWER)
    second_code = torch.where(second > 0, second_code.clamp(min=1.0), second_code).to(torch.uint8)
    return {
        "exp_avg": signed,
        "exp_avg_scale": first_scale,
        "exp_avg_sq": second_code,
        "exp_avg_sq_scale": second_scale,
    }


def to_bfloat16(number: Tensor, bits16: Tensor) -> Tensor:
    """Rounded up or down, more likely to the nearer one: the 16 bits that are cut off carry with that probability."""
    cut = (number.view(torch.int32).to(torch.int64) + bits16) & ~0xFFFF
    return cut.to(torch.int32).view(torch.float32).to(torch.bfloat16)


def to_codes(size_RC: Tensor, scale_RJ: Tensor, bits16: Tensor, most: int, power: int) -> Tensor:
    """The code below or above each number, so that the mean of what it stands for is the number; as float32."""
    share = size_RC / _by_block(torch.ones_like(size_RC), torch.where(scale_RJ > 0, scale_RJ, 1.0))
    root = share.sqrt() if power == 2 else share.sqrt().sqrt()
    below = (root * most).floor().clamp(max=most - 1)
    low, high = _power(below / most, power), _power((below + 1) / most, power)
    return below + ((share - low) * 65536.0 > (bits16.float() + 0.5) * (high - low)).float()


def _power(x: Tensor, power: int) -> Tensor:
    return x * x if power == 2 else (x * x) * (x * x)


def _largest(size_RC: Tensor) -> Tensor:
    """The largest number of each block [R, J]."""
    rows, columns = size_RC.shape
    blocks = -(-columns // BLOCK)
    return pad(size_RC, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK).amax(dim=2)


def _random_bits(like_RC: Tensor, key: int, first_row: int) -> Tensor:
    """32 random bits for each number, as int64; the same as in the kernel."""
    rows, columns = like_RC.shape
    index = torch.arange(first_row * columns, (first_row + rows) * columns, device=like_RC.device)
    x = (index * 0x9E3779B1 + key) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return (x ^ (x >> 16)).view(rows, columns)
