"""Weights as an engine of low precision would have them: a simulation, made in place, that can be undone.

The matrices of the linear layers go through 8 bits, with one float32 scale for each output, and are then used in the
precision that the sampler computes in. Embeddings, norms, biases and the output layer stay exact, as they do in engines
that serve a policy in 8 bits. Axes: O outputs, I inputs of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from stalewise.errors import ModelError

FP8 = torch.float8_e4m3fn
# What the largest weight of an output becomes.
LARGEST = {"fp8": torch.finfo(FP8).max, "int8": 127.0}


def rounded(weight_OI: Tensor, kind: str) -> Tensor:
    """The matrix after its way through 8 bits, in the precision it had.

    >>> rounded(torch.tensor([[1.27, 0.014], [0.0, 0.0]]), "int8")
    tensor([[1.2700, 0.0100],
            [0.0000, 0.0000]])
    """
    exact_OI, largest = weight_OI.float(), LARGEST[kind]
    # An output without weights has no scale of its own: any will do but 0.
    scale_O1 = (exact_OI.abs().amax(dim=1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scaled_OI = (exact_OI / scale_O1).clamp(-largest, largest)
    whole_OI = scaled_OI.to(FP8).float() if kind == "fp8" else scaled_OI.round()
    return (whole_OI * scale_O1).to(weight_OI.dtype)


class RoundableWeights:
    """The weights of a model, which are exact when it is handed over, and stay where they are in memory.

    A captured CUDA graph reads the addresses that it was captured with: values are copied, and no tensor is replaced.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kind = "exact"
        self._exact: list[
            Tensor
        ] = []  # while others are in use; in the machine's memory, which a GPU's is smaller than

    @torch.no_grad()
    def use(self, kind: str) -> None:
        """Let the model compute with weights of this kind from now on."""
        if kind == self._kind:
            return
        matrices = linear_matrices(self._model)
        for matrix_OI, exact_OI in zip(matrices, self._exact, strict=False):
            matrix_OI.copy_(exact_OI)
        self._kind, self._exact = "exact", []
        if kind != "exact":
            self._exact = [matrix_OI.to("cpu", copy=True) for matrix_OI in matrices]
            for matrix_OI in matrices:
                matrix_OI.copy_(rounded(matrix_OI, kind))
            self._kind = kind


def linear_matrices(model: Any) -> list[Tensor]:
    """The matrices [O, I] of all linear layers but the output layer, as views of the model's own memory."""
    outside = [
        name
        for name, module in model.named_modules()
        if not isinstance(module, torch.nn.Conv1d) and any(p.ndim > 2 for p in module.parameters(recurse=False))
    ]
    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    found = {
        id(module.weight): module.weight.data if isinstance(module, torch.nn.Linear) else module.weight.data.T
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and id(module.weight) not in embeddings
    }
    if outside or not found:
        where = f"{outside[0]} holds matrices that are in no linear layer" if outside else "it has no linear layers"
        raise ModelError(
            f'the weights of {type(model).__name__} cannot be rounded: {where}; say sampler.weights = "exact"'
        )
    return list(found.values())
