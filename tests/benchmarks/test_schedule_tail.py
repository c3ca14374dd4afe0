"""benchmarks/schedule_tail.py: steps of small pools by hand, and what an earlier pool is good for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks.schedule_tail import compare, decode

from stalewise.rollout.engines.request_queue import LengthHistory, RequestQueue


def test_steps_by_hand() -> None:
    # Two prompts of 8 in 8 slots: the second begin as the first end, after 1 step, and end after 5; the other way round
    # the short ones would begin at step 5.
    lengths = np.array([1] * 8 + [5] * 8)
    assert decode(lengths, 8, 8, RequestQueue.next, LengthHistory()) == 6
    # 15 slots: one of the long ones waits for a step. With what is known of the first pool the short one waits instead.
    history = LengthHistory()
    assert decode(lengths, 15, 8, RequestQueue.next, history) == 6
    assert decode(lengths, 15, 8, RequestQueue.next, history) == 5


def test_an_earlier_pool_shortens_the_tail() -> None:
    draws = [compare(64, 512, 64, draw) for draw in range(4)]
    more = {name: np.mean([draw[name][0] for draw in draws]) for name in draws[0]}
    assert 0 <= more["true"] < more["expected, an earlier pool known"] < more["arrival"]
    assert all(0.5 < busy <= 1 for draw in draws for _, busy in draw.values())
