"""Mixtures: shares are exact, prompts depend on seed and number alone, each task has its own verifier."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stalewise
from judge_server import judge_server
from stalewise.config import RunConfig, make_config
from stalewise.errors import TaskError
from stalewise.orchestrator.contamination import seen_in_training
from stalewise.orchestrator.evaluation import answers_of
from stalewise.reporting.read import read_run
from stalewise.reporting.trackers import Trackers
from stalewise.store import batch_directories, open_batch
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.store.json_lines import read_jsonl
from stalewise.tasks import close_task, make_task
from stalewise.tasks.mixture import LARGEST_BLOCK, MixtureTask, block_counts, split
from stalewise.tasks.rows import own_id, task_of
from stalewise.types import NullCallback, Reward
from tiny import call, called_json, tiny_record

TASKS = [{"name": "arithmetic", "weight": 3}, {"name": "arithmetic-steps", "options": {"most_terms": 6}}]


def test_shares_are_exact_in_every_block() -> None:
    task = MixtureTask(TASKS, seed=4)
    assert task.counts == {"arithmetic": 3, "arithmetic-steps": 1}
    for start in (0, 4, 400):
        assert Counter(task_of(p.prompt_id) for p in task.prompts(start, 4)) == {"arithmetic": 3, "arithmetic-steps": 1}
    orders = {tuple(task_of(p.prompt_id) for p in task.prompts(4 * block, 4)) for block in range(20)}
    assert len(orders) > 1  # not always in the same places


def test_a_task_of_a_mixture_gives_the_prompts_that_it_gives_alone() -> None:
    mixed = MixtureTask(TASKS, seed=4).prompts(0, 40)
    for name, options in (("arithmetic", {}), ("arithmetic-steps", {"most_terms": 6})):
        own = [prompt for prompt in mixed if task_of(prompt.prompt_id) == name]
        alone = make_task(name, seed=4, **options).prompts(0, len(own))
        assert [(own_id(p.prompt_id), p.text, p.answer) for p in own] == [
            (p.prompt_id, p.text, p.answer) for p in alone
        ]


@given(seed=st.integers(0, 2**40), start=st.integers(0, 20_000), count=st.integers(0, 40))
def test_prompt_number_i_depends_on_seed_and_i_alone(seed: int, start: int, count: int) -> None:
    whole = MixtureTask(TASKS, seed=seed).prompts(start, count)
    task = MixtureTask(TASKS, seed=seed)
    assert [task.prompts(index, 1)[0] for index in reversed(range(start, start + count))] == whole[::-1]


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100).map(lambda x: round(x, 3)), min_size=2))
def test_counts_of_a_block_are_near_the_weights(weights: dict[str, float]) -> None:
    try:
        counts = block_counts(weights)
    except TaskError:
        assert min(weights.values()) / sum(weights.values()) < 1 / LARGEST_BLOCK
        return
    size = sum(counts.values())
    assert size <= LARGEST_BLOCK
    assert min(counts.values()) >= 1
    for name, weight in weights.items():
        # Two places: one of rounding, and one that a task without a place takes.
        assert abs(
            Fraction(counts[name], size) - Fraction(str(weight)) / sum(map(Fraction, map(str, weights.values())))
        ) <= (Fraction(len(weights) + 1, LARGEST_BLOCK))


def test_splits_add_up() -> None:
    assert split(10, {"a": 2, "b": 1}) == {"a": 7, "b": 3}  # 6.67 and 3.33
    assert split(8, {"a": 98, "b": 1, "c": 1}) == {"a": 6, "b": 1, "c": 1}
    assert split(0, {"a": 1, "b": 1}) == {"a": 0, "b": 0}


def test_each_response_is_scored_by_its_task_in_order() -> None:
    task = MixtureTask(TASKS, seed=1)
    prompts = task.prompts(0, 8)
    right = [p.answer if task_of(p.prompt_id) == "arithmetic" else f"1+1=2;#{p.answer}" for p in prompts]
    assert [reward.value for reward in task.verifier.score(prompts, right)] == [1.0] * 8
    swapped = [f"#{p.answer}" if task_of(p.prompt_id) == "arithmetic" else p.answer for p in prompts]
    assert [reward.value for reward in task.verifier.score(prompts, swapped)] == [0.0] * 8
    assert answers_of(task.verifier, prompts, right, [Reward(1.0)] * 8) == [p.answer for p in prompts]
    stranger = make_task("arithmetic").prompts(0, 1)
    with pytest.raises(TaskError, match="which the mixture does not have"):
        task.verifier.score(stranger, ["1"])


def test_a_mixture_is_scored_independently_where_all_of_its_parts_are(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"1+{n}", "answer": str(1 + n)}) + "\n" for n in range(9)))
    math = {"name": "jsonl", "options": {"path": str(rows), "verifier": "math"}}
    both = [math | {"label": label} for label in "ab"]
    found = [MixtureTask(parts, seed=0) for parts in (both, [math, {"name": "arithmetic"}])]
    assert [getattr(task.verifier, "scores_independently", None) for task in found] == [True, False]


def test_parts_may_have_a_judge_and_code_and_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    rows = "".join(
        json.dumps({"problem": f"p{n}", "answer": "a", "tests": ["assert f() == 1"]}) + "\n" for n in range(9)
    )
    (tmp_path / "rows.jsonl").write_text(rows)
    with judge_server(lambda text, number: "Score: 5") as server:
        asked = {"url": server.url, "model": "m", "rubric": "{response}", "cache": str(tmp_path / "cache")}
        judge = {"verifier": "judge", "verifier_options": asked}
        options = {"path": str(tmp_path / "rows.jsonl"), "held_out": 0.2}
        tasks = [
            {"name": "jsonl", "label": "judged", "options": {**options, **judge}},
            {"name": "jsonl", "label": "coded", "options": {**options, "verifier": "code"}},
        ]
        task = MixtureTask(tasks)
        prompts = task.prompts(0, 4)
        rewards = task.verifier.score(prompts, ["def f(): return 1"] * 4)
        close_task(task)
    found = [(task_of(prompt.prompt_id), reward.value) for prompt, reward in zip(prompts, rewards, strict=True)]
    assert sorted(found) == [("coded", 1.0), ("coded", 1.0), ("judged", 0.5), ("judged", 0.5)]
    with pytest.raises(TaskError, match="mixture, arithmetic: an environment plays all tasks"):
        MixtureTask([{"name": "arithmetic", "options": {"environment": "sums"}}, {"name": "arithmetic-steps"}])


def test_held_out_prompts_are_of_all_tasks_and_of_no_training(tmp_path: Path) -> None:
    task = MixtureTask(TASKS, seed=1)
    held_out = task.evaluation_prompts(16)
    assert Counter(task_of(p.prompt_id) for p in held_out) == {"arithmetic": 12, "arithmetic-steps": 4}
    assert not {p.prompt_id for p in held_out} & {p.prompt_id for p in task.prompts(0, 4000)}
    assert task.evaluation_prompts(16) == MixtureTask(TASKS, seed=9).evaluation_prompts(16)
    with pytest.raises(TaskError, match=r"evaluation\.prompts is 1, fewer than the 2 tasks"):
        task.evaluation_prompts(1)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"name": "arithmetic"}, "must be a list of tables"),
        (TASKS[:1], "1 task\\(s\\) are not a mixture"),
        ([TASKS[0], TASKS[0]], "two tasks are called 'arithmetic': give each a label"),
        ([TASKS[0], {"name": "arithmetik"}], "mixture, arithmetik: unknown task 'arithmetik'; did you mean"),
        ([TASKS[0], {"name": "jsonl"}], "mixture, jsonl: task jsonl needs the option 'path'"),
        ([TASKS[0], {"name": "mixture"}], "task 1: needs a name"),
        ([TASKS[0], {"name": "arithmetic-chat", "weigth": 1}], "'weigth' is not a setting; did you mean weight"),
        ([TASKS[0], {"name": "arithmetic-chat", "weight": 0}], "weight is 0; expected a number above 0"),
        ([TASKS[0], {"name": "arithmetic-chat", "weight": "1"}], "weight is '1'"),
        ([TASKS[0], {"name": "arithmetic-chat", "label": "a::b"}], "label is 'a::b'"),
        ([TASKS[0], {"name": "arithmetic-chat", "weight": 1e-6}], "has a share below 1/480"),
    ],
)
def test_bad_mixtures_are_one_message(tasks: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        MixtureTask(tasks)


def mixed_config(runs: Path, name: str = "mixed", **changes: Any) -> RunConfig:
    data = runs / "rows.jsonl"
    rows = [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    small = {"name": "jsonl", "weight": 1, "label": "small", "options": {"path": str(data), "verifier": "exact"}}
    task = {"name": "mixture", "options": {"tasks": [{"name": "arithmetic", "weight": 1}, small]}}
    model = {"path": "arithmetic", "threads": 1}
    return make_config(tiny_record(runs, name, task=task, model=model, **changes))


class Stop(NullCallback):
    """Ends the run after an update, as Ctrl-C does."""

    def metrics(self, update: int, record: dict[str, Any]) -> None:
        if update == 1:
            raise KeyboardInterrupt


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{key: v for key, v in line.items() if key not in ("seconds", "time")} for line in read_jsonl(path)]


def test_a_run_on_a_mixture_reports_by_task_and_resumes_exactly(tmp_path: Path, monkeypatch: Any) -> None:
    result = stalewise.run(mixed_config(tmp_path))
    metrics = read_jsonl(result.directory / "metrics.jsonl")
    rollouts = {
        one.rollout_id: one
        for path in batch_directories(result.directory / "rollouts")
        for one in open_batch(path).iter_rollouts()
    }
    ledger = read_jsonl(result.directory / "ledger" / "updates.jsonl")
    for line, entry in zip(metrics, ledger, strict=True):
        used = [rollouts[i] for first, last in entry["rollout_ids"] for i in range(first, last + 1)]
        for label in ("arithmetic", "small"):
            own = [one.reward for one in used if task_of(one.prompt_id) == label]
            assert line[f"rollouts/{label}"] == len(own)
            assert line[f"reward/{label}"] == pytest.approx(np.mean(own)) if own else np.isnan(line[f"reward/{label}"])
    record = result.evaluations[-1]
    assert {label: one["prompts"] for label, one in record["by_task"].items()} == {"arithmetic": 4, "small": 4}
    mean = np.mean([one["accuracy"]["value"] for one in record["by_task"].values()])
    assert record["accuracy"]["value"] == pytest.approx(mean)  # equally many prompts of each
    votes = [one["majority"]["value"] for one in record["by_task"].values()]
    assert record["majority"]["value"] == pytest.approx(np.mean(votes))
    with pytest.raises(KeyboardInterrupt):
        stalewise.run(mixed_config(tmp_path, "stopped"), Stop())
    again = stalewise.run(mixed_config(tmp_path, "stopped"))
    for name in ("metrics.jsonl", "ledger/updates.jsonl", "eval.jsonl"):
        assert repr(without_times(again.directory / name)) == repr(without_times(result.directory / name))
    model = "model.safetensors"
    assert (again.checkpoint / model).read_bytes() == (result.checkpoint / model).read_bytes()
    _is_shown(result.directory, monkeypatch)


def _is_shown(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(directory)
    assert run.tasks == ["arithmetic", "small"]
    assert all(np.isfinite(run.task_rewards("small")))
    page = Path(call("report", directory).stdout.strip()).read_text()
    assert "Tasks of the mixture (2)" in page
    shown = call("train", directory).stdout
    assert "; small 0." in shown
    assert set(called_json("train", directory)["evaluations"][0]["by_task"]) == {"arithmetic", "small"}
    evaluated = called_json("eval", directory, "--prompts", 4, "--samples", 1)
    assert set(evaluated["by_task"]) == {"arithmetic", "small"}
    logged: dict[str, float] = {}
    trackers = Trackers(make_config({"runs": str(directory.parent), "name": directory.name}))
    monkeypatch.setattr(trackers, "_log", lambda values, step: logged.update(values))
    trackers.evaluation(run.evaluations[-1])
    assert logged["evaluation/small/accuracy"] == run.evaluations[-1]["by_task"]["small"]["accuracy"]["value"]
    seen = seen_in_training(directory)
    assert any(name.startswith("arithmetic/") for name in seen.ids)  # by the ids that its task gives them
    assert checkpoint_directory(directory, 4).is_dir()
