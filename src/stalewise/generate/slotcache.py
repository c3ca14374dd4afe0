"""Keys and values of the slots, in one block of memory, and those of the prompts that were read for them.

Axes: S slots, L tokens that a slot has room for, K key-value heads, D numbers per head, R rows of a step, M tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

COPIED_BYTES = 1 << 28  # at once, on their way from a prompt into slots


class SlotCache(Cache):
    """Keys and values of all layers; what a model writes to depends on `place_R`.

    Layers whose shapes are equal, mostly all, lie in one block of keys and one of values, so that a prompt is copied
    for all of them at once.
    """

    def __init__(self, slots: int, room: int, example: list[tuple[Tensor, Tensor]]) -> None:
        """`example` are keys and values of one token in each layer, [1, K, 1, D]."""
        super().__init__(layer_class_to_replicate=object)  # pyright: ignore[reportArgumentType]
        layers_of: dict[Any, list[int]] = {}
        for layer, (key, value) in enumerate(example):
            layers_of.setdefault((key.shape, value.shape), []).append(layer)
        self.place_of = {
            layer: (kind, place) for kind, layers in enumerate(layers_of.values()) for place, layer in enumerate(layers)
        }
        self.shapes = [(len(layers), example[layers[0]]) for layers in layers_of.values()]
        self.slots = slots
        self.stored = self._blocks(slots * room)
        self.read = self._blocks(0)  # of the prompts read last
        self.place_R: Tensor | None = None  # where a decoding step writes; None: prompts are being read

    def _blocks(self, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Room for so many tokens, [layers, tokens, K, D]."""
        return [
            (key.new_zeros(count, tokens, *key.shape[1::2]), value.new_zeros(count, tokens, *value.shape[1::2]))
            for count, (key, value) in self.shapes
        ]

    @property
    def nbytes(self) -> int:
        """Memory that the slots take."""
        return sum(x.nbytes for both in self.stored for x in both)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write the new keys and values; what attention is to read."""
        kind, place = self.place_of[layer_idx]
        if self.place_R is None:
            for read, states in zip(self.read[kind], (key_states, value_states), strict=True):
                read[place].copy_(states[0].transpose(0, 1))
            return key_states, value_states
        stored = [x[place] for x in self.stored[kind]]
        for x, states in zip(stored, (key_states, value_states), strict=True):
            x.index_copy_(0, self.place_R, states[:, :, 0])
        return tuple(x.unflatten(0, (self.slots, -1)) for x in stored)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not a property of all rows alike; positions are always given."""
        return 0

    def read_next(self, tokens: int) -> None:
        """Prompts of so many tokens are read next; the last ones are let go first."""
        self.place_R, self.read = None, []
        self.read = self._blocks(tokens)

    def copy_read(self, source_M: Tensor, place_M: Tensor) -> None:
        """Copy tokens of the prompts read last to places of the slots."""
        for stored, read in zip(self.stored, self.read, strict=True):
            for to, tokens in zip(stored, read, strict=True):
                at_once = max(1, COPIED_BYTES // to[:, 0].nbytes)
                for source, place in zip(source_M.split(at_once), place_M.split(at_once), strict=True):
                    to.index_copy_(1, place, tokens.index_select(1, source))


def one_token(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of one token in each layer."""
    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    model.set_attn_implementation(before)
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]
