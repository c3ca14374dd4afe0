"""Updates that run ahead of their metrics."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stalewise.trainer.pending_update import _prefetch, prefetch
from stalewise.trainer.trainer import Trainer
from trainer_inputs import (
    CPU,
    POLICY,
    config,
    rollouts,
)


def test_updates_can_be_enqueued_before_they_are_read() -> None:
    one, other = Trainer(config(), POLICY), Trainer(config(), POLICY)
    batches = [rollouts(seed=seed) for seed in range(3)]
    pending = [one.enqueue(rows) for rows in batches]
    assert [p.metrics() for p in pending] == [other.update(rows) for rows in batches]


def test_the_mismatch_of_the_engines_is_that_of_fresh_rollouts() -> None:
    trainer = Trainer(config(), POLICY)
    rows = rollouts(drift=0.0)
    first, second = trainer.update(rows), trainer.update(rows)
    assert 0 < first["mismatch_mean"] <= first["mismatch_max"] < 1e-4
    assert math.isnan(second["mismatch_mean"]) and second["log_ratio_mean_abs"] > first["mismatch_mean"]


def test_one_is_made_ahead_and_no_more() -> None:
    made: list[tuple[int, str]] = []

    def make(number: int) -> int:
        made.append((number, threading.current_thread().name))
        return number * number

    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        found = _prefetch(make, range(5), thread)
        assert next(found) == 0
        assert [number for number, _ in made] == [0, 1]  # at once: nothing is made beside the first
        assert next(found) == 1
        thread.submit(lambda: None).result()
        assert [number for number, _ in made] == [0, 1, 2]
        assert list(found) == [4, 9, 16]
    assert all(name.startswith("ahead") for _, name in made)
    assert list(prefetch(make, range(3), CPU)) == [0, 1, 4]
    assert made[-1][1] == threading.current_thread().name  # without a GPU there is nobody to get ahead of


def test_what_goes_wrong_ahead_is_raised_where_it_is_asked_for() -> None:
    with ThreadPoolExecutor(1) as thread:
        found = _prefetch(lambda number: 1 / number, [2, 0, 1], thread)
        assert next(found) == 0.5
        with pytest.raises(ZeroDivisionError):
            next(found)
