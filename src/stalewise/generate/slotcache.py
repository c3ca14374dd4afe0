"""Keys and values of slots and of prompts, in one block of memory for each layer.

Axes: T tokens that there is room for, R rows of a step or tokens of prompts, K key-value heads, D numbers per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from stalewise.kernels import can_compile


class SlotCache(Cache):
    """Keys and values of all layers. Whoever calls the model says before where they are to be written."""

    def __init__(self, tokens: int, example: list[tuple[Tensor, Tensor]]) -> None:
        """`example` are keys and values of one token in each layer, [1, K, 1, D]."""
        super().__init__(layer_class_to_replicate=object)  # pyright: ignore[reportArgumentType]
        self.keys = [key.new_zeros(tokens, key.shape[1], key.shape[3]) for key, _ in example]
        self.values = [value.new_zeros(tokens, value.shape[1], value.shape[3]) for _, value in example]
        self.place_R = torch.empty(0, dtype=torch.long)  # where the next tokens are written
        self.reads_prompts = False

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write the new keys and values; what attention is to read: all of it, or of prompts they themselves."""
        keys_TKD, values_TKD = self.keys[layer_idx], self.values[layer_idx]
        new = [x[0].transpose(0, 1) if self.reads_prompts else x[:, :, 0] for x in (key_states, value_states)]
        if keys_TKD.is_cuda and can_compile():
            from stalewise.kernels.rotate import write_on_device  # Triton comes with torch for GPUs alone

            write_on_device(keys_TKD, values_TKD, self.place_R, *new)
        else:
            for stored_TKD, new_RKD in zip((keys_TKD, values_TKD), new, strict=True):
                stored_TKD.index_copy_(0, self.place_R, new_RKD)
        return (key_states, value_states) if self.reads_prompts else (keys_TKD, values_TKD)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not a property of all rows alike; positions are always given."""
        return 0


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
