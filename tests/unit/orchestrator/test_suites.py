"""Suites: their settings, when they are due, and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stalewise
from prompts import write
from stalewise.api import evaluate, evaluate_suites, run
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import read_result
from stalewise.config.sections import SuiteSection
from stalewise.errors import ConfigError, ModelError, TaskError
from stalewise.orchestrator.evaluation import Suites, check_suite, definition_of, majority_of, sampling_of
from stalewise.reporting.read import read_run
from stalewise.reporting.render import render
from stalewise.store.json_lines import read_jsonl
from tiny import call, called_json, refused, tiny_record

SUMS = [{"problem": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 30)]


def suites_of(directory: Path) -> list[dict[str, Any]]:
    rows = write(directory / "doubles.jsonl", SUMS)
    return [
        {"name": "greedy", "temperature": 0.0, "prompts": 6},
        {"file": str(rows), "samples": 4, "every": 2, "options": {"verifier": "exact"}, "max_new_tokens": 4},
    ]


def test_a_suite_without_prompts_and_one_that_comes_to_a_run_that_is_complete(evaluated: RunConfig) -> None:
    class Empty:
        name = "empty"

        def evaluation_prompts(self, count: int) -> list[Any]:
            return []

    task: Any = Empty()
    for is_single, words in ((False, "task empty, of the suite 'a', has no"), (True, "task empty has no")):
        with pytest.raises(TaskError, match=f"{words} held-out prompts to evaluate on"):
            check_suite(evaluated.sampler, SuiteSection(name="a"), Path("x"), task, 4, is_single=is_single)
    added = SuiteSection(name="long", task="arithmetic", max_new_tokens=4096)
    section = evaluated.evaluation.model_copy(update={"suite": [*evaluated.evaluation.suite, added]})
    with pytest.raises(ModelError, match="with max_new_tokens of the suite 'long' = 4096 that is over"):
        run(evaluated.model_copy(update={"evaluation": section}))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("suites")
    more = {"prompts": 8, "samples": 2, "suite": suites_of(directory)}
    config = make_config(tiny_record(directory / "runs", evaluation=more))
    run(config)
    return config


def test_suites_are_evaluated_when_they_are_due_and_training_is_the_same(
    evaluated: RunConfig, tiny_run: RunConfig
) -> None:
    records = read_jsonl(evaluated.directory / "suites.jsonl")
    assert [(one["suite"], one["version"]) for one in records] == [
        *[("greedy", 0), ("doubles", 0)],
        ("doubles", 2),
        *[("greedy", 4), ("doubles", 4)],
    ]
    greedy, doubles = records[-2:]
    assert (greedy["prompts"], greedy["samples"], greedy["settings"]["temperature"]) == (6, 1, 0.0)
    assert greedy["accuracy"] == greedy["pass_at"]["1"] == greedy["majority"]  # of one sample they are the same
    assert (doubles["prompts"] + doubles["excluded"], doubles["samples"]) == (20, 4)
    assert doubles["settings"] == {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4}
    assert [one["accuracy"] for one in read_jsonl(evaluated.directory / "eval.jsonl")] == [
        one["accuracy"] for one in read_jsonl(tiny_run.directory / "eval.jsonl")
    ]
    assert read_jsonl(evaluated.directory / "ledger/updates.jsonl") == read_jsonl(
        tiny_run.directory / "ledger/updates.jsonl"
    )
    result = read_result(evaluated.directory, 4)
    assert {name: one["version"] for name, one in result.suites.items()} == {"greedy": 4, "doubles": 4}


def test_suites_may_change_within_a_run_and_only_what_changed_is_evaluated(evaluated: RunConfig) -> None:
    record = evaluated.model_dump(mode="json")
    record["evaluation"]["suite"][0]["prompts"] = 5
    assert make_config(record).identity() == evaluated.identity()
    done = read_jsonl(evaluated.directory / "suites.jsonl")
    assert Suites(evaluated, print).due(4, 4, done) is None
    due = Suites(make_config(record), print).due(4, 4, done)
    assert due is not None
    assert (due.label, definition_of(due)["prompts"]) == ("greedy", 5)
    record["evaluation"]["suite"][1]["every"] = 1  # how often is no part of a result
    assert Suites(make_config(record), print).due(2, 4, done) is None
    assert Suites(make_config(record), print).periods() == [1]


def test_greedy_is_the_most_probable_token_and_does_not_depend_on_seeds(evaluated: RunConfig) -> None:
    assert (
        sampling_of(SuiteSection(temperature=0.0)).top_k,
        sampling_of(SuiteSection(temperature=0.7)).temperature,
    ) == (*(1, 0.7),)
    one, other = (evaluate(evaluated.directory, temperature=0.0, prompts=8) for _ in range(2))
    assert (one.accuracy, one.samples, one.response_length) == (other.accuracy, 1, other.response_length)
    sampled = evaluate(evaluated.directory, prompts=8, samples=4)
    assert sampled.settings == {}
    assert one.settings["temperature"] == 0


def test_majority_by_hand() -> None:
    score_PK = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, np.nan], [1, 0, 0, 0]])
    answers = [*("7", "7", "8", "9"), *("7", "8", "8", "8"), *(None, None, None, None), *("7", "8", None, None)]
    found = majority_of(score_PK, answers)
    assert found is not None
    assert found.value == pytest.approx((1 + 0 + 0 + 0.5) / 4)  # right, wrong, no vote, a tie
    assert found.low <= found.value <= found.high
    assert majority_of(score_PK, None) is None


def test_the_report_the_command_line_and_json_have_a_table_by_suite(evaluated: RunConfig, tmp_path: Path) -> None:
    page = render([read_run(evaluated.directory)])
    assert "<summary>Suites (2)</summary>" in page
    assert "majority@k" in page
    assert refused("eval", evaluated.directory, "--suite", "gredy").endswith("no suite 'gredy'; did you mean greedy?")
    (one,) = called_json("eval", evaluated.directory, "--suite", "greedy")
    last = next(
        record for record in reversed(read_jsonl(evaluated.directory / "suites.jsonl")) if record["suite"] == "greedy"
    )
    assert (one["suite"], one["accuracy"]) == ("greedy", last["accuracy"])
    both = call("eval", evaluated.directory, "--suite", "all")
    assert both.exit_code == 0
    assert all(word in both.stdout for word in ("greedy", "doubles", "majority@k"))
    rows = write(tmp_path / "halves.jsonl", SUMS[:4])
    found = called_json(
        "eval", "arithmetic", "--task", "arithmetic", "--file", rows, "--temperature", 0, "--prompts", 3
    )
    assert [(one["suite"], one["samples"], one["prompts"]) for one in found] == [("arithmetic", 1, 3), ("halves", 1, 3)]
    finished = called_json("train", _config_file(evaluated, tmp_path))
    assert set(finished["suites"]) == {"greedy", "doubles"}


def _config_file(config: RunConfig, directory: Path) -> Path:
    from stalewise.config.template import toml

    record = config.model_dump(mode="json", exclude_defaults=True)
    path = directory / "config.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in record.items()))
    return path


def test_flips(evaluated: RunConfig) -> None:
    found = called_json("flips", evaluated.directory, "--suite", "doubles", "--before", 0)
    first, *_, last = [one for one in read_jsonl(evaluated.directory / "suites.jsonl") if one["suite"] == "doubles"]
    pairs = zip(first["by_prompt"]["prompt_ids"], first["by_prompt"]["score"], last["by_prompt"]["score"], strict=True)
    flipped = {name: (a / 4, b / 4) for name, a, b in pairs if (a >= 2) != (b >= 2)}
    listed = [*found["gained"], *found["lost"]]
    assert {one["prompt_id"]: (one["score_before"], one["score_after"]) for one in listed} == flipped
    assert all(one["text"].endswith("=") for one in listed)
    assert found["same"] + len(listed) == found["prompts"] == last["prompts"]
    assert "as before (p = " in call("flips", evaluated.directory).stdout
    assert "was not evaluated; evaluated: [0, 4]" in refused("flips", evaluated.directory, "--after", 3)
    assert "has no evaluation on a suite 'x'" in refused("flips", evaluated.directory, "--suite", "x")


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ({"nme": "a"}, "evaluation.suite.0.nme is not a setting; did you mean name"),
        ({"task": "arithmetic", "file": "a.jsonl"}, "task and file both choose the prompts"),
        ({"temperature": 0.0, "samples": 4}, "greedy responses"),
        ({"temperature": -1.0}, "greater than or equal to 0"),
        ({"temperature": 0.0, "top_p": 0.9}, "top_p has no meaning at temperature 0"),
    ],
)
def test_bad_suites_get_one_message(suite: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"evaluation": {"suite": [suite]}})
    with pytest.raises(ConfigError, match="two suites are called 'a'"):
        make_config({"evaluation": {"suite": [{"name": "a"}, {"name": "a"}]}})


def test_a_model_without_suites_says_so(tiny_run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="has no suites: pass some"):
        evaluate_suites(tiny_run.directory)
    found = evaluate_suites(tiny_run.directory, [{"name": "own", "prompts": 4, "samples": 2}])
    assert (found["own"].prompts, found["own"].samples) == (4, 2)
    assert json.dumps(found["own"].record())
    assert stalewise.evaluate_suites is evaluate_suites
