"""Updates that run ahead of their metrics."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from callbacks import Listener
from stalewise.api import fork, learn, run
from stalewise.config import make_config
from stalewise.store.json_lines import read_jsonl
from stalewise.trainer.micro_batch import micro_batches
from stalewise.trainer.pending_update import _prefetch, prefetch
from stalewise.trainer.trainer import Trainer
from tiny import tiny_record
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


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_a_policy_trained_at_the_temperature_of_its_sampler_has_ratios_of_one(tmp_path: Path, kl: float) -> None:
    first: list[dict[str, float]] = []
    for trained in (1.0, 1.3):
        objective = {"policy_temperature": trained, "kl": kl, "entropy_bonus": 0.01}
        record = tiny_record(tmp_path, f"at-{trained}", sampler={"temperature": 1.3}, objective=objective)
        made, listener = make_config(record), Listener()
        run(made, listener)
        assert ("ratios differ from 1" in "".join(listener.said)) == (trained == 1.0)
        first.append(read_jsonl(made.directory / "metrics.jsonl")[0])
    assert first[0]["mismatch_mean"] > 0.05 and first[1]["mismatch_mean"] < 1e-5
    assert first[1]["entropy"] > first[0]["entropy"]
    if kl:  # the reference is taken at the same temperature as the policy that begins at it
        assert first[0]["kl_reference"] == first[1]["kl_reference"] == 0.0


def test_forks_and_learning_again_are_warned_by_the_temperature_of_their_rollouts(tmp_path: Path) -> None:
    def told(call: Callable[[Listener], object]) -> list[str]:
        call(listener := Listener())
        return [line.partition(":")[0] for line in listener.said if "ratios differ from 1" in line]

    plain = make_config(tiny_record(tmp_path, "plain"))
    assert told(lambda listener: run(plain, listener)) == []
    made = fork(plain.directory, at=2, settings={"sampler.temperature": 0.7}, name="cool")
    different = ["rollouts are sampled at temperature 0.7 and the policy is trained at 1"]
    assert told(lambda listener: run(made, listener)) == different
    hot = tiny_record(tmp_path, "again", sampler={"temperature": 1.3}, objective={"policy_temperature": 1.3})
    asked = make_config(hot)  # its own sampler is not used
    different = ["rollouts are sampled at temperature 1 and the policy is trained at 1.3"]
    assert told(lambda listener: learn(asked, [plain.directory], callback=listener)) == different


def test_the_proximal_policy_has_the_same_temperature() -> None:
    found: list[torch.Tensor] = []
    for temperature in (1.0, 1.3):
        objective = {"name": "p3o_two_anchor", "policy_temperature": temperature}
        trainer = Trainer(config(objective=objective), POLICY)
        (part,) = micro_batches(rollouts(), trainer.execution.layout(10_000, 0), CPU)
        proximal = trainer.execution.proximal_logp(part)  # it begins at the policy
        assert proximal is not None
        assert torch.allclose(proximal, trainer.execution.forward(part)[0], atol=1e-6)
        found.append(proximal)
    assert (found[0] - found[1]).abs().max() > 0.1


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
