"""Requests, responses and the limits of their lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stalewise.errors import ModelError
from stalewise.rollout.sampler import OffloadableSampler, Response, check_lengths, token_limit
from stalewise.types import FinishReason


def response(ids: list[int], logp: list[float], text: str = "a") -> Response:
    return Response(np.array(ids, dtype=np.int32), np.array(logp, dtype=np.float32), text, FinishReason.STOP)


def test_responses_are_equal_by_value() -> None:
    one = response([1, 2], [-0.5, -1.0])
    assert one == response([1, 2], [-0.5, -1.0])
    assert one != response([1, 3], [-0.5, -1.0])
    assert one != response([1, 2], [-0.5, -1.1])
    assert one != response([1, 2], [-0.5, -1.0], "b")
    assert one != response([1], [-0.5]) and one != "a"


def test_the_longest_prompt_and_its_response_must_fit() -> None:
    check_lengths([[1], [1, 2, 3]], limit=8, max_new_tokens=5)
    check_lengths([[1] * 99], limit=None, max_new_tokens=5)
    with pytest.raises(ModelError, match=r"prompt has 3 tokens; .* the model's context of 7: .* to at most 4$"):
        check_lengths([[1], [1, 2, 3]], limit=7, max_new_tokens=5)


def test_a_token_limit_ends_with_its_context_whatever_happens() -> None:
    sampler: Any = SimpleNamespace(max_new_tokens=8)
    with pytest.raises(ModelError), token_limit(sampler, 1):
        assert sampler.max_new_tokens == 1
        raise ModelError("no memory")
    assert sampler.max_new_tokens == 8


def test_a_sampler_that_can_sleep_is_known_by_its_method() -> None:
    class Sleeping:
        def sleep(self) -> None: ...

    assert isinstance(Sleeping(), OffloadableSampler) and not isinstance(object(), OffloadableSampler)
