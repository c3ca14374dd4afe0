"""Runs described by objects of a program."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stalewise
from stalewise.config.run_directory import read_config
from stalewise.errors import ConfigError, ModelError, StoreError, TaskError
from stalewise.models import EMBEDDED
from stalewise.objectives import registry
from stalewise.orchestrator import python_objects
from stalewise.store import open_batch
from stalewise.store.atomic import read_json, sha256_file
from stalewise.store.json_lines import read_jsonl
from stalewise.tasks import callables
from stalewise.types import NullCallback, Prompt, Reward
from tiny import TINY, call

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "level": a % 3} for a in range(10, 30) for b in (11, 23, 47)]
SMALL: dict[str, Any] = {**TINY, "schedule": {"updates": 2, "stages": 2}, "callback": NullCallback(), "check": "off"}
ARITHMETIC = EMBEDDED / "arithmetic"


def equal(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def len_of_response(response: str) -> float:
    return float(len(response))


class Own:
    def __call__(self, response: str, answer: str) -> float:
        return equal(response, answer)


exact = functools.partial(equal)  # which runs in this process: others would import this module, and torch


def config_of(
    runs: Path, model: Any = "embedded:arithmetic", dataset: Any = ROWS, reward: Any = exact, **more: Any
) -> Any:
    named = {key: more.pop(key, None) for key in ("tokenizer", "eval_dataset", "task", "objective", "settings")}
    return python_objects.config_of(model, dataset, reward, **named, keywords={"runs": str(runs), **more})


def weights(directory: Path, version: int) -> str:
    return sha256_file(directory / f"checkpoints/v{version:06d}/model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> stalewise.RunResult:
    runs = tmp_path_factory.mktemp("runs")
    reward = lambda response, answer, level: {"reward": exact(response, answer), "level": level}  # noqa: E731
    return stalewise.train("embedded:arithmetic", ROWS, reward, runs=str(runs), name="own", **SMALL)


def test_a_list_and_a_lambda_train_the_embedded_policy(trained: stalewise.RunResult) -> None:
    assert trained.updates == 2
    assert 0 <= trained.accuracy <= 1
    assert AutoModelForCausalLM.from_pretrained(trained.checkpoint).num_parameters() > 0
    config = read_config(trained.directory)
    assert config.model.path == "arithmetic"
    task = config.make_task()
    assert (task.size, len(task.evaluation_prompts(99))) == (54, 6)  # a tenth is held out
    import pyarrow.parquet as pq

    (shard, *_) = sorted(trained.directory.glob("rollouts/*/shard-*.parquet"))
    (parts, *_) = pq.read_table(shard).column("reward_parts").to_pylist()
    assert [part["name"] for part in parts] == ["level"]
    assert "lambda response, answer, level:" in (trained.directory / "python/reward.py").read_text()


def test_the_result_is_evaluated_in_the_same_program_and_in_another_only_with_a_reward(
    trained: stalewise.RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = stalewise.evaluate(trained.directory)
    assert again.accuracy.value == trained.accuracy
    assert stalewise.evaluate(trained.directory, ROWS, exact, samples=1).excluded > 0  # seen in training
    others = [{"prompt": "12+13=", "answer": "25"}, {"prompt": "33+44=", "answer": "77"}]
    found = stalewise.evaluate(model=trained.checkpoint, dataset=others, reward=exact, samples=2, max_new_tokens=4)
    assert (found.prompts, found.samples, found.excluded) == (2, 2, 0)
    monkeypatch.setattr(callables, "_REGISTERED", {})  # as in another program
    with pytest.raises(TaskError, match=r"the reward function lambda exists only in the program that called"):
        stalewise.evaluate(trained.directory)
    assert stalewise.evaluate(trained.directory, ROWS, exact, samples=1).prompts == 52  # training saw 8


def test_every_form_of_a_data_set_gives_the_same_rows(tmp_path: Path) -> None:
    lines = tmp_path / "sums.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(tmp_path / "sums.parquet")
    given = [ROWS, tuple(ROWS), table, str(lines), lines, str(tmp_path / "saved"), tmp_path / "sums.parquet"]
    files = {Path(config_of(tmp_path / "runs", dataset=one).task.options["path"]).parent.name for one in given}
    assert len(files) == 1
    other = Path(config_of(tmp_path / "runs", dataset=ROWS[:-1]).task.options["path"]).parent.name
    assert other not in files
    kept = tmp_path / "runs/run/data" / other / "rows.jsonl"
    assert read_jsonl(kept) == ROWS[:-1]


def test_fields_splits_and_evaluation_rows(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "gold": row["answer"]} for row in ROWS]
    options = {"prompt_field": "question", "answer_field": "gold", "template": "Q: {problem} A:", "held_out": 0.5}
    config = config_of(tmp_path, dataset=rows, **options)
    task = config.make_task()
    assert (task.size, task.prompts(0, 1)[0].text[:3]) == (30, "Q: ")
    config = config_of(tmp_path, eval_dataset=ROWS[:4], dataset=ROWS[4:], name="other")
    assert [len(config.make_task().evaluation_prompts(99)), config.make_task().size] == [4, 56]
    unanswered = [{"prompt": row["prompt"]} for row in ROWS]
    task = config_of(tmp_path, dataset=unanswered, reward=lambda response: len(response), name="third").make_task()
    assert (task.size, task.prompts(0, 1)[0].answer) == (54, "")
    with pytest.raises(TaskError, match="asks for 'answer', and no row has it; answer_field names its field"):
        config_of(tmp_path, dataset=unanswered, name="fourth")
    partly = config_of(tmp_path, dataset=[unanswered[0], *ROWS[1:]], name="fifth")  # the first row alone lacks one
    with pytest.raises(TaskError, match=r"^dataset\[0\]: there is no field 'answer'"):
        partly.make_task()


def test_answers_keep_their_types_for_functions(tmp_path: Path) -> None:
    given: list[Any] = []

    def own(response: str, answer: Any) -> float:
        given.append(answer)
        return float(response.isdigit() and int(response) == answer)

    def of_trl(completions: list[str], answer: list[Any], **columns: Any) -> list[float]:
        given.extend(answer)
        return [1.0]

    numbers = [{**row, "answer": int(row["answer"])} for row in ROWS]
    task = config_of(tmp_path, dataset=numbers, reward=own).make_task()
    (prompt,) = task.prompts(0, 1)
    assert [reward.value for reward in task.verifier.score([prompt, prompt], [prompt.answer, "x"])] == [1, 0]
    assert config_of(tmp_path, reward=of_trl, dataset=numbers, name="trl").make_task().verifier.score([prompt], ["x"])
    assert [type(answer) for answer in given] == [int, int, int]
    for answer in (["20", "twenty"], None, True, {"any": "20"}):
        task = config_of(tmp_path, dataset=[{**row, "answer": answer} for row in ROWS], reward=of_trl).make_task()
        task.verifier.score(task.prompts(0, 1), ["x"])
        assert given[-1] == answer


def test_splits_are_of_named_data_or_of_a_dict_of_splits(tmp_path: Path) -> None:
    for given in (ROWS, datasets.Dataset.from_list(ROWS)):
        for key in ("split", "eval_split", "dataset_config"):
            with pytest.raises(
                ConfigError, match=f"^{key} is for a dataset that is named, and this one is in memory: "
            ):
                config_of(tmp_path, dataset=given, **{key: "test"})
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS[4:]), "test": datasets.Dataset.from_list(ROWS[:4])}
    )
    task = config_of(tmp_path, dataset=both, eval_split="test").make_task()
    assert (task.size, len(task.evaluation_prompts(99))) == (56, 4)
    task = config_of(tmp_path, dataset=both, split="test", held_out=0.25, name="one").make_task()
    assert (task.size, len(task.evaluation_prompts(99))) == (3, 1)
    with pytest.raises(TaskError, match="the data set has no split 'tset'; did you mean test"):
        config_of(tmp_path, dataset=both, eval_split="tset")
    with pytest.raises(TaskError, match=r"is a dict with train, test: pass one split, .* or name it with split="):
        config_of(tmp_path, dataset=both)
    lines = tmp_path / "sums.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(TaskError, match="is a single file and has no split 'test'"):
        config_of(tmp_path, dataset=lines, eval_split="test")


def test_a_part_that_no_reward_has_is_found_by_the_first_evaluation(tmp_path: Path) -> None:
    settings = {**SMALL, "reward_weights": {"equl": 1.0}, "runs": str(tmp_path)}
    message = "objective.reward_weights names 'equl', which no reward has as a part; did you mean equal"
    with pytest.raises(ConfigError, match=message):
        stalewise.train("embedded:arithmetic", ROWS, [equal, len_of_response], name="slip", **settings)
    assert not [*(tmp_path / "slip").glob("rollouts/*")]


def test_a_function_that_does_not_apply_to_some_responses_can_be_weighted(tmp_path: Path) -> None:
    def even(answer: str) -> float | None:
        return None if int(answer) % 2 else 1.0

    settings = {**SMALL, "reward_weights": {"even": 2.0, "equal": 1.0}, "runs": str(tmp_path)}
    done = stalewise.train("embedded:arithmetic", ROWS, [equal, even], name="partly", **settings)
    (directory, *_) = sorted(done.directory.glob("rollouts/*"))
    batch = open_batch(directory)
    plain = batch.column("reward")
    weighted = batch.with_columns(reward_weights=settings["reward_weights"]).column("reward")
    assert set((weighted - plain).tolist()) == {0.0, 1.0}


def test_a_reward_function_that_fails_is_named_as_such(tmp_path: Path) -> None:
    message = r"the reward function of rows failed on all \d+ responses.* returned None \(it must return a number"
    with pytest.raises(TaskError, match=message):
        stalewise.train("embedded:arithmetic", ROWS, lambda response: None, name="none", runs=str(tmp_path), **SMALL)


def test_a_bad_row_is_named_by_its_place_in_the_object_that_was_passed(tmp_path: Path) -> None:
    bad = [*ROWS[:5], {"prompt": "1+1=", "answer": ""}, *ROWS[5:]]
    for given in (bad, datasets.Dataset.from_list(bad), (row for row in bad)):
        with pytest.raises(TaskError, match=r"^dataset\[5\]: field 'answer' is empty$"):
            config_of(tmp_path, dataset=given).make_task()
    with pytest.raises(TaskError, match=r"^eval_dataset\[5\]: field 'answer' is empty$"):
        config_of(tmp_path, eval_dataset=bad).make_task()
    twice = [{**row, "id": place % 59} for place, row in enumerate(ROWS)]
    with pytest.raises(TaskError, match=r"^dataset\[59\]: id '0' was already used by dataset\[0\]$"):
        config_of(tmp_path, dataset=twice).make_task()
    with pytest.raises(TaskError, match=r"^dataset\[5\]: field 'answer' is empty$"):
        stalewise.evaluate("embedded:arithmetic", bad, "exact")
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    with pytest.raises(TaskError, match=r"^dataset sums, row 5, counted from 0: field 'answer' is empty$"):
        config_of(tmp_path, dataset=tmp_path / "sums.jsonl").make_task()


def test_an_unknown_objective_is_an_error_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no objective is called 'grpoo'; did you mean grpo"):
        config_of(tmp_path, objective="grpoo")


def interrupted(reward: Any, runs: Path, **more: Any) -> stalewise.RunResult:
    class Stop(Recorder):
        def metrics(self, update: int, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    settings = {**SMALL, "runs": str(runs), "name": "own", **more}
    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        stalewise.train("embedded:arithmetic", ROWS, reward, **{**settings, "callback": stop})
    assert stop.said[-1] == f"interrupted: committed work is in {runs}/own, and the same call resumes"
    return stalewise.train("embedded:arithmetic", ROWS, reward, **settings)


def test_an_interrupted_run_resumes_to_the_same_bits_and_refuses_other_objects(
    trained: stalewise.RunResult, tmp_path: Path
) -> None:
    reward = lambda response, answer, level: {"reward": exact(response, answer), "level": level}  # noqa: E731
    result = interrupted(reward, tmp_path)
    assert weights(result.directory, 2) == weights(trained.directory, 2)

    def refused(dataset: Any = ROWS, reward: Any = reward, model: Any = "arithmetic", **more: Any) -> str:
        before = {path: path.stat().st_mtime_ns for path in result.directory.rglob("*")}
        with pytest.raises(StoreError) as caught:
            stalewise.train(model, dataset, reward, **{**SMALL, "runs": str(tmp_path), "name": "own", **more})
        assert {path: path.stat().st_mtime_ns for path in result.directory.rglob("*")} == before
        return str(caught.value)

    message = refused(reward=lambda response: 0.0)
    assert "was begun with another reward function (the run's own is in python/reward.py): restore it" in message
    assert "choose another name=… for a new run" in message
    assert "another data set (the run's own is in data/)" in refused(dataset=ROWS[:-1])
    message = refused(optimizer={"learning_rate": 0.1})
    assert "optimizer.learning_rate was 0.0003 and is 0.1" in message
    assert "continues from version 1 as a new run, by the same call with its name; or choose another name" in message
    moved = tmp_path / "elsewhere"
    result.directory.rename(moved / "own") if moved.mkdir() is None else None
    settings = {**SMALL, "runs": str(moved), "name": "own"}
    assert stalewise.train("embedded:arithmetic", ROWS, reward, **settings).accuracy == result.accuracy
    assert Path(read_config(moved / "own").task.options["path"]).is_file()


def test_a_loaded_model_is_kept_in_the_run_directory(tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(ARITHMETIC), AutoTokenizer.from_pretrained(ARITHMETIC)
    settings = {**SMALL, "runs": str(tmp_path), "name": "loaded"}
    result = stalewise.train(model, ROWS, exact, tokenizer=tokenizer, **settings)
    named = stalewise.train(ARITHMETIC, ROWS, exact, **{**settings, "name": "named"})
    assert weights(result.directory, 2) == weights(named.directory, 2)
    assert stalewise.train(model, ROWS, exact, tokenizer=tokenizer, **settings).accuracy == result.accuracy
    found = stalewise.evaluate(model, ROWS, exact, tokenizer=tokenizer, samples=1, max_new_tokens=4)
    assert found.prompts == 60
    with torch.no_grad():
        next(iter(model.parameters())).add_(0.01)
    with pytest.raises(StoreError, match="was begun with another model: restore it"):
        stalewise.train(model, ROWS, exact, tokenizer=tokenizer, **settings)


class Doubles:
    """A task of a program: 2·n."""

    name = "doubles"
    size: int | None = 40

    def __init__(self, seed: int = 0, largest: int = 40) -> None:
        self.seed, self.size = seed, largest
        self.verifier = self

    def prompts(self, start: int, count: int) -> list[Prompt]:
        numbers = [10 + (index * 7 + self.seed) % (self.size or 1) for index in range(start, start + count)]
        return [Prompt(f"doubles/{n}", f"{n}+{n}=", str(2 * n)) for n in numbers]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [Prompt(f"doubles/{n}", f"{n}+{n}=", str(2 * n)) for n in range(60, 60 + min(count, 8))]

    def score(self, prompts: list[Prompt], responses: list[str]) -> list[Reward]:
        return [Reward(exact(response, prompt.answer)) for prompt, response in zip(prompts, responses, strict=True)]

    def close(self) -> None:
        return


def test_a_task_class_or_object_of_a_program(tmp_path: Path) -> None:
    settings = {**SMALL, "runs": str(tmp_path)}
    one = stalewise.train("embedded:arithmetic", task=Doubles, name="class", **settings)
    other = stalewise.train("embedded:arithmetic", task=Doubles(), name="object", **settings)
    assert weights(one.directory, 2) == weights(other.directory, 2)
    assert stalewise.evaluate(ARITHMETIC, task=Doubles, samples=1, max_new_tokens=4).prompts == 8
    assert stalewise.evaluate(one.directory).accuracy.value == one.accuracy
    with pytest.raises(StoreError, match=r"another task \(the run's own is in python/task.py\)"):
        stalewise.train("embedded:arithmetic", task=Doubles(largest=30), name="object", **settings)
    with pytest.raises(TaskError, match="has no method prompts"):
        stalewise.train("embedded:arithmetic", task=object(), **settings)
    with pytest.raises(ConfigError, match="reward goes with dataset"):
        stalewise.train("embedded:arithmetic", task=Doubles, reward=exact, **settings)


@pytest.fixture
def objectives() -> Iterator[None]:
    yield
    registry._CUSTOM.clear()


def test_an_objective_of_a_program(tmp_path: Path, objectives: None) -> None:
    def like_grpo(tokens: Any, batch: Any, *, clip_low: float = 0.8, clip_high: float = 1.2) -> Any:
        ratio_BT = tokens.log_ratio_BT.exp()
        clipped_BT = ratio_BT.clamp(clip_low, clip_high)
        return -torch.minimum(ratio_BT * tokens.advantage_BT, clipped_BT * tokens.advantage_BT)

    stalewise.objective(like_grpo)
    settings = {**SMALL, "runs": str(tmp_path), "precision": "float32"}
    own = stalewise.train("embedded:arithmetic", ROWS, exact, objective=like_grpo, name="own", **settings)
    theirs = stalewise.train("embedded:arithmetic", ROWS, exact, objective="grpo", name="theirs", **settings)
    assert weights(own.directory, 2) == weights(theirs.directory, 2)
    assert "def like_grpo" in (own.directory / "python/objective.py").read_text()
    assert read_json(own.directory / "config.resolved.json")["objective"]["name"].startswith("like_grpo@")
    again = stalewise.train("embedded:arithmetic", ROWS, exact, objective="like_grpo", name="own", **settings)
    assert again.accuracy == own.accuracy

    def changed(tokens: Any, batch: Any) -> Any:
        return -tokens.advantage_BT * tokens.logp_BT

    stalewise.objective(changed, name="like_grpo")
    with pytest.raises(StoreError, match=r"another objective \(the run's own is in python/objective.py\)"):
        stalewise.train("embedded:arithmetic", ROWS, exact, objective="like_grpo", name="own", **settings)
    with pytest.raises(ConfigError, match="like_grpo was changed since the run began"):
        stalewise.run(read_config(own.directory))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": []}, TaskError, "the data set has no rows"),
        ({"dataset": [1, 2]}, TaskError, "row 0 of the data set is 1: expected a dict with prompt and answer"),
        ({"dataset": {"train": ROWS}}, TaskError, r"a dict with train: pass one split, as in dataset\['train'\]"),
        ({"dataset": 3}, TaskError, "a data set is a list of dicts"),
        ({"dataset": "missing.jsonl"}, TaskError, "there is no file or directory missing.jsonl"),
        ({"dataset": [{"prompt": "a", "picture": b"1"}]}, TaskError, "field 'picture' of row 0 holds what JSON cannot"),
        ({"dataset": [{"question": "a", "answer": "b"}] * 20}, TaskError, "there is no field 'prompt'; .*prompt_field"),
        ({"reward": 3}, TaskError, "reward=3 is not a function"),
        ({"reward": "numbr"}, TaskError, "reward='numbr' is not a verifier: pass a function, or code, exact, judge"),
        ({"reward": "function"}, TaskError, "reward='function' is not a verifier: pass a function, or code, exact, j"),
        ({"reward": Own}, TaskError, r"reward=Own is a class: pass an object of it, Own\(\), which can be called"),
        ({"reward": [exact, Own]}, TaskError, "reward=Own is a class"),
        ({"reward_weights": [1.0, 0.5]}, ConfigError, r'a valid dictionary, as in \{"correct": 1\.0, "format": 0\.1'),
        (
            {"lora": {"rank": 4, "targets": "all-linear"}},
            ConfigError,
            "'all-linear': .* leave it out: an empty list nam",
        ),
        ({"reward": lambda response, gold: 0}, TaskError, "asks for 'gold', which it does not get"),
        ({"model": object()}, ModelError, "model is a object: expected a directory, a name, or a PreTrainedModel"),
        ({"model": "embedded:algebra"}, ModelError, "there is no embedded policy 'algebra'"),
        ({"tokenizer": object()}, ConfigError, "goes with a loaded model"),
        ({"updates": "3"}, ConfigError, r"schedule\.updates is '3'"),
        ({"num_generations": 8}, ConfigError, "use group_size"),
        ({"kind": "pipelined", "reward": lambda response: 0}, ConfigError, "another process, which does not have the"),
        ({"objective": "grpoo"}, ValueError, "did you mean"),
    ],
)
def test_bad_objects_get_one_message_and_nothing_is_written(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    settings = {"model": "embedded:arithmetic", "dataset": ROWS, "reward": exact, "runs": str(tmp_path / "runs")}
    with pytest.raises(error, match=message):
        stalewise.train(**{**settings, "callback": NullCallback(), **arguments})
    assert not list(tmp_path.rglob("checkpoints"))


def test_evaluate_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    for arguments, message in (
        ({}, "evaluate needs a model"),
        ({"model": "arithmetic", "sample": 3}, "no argument 'sample'; did you mean samples"),
        ({"model": "arithmetic", "reward": exact}, "reward goes with dataset"),
        ({"model": "arithmetic", "dataset": ROWS, "file": "a.jsonl"}, "file and dataset both"),
    ):
        with pytest.raises(ConfigError, match=message):
            stalewise.evaluate(**arguments)
    with pytest.raises(ModelError, match="a loaded model needs its tokenizer"):
        stalewise.evaluate(AutoModelForCausalLM.from_pretrained(ARITHMETIC), ROWS, exact)


class Recorder(NullCallback):
    """What a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.notes: list[str] = []

    def log(self, message: str) -> None:
        self.said.append(message)

    def advance(self, amount: int, note: str = "") -> None:
        self.notes.append(note)


