"""Nobody is judged on what they were trained on: by ids, by problems, by a list; and evaluation on files of rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from callbacks import Listener
from stalewise import api as verbs
from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.errors import TaskError
from stalewise.integrations.hub import export_policy, export_rollouts
from stalewise.orchestrator.contamination import seen_in_training
from stalewise.reporting.read import read_run
from stalewise.reporting.summary import findings
from stalewise.store import batch_directories, open_batch
from stalewise.store.atomic import read_json
from stalewise.tasks import Seen, make_evaluation_file
from stalewise.tasks.rows import problem_key, read_ids, seen
from stalewise.tasks.verifiers.number import NumberVerifier
from stalewise.types import Prompt, Reward
from tiny import call, called_json, refused, tiny_record


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(terms: range, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": f"sum-{a}", "problem": f"{a}+{a}=", "answer": str(2 * a), **fields} for a in terms]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run on 40 sums, 4 of them held out; its 16 prompts are among the other 36."""
    directory = tmp_path_factory.mktemp("rows")
    path = write(directory / "train.jsonl", sums(range(10, 50)))
    task = {"name": "jsonl", "options": {"path": str(path), "held_out": 0.1}}
    config = make_config(tiny_record(directory / "runs", model={"path": "arithmetic"}, task=task))
    run(config)
    return config


def trained_on(config: RunConfig) -> set[str]:
    found: set[str] = set()
    for batch in batch_directories(config.directory / "rollouts"):
        found.update(open_batch(batch).column("prompt_id"))
    return found


# ---------------------------------------------------------------- what counts as the same


def test_a_problem_is_known_again_in_other_clothes() -> None:
    key = problem_key("Find $x$ with\n\\[2x^{2} = 4.\\]")
    assert problem_key("find  x with $2x^2=4$?") == key
    assert problem_key("Find $x$ with\n\\[2x^{2} = 5.\\]") != key
    assert problem_key("z^4 - z^2 + 1") != problem_key("z^4 + z^2 + 1")
    assert problem_key("What is 3.5?") != problem_key("What is 35?")
    assert problem_key("🙂") != problem_key("🙁")  # where nothing else is left


def test_ids_and_problems_are_compared() -> None:
    known = seen([Prompt("math-1", "Solve: x=1", "1", {"problem": "x=1"}), Prompt("7", "y=2", "2")])
    assert Prompt("evaluation/math-1", "anything", "") in known
    assert Prompt("math-1", "anything", "") in known
    assert Prompt("other", "Question: x = 1\nAnswer:", "", {"problem": "x = 1"}) in known
    assert Prompt("other", "Y=2", "") in known
    assert Prompt("other", "Solve: x=1", "") not in known  # the template is not the problem
    # An id of digits is a place in a file: number 7 of another file is another problem.
    assert Prompt("evaluation/7", "z=3", "") not in known
    both = known | Seen(frozenset({"7"}))
    assert Prompt("evaluation/7", "z=3", "") in both


def test_lists_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text('a-1\n\n  a-2 \n{"id": "t-1", "train_file": "x.jsonl", "eval_id": "e-1"}\n{"id": 5}\n')
    assert read_ids(path).ids == {"a-1", "a-2", "t-1", "e-1", "5"}
    for content, message in (
        ("\n", "holds no ids: write one on each line"),
        ('{"name": 1}\n', "line 1: an object without id, eval_id or prompt_id"),
        ("a\n{nonsense\n", "line 2: not JSON"),
    ):
        path.write_text(content)
        with pytest.raises(TaskError, match=message):
            read_ids(path)
    with pytest.raises(TaskError, match="there is no file"):
        read_ids(tmp_path / "none")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="cannot be read"):
        read_ids(path)


# ---------------------------------------------------------------- evaluation


