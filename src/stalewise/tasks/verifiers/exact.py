"""Compares texts."""

from __future__ import annotations

from stalewise.tasks.base import LocalVerifier
from stalewise.types import Prompt, Reward


class ExactVerifier(LocalVerifier):
    """The response must be the answer, but for white space around either."""

    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""
        return Reward(float(response.strip() == prompt.answer.strip()))
