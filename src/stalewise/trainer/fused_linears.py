"""Weights of linear layers in a lower precision, at addresses that stay, and layers with one input made one.

Autocast rounds every weight at every use, and returns every gradient in float32: with CUDA graphs that is a launch for
each weight in every replay. Here all are rounded in a few launches after a step. Layers that read the same numbers,
such as those of queries, keys and values, are one product forward and two backward instead of three and six.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from stalewise.trainer.optimizer import copy_to

# Children of one module that read the same input, in the order in which they do: the names of the Llama family.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Together(torch.nn.Module):
    """Several linear layers with one input as one product; stands in for the first of them."""

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias, self.sizes = weight, bias, tuple(sizes)
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """The part of the first layer; those of the others wait."""
        product = linear(x, self.weight, self.bias)
        if len(self.sizes) == 1:
            return product
        self.input, self.parts = x, product.split(self.sizes, dim=-1)
        return self.parts[0]


class Later(torch.nn.Module):
    """Stands in for one of the others, which read what the first one read."""

    def __init__(self, together: Together, place: int) -> None:
        super().__init__()
        self.together = [together]  # not a child a second time: its weights would have two names
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        """What was computed along with the first; after the last one nothing is held any more."""
        together = self.together[0]
        if x is not together.input:
            raise RuntimeError("layers whose names say that they read the same input do not")
        part = together.parts[self.place]
        if self.place + 1 == len(together.sizes):
            together.input, together.parts = None, ()
        return part


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Where a weight is within a rounded one: so many of its rows, from one of them on."""

    rounded: torch.nn.Parameter
    start: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor that is as large as the rounded one."""
        return tensor.narrow(0, self.start, self.rows)


class RoundedWeights:
    """The weights of a module's linear layers, rounded; parameters, since the compiler fixes sizes of those alone.

    A weight that has another use as well, such as an embedding or a second layer, stays as it is.
    """

    def __init__(self, module: torch.nn.Module, precision: torch.dtype) -> None:
        self.precision = precision
        self.places: dict[Tensor, WeightSlice] = {}
        self.swaps: list[tuple[torch.nn.Module, str, torch.nn.Module, torch.nn.Module]] = []
        self.uses = Counter(
            id(weight)
            for _, layer in module.named_modules(remove_duplicate=False)
            for weight in layer.parameters(recurse=False)
        )
        for parent in list(module.modules()):
            done: set[str] = set()
            for names in TOGETHER:
                if self._join(parent, names):
                    done |= set(names)
            for name, layer in parent.named_children():
                if name not in done and isinstance(layer, torch.nn.Linear) and self._fits(layer):
                    self._round(parent, name, layer)
        # Made once: there may be hundreds, and they are asked for after every step.
        self.targets = [place.of(place.rounded.detach()) for place in self.places.values()]
        self.sources = [weight.detach() for weight in self.places]

    def _fits(self, layer: torch.nn.Module | None) -> bool:
        return type(layer) is torch.nn.Linear and not any(
            weight.dtype is self.precision or self.uses[id(weight)] > 1 for weight in layer.parameters()
        )

    def _join(self, parent: torch.nn.Module, names: Sequence[str]) -> bool:
        if getattr(getattr(parent, "config", None), "clip_qkv", None) is not None:
            return False  # OLMo's clips each of them in place, which autograd refuses for parts of one product
        layers = [getattr(parent, name, None) for name in names]
        plain = [layer for layer in layers if isinstance(layer, torch.nn.Linear) and self._fits(layer)]
        alike = {
            (layer.in_features, *(w.requires_grad if w is not None else None for w in (layer.weight, layer.bias)))
            for layer in plain
        }
        if len(plain) < len(names) or len(alike) > 1:
            return False
        weight = self._together([layer.weight for layer in plain])
        biases = [layer.bias for layer in plain if layer.bias is not None]
        first = Together(weight, self._together(biases) if biases else None, [layer.out_features for layer in plain])
        stand_ins = [first, *(Later(first, place) for place in range(1, len(plain)))]
        for name, layer, stand_in in zip(names, plain, stand_ins, strict=True):
            self.swaps.append((parent, name, layer, stand_in))
        return True

    def _round(self, parent: torch.nn.Module, name: str, layer: torch.nn.Linear) -> None:
        bias = None if layer.bias is None else self._together([layer.bias])
        self.swaps.append((parent, name, layer, Together(self._together([layer.weight]), bias, [layer.out_features])))

    def _together(self, weights: Sequence[Tensor]) -> torch.nn.Parameter:
        rounded = torch.cat([weight.detach().to(self.precision) for weight in weights])
        parameter = torch.nn.Parameter(rounded, requires_grad=weights[0].requires_grad)
        start = 0
        for weight in weights:
            self.places[weight] = WeightSlice(parameter, start, len(weight))
            start += len(weight)
        return parameter

    def refresh(self) -> None:
        """Round what the weights are now."""
        copy_to(self.targets, self.sources)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The module with these layers for its own."""
        try:
            for parent, name, _, stand_in in self.swaps:
                parent._modules[name] = stand_in
            yield
        finally:
            for parent, name, own, _ in self.swaps:
                parent._modules[name] = own

    def read(self, weight: Tensor) -> Tensor:
        """What the module reads in place of this weight."""
        return self.places[weight].rounded if weight in self.places else weight

    def part(self, weight: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a weight, within that of what is read in its place."""
        return self.places[weight].of(gradient) if gradient is not None and weight in self.places else gradient


class Twins:
    """Parameters of its own for a pass of a module, with the same numbers at the same addresses.

    Autograd ties a parameter to the stream of its first use: passes on different streams that shared one would wait
    for each other, and break a capture.
    """

    def __init__(self, rounded: RoundedWeights) -> None:
        self.rounded = rounded
        self.twins: dict[Tensor, torch.nn.Parameter] = {}

    @contextlib.contextmanager
    def in_place(self, module: torch.nn.Module) -> Iterator[None]:
        """The module with these for its parameters."""
        places = [
            (layer, name, weight)
            for layer in module.modules()
            for name, weight in layer.named_parameters(recurse=False, remove_duplicate=False)
            if weight.requires_grad
        ]
        try:
            for layer, name, weight in places:
                layer._parameters[name] = self._twin(weight)
            yield
        finally:
            for layer, name, weight in places:
                layer._parameters[name] = weight

    def _twin(self, weight: torch.nn.Parameter) -> torch.nn.Parameter:
        if weight not in self.twins:
            self.twins[weight] = torch.nn.Parameter(weight.detach())
        return self.twins[weight]

    def gradients(self, output: Tensor, weights: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
        """Gradients of the module's own weights, from an output that was made with these."""
        leaves = {id(weight): self.twins.get(self.rounded.read(weight)) for weight in weights}
        distinct = list({id(leaf): leaf for leaf in leaves.values() if leaf is not None}.values())
        found = torch.autograd.grad(output, distinct, gradient, allow_unused=True)
        by_leaf = dict(zip(map(id, distinct), found, strict=True))
        return [self.rounded.part(weight, by_leaf.get(id(leaves[id(weight)]))) for weight in weights]
