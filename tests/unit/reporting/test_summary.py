"""Verdicts, rankings and warnings."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from rundirs import add_batch, add_evaluation, add_journal, metrics, warnings, write_run
from stalewise.reporting.read import read_run, read_runs, verifier_errors
from stalewise.reporting.summary import (
    CHARTS,
    count_noun,
    describe_extremes,
    format_interval,
    format_value,
    join_names,
    ranking,
    summarize,
    time_shares,
)
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line

ESS = next(chart for chart in CHARTS if chart.name == "ess")


def test_the_ranking_knows_what_it_cannot_say(tmp_path: Path) -> None:
    good, bad, other = (write_run(tmp_path / name) for name in ("good", "bad", "other"))
    add_evaluation(bad, 8, 0.69)  # [0.64, 0.74] ends below 0.75, where that of `good` begins
    assert ranking(read_runs([bad, good])).endswith("0.800 [0.750, 0.850], above all others.")
    add_evaluation(other, 9, 0.9, task="gym")
    assert "cannot be compared" in ranking(read_runs([good, other]))
    (bad / "eval.jsonl").unlink()
    assert "Fewer than two" in ranking(read_runs([good, bad]))


@pytest.mark.parametrize(
    ("value", "verdict"),
    # The first evaluation is 0.4 with [0.35, 0.45], and every interval is ± 0.05.
    [(0.52, "Improved"), (0.48, "No clear change"), (0.28, "Got worse"), (math.nan, "No clear change")],
)
def test_the_verdict_follows_from_the_intervals(tmp_path: Path, value: float, verdict: str) -> None:
    run = write_run(tmp_path / "run")
    add_evaluation(run, 8, value)
    assert summarize(read_run(run)).verdict == verdict


def test_an_evaluation_on_fewer_prompts_than_asked_for_is_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", evaluation={"prompts": 128})  # its evaluations have 128
    assert "holds out" not in warnings(read_run(run))
    add_evaluation(run, 8, 0.8, prompts=100, excluded=28)
    assert "holds out" not in warnings(read_run(run))
    add_evaluation(run, 8, 0.8, prompts=14)
    few = "evaluation.prompts is 128, but arithmetic holds out 14: accuracy is measured on those"
    assert few in warnings(read_run(run))
    add_journal(run, "config", 200.0, 0.0, version=4, changes={"evaluation.prompts": [8, 128]})
    assert few in warnings(read_run(run))
    add_journal(run, "config", 201.0, 0.0, version=8, changes={"evaluation.prompts": [14, 128]})  # not evaluated since
    assert "holds out" not in warnings(read_run(run))


WARNINGS = [
    ({"ess": 0.05}, "ESS falls to 0.05 and is below 0.1 in 12% of the updates"),
    ({"nonfinite": 3.0}, "3 tokens had a ratio that is not finite"),
    ({"grad_norm": math.inf}, "grad_norm is not finite in 1 update"),
    ({"taken": 0.0}, "1 of 8 updates had nothing to learn from"),
    ({"degenerate_fraction": 3.0}, "59% of the groups have equal rewards"),  # (7 · 0.25 + 3) / 8 = 0.594
    ({"age_max": 4.0}, "Rollouts reach age 4; the schedule allows 3"),  # 8 updates in 2 stages
    ({"log_ratio_max_abs": 0.2}, "On fresh rollouts log-ratios reach 0.2"),
    ({"batch_budget": 0.85}, "batch_budget reaches 0.85: 85% of the drift that the law allows within one generation"),
    ({"grad_norm": 6.1}, "grad_norm reaches 6.1, median 0.25: update 7; gradients are scaled down to a norm of 1."),
    ({"ess_sequence": 0.1}, "ess_sequence falls to 0.1, median 0.25: update 7: there few responses carry"),
    ({"kl_behaviour_policy": 0.6}, "kl_behaviour_policy reaches 0.6"),
    ({"ratio_max_negative": 11.0}, "ratio_max_negative reaches 11, median 0.25: update 7: responses that are to"),
    ({"horizon_budget": 1.2}, "horizon_budget reaches 1.20: more than all of the drift that the law allows over the"),
]


@pytest.mark.parametrize(("change", "words"), WARNINGS)
def test_what_is_wrong_with_updates_is_said(tmp_path: Path, change: dict[str, float], words: str) -> None:
    run = write_run(tmp_path / "run", done=7)
    assert warnings(read_run(run)) == ""
    append_line(run / "metrics.jsonl", metrics(7, **change))
    assert words in warnings(read_run(run))


def test_spikes_are_named_farthest_first_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=3, updates=40)
    for update in range(3, 40):
        append_line(
            run / "metrics.jsonl", metrics(update, grad_norm={9: 2.0, 20: 7.0, 21: 3.0, 30: 1.3}.get(update, 0.2))
        )
    told = warnings(read_run(run))
    # Five times the median is 1.0, and so is optimizer.max_grad_norm.
    assert "grad_norm reaches 7, median 0.2: update 20, 21, 9, … (4 updates);" in told
    assert summarize(read_run(run)).extremes == "Lowest ess_sequence 0.25 at update 0 (median 0.25)."  # not told twice
    assert describe_extremes(read_run(run)).startswith("Largest grad_norm 7 at update 20 (median 0.2); lowest ess_")
    assert summarize(read_run(write_run(tmp_path / "empty", done=0))).extremes == ""


def test_an_update_that_was_not_taken_is_no_gap_to_warn_of(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", done=7)
    append_line(run / "metrics.jsonl", {"update": 7, "reward": 1.0, "taken": 0.0})
    assert "not finite" not in warnings(read_run(run))


def test_truncation_and_verifier_errors_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sampler={"max_new_tokens": 16})
    kinds = {"verifier_error_kinds": {"timeout": 4}}
    # 300 + 800 of 2048 rollouts are 54%; 5 + 2 errors, of which 1 has no kind.
    add_batch(run, 0, 0, truncated=300, verifier_errors=5, extra=kinds)
    add_batch(run, 1, 4, truncated=800)
    add_evaluation(run, 8, 0.8, truncated_fraction=0.75, verifier_errors=2, verifier_error_kinds={"timeout": 2})
    found = warnings(read_run(run))
    assert "54% of the rollouts are truncated at sampler.max_new_tokens = 16; raise it." in found
    assert "In an evaluation 75% of the responses are truncated at 16 tokens." in found
    assert "failed on 7 responses (0.2% of the rollouts): timeout (6), of no recorded kind (1)" in found
    assert verifier_errors(read_run(run)).total() == 7
    assert "No answer was found" not in found


def test_responses_without_an_answer_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    examples = [{"prompt_id": name, "response": "?"} for name in ("a", "a", "b", "c", "d")]
    add_batch(run, 0, 0, extra={"unparsed": 5, "unparsed_examples": examples})
    add_batch(run, 1, 4, extra={"unparsed": "many", "unparsed_examples": [7, {"prompt_id": None}]})  # damaged
    add_evaluation(run, 8, 0.8, unparsed=2, unparsed_examples=3)
    found = warnings(read_run(run))
    assert "No answer was found in 7 responses, for example at a, b, c; they count as wrong." in found


def test_programs_that_took_too_long_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    add_batch(run, 0, 0, extra={"timed_out": 3})
    add_evaluation(run, 8, 0.8, timed_out=1)
    assert "4 programs took too long; they count as wrong." in warnings(read_run(run))


def test_a_run_that_learned_from_the_rollouts_of_others(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", updates=8, schedule={"updates": 128})
    shutil.rmtree(run / "rollouts")
    write_json_atomic(
        run / "sources.json", {"batches": [{"directory": "a", "updates": 6}, {"directory": "b", "updates": 2}]}
    )
    assert "8 of 8 updates with grpo are done, on 2 generation batches of other runs." in summarize(read_run(run)).cost


def test_values_are_formatted_for_sentences() -> None:
    assert time_shares({"generate": 0.0, "learn": 3.0, "idle": 1.0}) == "75% learning, 25% idle"
    assert format_interval({"value": 0.5, "low": 0.25, "high": 0.75}) == "0.500 [0.250, 0.750]"
    assert format_interval({"value": math.nan, "low": 0.25, "high": 0.75}) == "unknown"
    assert (join_names(["a"]), join_names(["a", "b", "c"])) == ("a", "a, b and c")
    assert (count_noun(1, "update"), count_noun(4096, "update")) == ("1 update", "4,096 updates")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), ("grpo", "grpo"), (True, "true"), (0.0003, "0.0003"), ([0.9, 0.999], "[0.9, 0.999]")],
)
def test_a_config_value_is_shown_as_it_is_written(value: object, text: str) -> None:
    assert format_value(value) == text
