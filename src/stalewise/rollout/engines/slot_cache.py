"""Keys and values of slots and of prompts, in one block of memory for each layer.

Axes: T tokens that there is room for, R rows of a step or tokens of prompts, K key-value heads, D numbers per head.
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
            from stalewise.models.kernels.rope import write_on_device  # Triton comes with torch for GPUs alone

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


# Requests that wait for a slot, by prompt: what is read once lies in one place and serves all its responses.
# Axes: Q requests, P distinct prompts.


class RequestQueue:
    """Requests that wait, those with one prompt together, and the places of the prompts that have been read.

    A prompt is read but for its last token, which the first step of each response takes.
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
        self.unread = 0  # the first prompt that has not been read
        self.read: deque[int] = deque()  # requests whose prompts have been read
        self.free: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.read) or self.unread < len(self.prompts)

    def resolve_learning_rate(self, places: int) -> None:
        """There is room for so many prompts."""
        self.free = list(range(places))

    def next_prompts(self, most_tokens: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """The next prompts without their last tokens, and where each is to lie; their requests are `read` from now on.

        As many as there are places and `most_tokens` allow, and at least one where there is a place.
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
        """The next requests whose prompts have been read."""
        return np.array([self.read.popleft() for _ in range(min(most, len(self.read)))], dtype=np.int64)

    def end(self, requests: np.ndarray) -> None:
        """These need their prompts no longer; what nobody needs makes way for the next."""
        prompts, counts = np.unique(self.prompt_Q[requests], return_counts=True)
        self.open_P[prompts] -= counts
        self.free.extend(self.place_P[prompts[self.open_P[prompts] == 0]].tolist())
