"""Pass rates that outlive runs, and the prompts that they choose."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError, TaskError
from stalewise.reporting.verification import verify_run
from stalewise.store import batch_directories, open_batch
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.tasks import Task, make_task
from stalewise.tasks.difficulty import ChosenPrompts, DifficultyTable, PassCounts, read_table
from tiny import call, called_json, refused, tiny_record


def table_of(task: Task, rates: list[int]) -> DifficultyTable:
    """The first prompts of a task passed so many of 8 times; the others are unknown."""
    names = [prompt.prompt_id for prompt in task.prompts(0, len(rates))]
    return DifficultyTable({name: PassCounts(passed, 8) for name, passed in zip(names, rates, strict=True)})


def ids(task: Any, start: int, count: int) -> list[str]:
    return [prompt.prompt_id for prompt in task.prompts(start, count)]


def test_prompts_that_are_solved_or_hopeless_are_left_out() -> None:
    task = make_task("arithmetic")
    chosen = ChosenPrompts(task, table_of(task, [0, 4, 8, 7, 1]), low=0.1, high=0.9)
    assert isinstance(chosen, Task)
    first = ids(task, 0, 8)
    assert ids(chosen, 0, 5) == [first[1], first[3], first[4], first[5], first[6]]
    assert ids(chosen, 3, 2) == [first[5], first[6]]
    assert task.size is not None and chosen.size is not None and chosen.size == task.size - 2
    # Also in the next epoch, where the order is another.
    later = ids(chosen, chosen.size, chosen.size)
    assert sorted(later) == sorted(ids(chosen, 0, chosen.size)) and first[0] not in later
    assert chosen.evaluation_prompts(4) == task.evaluation_prompts(4)
    assert chosen.solution(task.prompts(0, 1)[0])  # what only some tasks have


def test_prompts_are_sampled_by_the_variance_of_their_reward() -> None:
    task = make_task("arithmetic")
    table = table_of(task, [1, 4] * 500)
    one, again, other = (ChosenPrompts(task, table, low=0, high=1, by="sample", seed=seed) for seed in (0, 0, 1))
    assert ids(one, 0, 300) == ids(again, 0, 300) != ids(other, 0, 300)
    # p = (1 + 1) / 10 and (4 + 1) / 10: weights 4 p (1 − p) = 0.64 and 1.
    chosen = set(ids(one, 0, 900)) & table.prompts.keys()
    hard = sum(table.prompts[name].passed == 1 for name in chosen)
    assert len(chosen) - hard == 500
    assert hard / 500 == pytest.approx(0.64, abs=0.07)


def test_nothing_in_the_range_is_one_message() -> None:
    task = make_task("arithmetic-chat", largest=12)
    table = DifficultyTable({prompt.prompt_id: PassCounts(8, 8) for prompt in task.prompts(0, task.size or 0)})
    with pytest.raises(TaskError, match=r"no prompt of .* has a pass rate from 0\.1 to 0\.9: widen task\.pass_rates"):
        ChosenPrompts(task, table, low=0.1, high=0.9)


def test_a_batch_is_counted_once() -> None:
    table = DifficultyTable()
    assert table.add("abc", "run/g0", {"a": PassCounts(1, 4), "b": PassCounts(0, 4)})
    assert not table.add("abc", "run/g0", {"a": PassCounts(1, 4)})
    assert table.add("def", "run/g1", {"a": PassCounts(4, 4)})
    assert table.prompts == {"a": PassCounts(5, 8), "b": PassCounts(0, 4)}
    summary = table.summary(0.5, 0.9)
    assert (summary["never"], summary["always"], summary["between"], summary["in_range"]) == (1, 0, 1, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "should hold a JSON object, not a list"),
        ("{", "is not a table of pass rates: is corrupt"),
        ('{"format": 1}', "has format 1; expected stalewise.difficulty/1"),
        ('{"format": "stalewise.difficulty/1", "batches": {}, "prompts": {"a": [1.5, 4]}}', r"a passed 1\.5 of 4"),
        ('{"format": "stalewise.difficulty/1", "batches": {}, "prompts": {"a": ["1", true]}}', "is damaged"),
        ('{"format": "stalewise.difficulty/1"}', "is damaged"),
        ('{"format": "stalewise.difficulty/1", "batches": {}, "prompts": {"a": [5, 4]}}', "a passed 5 of 4"),
    ],
)
def test_a_bad_table_is_one_message(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    with pytest.raises(TaskError, match="there is no table of pass rates"):
        read_table(path, read_json)
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        read_table(path, read_json)


def test_a_table_that_was_changed_is_refused(tmp_path: Path) -> None:
    path, table = tmp_path / "table.json", DifficultyTable({"a": PassCounts(1, 4)})
    write_json_atomic(path, table.record(), sealed=True)
    assert read_table(path, read_json) == table
    path.write_text(path.read_text().replace("      1,", "      2,"))
    with pytest.raises(TaskError, match="was changed after it was written"):
        read_table(path, read_json)


def made(runs: Path, name: str = "run", **task: Any) -> RunConfig:
    return make_config(tiny_record(runs, name, task=task))


def test_the_next_run_begins_with_prompts_worth_training_on(runs: Path, tmp_path: Path) -> None:
    first, table = made(runs, "first"), tmp_path / "table.json"
    run(first)
    found = called_json("difficulty", first.directory, "--output", table)
    assert (found["added"], found["prompts"], found["rollouts"]) == (2, 16, 64)
    assert called_json("difficulty", first.directory, "--output", table)["added"] == 0
    assert called_json("difficulty", first.directory, "--stage", "last")["rollouts"] == 32
    before = json.loads(table.read_text())
    rewards: dict[str, list[float]] = {}
    for directory in batch_directories(first.directory / "rollouts"):
        for record in open_batch(directory).iter_records(["prompt_id", "reward"]):
            rewards.setdefault(record["prompt_id"], []).append(record["reward"])
    assert before["prompts"] == {name: [sum(one), len(one)] for name, one in rewards.items()}
    assert "never passed" in call("difficulty", first.directory).stdout

    second = made(runs, "second", difficulty=str(table))
    run(second)
    trained = {
        name
        for directory in batch_directories(second.directory / "rollouts")
        for name in open_batch(directory).column("prompt_id")
    }
    left_out = {name for name, (passed, total) in before["prompts"].items() if passed in (0, total)}
    assert left_out and not left_out & trained
    checked = verify_run(second.directory)
    assert checked.damaged == [] and checked.not_covered == []
    # A run keeps the table with which it began.
    table.write_text("gone")
    assert run(second).updates == 4
    assert ids(second.make_task(), 0, 16) == ids(second.make_task(), 0, 16)
    with pytest.raises(TaskError, match="is not a table of pass rates"):
        run(made(runs, "third", difficulty=str(table)))


def test_bad_input_of_the_command_is_one_message(runs: Path) -> None:
    assert "is not a run directory" in refused("difficulty", runs)
    assert "name the run directories to count" in refused("difficulty")
    with pytest.raises(ConfigError, match="by_pass_rate has no meaning without difficulty"):
        made(runs, by_pass_rate="sample")
    with pytest.raises(ConfigError, match=r"pass_rates is \[0\.9, 0\.1\]"):
        made(runs, difficulty="a", pass_rates=[0.9, 0.1])


def test_chosen_prompts_can_be_copied() -> None:
    task = make_task("arithmetic-chat", largest=12)
    table = DifficultyTable({prompt.prompt_id: PassCounts(4, 8) for prompt in task.prompts(0, task.size or 0)})
    chosen = ChosenPrompts(task, table, low=0.1, high=0.9)
    assert copy.copy(chosen).prompts(0, 3) == pickle.loads(pickle.dumps(chosen)).prompts(0, 3) == chosen.prompts(0, 3)
