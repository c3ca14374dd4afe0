"""A run described by objects of a Python program: a model, a data set, a reward function, a task, an objective.

Each becomes what a config can name. Rows and a loaded model are written into the run directory, under a name made of
their content. Functions and classes stay in the program and are registered under their fingerprint. So the config
identifies all of them, and the commands that read run directories work as with any other run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from stalewise.config import RunConfig, make_config
from stalewise.config.run import settings_record
from stalewise.config.run_directory import check_identity, is_started
from stalewise.errors import ConfigError, ModelError, StoreError, TaskError, nearest
from stalewise.models import embedded_policy
from stalewise.objectives.registry import Objective, get_objective, register_objective
from stalewise.orchestrator.setup import resolve_settings
from stalewise.store import atomic
from stalewise.tasks import callables
from stalewise.tasks.hf_datasets import rows_of, split_of
from stalewise.tasks.verifiers import VERIFIERS

# Keywords that say how rows become prompts; all others are settings.
ROW_KEYWORDS = frozenset(
    {
        "prompt_field",
        "answer_field",
        "id_field",
        "template",
        "chat",
        "system",
        "verifier_options",
        "prefill",
        "few_shot",
        "chat_template_kwargs",
        "held_out",
        "exclude_ids",
        "dataset_config",
        "split",
        "eval_split",
    }
)
EVALUATE_KEYWORDS = ROW_KEYWORDS | {"prompts", "samples", "max_new_tokens", "dataset", "reward", "task", "file"}
_OF_THE_SOURCE = ("dataset_config", "split", "eval_split")
PIECES_BYTES = 1 << 26  # numbers of a weight that are hashed at a time


def config_of(
    model: Any,
    dataset: Any,
    reward: Any,
    *,
    tokenizer: Any,
    eval_dataset: Any,
    task: Any,
    objective: Any,
    settings: Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
) -> RunConfig:
    """The config of a run. Its objects are registered, or written into its directory.

    A directory that belongs to other objects is refused before anything is written.
    """
    row_keywords = {key: value for key, value in keywords.items() if key in ROW_KEYWORDS}
    record = settings_record({key: value for key, value in keywords.items() if key not in ROW_KEYWORDS}, settings)
    if objective is not None:
        record.setdefault("objective", {})["name"] = objective_name(objective)
    directory = make_config({**record, "model": {}, "task": {}}, source="stalewise.train").directory
    files = RunFiles(directory)
    if task is not None or dataset is None:
        if row_keywords or eval_dataset is not None or reward is not None:
            wrong = next(iter(row_keywords), "reward" if reward is not None else "eval_dataset")
            raise ConfigError(f"{wrong} goes with dataset=…: a task has its own prompts and its own verifier")
        record["task"] = _task_table(task, record.get("task", {}), files)
    else:
        record["task"] = {**record.get("task", {}), **files.rows_task(dataset, eval_dataset, reward, row_keywords)}
    record["model"] = {**record.get("model", {}), "path": files.model_path(model, tokenizer)}
    config = make_config(record, source="stalewise.train")
    if config.schedule.kind == "pipelined" and (name := files.only_here):
        raise ConfigError(
            f"a pipelined run generates in another process, which does not have {name}: define it in a module that "
            'Python finds, or use kind = "staged"'
        )
    if is_started(directory):
        check_identity(resolve_settings(config))
    files.write(record.get("objective", {}).get("name", ""))
    return config


def _task_table(task: Any, table: Mapping[str, Any], files: RunFiles) -> dict[str, Any]:
    if task is None or isinstance(task, str):
        return {**table, **({"name": task} if task else {})}
    for method in ("prompts", "evaluation_prompts"):
        if not callable(getattr(task, method, None)):
            raise TaskError(f"task={task!r:.60} has no method {method}: see the protocol stalewise.tasks.Task")
    if isinstance(task, type) and "seed" not in inspect.signature(task).parameters:
        raise TaskError(f"the class {task.__name__} takes no seed: add it to __init__, or pass an object")
    return {"name": "python", "options": {"task": files.keep("task", task, callables.fingerprint_of_task(task))}}


def objective_name(objective: Any) -> str:
    """The name of an objective in a config: a built-in one, or a registered function with its fingerprint."""
    if callable(objective):
        objective = getattr(objective, "objective_name", None) or register_objective(objective).objective_name
    try:
        found: Objective = get_objective(str(objective).partition("@")[0])
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from error
    if not found.is_custom:
        return found.name
    return f"{found.name}@{callables.fingerprint(found.token_loss).digest}"


class RunFiles:
    """Files of a program's objects in a run directory, written once the directory is known to belong to them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.only_here = ""  # name of a function that no other process has
        self._texts: dict[str, str] = {}
        self._model: tuple[Path, Any, Any] | None = None

    def keep(self, what: str, value: Any, found: callables.Fingerprint) -> str:
        """Register a function or class, and note its source."""
        self._texts[f"python/{what}.py"] = found.describe()
        if ":" not in found.name:
            self.only_here = self.only_here or f"the {what} {found.name}"
        return callables.register(value, found)

    def rows_task(self, dataset: Any, eval_dataset: Any, reward: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The table `task` for rows."""
        options = {key: value for key, value in keywords.items() if key not in _OF_THE_SOURCE}
        options["problem_field"] = options.pop("prompt_field", "prompt")
        source = {key: keywords[key] for key in _OF_THE_SOURCE if keywords.get(key) is not None}
        _check_source(dataset, eval_dataset, source)
        config, split, eval_split = source.get("dataset_config"), source.get("split", "train"), source.get("eval_split")
        has_splits = isinstance(dataset, Mapping) and bool({"split", "eval_split"} & source.keys())
        rows = rows_of(split_of(dataset, split) if has_splits else dataset, config=config, split=split)
        options["path"] = self._rows(dataset, rows)
        if eval_split is not None:
            eval_dataset, split = split_of(dataset, eval_split) if has_splits else dataset, eval_split
        if eval_dataset is not None:
            options["evaluation_path"] = self._rows(eval_dataset, rows_of(eval_dataset, config=config, split=split))
        return {"name": "jsonl", "options": options | self.reward_options(reward, rows, options)}

    def to_evaluate(
        self,
        model: Any,
        tokenizer: Any,
        dataset: Any,
        reward: Any,
        file: str | Path | None,
        options: Mapping[str, Any] | None,
        keywords: Mapping[str, Any],
    ) -> tuple[str, str | Path | None, Mapping[str, Any] | None]:
        """The name of the model, the file and the options of an evaluation on objects, which are written here."""
        if model is None:
            raise ConfigError("evaluate needs a model: a run directory, a checkpoint, a name, or a loaded model")
        if unknown := sorted(keywords.keys() - ROW_KEYWORDS):
            raise ConfigError(f"evaluate has no argument {unknown[0]!r}; {nearest(unknown[0], EVALUATE_KEYWORDS)}")
        if dataset is None and (reward is not None or keywords):
            raise ConfigError(f"{next(iter(keywords), 'reward')} goes with dataset=…: a task has its own verifier")
        if dataset is not None:
            if file is not None:
                raise ConfigError("file and dataset both say what to evaluate on: give one of them")
            table = self.rows_task(dataset, None, reward, keywords)["options"]
            if reward is None:  # as in the run, or `number`
                from_run = ("verifier",) if keywords.get("verifier_options") else ("verifier", "verifier_options")
                table = {key: value for key, value in table.items() if key not in from_run}
            if "prompt_field" not in keywords and is_run(model):
                table.pop("problem_field")
            file, options = table.pop("path"), {**table, **(options or {})}
        name = self.model_path(model, tokenizer)
        self.write("")
        return name, file, options

    def reward_options(
        self, reward: Any, rows: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The options `verifier` and `verifier_options` of a reward: a callable, or the name of a verifier."""
        verifier_options = dict(options.get("verifier_options") or {})
        if reward is None or isinstance(reward, str):
            named = [name for name in VERIFIERS if name != "function"]  # which needs the reference of a function
            if reward is not None and reward not in named:
                raise TaskError(f"reward={reward!r} is not a verifier: pass a function, or {', '.join(named)}")
            return {"verifier": reward or "number", "verifier_options": verifier_options}
        is_list = isinstance(reward, list | tuple)
        if classes := [one for one in (reward if is_list else [reward]) if isinstance(one, type)]:
            name = classes[0].__name__
            raise TaskError(f"reward={name} is a class: pass an object of it, {name}(), which can be called")
        if is_list and not (reward and all(map(callable, reward))):
            raise TaskError(
                f"reward={reward!r:.60} must have functions, and at least one: verifiers have no place in it"
            )
        if not is_list and not callable(reward):
            raise TaskError(
                f"reward={reward!r:.60} is not a function: expected (prompt, response, answer, **row) → number"
            )
        has_answer = "answer_field" in options or any("answer" in row for row in rows)
        for function in reward if is_list else [reward]:
            callables.check_parameters(function, rows[0], has_answer=has_answer)
        found = callables.fingerprint_of_list(reward) if is_list else callables.fingerprint(reward)
        reference = self.keep("reward", callables.combined(reward) if is_list else reward, found)
        more = {} if has_answer else {"answer_field": ""}
        return {"verifier": "function", "verifier_options": {**verifier_options, "function": reference}, **more}

    def _rows(self, dataset: Any, rows: Iterable[Mapping[str, Any]]) -> str:
        text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[: callables.DIGITS]
        name = Path(dataset).stem if isinstance(dataset, str | Path) else "rows"
        path = f"data/{digest}/{name or 'rows'}.jsonl"
        self._texts[path] = text
        return str(self.directory / path)

    def model_path(self, model: Any, tokenizer: Any) -> str:
        """`model.path` of a directory, a name, or a loaded model with its tokenizer."""
        if isinstance(model, str | Path):
            if tokenizer is not None:
                raise ConfigError("tokenizer=… goes with a loaded model: a directory or a name has its own")
            return embedded_policy(str(model)) or str(model)
        check_loaded(model, tokenizer)
        path = self.directory / f"model-{digest_of_model(model, tokenizer)}"
        self._model = path, model, tokenizer
        return str(path)

    def write(self, objective: str) -> None:
        """Write what is missing."""
        if "@" in objective:
            found = callables.fingerprint(get_objective(objective.partition("@")[0]).token_loss)
            self._texts["python/objective.py"] = found.describe()
        for name, text in self._texts.items():
            path = self.directory / name
            if not path.is_file() or name.startswith("python/"):
                with atomic.explain_write_errors(path, len(text)):
                    atomic.make_directory(path.parent)
                atomic.write_atomic(path, text)
        if self._model is not None and not self._model[0].is_dir():
            save_loaded(*self._model)


def _check_source(dataset: Any, eval_dataset: Any, source: Mapping[str, str]) -> None:
    """Refuse a config or a split of data that have none: these are for data that are named, or for a dict of splits."""
    if "eval_split" in source and eval_dataset is not None:
        raise ConfigError("eval_split and eval_dataset both say what to evaluate on: give one of them")
    for key in source:
        has_splits = key != "dataset_config" and isinstance(dataset, Mapping)
        if not has_splits and not any(isinstance(data, str | os.PathLike) for data in (dataset, eval_dataset)):
            advice = "pass eval_dataset" if key == "eval_split" else "slice the list instead"
            advice = "pass the configuration that was loaded" if key == "dataset_config" else advice
            raise ConfigError(f"{key} is for a dataset that is named, and this one is in memory: {advice}")


def is_run(model: Any) -> bool:
    """Whether this is the path of a run directory, or of a checkpoint in one."""
    path = Path(model).expanduser() if isinstance(model, str | Path) else Path()
    if "\0" in str(path):
        raise ModelError(f"{str(path)!r} is not a model: a path has no NUL character")
    return any((run / "config.resolved.json").is_file() for run in (path, path.resolve().parent.parent))


def check_loaded(model: Any, tokenizer: Any) -> None:
    """Refuse what is not a loaded model of transformers with its tokenizer."""
    if hasattr(model, "peft_config"):
        raise ModelError("the model has PEFT adapters: call merge_and_unload() first, or name them in adapter=…")
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"model is a {type(model).__name__}: expected a directory, a name, or a PreTrainedModel")
    if tokenizer is None or not hasattr(tokenizer, "save_pretrained"):
        raise ModelError("a loaded model needs its tokenizer: pass tokenizer=AutoTokenizer.from_pretrained(…)")


def digest_of_model(model: PreTrainedModel, tokenizer: Any) -> str:
    """A fingerprint of the weights, the config and the vocabulary."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    template = getattr(tokenizer, "chat_template", None)
    digest.update(json.dumps([sorted(tokenizer.get_vocab().items()), template, str(tokenizer)]).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        for piece in weight.detach().reshape(-1).split(PIECES_BYTES):
            digest.update(piece.contiguous().view(torch.uint8).cpu().numpy().tobytes() if len(piece) else b"")
    return digest.hexdigest()[: callables.DIGITS]


def save_loaded(path: Path, model: Any, tokenizer: Any) -> None:
    """Write a loaded model and its tokenizer to a new directory."""
    temporary = atomic.temporary_name(path)
    atomic.make_directory(temporary.parent)
    try:
        with atomic.explain_write_errors(path, 0):
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        atomic.commit_directory(temporary, path)
    except StoreError:
        if not path.is_dir():  # another rank may have written the same
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
