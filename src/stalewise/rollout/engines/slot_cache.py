"""The cache of a slot decoder (one block of memory per layer for slots and prompts), and its queue of requests.

Axes: T tokens of the cache, R rows of a step or tokens of prompts, K key-value heads, D numbers per head, Q requests,
P distinct prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from stalewise.models.kernels import can_compile
from stalewise.rollout.sampler import Request


class SlotCache(Cache):
    """Keys and values of all layers. The caller of the model sets `place_R` and `reads_prompts` first."""

    def __init__(self, tokens: int, example: list[tuple[Tensor, Tensor]]) -> None:
        """`example` holds keys and values of one token in each layer, [1, K, 1, D]."""
        super().__init__(layer_class_to_replicate=object)  # pyright: ignore[reportArgumentType]
        self.keys = [key.new_zeros(tokens, key.shape[1], key.shape[3]) for key, _ in example]
        self.values = [value.new_zeros(tokens, value.shape[1], value.shape[3]) for _, value in example]
        self.place_R = torch.empty(0, dtype=torch.long)  # where the next tokens are written
        self.reads_prompts = False

    @property
    def nbytes(self) -> int:
        """Memory of the cache."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write the new keys and values; returns what attention reads: the whole cache, or a prompt's own tokens."""
        keys_TKD, values_TKD = self.keys[layer_idx], self.values[layer_idx]
        new = [x[0].transpose(0, 1) if self.reads_prompts else x[:, :, 0] for x in (key_states, value_states)]
        if keys_TKD.is_cuda and can_compile():
            from stalewise.models.kernels.rope import write_on_device  # Triton comes with torch for GPUs alone

            write_on_device(keys_TKD, values_TKD, self.place_R, *new)
        else:
            for stored_TKD, new_RKD in zip((keys_TKD, values_TKD), new, strict=True):
                stored_TKD.index_copy_(0, self.place_R, new_RKD)
        return (key_states, value_states) if self.reads_prompts else (keys_TKD, values_TKD)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length; positions are always given."""
        return 0


def one_token_states(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of one token in each layer."""
    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    model.set_attn_implementation(before)
    layers: list[Any] = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


class RequestQueue:
    """Requests waiting for a slot, grouped by prompt, and where the prompts lie in the cache.

    A prompt is prefilled but for its last token, which is the input of each response's first step.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_prompt.setdefault(tuple(request.prompt_ids), []).append(index)
        self.prompts = list(by_prompt)
        self.members = list(by_prompt.values())
        self.seed_Q = np.array([request.seed for request in requests], dtype=np.int64)
        self.prompt_Q = np.empty(len(requests), dtype=np.int64)
        for prompt, members in enumerate(self.members):
            self.prompt_Q[members] = prompt
        self.prefix_P = np.array([len(prompt) - 1 for prompt in self.prompts])
        self.last_P = np.array([prompt[-1] for prompt in self.prompts])
        self.place_P = np.full(len(self.prompts), -1)
        self.open_P = np.array([len(members) for members in self.members])  # requests that have not ended
        self.unread = 0  # the first prompt that is not prefilled
        self.read: deque[int] = deque()  # requests whose prompts are prefilled
        self.free: list[int] = []  # places for prompts

    def __bool__(self) -> bool:
        return bool(self.read) or self.unread < len(self.prompts)

    def set_places(self, places: int) -> None:
        """The number of prompts that the cache has room for."""
        self.free = list(range(places))

    def next_prompts(self, most_tokens: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """The next prompts without their last tokens, and their places; their requests count as `read` from now on.

        As many as free places and `most_tokens` allow, but at least one if a place is free.
        """
        first, tokens = self.unread, 0
        while self.unread < len(self.prompts) and self.free:
            tokens += int(self.prefix_P[self.unread])
            if tokens > most_tokens and self.unread > first:
                break
            self.place_P[self.unread] = self.free.pop()
            self.read.extend(self.members[self.unread])
            self.unread += 1
        return [prompt[:-1] for prompt in self.prompts[first : self.unread]], self.place_P[first : self.unread]

    def take(self, most: int) -> np.ndarray:
        """The next requests whose prompts are prefilled."""
        return np.array([self.read.popleft() for _ in range(min(most, len(self.read)))], dtype=np.int64)

    def end(self, requests: np.ndarray) -> None:
        """These requests have ended; the places of prompts without open requests become free."""
        prompts, counts = np.unique(self.prompt_Q[requests], return_counts=True)
        self.open_P[prompts] -= counts
        self.free.extend(self.place_P[prompts[self.open_P[prompts] == 0]].tolist())
