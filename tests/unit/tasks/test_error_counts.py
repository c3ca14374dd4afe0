"""Counts of errors by kind."""

import math

from stalewise.tasks import count_errors
from stalewise.tasks.verifiers.error_counts import LISTED, ErrorCounts
from stalewise.types import Prompt, Reward


def test_errors_are_counted_by_kind_with_an_example() -> None:
    nan = math.nan
    rewards = [
        Reward(1.0),
        Reward(nan, error="ValueError: first"),
        Reward(nan, error="timeout after 5.0 s"),
        Reward(nan, error="ValueError: second"),
    ]
    counts = count_errors(rewards)
    assert (counts.total, counts.failed) == (4, 3)
    assert counts.kinds == {"ValueError": 2, "timeout after 5.0 s": 1}
    assert counts.examples["ValueError"] == "ValueError: first"
    assert str(counts) == "3 of 4 responses could not be scored: 2 × ValueError (first), 1 × timeout after 5.0 s"
    assert (counts + count_errors(rewards)).kinds == {"ValueError": 4, "timeout after 5.0 s": 2}
    assert str(count_errors([Reward(0.0)])) == "all 1 responses were scored"


def test_what_went_wrong_is_listed_by_prompt() -> None:
    nan = math.nan
    prompts = [Prompt(name, "x", "1") for name in "aabcd"]
    rewards = [
        Reward(nan, error="unparseable gold answer: '?'"),
        Reward(nan, error="unparseable gold answer: '?'"),
        Reward(0.0, {"parsed": 0.0}),
        Reward(0.0, {"parsed": 1.0}),
        Reward(0.0, {"parsed": 0.0}),
    ]
    texts = ["1", "2", "I do not know", "7", "x" * 500 + "end"]
    counts = count_errors(rewards, prompts, texts)
    assert counts.record() == {
        "verifier_error_kinds": {"unparseable gold answer": 2},
        "verifier_error_examples": {"unparseable gold answer": "unparseable gold answer: '?'"},
        "verifier_error_prompts": {"unparseable gold answer": ["a"]},  # each prompt once
        "unparsed": 2,
        "unparsed_examples": [
            {"prompt_id": "b", "response": "I do not know"},
            {"prompt_id": "d", "response": "…" + "x" * 197 + "end"},  # where an answer would have stood
        ],
    }
    twice = counts + count_errors(rewards, [Prompt(name, "x", "1") for name in "eebcd"], texts)
    assert (twice.unparsed, twice.failed, twice.prompts) == (4, 4, {"unparseable gold answer": ("a", "e")})
    assert len(twice.unparsed_examples) == 4
    many = [Prompt(str(number), "x", "1") for number in range(50)]
    listed = count_errors([Reward(0.0, {"parsed": 0.0})] * 50, many, ["?"] * 50)
    assert (listed.unparsed, len(listed.unparsed_examples)) == (50, 20)  # all are counted, some are named


def test_a_record_gives_the_counts_back_and_lists_are_bounded() -> None:
    prompts = [Prompt(str(number), "?", "1") for number in range(LISTED + 5)]
    counts = count_errors([Reward(math.nan, error="E: x")] * len(prompts), prompts, ["r"] * len(prompts))
    assert counts.failed == LISTED + 5 and len(counts.prompts["E"]) == LISTED
    assert ErrorCounts.of_record(counts.record(), counts.total) == counts
    assert str(ErrorCounts.of_record({}, 3)) == "all 3 responses were scored"


def test_a_limit_is_a_fraction_of_all_and_the_message_names_the_first_line() -> None:
    trace = '  File "rewards.py", line 3, in outer\n    f()\n  File "rewards.py", line 7, in f\n    1 / 0\nError: x'
    bad = Reward(math.nan, error="ZeroDivisionError: x", traceback=trace)
    counts = count_errors([bad, Reward(1.0), Reward(1.0), Reward(0.0)]) + count_errors([Reward(1.0)])
    assert counts.traceback == trace
    assert counts.over(0.2) == ""  # 1 of 5 is no more than 0.2
    assert counts.over(0.19) == (
        "1 of 5 responses could not be scored: 1 × ZeroDivisionError (x); that is 20%, and task.max_unscored is 0.19; "
        "the first error was raised in rewards.py, line 7: repair the verifier, or raise task.max_unscored to go on "
        "without these responses"
    )
    assert count_errors([Reward(1.0)]).over(0.0) == ""
    assert "the first error" not in count_errors([Reward(math.nan, error="timeout after 5 s")]).over(0.5)