def test_a_reward_that_mostly_fails_stops_the_run_at_once_and_is_repaired_under_the_same_name(tmp_path: Path) -> None:
    settings = {**SMALL, "runs": str(tmp_path), "name": "own", "evaluation": {"prompts": 6, "samples": 16}}
    first: Any = {**settings, "callback": Recorder()}

    def broken(response: str, answer: str, level: int) -> float:
        return 1.0 if level else exact(response, answer) / 0

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(TaskError, match=rf"task.max_unscored is 0.2; the first error was raised in .*, line {line}: "):
        stalewise.train("embedded:arithmetic", ROWS, broken, **first)
    (told,) = [text for text in first["callback"].said if "Traceback" in text or "ZeroDivisionError" in text]
    assert f'File "{__file__}", line {line}, in broken' in told  # once, with file and line
    assert not (tmp_path / "own/rollouts").exists()
    repaired = stalewise.train("embedded:arithmetic", ROWS, exact, **settings)
    assert (repaired.updates, repaired.unscored) == (2, 0.0)
    assert "equal" in (tmp_path / "own/python/reward.py").read_text()


def test_a_reward_that_fails_after_the_first_stage_is_repaired_in_a_fork(tmp_path: Path) -> None:
    settings: Any = {**SMALL, "runs": str(tmp_path), "evaluation": {"prompts": 6, "samples": 2}}
    calls: list[str] = []

    def broken(response: str, answer: str) -> float:
        calls.append(response)
        return exact(response, answer) if len(calls) <= 12 + 16 else 1 / 0

    call_of_fork = f'stalewise.fork("{tmp_path}/own", name="own-2"), then the same call'
    fork = f"goes on from the last checkpoint: {call_of_fork}"
    with pytest.raises(
        TaskError, match=re.escape(f"these responses are not kept, and a repaired function {fork} with that name")
    ):
        stalewise.train("embedded:arithmetic", ROWS, broken, name="own", **settings)
    with pytest.raises(StoreError, match=re.escape(f"for a new run; the changed program {fork} with that name")):
        stalewise.train("embedded:arithmetic", ROWS, exact, name="own", **settings)
    said = call("fork", tmp_path / "own", "--name", "own-2").stderr
    assert said == f'next: stalewise.train(…, name="own-2") in the program that has the objects of {tmp_path}/own\n'
    directory = tmp_path / "own-2"
    with pytest.raises(StoreError, match=r"optimizer\.learning_rate was .* and is 0\.1"):  # no object of a program
        stalewise.train(
            "embedded:arithmetic", ROWS, exact, name="own-2", **{**settings, "optimizer": {"learning_rate": 0.1}}
        )
    repaired = stalewise.train("embedded:arithmetic", ROWS[:-1], exact, name="own-2", **settings)
    assert (repaired.updates, repaired.directory, repaired.unscored) == (2, directory, 0.0)
    assert [record["version"] for record in repaired.evaluations] == [1, 2]  # version 0 was scored by the other
    assert "equal" in (directory / "python/reward.py").read_text()
    assert "broken" in (tmp_path / "own/python/reward.py").read_text()
    (line,) = [line for line in read_jsonl(directory / "journal.jsonl") if line["event"] == "config"]
    assert "task.options.verifier_options.function" in line["changes"]
    assert call("verify", directory).exit_code == 0
    with pytest.raises(StoreError, match="was begun with another reward function"):  # it has made an update of its own
        stalewise.train("embedded:arithmetic", ROWS[:-1], lambda response: 0.0, name="own-2", **settings)


