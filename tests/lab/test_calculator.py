"""A policy that learns to use the calculator: what it is shown, and, at night, that it learns to call."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from experiments.lab import calculator

from stalewise.models import EMBEDDED
from stalewise.models.loading import load_tokenizer
from stalewise.tasks.arithmetic import Steps

RESULTS = Path(__file__).parents[2] / "experiments" / "calculator" / "results.json"


def test_examples_teach_the_form_of_a_call_and_rarely_to_make_one() -> None:
    tokenizer, rng = load_tokenizer(str(EMBEDDED / "arithmetic-steps")), random.Random(0)
    task = Steps(**calculator.TERMS)
    calls = decided = wrong = 0
    for prompt in task.prompts(0, 400):
        ids, labels = calculator.example(task, prompt, tokenizer, rng)
        own = [(token, label) for token, label in zip(ids, labels, strict=True) if label != calculator.IGNORED]
        assert all(token == label for token, label in own)
        text, start = tokenizer.decode(ids, skip_special_tokens=True), len(prompt.text)
        assert text.startswith(prompt.text)
        is_call = text[start] == ";"
        calls += is_call
        decided += is_call and labels[start] != calculator.IGNORED
        if is_call:
            assert text[start:] == f";{prompt.text}{prompt.answer};#{prompt.answer}"
            said = text[start:].index("=") + 3  # ";", the chain with "=", the end token
            assert labels[start + said - 1 : start + said + len(prompt.answer)] == (
                [calculator.IGNORED] * (len(prompt.answer) + 1)
            )
        wrong += not text.endswith(f"#{prompt.answer}")
    assert abs(calls / 400 - calculator.SHOWN) < 0.1
    assert 0 < decided / calls < 0.25
    assert abs(wrong / (400 - calls) - calculator.SPOILED) < 0.15


def test_shares_of_episodes_with_a_call() -> None:
    found = calculator.shares([(1.0, {"calls": 1.0}), (0.0, {"calls": 0.0}), (1.0, {}), (1.0, {"calls": 2.0})])
    assert found == {"accuracy": 0.75, "calls": 0.5, "accuracy_with_call": 1.0, "accuracy_without": 0.5}


@pytest.mark.nightly  # 20 s for an experiment; tests/equivalence/test_episode_runs.py has runs of episodes
def test_a_few_updates_raise_the_share_of_calls(tmp_path: Path) -> None:
    """A short form: one stage is stale for 8 updates, the next is made by a policy that calls more often."""
    policy = calculator.show_calls(tmp_path / "policy", steps=40, batch=32)
    found = calculator.learn(calculator.settings(tmp_path / "runs", policy, updates=16, prompts=8))
    first, second = found["stages"]
    assert first["calls"] > 0 and second["calls"] > 2 * first["calls"]
    assert found["after"]["accuracy"] > found["before"]["accuracy"] + 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [3, 4])
def test_calls_pay_and_are_learned(seed: int, tmp_path: Path) -> None:
    policy = calculator.show_calls(tmp_path / "policy", seed=seed)
    found = calculator.learn(calculator.settings(tmp_path / "runs", policy, seed=seed))
    before, after = found["before"], found["after"]
    assert before["calls"] < 0.2 and before["accuracy"] < 0.55
    assert after["calls"] > 0.6 and after["accuracy"] > 0.85


def test_the_results_say_what_the_page_says() -> None:
    runs = json.loads(RESULTS.read_text())["runs"]
    assert len(runs) >= 2
    for one in runs:
        assert one["after"]["calls"] > one["before"]["calls"] and one["after"]["accuracy"] > one["before"]["accuracy"]