def test_a_file_is_evaluated_on_as_a_whole(trained: RunConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", sums(range(60, 90)))
    result = verbs.evaluate(trained.directory, file=path, samples=3)
    assert (result.task, result.prompts, result.samples, result.excluded) == ("test", 30, 3, 0)
    assert list(result.pass_at) == [1, 2, 3]  # powers of two, and all samples
    assert result.accuracy.low <= result.accuracy.value <= result.accuracy.high
    assert verbs.evaluate(trained.directory, file=path, samples=1, prompts=7).prompts == 7
    other = verbs.evaluate("arithmetic", file=path, samples=1, prompts=3, max_new_tokens=8)
    assert (other.version, other.prompts) == (0, 3)


def test_what_a_run_was_trained_on_is_left_out_and_counted(trained: RunConfig, tmp_path: Path) -> None:
    assert len(trained_on(trained)) == 16
    path = write(tmp_path / "test.jsonl", sums(range(10, 60)))
    result = verbs.evaluate(trained.directory, file=path, samples=1)
    assert (result.prompts, result.excluded) == (34, 16)
    # Without names of their own the rows are known by their problems, in whatever clothes.
    renamed = [{"problem": f" {row['problem']} ", "answer": row["answer"]} for row in sums(range(10, 60))]
    result = verbs.evaluate(trained.directory, file=write(tmp_path / "renamed.jsonl", renamed), samples=1)
    assert (result.prompts, result.excluded) == (34, 16)
    checkpoint = trained.directory / "checkpoints" / "v000004"
    assert verbs.evaluate(checkpoint, file=path, samples=1).excluded == 16
    assert verbs.evaluate("arithmetic", file=path, samples=1, max_new_tokens=8).excluded == 0


def test_the_runs_own_task_holds_its_prompts_apart_already(trained: RunConfig) -> None:
    assert verbs.evaluate(trained.directory, samples=1).excluded == 0
    wider = verbs.evaluate(trained.directory, options={"held_out": 0.9}, prompts=36, samples=1)
    assert wider.excluded > 0
    assert wider.prompts + wider.excluded == 36


def test_rollouts_that_were_learned_from_again_count_as_training(trained: RunConfig, tmp_path: Path) -> None:
    again = trained.model_copy(update={"runs": str(tmp_path), "name": "again"})
    verbs.learn(again, [trained.directory])
    assert seen_in_training(again.directory).ids >= trained_on(trained)
    path = write(tmp_path / "test.jsonl", sums(range(10, 60)))
    assert verbs.evaluate(again.directory, file=path, samples=1).excluded == 16


def started_from(trained: RunConfig, directory: Path, path: Path, **sources: Any) -> Path:
    """A run on other rows, whose policy is said to come from `path`."""
    for name in ("checkpoints", "ledger"):
        shutil.copytree(trained.directory / name, directory / name)
    config = read_json(trained.directory / "config.resolved.json")
    config["model"]["path"] = str(path)
    rows = write(directory / "rows.jsonl", sums(range(60, 100)))
    config["task"]["options"] = {"path": str(rows), "held_out": 0.5}
    (directory / "config.resolved.json").write_text(json.dumps(config))
    if sources:
        (directory / "sources.json").write_text(json.dumps(sources))
    return directory


def test_what_a_run_comes_from_has_been_seen_as_well(trained: RunConfig, tmp_path: Path) -> None:
    checkpoint = trained.directory / "checkpoints" / "v000004"
    child = started_from(trained, tmp_path / "child", checkpoint)
    # The checkpoint of the child that this one names was removed since then: its run is known all the same.
    grandchild = started_from(trained, tmp_path / "grandchild", child / "checkpoints" / "v000001")
    path = write(tmp_path / "test.jsonl", sums(range(10, 60)))
    for run_directory in (child, grandchild, grandchild / "checkpoints" / "v000004"):
        result = verbs.evaluate(run_directory, file=path, samples=1)
        assert (result.prompts, result.excluded, result.unknown) == (34, 16, [])
    # `learn --checkpoint` starts there, whatever model.path says.
    learned = started_from(trained, tmp_path / "learned", Path("arithmetic"), checkpoint=str(checkpoint), batches=[])
    assert seen_in_training(learned).ids >= trained_on(trained)
    # A line that comes back to itself has an end.
    ring = started_from(trained, tmp_path / "ring", tmp_path / "ring" / "checkpoints" / "v000004")
    assert len(seen_in_training(ring).problems) == 16


def test_a_runs_own_task_does_not_hold_apart_what_came_before_it(trained: RunConfig, tmp_path: Path) -> None:
    child = started_from(trained, tmp_path / "child", trained.directory / "checkpoints" / "v000004")
    write(child / "rows.jsonl", sums(range(10, 50)))
    assert verbs.evaluate(child, prompts=20, samples=1).excluded > 0


def test_where_the_line_cannot_be_followed_it_is_said(trained: RunConfig, tmp_path: Path) -> None:
    def told(path: Path) -> str:
        result = verbs.evaluate(path, file=rows, samples=1, max_new_tokens=8)
        (said,) = result.unknown or []
        return said

    rows = write(tmp_path / "test.jsonl", sums(range(10, 60)))
    copied = shutil.copytree(trained.directory / "checkpoints" / "v000004", tmp_path / "copied")
    assert "copied is a checkpoint whose run does not exist: what it was trained on is unknown" in told(copied)
    gone = started_from(trained, tmp_path / "from_gone", tmp_path / "gone")
    assert "gone, where training began, does not exist" in told(gone)
    batch = {"updates": 2, "directory": str(tmp_path / "no" / "rollouts" / "g000000")}
    learned = started_from(trained, tmp_path / "learned", Path("arithmetic"), checkpoint=None, batches=[batch])
    assert "g000000 was learned from and does not exist: its prompts are unknown; exclude with" in told(learned)


def test_what_is_not_here_may_be_on_a_hub(trained: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    said: list[str] = []
    for number, name in enumerate(("gpt2", "owner/model", "models/base")):
        seen_in_training(started_from(trained, tmp_path / f"from{number}", Path(name)), said.append)
    assert len(said) == 1 and said[0].startswith("models/base, where training began, does not exist")


def test_exported_rollouts_are_no_policy(trained: RunConfig, tmp_path: Path) -> None:
    said: list[str] = []
    seen_in_training(export_rollouts(trained.directory, tmp_path / "out"), said.append)
    assert said == []


def test_an_export_says_what_it_can(trained: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write(tmp_path / "test.jsonl", sums(range(10, 60)))
    exported = export_policy(trained.directory, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    words = ["eval", exported, "--file", rows, "--samples", 1, "--max-new-tokens", 8]
    record = called_json(*words)
    assert record["excluded"] == 0
    # Its config names the file without the directory.
    reason = (
        "is an export of version 4 of the run tiny: what it was trained on is unknown (there is no file train.jsonl in"
    )
    assert reason in record["unknown"][0]
    assert "is an export of version 4 of the run tiny" in call(*words).stderr.replace("\n", " ")
    shutil.copy(trained.task.options["path"], tmp_path / "train.jsonl")
    child = started_from(trained, tmp_path / "child", exported)
    record = called_json("eval", child, "--file", rows, "--samples", 1)
    assert record["excluded"] == 16
    assert "only the task's prompts are known to have been trained on; evaluate the run" in record["unknown"][0]
    words[1] = export_policy(child, tmp_path / "later")
    later = called_json(*words)["unknown"][0]
    assert "which began as version 4 of the run tiny, which started from the small policy `arithmetic`" in later


def test_where_the_task_is_gone_the_ids_of_the_rollouts_are_left(trained: RunConfig, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(trained.directory, copied)
    config = read_json(copied / "config.resolved.json")
    config["task"]["options"]["path"] = str(tmp_path / "gone.jsonl")
    (copied / "config.resolved.json").write_text(json.dumps(config))
    path = write(tmp_path / "test.jsonl", sums(range(10, 60)))
    listener = Listener()
    result = verbs.evaluate(copied, file=path, samples=1, callback=listener)
    assert result.excluded == 16
    (said,) = listener.said
    assert "only the ids are known, not the problems: there is no file" in said


def test_the_form_of_the_runs_own_rows_is_kept(trained: RunConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"question": f"{a}+{a}=", "gold": 2 * a} for a in range(60, 64)])
    with pytest.raises(TaskError, match="there is no field 'problem'"):
        verbs.evaluate(trained.directory, file=path, samples=1)
    options = {"problem_field": "question", "answer_field": "gold"}
    assert verbs.evaluate(trained.directory, file=path, options=options, samples=1).prompts == 4
    with pytest.raises(TaskError, match="task jsonl has no option 'held_out'"):
        verbs.evaluate(trained.directory, file=path, options={"held_out": 0.5})
    task = make_evaluation_file(str(path), **options)
    assert task.size == 0
    with pytest.raises(TaskError, match="q is there to evaluate on: it has no training prompts"):
        task.prompts(0, 1)


def test_the_command_line(trained: RunConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", sums(range(40, 60)))
    write(tmp_path / "ids.jsonl", [{"id": "elsewhere", "eval_id": "sum-55"}])
    words = ["eval", trained.directory, "--file", path, "--samples", 1, "--exclude-ids", tmp_path / "ids.jsonl"]
    record = called_json(*words)
    overlapping = len(trained_on(trained) & {f"sum-{a}" for a in range(40, 60)})
    assert record["excluded"] == overlapping + 1
    text = call(*words).stdout
    assert f"{overlapping + 1} prompts left out: they were used in training, or their ids are excluded" in text
    assert "task jsonl needs the option 'path'" in refused(*words, "--task", "jsonl")  # both are evaluated
    everything = write(tmp_path / "all.jsonl", [{"id": f"sum-{a}"} for a in range(60)])
    assert "no held-out prompts left" in refused(*words[:-1], everything)


# ---------------------------------------------------------------- answers that cannot be read


def test_answers_that_cannot_be_read_are_counted_and_listed(tmp_path: Path) -> None:
    rows = sums(range(20, 24))
    rows[1]["answer"], rows[2]["answer"] = "see above", "none"
    rows += [{"id": "words", "problem": "+=-", "answer": "1"}]
    path = write(tmp_path / "rows.jsonl", rows)
    words = ["eval", "arithmetic", "--file", path, "--samples", 2, "--max-new-tokens", 8]
    record = called_json(*words)
    assert record["verifier_errors"] == 4
    assert record["verifier_error_kinds"] == {"answer is not a number": 4}
    assert sorted(record["verifier_error_prompts"]["answer is not a number"]) == [
        "evaluation/sum-21",
        "evaluation/sum-22",
    ]
    text = call(*words).stdout
    assert "4 responses without a score: answer is not a number, at evaluation/sum-2" in text
    assert record["unparsed"] == len(record["unparsed_examples"])


def test_gold_answers_of_which_a_part_is_read_are_counted_and_listed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl", [*sums(range(20, 22)), {"id": "two", "problem": "1+1=", "answer": "$221,$8$"}]
    )
    words = ["eval", "arithmetic", "--file", path, "--samples", 1, "--max-new-tokens", 8, "--option", "verifier=math"]
    words += ["--option", "verifier_options={workers = 1}"]
    record = called_json(*words)
    assert (record["unmatched"], record["unmatched_prompts"]) == (1, ["evaluation/two"])
    assert (
        "1 gold answers are scored as wrong, since the verifier parses only part of them: evaluation/two"
        in call(*words).stdout
    )


def test_responses_without_an_answer_are_counted_and_listed(tmp_path: Path) -> None:
    # One token is a digit or another character; after "=-=" the policy may end at once or write something else.
    rows = [{"id": f"odd-{n}", "problem": "=" * n, "answer": "1"} for n in range(1, 30)]
    path = write(tmp_path / "rows.jsonl", rows)
    record = called_json("eval", "arithmetic", "--file", path, "--samples", 4, "--max-new-tokens", 1)
    assert record["unparsed"] > 0
    assert len(record["unparsed_examples"]) == min(20, record["unparsed"])
    assert {*record["unparsed_examples"][0]} == {"prompt_id", "response"}
    text = call("eval", "arithmetic", "--file", path, "--samples", 4, "--max-new-tokens", 1).stdout
    assert f"no answer found in {record['unparsed']} responses, which count as wrong; for example:" in text


def test_the_manifest_of_a_generation_batch_lists_them_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: NumberVerifier, prompt: Prompt, response: str) -> Reward:
        return Reward(0.0, {"parsed": 0.0}) if prompt.prompt_id == "sum-12" else right(self, prompt, response)

    right = NumberVerifier.judge
    monkeypatch.setattr(NumberVerifier, "judge", judge)
    rows = sums(range(10, 20))
    rows[3]["answer"] = "no number"
    options = {"path": str(write(tmp_path / "rows.jsonl", rows)), "evaluation_path": str(tmp_path / "test.jsonl")}
    write(tmp_path / "test.jsonl", sums(range(50, 60)))
    sections = {"model": {"path": "arithmetic"}, "task": {"name": "jsonl", "options": options}}
    config = make_config(tiny_record(tmp_path / "runs", **sections, batch={"prompts": 5, "group_size": 4}))
    (manifest,) = verbs.generate(config)  # two updates of 5 prompts: all of the rows
    assert manifest.verifier_errors == 4
    assert manifest.extra["verifier_error_prompts"] == {"answer is not a number": ["sum-13"]}
    assert manifest.extra["unparsed"] == 4
    assert [example["prompt_id"] for example in manifest.extra["unparsed_examples"]] == ["sum-12"] * 4
    (batch,) = called_json("inspect", config.directory)["batches"]
    assert (batch["unparsed"], batch["unparsed_examples"]) == (4, manifest.extra["unparsed_examples"])
    text = call("inspect", config.directory).stdout
    assert "no answer found in 4 responses, which count as wrong; for example:\n  sum-12: " in text
    assert "No answer was found in 4 responses, for example at sum-12; they count as wrong." in findings(
        read_run(config.directory)
    )
