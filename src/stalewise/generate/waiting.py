"""Requests that wait for a slot, by prompt: what is read once lies in one place and serves all its responses.

Axes: Q requests, P distinct prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from stalewise.generate.sampler import Request


class Waiting:
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

    def settle(self, places: int) -> None:
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
