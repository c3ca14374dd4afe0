"""What a judge returns or raises becomes a reward or an error."""

import math

import pytest

from stalewise.tasks.verifiers.judge_process import reward_of
from stalewise.tasks.verifiers.pool import ProcessVerifier
from stalewise.types import MOST_PARTS, Reward
from verifying import score


def test_scalars_of_numpy_are_numbers() -> None:
    import numpy as np

    assert reward_of(np.float32(0.5)) == Reward(0.5)
    assert reward_of({"reward": np.bool_(True), "length": np.int64(3)}) == Reward(1.0, {"length": 3.0})


def test_everything_that_can_go_wrong_is_an_error_of_its_own_response(
    judges: str, capfd: pytest.CaptureFixture[str]
) -> None:
    responses = ["8", "raise", "exit", "die", "crash", "nan", "inf", "none", "text", "headless", "interrupt", "9"]
    with ProcessVerifier(
        "stalewise.tasks.verifiers.python:load_judge", {"function": judges}, workers=2, limit_s=5
    ) as verifier:
        rewards = score(verifier, *responses, "parts", "torch")
    assert {response: reward.error for response, reward in zip(responses, rewards, strict=False)} == {
        "8": "",
        "raise": "ValueError: bad response",
        "exit": "SystemExit: 3",
        "die": "worker died: exit code 3",
        "crash": "worker died: Segmentation fault",
        "nan": "not a finite number: reward is nan",
        "inf": "not a finite number: bonus is inf",
        "none": "returned None: it must return a number, or a dict with the key reward",
        "text": "not a finite number: reward is str",
        "headless": 'no reward: a dict from a verifier must have the key "reward"',
        "interrupt": "KeyboardInterrupt: ",
        "9": "",
    }
    assert all(math.isnan(reward.value) for reward in rewards if reward.error)
    assert [rewards[0].value, rewards[11].value] == [1.0, 0.0]
    assert rewards[12] == Reward(0.5, {"length": 3.0, "correct": 1.0})
    assert rewards[13].value == 0.0, "a worker imported torch"
    assert capfd.readouterr().out == "", "what a judge prints must not reach standard output"


@pytest.mark.parametrize("value", [1e15 * 1.01, -1e30, 1e300])
def test_a_reward_whose_square_no_float_could_hold_is_an_error(value: float) -> None:
    assert reward_of(value).error == f"too large: reward is {value}; the largest is 1e+15"
    assert reward_of({"reward": value, "answer": "8"}).error.startswith("too large: reward is ")
    assert reward_of(math.copysign(1e15, value)) == Reward(math.copysign(1e15, value))
    assert reward_of({"reward": 1, "size": value}) == Reward(1.0, {"size": value})  # parts are only shown


def test_more_parts_than_are_kept_are_an_error() -> None:
    parts = {f"part {number}": 1.0 for number in range(MOST_PARTS)}
    assert len(reward_of({"reward": 1.0, **parts}).parts) == MOST_PARTS
    found = reward_of({"reward": 1.0, **parts, "one more": 1.0})
    assert found.error == "too many reward parts: 101; the most are 100" and math.isnan(found.value)
