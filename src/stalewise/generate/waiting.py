"""Requests that wait for a slot, by prompt: what is read once serves all its responses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from stalewise.generate.sampler import Request


class Waiting:
    """Requests that wait, those with one prompt together; `read` are those whose prompt has been read."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_prompt.setdefault(tuple(request.prompt_ids), []).append(index)
        self.prompts = deque(by_prompt.items())
        self.read: deque[tuple[int, int]] = deque()  # request, and where the tokens of its prompt begin

    def __bool__(self) -> bool:
        return bool(self.read or self.prompts)

    def next_prompts(self, most_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the next prompts without their last ones, and lengths; their requests are `read` from now on."""
        pieces: list[np.ndarray] = []
        total = 0
        while self.prompts and (not self.read or total + len(self.prompts[0][0]) - 1 <= most_tokens):
            prompt, indices = self.prompts.popleft()
            pieces.append(np.array(prompt[:-1], dtype=np.int64))
            self.read.extend((index, total) for index in indices)
            total += len(prompt) - 1
        lengths = np.array([len(piece) for piece in pieces if len(piece)])
        return np.concatenate([np.empty(0, np.int64), *pieces]), lengths

    def take(self, most: int) -> list[tuple[int, int]]:
        """The next requests whose prompts have been read."""
        return [self.read.popleft() for _ in range(min(most, len(self.read)))]
