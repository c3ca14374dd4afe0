"""Comparisons of runs: what is told of simulated runs whose truth is known, and of runs that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rundirs import add_batch, add_evaluation, add_journal, write_run
from stalewise.errors import StoreError
from stalewise.reporting.compare import compare, describe_speed, first_reached, prompt_scores, side_names
from stalewise.reporting.read import read_runs
from stalewise.reporting.summary import ranking
from stalewise.statistics import error_of_runs, resample_prompts
from stalewise.store.atomic import write_json_atomic
from tiny import call, called_json, refused

PROMPTS = 200


def by_prompt(scores: np.ndarray[Any, Any], samples: int = 4) -> dict[str, list[Any]]:
    ids = [f"q{place}" for place in range(len(scores))]
    return {"prompt_ids": ids, "score": scores.tolist(), "scored": [samples] * len(scores)}


def judged(directory: Path, scores: np.ndarray[Any, Any], *, seed: int = 0, **changes: Any) -> Path:
    """A finished run whose last policy got so many of 4 samples right on each prompt."""
    run = write_run(directory, seed=seed)
    changes = {"prompts": len(scores), "by_prompt": by_prompt(scores), **changes}
    add_evaluation(run, 8, float(scores.mean()) / 4, **changes)
    return run


def scores_of(rng: np.random.Generator, difficulty: np.ndarray[Any, Any], gain: float) -> np.ndarray[Any, Any]:
    return rng.binomial(4, np.clip(difficulty + gain, 0, 1))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# ---------------------------------------------------------------- what is told


def test_a_clear_difference_is_told_with_its_interval(tmp_path: Path, rng: np.random.Generator) -> None:
    difficulty = rng.uniform(0.1, 0.7, PROMPTS)
    a = judged(tmp_path / "a", scores_of(rng, difficulty, 0.0))
    b = judged(tmp_path / "b", scores_of(rng, difficulty, 0.2))
    found = compare([a], [b])
    assert found.difference.low < 0.2 < found.difference.high
    assert found.words.startswith("b is better by ") and found.probability_better > 0.999
    assert found.method.startswith("paired over 200 prompts; one run on each side")
    back = compare([b], [a])
    assert back.words == found.words  # whichever is named first
    assert back.difference.value == pytest.approx(-found.difference.value)


def test_no_difference_is_not_made_up(tmp_path: Path, rng: np.random.Generator) -> None:
    difficulty = rng.uniform(0.1, 0.9, PROMPTS)
    a, b = (judged(tmp_path / name, scores_of(rng, difficulty, 0.0)) for name in "ab")
    found = compare([a], [b])
    assert found.difference.low < 0 < found.difference.high
    assert found.words.startswith("no significant difference: b minus a is ")
    same = judged(tmp_path / "same", np.full(PROMPTS, 2))
    other = judged(tmp_path / "other", np.full(PROMPTS, 2))
    assert compare([same], [other]).probability_better == 0.5


def test_pairing_by_prompt_makes_the_interval_narrower(tmp_path: Path, rng: np.random.Generator) -> None:
    scores = rng.integers(0, 4, PROMPTS)
    a = judged(tmp_path / "a", scores)
    b = judged(tmp_path / "b", scores + (rng.random(PROMPTS) < 0.2))  # a little better on the very same prompts
    half = 1.96 * scores.std() / 4 / np.sqrt(PROMPTS)
    old = [write_run(tmp_path / f"old {name}") for name in "ab"]
    for run, value in zip(old, (scores.mean() / 4, scores.mean() / 4 + 0.05), strict=True):
        add_evaluation(run, 8, 0.0, accuracy={"value": value, "low": value - half, "high": value + half})
    paired, unpaired = compare([a], [b]), compare([old[0]], [old[1]])
    assert paired.words.startswith("b is better by")
    assert unpaired.words.startswith("no significant difference")
    assert (unpaired.prompts, unpaired.method[:20]) == (0, "not paired by prompt")
    assert "eval.jsonl of old a has no results per prompt, so prompts cannot be paired" in unpaired.notes
    # Two independent errors add up.
    width = unpaired.difference.high - unpaired.difference.low
    assert width == pytest.approx(2 * half * np.sqrt(2), rel=0.05)


def test_seeds_that_differ_widen_the_interval(tmp_path: Path, rng: np.random.Generator) -> None:
    difficulty = rng.uniform(0.2, 0.6, PROMPTS)
    sides: dict[str, list[Path]] = {"a": [], "b": []}
    for seed, luck in enumerate((-0.1, 0.0, 0.1)):
        sides["a"].append(judged(tmp_path / f"a{seed}", scores_of(rng, difficulty, 0.0), seed=seed))
        sides["b"].append(judged(tmp_path / f"b{seed}", scores_of(rng, difficulty, 0.05 + luck), seed=seed))
    one = compare(sides["a"][2:], sides["b"][2:])
    three = compare(sides["a"], sides["b"])
    assert one.words.startswith("b2 is better") and three.words.startswith("no significant difference: b minus a")
    assert three.method == "paired over 200 prompts; paired over 3 seeds"
    # Student's t: 4.30 standard errors of 0.1/√3 in either direction, and a little for the prompts.
    width = three.difference.high - three.difference.low
    assert width == pytest.approx(2 * 4.30 * 0.1 / np.sqrt(3), rel=0.25)
    assert compare(sides["a"][:2], sides["b"]).method == "paired over 200 prompts; over 2 and 3 runs"


def test_intervals_end_where_scores_do(tmp_path: Path) -> None:
    sides: dict[str, list[Path]] = {"a": [], "b": []}
    for seed, (low, high) in enumerate(((0, 3), (2, 4))):
        sides["a"].append(judged(tmp_path / f"a{seed}", np.full(8, low), seed=seed))
        sides["b"].append(judged(tmp_path / f"b{seed}", np.full(8, high), seed=seed + 7))
    found = compare(sides["a"], sides["b"])  # Student's t of two runs would go from far below 0 to far above 1
    assert (found.a.accuracy.low, found.b.accuracy.high) == (0, 1)
    assert (found.difference.low, found.difference.high) == (-1, 1)
    add_evaluation(sides["a"][0], 8, -1.0, prompts=8, by_prompt=by_prompt(np.full(8, -4)))
    assert compare(sides["a"], sides["b"]).a.accuracy.low < -1


@pytest.mark.parametrize(("a", "b"), [(0, 0), (4, 4), (2, 2), (0, 4), (2, 3)])
def test_prompts_that_all_score_alike_do_not_make_a_comparison_certain(tmp_path: Path, a: int, b: int) -> None:
    found = compare([judged(tmp_path / "a", np.full(5, a))], [judged(tmp_path / "b", np.full(5, b))])
    missed = 1 - 0.025 ** (1 / 5)  # of all prompts, by five draws with probability 2.5%
    assert found.difference.value == pytest.approx((b - a) / 4)
    assert found.difference.low == pytest.approx((1 - missed) * (b - a) / 4 - missed)
    assert found.difference.high == pytest.approx(min((1 - missed) * (b - a) / 4 + missed, 1))
    for side, right in ((found.a.accuracy, a), (found.b.accuracy, b)):
        assert side.low == pytest.approx((1 - missed) * right / 4)
        assert side.high == pytest.approx((1 - missed) * right / 4 + missed)


def test_intervals_over_prompts_hold_the_truth_as_often_as_they_say() -> None:
    held = 0
    for trial in range(30):
        rng = np.random.default_rng(trial)
        difficulty = rng.uniform(0.1, 0.8, 64)
        a, b = resample_prompts([scores_of(rng, difficulty, gain) / 4 for gain in (0.0, 0.05)])
        low, high = np.quantile(b - a, [0.025, 0.975])
        held += low <= 0.05 <= high
    assert held >= 25  # 28.5 expected; at 95% each, fewer than 25 of 30 are one case in 300


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_intervals_over_seeds_hold_the_truth_as_often_as_they_say(runs: int) -> None:
    rng = np.random.default_rng(runs)
    trials = 400
    held = 0
    for _ in range(trials):
        value_R = rng.normal(0.05, 0.1, runs)
        low, high = np.quantile(value_R.mean() + error_of_runs(value_R, seed=0), [0.025, 0.975])
        held += low <= 0.05 <= high
    # 380 expected, with a standard deviation of 4.4; a bootstrap over three runs would hold it in 300.
    assert 366 <= held <= 394


def test_only_the_prompts_in_common_are_compared(tmp_path: Path) -> None:
    a = judged(tmp_path / "a", np.array([4, 4, 0, 0]))
    b = judged(tmp_path / "b", np.array([4, 4, 4, 0, 0, 0]))  # q0 to q3: one more is right
    found = compare([a], [b])
    assert found.difference.value == pytest.approx(0.25) and found.prompts == 4
    assert "the runs have 4 of 6 held-out prompts in common; only those count" in found.notes


# ---------------------------------------------------------------- costs


def curve(directory: Path, seconds: float, accuracies: list[float]) -> Path:
    """A run with 2 updates between evaluations, each of which takes so many seconds."""
    run = write_run(directory, done=0)
    (run / "eval.jsonl").unlink()
    for place, accuracy in enumerate(accuracies):
        if place:
            learned = {"first": 2 * place - 2, "stop": 2 * place}
            add_journal(run, "learn", 1000.0 * place, 2 * seconds, **learned)
            add_journal(run, "evaluate", 1000.0 * place + 500, 400.0)  # costs nothing here
        add_evaluation(run, 2 * place, accuracy, by_prompt=by_prompt(np.full(50, round(4 * accuracy))), prompts=50)
    lines = [json.dumps({"update": update, "seconds": seconds}) for update in range(2 * len(accuracies) - 2)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_the_speed_at_equal_accuracy(tmp_path: Path) -> None:
    slow = curve(tmp_path / "slow", 10.0, [0.25, 0.5, 0.75])
    fast = curve(tmp_path / "fast", 5.0, [0.25, 0.5, 1.0])
    found = compare([slow], [fast])
    assert (found.a.seconds, found.b.seconds) == (40, 20)
    line = found.a.accuracy.low  # the lower end, between the second and the third evaluation of both
    assert line == pytest.approx(0.75 * 0.025 ** (1 / 50))
    seconds = (20 + 20 * (line - 0.5) / 0.25, 10 + 10 * (line - 0.5) / 0.5)
    assert (found.a.seconds_to_accuracy, found.b.seconds_to_accuracy) == pytest.approx(seconds)
    assert found.speed_up == pytest.approx(seconds[0] / seconds[1])
    assert found.speed.endswith(": 2.6 times as fast")
    other_way = compare([fast], [slow])
    assert other_way.speed_up is None
    assert other_way.speed == ("slow never reached 0.929, the lower end of fast's final accuracy: its best is 0.750")


def test_as_good_as_the_prompts_can_tell_is_as_good(tmp_path: Path) -> None:
    a, b = (curve(tmp_path / name, 10.0, [0.25, 0.5, 0.75]) for name in "ab")
    # 38 of 50 prompts are right in the end, ± 1.96·√(0.76·0.24/50) = 0.118; b comes to 0.75, as on record.
    add_evaluation(a, 4, 0.76, prompts=50, by_prompt=by_prompt(np.repeat([4, 0], [38, 12])))
    found = compare([a], [b])
    assert found.speed_up is not None and found.b.seconds_to_accuracy == pytest.approx(20 + 20 * (0.64 - 0.5) / 0.25)
    assert "b reached 0.640, the lower end of a's final accuracy, after 31.2 s" in found.speed


def test_a_run_that_was_seldom_evaluated_has_no_speed(tmp_path: Path) -> None:
    seldom = curve(tmp_path / "seldom", 10.0, [0.25, 0.75])
    found = compare([curve(tmp_path / "often", 10.0, [0.25, 0.5, 0.75])], [seldom])
    assert found.speed_up is None
    assert "seldom has too few evaluations (2): set evaluation.every" in found.speed
    assert first_reached(np.array([0.0, 1.0]), np.array([0.5, 0.9]), 0.4) == 0.0


def test_times_of_different_devices_are_not_compared(tmp_path: Path) -> None:
    slow = curve(tmp_path / "slow", 10.0, [0.25, 0.5, 0.75])
    fast = curve(tmp_path / "fast", 5.0, [0.25, 0.5, 1.0])
    write_json_atomic(fast / "environment.json", {"device": "cuda"})
    found = compare([slow], [fast])
    assert found.speed == "speed is not compared: the runs used different devices" and found.speed_up is None


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        *((4.0, "4 times as fast"), (1.96, "twice as fast"), (0.98, "about as fast"), (0.52, "half as fast")),
        *((0.34, "a third as fast"), (0.6, "it took 1.7 times as long"), (0.125, "it took 8 times as long")),
    ],
)
def test_a_speed_is_said_as_one_would_say_it(ratio: float, words: str) -> None:
    assert describe_speed(ratio) == words


def test_unequal_work_stands_in_the_line_of_the_difference(tmp_path: Path) -> None:
    scores = {"a": np.array([0, 1, 2, 3]), "b": np.array([4, 4, 4, 4])}
    a, b = (judged(tmp_path / name, scores[name]) for name in "ab")
    assert "work" not in compare([a], [b]).words  # 8 updates each
    short = write_run(tmp_path / "short", updates=4)
    add_evaluation(short, 4, 0.5, prompts=4, by_prompt=by_prompt(scores["a"]))
    for one, other in ((short, b), (b, short)):
        words = compare([one], [other]).words
        assert words.startswith("b is better by ")
        assert words.endswith("; unequal work: 8 updates against 4"), words
    # The same updates, of twice the rollouts: the two batches of `write_run` hold 4,096 tokens each.
    lines = [json.dumps({"update": update, "rollouts": rollouts}) for rollouts in (64,) for update in range(8)]
    (b / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (a / "metrics.jsonl").write_text("\n".join(line.replace("64", "32") for line in lines) + "\n")
    add_batch(b, 1, 4, tokens=3 * 4096)
    found = compare([a], [b])
    assert found.words.endswith("; unequal work: 512 rollouts against 256, 16,384 response tokens against 8,192"), (
        found.words
    )
    assert found.b.work == {"updates": 8, "rollouts": 512, "response tokens": 16384}
    assert ranking(read_runs([a, b])).endswith(
        "; unequal work of b and a: 512 rollouts against 256, 16,384 response tokens against 8,192."
    )


# ---------------------------------------------------------------- on the command line


def test_the_command_says_it_in_words_and_as_json(tmp_path: Path) -> None:
    a = judged(tmp_path / "plain", np.repeat([0, 2], 100))
    b = judged(tmp_path / "better", np.repeat([2, 4], 100))
    shown = call("compare", a, b).stdout
    assert shown.startswith(
        "better is better by 50.0 points (47.3 to 50.9).\nProbability that better is better: 99.9%."
    )
    assert "Speed at equal accuracy is unknown: plain has too few evaluations (2)" in shown
    record = called_json("compare", "--a", a, "--b", b)
    assert record["words"] == "better is better by 50.0 points (47.3 to 50.9)"
    assert (record["probability_better"], record["task"], record["prompts"]) == (1.0, "arithmetic", 200)
    assert record["a"]["accuracy"]["value"] == 0.25 and record["speed_up"] is None


def test_tasks_of_one_name_are_told_apart_by_their_prompts(tmp_path: Path) -> None:
    a, b = (judged(tmp_path / name, np.array([1, 2, 3])) for name in "ab")
    shifted = by_prompt(np.array([1, 2, 3])) | {"prompt_ids": ["q2", "q3", "q4"]}
    add_evaluation(b, 8, 0.5, prompts=3, by_prompt=shifted)
    needed = "and a comparison needs at least 2: compare runs that were evaluated on the same 2 prompts or more"
    few = f"the runs have 1 held-out prompt(s) with scores in common (a has 3, b has 3), {needed}"
    assert refused("compare", a, b) == few
    one, same = (judged(tmp_path / name, np.array([1])) for name in ("one", "same"))  # the same task, and prompt
    few = f"the runs have 1 held-out prompt(s) with scores in common (one has 1, same has 1), {needed}"
    assert refused("compare", one, same) == few
    other = write_run(tmp_path / "other", task={"name": "arithmetic", "options": {"difficulty": 3}})
    add_evaluation(other, 8, 0.5, prompts=3, by_prompt=by_prompt(np.array([1, 2, 3])))
    note = "the runs differ in task.options.difficulty: make sure that their task is the same"
    assert note in compare([a], [other]).notes
    assert not any("task" in note for note in compare([a], [judged(tmp_path / "c", np.array([1, 2, 3]))]).notes)


def test_rows_and_models_that_runs_copied_are_told_apart_by_their_content(tmp_path: Path) -> None:
    def trained(name: str, digest: str) -> Path:
        own = f"runs/{name}"
        options = {"path": f"{own}/data/{digest}/rows.jsonl"}
        model = {"path": f"{own}/model-{digest}"}
        run = write_run(tmp_path / name, name=name, model=model, task={"name": "jsonl", "options": options})
        add_evaluation(run, 8, 0.5, prompts=3, by_prompt=by_prompt(np.array([1, 2, 3])))
        return run

    a, same, other = trained("a", "0123456789ab"), trained("same", "0123456789ab"), trained("other", "ba9876543210")
    compared = compare([a], [same])
    assert compared.notes == [] and compared.settings == {}
    note = "the runs differ in task.options.path: make sure that their task is the same"
    assert note in compare([a], [other]).notes
    assert compare([a], [other]).settings["model.path"] == [["model-0123456789ab"], ["model-ba9876543210"]]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = judged(tmp_path / "a", np.array([1, 2]))
    other = judged(tmp_path / "other", np.array([1, 2]), task="gym")
    unevaluated = write_run(tmp_path / "unevaluated")
    (unevaluated / "eval.jsonl").unlink()
    refusal = refused("compare", a, other)
    assert "runs of different tasks cannot be compared: a has arithmetic, other has gym" in refusal
    assert "has no evaluation to compare: continue the run" in refused("compare", a, unevaluated)
    assert "name two run directories, A and B" in refused("compare", a)
    assert "name two run directories, A and B" in refused("compare", a, "--b", other)
    assert "is not a run directory" in refused("compare", a, tmp_path)
    with pytest.raises(StoreError, match="named twice"):
        compare([a], [a])
    with pytest.raises(StoreError, match="needs a run on either side"):
        compare([a], [])


def test_runs_that_are_not_finished_are_said(tmp_path: Path) -> None:
    a = judged(tmp_path / "a", np.array([1, 2]))
    young = write_run(tmp_path / "young", done=5)
    found = compare([a], [young])
    assert "young has not been evaluated after learning: its accuracy is that of version 0" in found.notes
    add_evaluation(young, 4, 0.5)
    assert "young is not finished: its accuracy is that of version 4" in compare([a], [young]).notes


def test_sides_are_named_after_what_their_labels_share() -> None:
    assert side_names(["grpo0", "grpo1"], ["p3o"]) == ["grpo", "p3o"]
    assert side_names(["x", "y"], ["z"]) == ["A", "z"]
    assert side_names(["x"], ["x"]) == ["A", "B"]


def test_the_score_of_a_prompt_is_its_mean() -> None:
    assert prompt_scores({"by_prompt": {"prompt_ids": ["a", "b"], "score": [1, 0.5], "scored": [2, 0]}}) == {"a": 0.5}
    assert prompt_scores({}) == {}


def test_a_value_is_reached_between_evaluations() -> None:
    seconds, accuracy = np.array([0.0, 10.0, 20.0]), np.array([0.25, 0.5, 0.75])
    assert [first_reached(seconds, accuracy, target) for target in (0.625, 0.25, 0.8)] == [15.0, 0.0, None]
