"""Policies that are decoded or trained other than a plain forward pass computes are refused before anything is made."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from families import build, settings
from stalewise.api import evaluate, run
from stalewise.config import RunConfig, make_config
from stalewise.errors import ModelError
from stalewise.models import EMBEDDED
from stalewise.orchestrator import model_check
from stalewise.orchestrator.model_check import NEW_TOKENS, check_model, stage_problem, trial_requests
from stalewise.orchestrator.preflight import examine
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.factory import make_sampler
from stalewise.store.checkpoints import versions
from stalewise.tasks import make_task
from stalewise.trainer.trainer import Trainer
from stalewise.types import NullCallback
from tiny import tiny_record


class Notes(NullCallback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose learned positions ignore left padding."""
    directory = tmp_path_factory.mktemp("bart")
    build("bart", directory)
    return directory


def a_run(directory: Path, runs: Path, **changes: Any) -> RunConfig:
    record = settings(directory, runs, "one")
    return make_config(record | {key: {**record[key], **value} for key, value in changes.items()})


def test_a_run_records_how_far_it_is_from_plain_passes(runs: Path) -> None:
    hot = {"sampler": {"temperature": 1.5}, "objective": {"policy_temperature": 1.5}}  # it compares at 1
    run(make_config(tiny_record(runs, model={"check": "refuse"}, **hot)))
    journal = [json.loads(line) for line in (runs / "tiny" / "journal.jsonl").read_text().splitlines()]
    (found,) = [record["found"] for record in journal if record.get("reason") == "check"]
    assert found.startswith("decoding with a growing cache differs by up to ")
    assert "; learning from packed rows differs by up to " in found
    events = [record["event"] for record in journal]
    assert events.index("generate") > [record.get("reason") for record in journal].index("check")


def test_the_sampler_makes_room_for_the_learner_where_it_does_in_the_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model": {"check": "refuse"}, "sampler": {"max_new_tokens": 8, "weights": "fp8"}}
    settings = make_config(tiny_record(runs, **changes))
    sampler, there = make_sampler(settings), list[bool]()
    assert isinstance(sampler, HFSampler)
    for waits in (False, True):
        monkeypatch.setattr(model_check, "offloads", lambda config, source, waits=waits: waits)
        monkeypatch.setattr(
            model_check, "Trainer", lambda *given: (there.append(sampler._offload.is_away), Trainer(*given))[1]
        )
        for learns in (True, False):
            check_model(settings, EMBEDDED / "arithmetic", settings.make_task(), sampler, print, learns=learns)
            assert sampler._offload.is_away == (waits and learns)
    assert there == [False, True]


def test_a_policy_that_decodes_wrongly_is_refused_and_leaves_no_run(bart: Path, runs: Path) -> None:
    with pytest.raises(ModelError) as error:
        run(a_run(bart, runs))
    problem = str(error.value)
    assert problem.startswith("BartForCausalLM would have wrong log-probabilities: decoding with a growing cache")
    assert 'choose another model; model.check = "warn" goes on regardless' in problem
    assert not (runs / "one").exists()
    run(a_run(EMBEDDED / "arithmetic", runs))  # another model may have the name


def test_a_warning_goes_on_and_comes_again_with_the_first_update(bart: Path, runs: Path) -> None:
    notes = Notes()
    run(a_run(bart, runs, model={"check": "warn"}), notes)
    warnings = [line for line in notes.lines if line.startswith("warning: ")]
    assert "decoding with a growing cache differs" in warnings[0]
    assert "the trainer's log-probabilities of fresh rollouts differ from those of the engine hf" in warnings[1]
    assert versions(runs / "one")[-1] == 2


