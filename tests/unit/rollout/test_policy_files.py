"""Answers of engines in other processes are checked."""

from __future__ import annotations

from typing import Any, cast

import pytest

from policies import POLICY
from stalewise.errors import EngineError
from stalewise.rollout.engines import http as endpoint
from stalewise.rollout.policy_files import Answer, ExternalSampler, read_policy_files
from stalewise.rollout.sampler import Request
from stalewise.types import SamplerSettings


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "POLL_S", 0.02)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer([5], [-0.5, -0.1], "length"), "1 tokens and 2 log-probabilities"),
        (Answer([], [], "stop"), "0 tokens"),
        (Answer([5, 6, 7], [-1.0] * 3, "length"), "3 tokens and 3 log-probabilities, where 1 to 2"),
        (Answer([99, 1], [-1.0, -1.0], "stop"), "token 99 of a vocabulary of 18"),
        (Answer([5, 1], [-1.0, float("nan")], "stop"), "nan as a log-probability"),
        (Answer([5, 1], [-1.0, 0.5], "stop"), "0.5 as a log-probability"),
        (Answer([5, 1], [cast(Any, None), -1.0], "stop"), "None as a log-probability"),
        (Answer([5, 1], [-9999.0, -1.0], "stop"), "-9999.0 as a log-probability"),
        (Answer([5, 6], [-1.0, -1.0], "abort"), "finish reason is 'abort'"),
        (Answer([5, 6], [-1.0, -1.0], "stop"), "its last token 6 is none of the end tokens"),
        (Answer([5], [-1.0], "length"), "cut after 1 of"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(answer: Answer, message: str) -> None:
    sampler = ExternalSampler(SamplerSettings(), 2, lambda count: None)
    sampler.policy = read_policy_files(POLICY)
    with pytest.raises(EngineError, match=f"an engine gave a response that cannot be used: .*{message}"):
        sampler.make_responses([answer], [Request([1], 0)], "an engine")
