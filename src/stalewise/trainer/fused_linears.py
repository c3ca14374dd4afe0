"""Linear layers with weights rounded once per step, and layers with the same input fused into one.

Autocast rounds every weight at every use and returns every gradient in float32: in CUDA graphs, a launch for each
weight in every replay. Here all weights are rounded in a few launches after a step. Layers with the same input, such as
those of queries, keys and values, are one product forward and two backward instead of three and six.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from stalewise.models.fused_ops import SAME_INPUT
from stalewise.trainer.optimizer import foreach

Swap = tuple[dict[str, Any], str, Any, Any]  # of a module's table and name: what is there, and what replaces it


class FusedLinear(torch.nn.Module):
    """Several linear layers with the same input as one product; replaces the first of them."""

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias, self.sizes = weight, bias, tuple(sizes)
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def product(self, x: Tensor) -> Tensor:
        """Outputs of all layers, side by side."""
        return linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the first layer; those of the others are kept for `FusedLinearPart`."""
        product = self.product(x)
        if len(self.sizes) == 1:
            return product
        self.input, self.parts = x, product.split(self.sizes, dim=-1)
        return self.parts[0]


class FusedLinearPart(torch.nn.Module):
    """Replaces one of the other layers of a `FusedLinear`."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused = [fused]  # in a list, so that its weights do not get a second name
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        """Output that was computed with the first layer; the last part releases all of them."""
        fused = self.fused[0]
        if x is not fused.input:
            raise RuntimeError("layers whose names say that they read the same input do not")
        part = fused.parts[self.index]
        if self.index + 1 == len(fused.sizes):
            fused.input, fused.parts = None, ()
        return part


class WeightSlice(NamedTuple):
    """The rows of a rounded parameter that one weight has."""

    rounded: torch.nn.Parameter
    start: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor with the rounded parameter's shape."""
        return tensor.narrow(0, self.start, self.rows)


@contextlib.contextmanager
def _swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    try:
        for table, name, _, replacement in swaps:
            table[name] = replacement
        yield
    finally:
        for table, name, own, _ in swaps:
            table[name] = own


class RoundedWeights:
    """The weights of a module's linear layers in lower precision, at fixed addresses, except weights with another use.

    They are parameters, since the compiler fixes sizes only of those.
    """

    def __init__(self, module: torch.nn.Module, precision: torch.dtype) -> None:
        self.precision = precision
        self.slices: dict[Tensor, WeightSlice] = {}
        self.swaps: list[Swap] = []
        self.uses = Counter(
            id(weight)
            for _, layer in module.named_modules(remove_duplicate=False)
            for weight in layer.parameters(recurse=False)
        )
        for parent in list(module.modules()):
            done: set[str] = set()
            for names in SAME_INPUT:
                if self._fuse(parent, names):
                    done |= set(names)
            for name, layer in parent.named_children():
                if name not in done and isinstance(layer, torch.nn.Linear) and self._fits(layer):
                    self._replace(parent, [name], [layer])
        # Made once: there may be hundreds, and they are used after every step.
        self.targets = [piece.of(piece.rounded.detach()) for piece in self.slices.values()]
        self.sources = [weight.detach() for weight in self.slices]

    def _fits(self, layer: torch.nn.Module | None) -> bool:
        return type(layer) is torch.nn.Linear and not any(
            weight.dtype is self.precision or self.uses[id(weight)] > 1 for weight in layer.parameters()
        )

    def _fuse(self, parent: torch.nn.Module, names: Sequence[str]) -> bool:
        if getattr(getattr(parent, "config", None), "clip_qkv", None) is not None:
            return False  # OLMo clips each of them in place, which autograd refuses for parts of one product
        layers = [getattr(parent, name, None) for name in names]
        plain = [layer for layer in layers if isinstance(layer, torch.nn.Linear) and self._fits(layer)]
        kinds = {
            (layer.in_features, *(w.requires_grad if w is not None else None for w in (layer.weight, layer.bias)))
            for layer in plain
        }
        if len(plain) < len(names) or len(kinds) > 1:
            return False
        self._replace(parent, names, plain)
        return True

    def _replace(self, parent: torch.nn.Module, names: Sequence[str], layers: Sequence[torch.nn.Linear]) -> None:
        weight = self._rounded([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        fused = FusedLinear(weight, self._rounded(biases) if biases else None, [layer.out_features for layer in layers])
        modules = [fused, *(FusedLinearPart(fused, index) for index in range(1, len(layers)))]
        for name, layer, module in zip(names, layers, modules, strict=True):
            self.swaps.append((parent._modules, name, layer, module))

    def _rounded(self, weights: Sequence[Tensor]) -> torch.nn.Parameter:
        rounded = torch.cat([weight.detach().to(self.precision) for weight in weights])
        parameter = torch.nn.Parameter(rounded, requires_grad=weights[0].requires_grad)
        start = 0
        for weight in weights:
            self.slices[weight] = WeightSlice(parameter, start, len(weight))
            start += len(weight)
        return parameter

    def refresh(self) -> None:
        """Round the present weights."""
        if self.targets:  # none where weights have that precision already, or are in no linear layers (GPT-2)
            foreach._foreach_copy_(self.targets, self.sources)

    def swapped_in(self) -> contextlib.AbstractContextManager[None]:
        """The module with the fused layers instead of its own."""
        return _swapped(self.swaps)

    def used_for(self, weight: Tensor) -> Tensor:
        """The parameter that the module reads instead of this weight."""
        return self.slices[weight].rounded if weight in self.slices else weight

    def gradient_of(self, weight: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a weight, as part of the gradient of the parameter that is read instead."""
        return self.slices[weight].of(gradient) if gradient is not None and weight in self.slices else gradient


class StreamParameters:
    """Parameters for the passes of one stream, which share their data with the module's.

    Autograd ties a parameter to the stream of its first use. Passes on two streams with the same parameters would wait
    for each other, and break a capture.
    """

    def __init__(self, rounded: RoundedWeights) -> None:
        self.rounded = rounded
        self.parameters: dict[Tensor, torch.nn.Parameter] = {}

    def swapped_in(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """The module with these parameters instead of its own."""
        swaps: list[Swap] = []
        for layer in module.modules():
            for name, weight in layer.named_parameters(recurse=False, remove_duplicate=False):
                if weight.requires_grad and weight not in self.parameters:
                    self.parameters[weight] = torch.nn.Parameter(weight.detach())
                if weight.requires_grad:
                    swaps.append((layer._parameters, name, weight, self.parameters[weight]))
        return _swapped(swaps)

    def gradients(self, output: Tensor, weights: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
        """Gradients of the module's own weights, from an output that was made with these parameters."""
        leaves = {id(weight): self.parameters.get(self.rounded.used_for(weight)) for weight in weights}
        distinct = list({id(leaf): leaf for leaf in leaves.values() if leaf is not None}.values())
        computed = torch.autograd.grad(output, distinct, gradient, allow_unused=True)
        by_leaf = dict(zip(map(id, distinct), computed, strict=True))
        return [self.rounded.gradient_of(weight, by_leaf.get(id(leaves[id(weight)]))) for weight in weights]