def test_the_first_update_of_a_stage_stops_before_anything_is_learned(
    bart: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a worker elsewhere or another release of transformers would: the check before the run has seen nothing.
    monkeypatch.setattr("stalewise.orchestrator.orchestrator.check_model", lambda *given, **named: "")
    for _ in range(2):  # the same command again comes to the same end
        with pytest.raises(ModelError, match="so nothing was learned from this stage"):
            run(a_run(bart, runs))
        assert versions(runs / "one") == [0]
        assert not (runs / "one" / "metrics.jsonl").exists() or not (runs / "one" / "metrics.jsonl").read_text()


def test_evaluation_is_no_accuracy_of_wrong_samples(bart: Path) -> None:
    with pytest.raises(ModelError, match="BartForCausalLM would have wrong log-probabilities: decoding"):
        evaluate(bart, task="coins", prompts=2, samples=1, max_new_tokens=4)


def test_doctor_finds_what_train_would_find(bart: Path, runs: Path) -> None:
    *_, last = examine(a_run(bart, runs))
    assert (last.name, last.status) == ("learning", "bad") and "BartForCausalLM" in last.detail
    *_, last = examine(a_run(bart, runs, model={"check": "warn"}))
    assert last.status == "warning"
    *_, last = examine(a_run(bart, runs, model={"check": "off"}))
    assert (last.status, last.detail) == ("ok", "not checked: model.check is off")


def test_doctor_tries_adapters_too(runs: Path) -> None:
    *_, last = examine(make_config(tiny_record(runs, model={"lora": {"rank": 2}})))
    assert (last.name, last.status) == ("learning", "ok")
    assert not (runs / "tiny").exists()


def test_factors_that_follow_the_longest_position_are_refused_where_the_run_gets_there(
    tmp_path: Path, runs: Path
) -> None:
    build("phi3-longrope", tmp_path / "model")
    task = make_task("arithmetic", seed=0)
    long = a_run(tmp_path / "model", runs, task={"name": "arithmetic"}, sampler={"max_new_tokens": 32})
    with pytest.raises(ModelError, match="rotary factors depend on whether a batch has positions beyond 16"):
        check_model(long, tmp_path / "model", task, None, print)
    short = a_run(tmp_path / "model", runs, task={"name": "arithmetic"}, sampler={"max_new_tokens": 4})
    assert "learning from packed rows differs" in check_model(short, tmp_path / "model", task, None, print)


def test_trial_prompts_reach_the_longest_that_the_run_allows() -> None:
    task, policy = make_task("arithmetic", seed=0), EMBEDDED / "arithmetic"
    longest = max(len(prompt.text) for prompt in task.prompts(0, 256))
    requests = trial_requests(make_config({"sampler": {"max_new_tokens": 40}}), policy, task)
    lengths = [len(request.prompt_ids) for request in requests]
    assert max(lengths) + NEW_TOKENS == longest + 40
    assert min(lengths) == 3 and requests[0].prompt_ids == requests[-1].prompt_ids  # padded, and shared
    assert len({request.seed for request in requests}) == len(requests)


FAR = {"mismatch_mean": 0.05, "mismatch_max": 0.3}


@pytest.mark.parametrize(
    ("changes", "metrics", "is_wrong"),
    [
        ({}, FAR, True),
        ({}, {"mismatch_mean": 1e-6, "mismatch_max": 0.2}, True),
        ({}, {"mismatch_mean": 1e-6, "mismatch_max": 1e-4}, False),
        ({}, {"mismatch_mean": math.nan, "mismatch_max": math.nan}, False),  # not fresh
        ({}, {}, False),  # nothing was learned
        ({"model": {"precision": "bfloat16"}}, FAR, False),
        ({"model": {"precision": "bfloat16"}}, {"mismatch_mean": 0.3, "mismatch_max": 0.4}, True),
        ({"sampler": {"temperature": 1.2}}, FAR, False),  # another distribution was asked for
        ({"sampler": {"temperature": 1.2}, "objective": {"policy_temperature": 1.2}}, FAR, True),  # the same one again
        ({"sampler": {"weights": "int8"}}, FAR, False),
        ({"model": {"check": "off"}}, FAR, False),
    ],
)
def test_fresh_rollouts_must_be_the_learners_own(changes: Any, metrics: dict[str, float], is_wrong: bool) -> None:
    config = make_config({"model": {"precision": "float32"}} | changes)
    assert bool(stage_problem(config, metrics)) == is_wrong
