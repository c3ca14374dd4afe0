"""Shared records."""

from __future__ import annotations

from stalewise.types import (
    FinishReason,
    NullCallback,
    ProgressCallback,
    Rollout,
    SamplerSettings,
    TokenFlag,
    report_evaluation,
)


def test_a_rollout_is_truncated_where_the_limit_cut_it() -> None:
    def rollout(reason: FinishReason) -> Rollout:
        return Rollout(0, "a", 0, (1,), (2,), (-0.5,), 1.0, {}, "", reason, 0, 0, SamplerSettings(), 0, "x")

    assert rollout(FinishReason.LENGTH).truncated and not rollout(FinishReason.STOP).truncated


def test_flags_are_bits_of_one_byte() -> None:
    assert [int(flag) for flag in TokenFlag] == [1, 2, 4]  # stored in token logs


def test_the_null_callback_ignores_everything() -> None:
    callback: ProgressCallback = NullCallback()
    callback.begin("learn", 3)
    callback.advance(1)
    callback.metrics(0, {})
    callback.evaluation({})
    callback.log("message")


def test_a_callback_may_lack_evaluations() -> None:
    class Old:
        def log(self, message: str) -> None:
            raise AssertionError(message)

    report_evaluation(Old(), {"version": 0})  # pyright: ignore[reportArgumentType]
