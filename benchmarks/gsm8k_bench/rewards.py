"""The control: rewards that know nothing of the answer. Held-out responses are scored as in every other arm."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any


def random_reward(prompt: Any, response: str) -> float | dict[str, float]:
    """1 or 0 with equal chance, by a hash of prompt and response; of an evaluation prompt, what math-verify says."""
    if prompt.prompt_id.startswith("evaluation/"):
        reward = _judge()(prompt, response)
        return {"reward": reward.value, **reward.parts}
    return float(hashlib.sha256(f"{prompt.prompt_id}\0{response}".encode()).digest()[0] & 1)


@cache
def _judge() -> Any:
    from .library import math_judge

    return math_judge()