def test_rollouts_that_come_with_a_fork_keep_the_rewards_of_the_function_before(tmp_path: Path) -> None:
    class Stop(Recorder):
        def metrics(self, update: int, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    settings: Any = {
        **SMALL,
        "runs": str(tmp_path),
        "schedule": {"updates": 2, "stages": 1},
        "checkpoints": {"every": 1},
    }
    with pytest.raises(KeyboardInterrupt):
        stalewise.train("embedded:arithmetic", ROWS, exact, name="own", **{**settings, "callback": Stop()})
    stalewise.train("embedded:arithmetic", ROWS, exact, name="own", **settings)
    stalewise.fork(tmp_path / "own", at=1, name="other")
    zero = lambda response: 0.0  # noqa: E731
    result = stalewise.train(
        "embedded:arithmetic", ROWS, zero, name="other", **{**settings, "callback": (r := Recorder())}
    )
    assert result.accuracy == 0.0
    assert "g000000-v000000 came with the fork: their rollouts keep the rewards of the function before" in r.said
    assert weights(tmp_path / "other", 2) == weights(tmp_path / "own", 2)


def test_an_evaluation_counts_the_prompts_that_are_held_out(tmp_path: Path) -> None:
    class Totals(NullCallback):
        def begin(self, what: str, total: int) -> None:
            begun.append((what, total))

    begun: list[tuple[str, int]] = []
    settings: Any = {**SMALL, "runs": str(tmp_path), "evaluation": {"prompts": 128, "samples": 2}, "callback": Totals()}
    result = stalewise.train("embedded:arithmetic", ROWS, exact, name="own", **settings)
    assert result.evaluations[-1]["prompts"] == 6  # one row in ten
    assert ("evaluate", 12) in begun
    settings |= {"callback": (said := Recorder())}
    stalewise.train("embedded:arithmetic", ROWS, exact, name="own", **settings)
    assert [text.endswith(": no damage") for text in said.said if text.startswith("checked version 2")] == [True]
    assert "2 of 2 updates are made: there is nothing left to train" in said.said
    found = call("doctor", tmp_path / "own").stdout
    assert f"run directory   {tmp_path}/own: has made all 2 updates" in found


def test_a_few_failures_are_on_the_progress_line_and_in_the_result(tmp_path: Path) -> None:
    def sometimes(response: str, answer: str) -> float:
        return exact(response, answer) if answer != "33" else 1 / 0

    settings = {**SMALL, "runs": str(tmp_path), "callback": (said := Recorder())}
    settings |= {"batch": {"prompts": 32, "group_size": 4}, "sampler": {"max_new_tokens": 4, "rollouts_per_shard": 64}}
    result = stalewise.train("embedded:arithmetic", ROWS, sometimes, name="a", **settings)
    assert 0 < result.unscored <= 0.2
    assert any(note.endswith("% unscored") for note in said.notes)
    told = [text for text in said.said if "could not be scored: " in text]
    assert told
    assert all(text.endswith("ZeroDivisionError: division by zero") for text in told)
    settings |= {"max_unscored": 0.0, "evaluation": {"prompts": 1, "samples": 1}}
    with pytest.raises(TaskError, match=r"that is \d+%, and task\.max_unscored is 0: |max_unscored is 0; the first"):
        stalewise.train("embedded:arithmetic", ROWS, sometimes, name="b", **settings)
    rollouts = list((tmp_path / "b/rollouts").rglob("shard-*.parquet"))
    settings |= {"max_unscored": 0.2}  # is no part of the run's identity
    assert stalewise.train("embedded:arithmetic", ROWS, sometimes, name="b", **settings).unscored > 0
    assert all(path.is_file() for path in rollouts)


def test_a_list_of_functions_is_their_sum_with_parts_by_name(tmp_path: Path) -> None:
    def right(response: str, answer: str) -> dict[str, Any]:
        return {"reward": float(response.strip() == answer), "digits": len(response), "answer": response.strip()}

    async def brief(response: str) -> float:
        return -0.25 * len(response)

    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 14)]
    settings = {
        "runs": str(tmp_path),
        "settings": {"batch.prompts": 4, "evaluation.prompts": 8, "evaluation.samples": 2},
    }
    common: dict[str, Any] = {"updates": 1, "stages": 1, "group_size": 4, "max_new_tokens": 8, **settings}
    result = stalewise.train("embedded:arithmetic", rows, [right, brief], name="both", **common)
    (batch,) = (tmp_path / "both" / "rollouts").iterdir()
    for one in open_batch(batch).iter_rollouts():
        assert set(one.reward_parts) == {"right", "right.digits", "brief"}
        assert one.reward == one.reward_parts["right"] + one.reward_parts["brief"]
        assert one.reward_parts["brief"] == -0.25 * one.reward_parts["right.digits"]
    assert result.evaluations[-1]["majority"] is not None
    assert "right+brief@" in read_config(tmp_path / "both").task.options["verifier_options"]["function"]
    with pytest.raises(StoreError, match="another reward function"):
        stalewise.train("embedded:arithmetic", rows, [right], name="both", **common)
    with pytest.raises(TaskError, match="must have functions"):
        stalewise.train("embedded:arithmetic", rows, [right, "math"], name="b", **common)
    silent = stalewise.evaluate("embedded:arithmetic", rows[:4], lambda response: 1.0, samples=2, max_new_tokens=8)
    assert silent.majority is None
