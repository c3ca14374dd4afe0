"""Simulates the weights of a low-precision engine, in place and reversibly.

The matrices of the linear layers are rounded to 8 bits with one float32 scale per output, and used in the sampler's
precision. Embeddings, norms, biases and the output layer stay exact, as in engines that serve a policy in 8 bits.
Axes: O outputs, I inputs of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from stalewise.errors import ModelError

FP8 = torch.float8_e4m3fn
LARGEST = {"fp8": torch.finfo(FP8).max, "int8": 127.0}  # what the largest weight of an output becomes


def fake_quantize(weight_OI: Tensor, kind: str) -> Tensor:
    """The matrix rounded to 8 bits, in its own precision."""
    exact_OI, largest = weight_OI.float(), LARGEST[kind]
    # An output whose weights are all 0 may have any scale but 0.
    scale_O1 = (exact_OI.abs().amax(dim=1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scaled_OI = (exact_OI / scale_O1).clamp(-largest, largest)
    whole_OI = scaled_OI.to(FP8).float() if kind == "fp8" else scaled_OI.round()
    return (whole_OI * scale_O1).to(weight_OI.dtype)


class QuantizableWeights:
    """The weights of a model, exact at first; values are copied in place, since CUDA graphs read fixed addresses."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kind = "exact"
        self._exact: list[Tensor] = []  # in host memory, while rounded ones are in use

    @torch.no_grad()
    def use(self, kind: str) -> None:
        """Compute with weights of this kind from now on."""
        if kind == self._kind:
            return
        matrices = linear_matrices(self._model)
        for matrix_OI, exact_OI in zip(matrices, self._exact, strict=False):
            matrix_OI.copy_(exact_OI)
        self._kind, self._exact = "exact", []
        if kind != "exact":
            self._exact = [matrix_OI.to("cpu", copy=True) for matrix_OI in matrices]
            for matrix_OI in matrices:
                matrix_OI.copy_(fake_quantize(matrix_OI, kind))
            self._kind = kind


def linear_matrices(model: Any) -> list[Tensor]:
    """The matrices [O, I] of all linear layers but the output layer, as views of the model's memory."""
    outside = [
        name
        for name, module in model.named_modules()
        if not isinstance(module, torch.nn.Conv1d) and any(p.ndim > 2 for p in module.parameters(recurse=False))
    ]
    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = {
        id(module.weight): module.weight.data if isinstance(module, torch.nn.Linear) else module.weight.data.T
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and id(module.weight) not in embeddings
    }
    if outside or not matrices:
        where = f"{outside[0]} holds matrices that are in no linear layer" if outside else "it has no linear layers"
        raise ModelError(
            f'the weights of {type(model).__name__} cannot be rounded: {where}; set sampler.weights = "exact"'
        )
    return list(matrices.values())
