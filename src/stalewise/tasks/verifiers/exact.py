"""Scores responses by comparing texts."""

from __future__ import annotations

from stalewise.tasks.base import LocalVerifier
from stalewise.types import Prompt, Reward


class ExactVerifier(LocalVerifier):
    """The response must equal the answer, except for surrounding white space."""

    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""
        return Reward(float(response.strip() == prompt.answer.strip()))

    def answer(self, response: str) -> str | None:
        """The response, for a vote among responses."""
        return response.strip() or None
