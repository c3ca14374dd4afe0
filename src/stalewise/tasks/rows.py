"""Tasks over a finite set of rows, each with a problem and an answer, from any source.

`Seen` tells which evaluation prompts were trained on, by id and by problem.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import CHAT, FinitePrompts, Verifier, check_range, content_id, fraction_of, read_text
from stalewise.tasks.verifiers import make_verifier
from stalewise.types import Prompt

EVALUATION = "evaluation/"  # prefix of prompt ids from an evaluation file: files often use the same numbers as ids
MIXTURE = "mixture"  # the name of a task of several tasks
IN_MIXTURE = "::"  # between the label of a task and the id of its prompt, in a mixture
_ID_FIELDS = ("id", "eval_id", "prompt_id")
_MEANING = re.compile(r"(?<=\d)\.(?=\d)|[^\W_]|[-+*/^=<>()!|%]")


def problem_key(problem: str) -> str:
    """A key that is equal for copies of a problem: its letters, digits, decimal points, operators and parentheses.

    >>> problem_key("Find $x$:  2x^{2} = 4.") == problem_key("find x, 2x^2=4")
    True
    >>> problem_key("What is 3+5?") == problem_key("What is 3-5?")
    False
    """
    kept = "".join(_MEANING.findall(unicodedata.normalize("NFKC", problem).casefold()))
    return kept or problem.strip()


def _key_of(prompt: Prompt) -> str:
    return problem_key(prompt.metadata.get("problem", prompt.text))


@dataclass(frozen=True)
class Seen:
    """Ids and problems that must not be evaluated on."""

    ids: frozenset[str] = frozenset()
    problems: frozenset[str] = frozenset()

    def __contains__(self, prompt: Prompt) -> bool:
        own = own_id(prompt.prompt_id)
        ids = {prompt.prompt_id, own, own.removeprefix(EVALUATION)}
        return bool(ids & self.ids) or _key_of(prompt) in self.problems

    def __or__(self, other: Seen) -> Seen:
        return Seen(self.ids | other.ids, self.problems | other.problems)


def seen(prompts: Iterable[Prompt]) -> Seen:
    """The ids and problems of these prompts."""
    prompts = list(prompts)
    return Seen(named_ids(prompt.prompt_id for prompt in prompts), frozenset(map(_key_of, prompts)))


def named_ids(ids: Iterable[str]) -> frozenset[str]:
    """The ids that identify a problem in any file; ids of digits alone are row numbers, and every file has those."""
    return frozenset(name for name in map(own_id, ids) if not name.isdecimal())


def own_id(prompt_id: str) -> str:
    """The id of a prompt in its own task."""
    label, separator, own = prompt_id.partition(IN_MIXTURE)
    return own if separator else label


def task_of(prompt_id: str) -> str:
    """The label of the prompt's task in a mixture; empty if the prompt is of no mixture."""
    label, separator, _ = prompt_id.partition(IN_MIXTURE)
    return label if separator else ""


def read_ids(path: str | Path) -> Seen:
    """Ids from a file: one on each line, or JSON objects with `id` or `eval_id`."""
    try:
        lines = read_text(Path(path)).splitlines()
    except FileNotFoundError:
        raise TaskError(f"there is no file {path}") from None
    except (OSError, ValueError) as problem:  # ValueError: no UTF-8, or a NUL in the path
        raise TaskError(f"{path} cannot be read: {problem}") from None
    ids: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            ids.update(_ids_of(line.strip(), f"{path}, line {number}"))
    if not ids:
        raise TaskError(f"{path} holds no ids: write one on each line, or JSON objects with the key id")
    return Seen(frozenset(ids))


def _ids_of(line: str, where: str) -> list[str]:
    if not line.startswith("{"):
        return [line]
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise TaskError(f"{where}: not JSON: {problem}") from None
    ids = [str(record[name]) for name in _ID_FIELDS if record.get(name) is not None]
    if not ids:
        raise TaskError(f"{where}: an object without {', '.join(_ID_FIELDS[:-1])} or {_ID_FIELDS[-1]}")
    return ids


MOST_CHARACTERS = 2**22  # longest text: some million tokens
FUNCTIONS = ("function", "python")  # verifiers that call a function of the user's
WHOLE_ROW = ("code", "judge", *FUNCTIONS)  # verifiers that get all fields of a row
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its location, for error messages."""

    where: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class PromptForm:
    """Which fields of a row are used, and how they become a prompt. Without an `answer_field` answers are empty.

    `few_shot` are rows, or a JSONL file with rows, that every prompt shows with their field `response` or else their
    answers: as earlier turns of a chat, or as text before the problem. `prefill` is the beginning of the reply in a
    chat. `chat_template_kwargs` are variables of the chat template, such as `enable_thinking`.
    """

    problem_field: str = "problem"
    answer_field: str = "answer"
    id_field: str = "id"
    template: str = "{problem}"
    chat: bool = False
    system: str = ""
    prefill: str = ""
    few_shot: str | Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(init=False)
    chat_metadata: Mapping[str, str] = field(init=False)  # for rows whose prompt is a list of messages
    shown: frozenset[str] = field(init=False)  # problems of the few-shot rows
    before: str = field(init=False)  # text of the few-shot rows, without a chat

    def __post_init__(self) -> None:
        if "{problem}" not in self.template:
            raise TaskError(f"template {self.template!r} must contain {{problem}}, where the problem goes")
        if (self.system or self.prefill) and not self.chat:
            name = "system" if self.system else "prefill"
            raise TaskError(f"a {name} text needs chat=true; without a chat, write it into the template")
        if self.chat_template_kwargs and not self.chat:
            raise TaskError("chat_template_kwargs need chat=true: without a chat there is no chat template")
        shots = [self._shot(row) for row in _few_shot_rows(self.few_shot)]
        turns = [
            {"role": role, "content": text}
            for problem, answer in shots
            for role, text in (("user", self.insert(problem)), ("assistant", answer))
        ]
        chat = {**CHAT, "system": self.system, "prefill": self.prefill}
        chat |= {"history": json.dumps(turns, ensure_ascii=False)} if turns else {}
        chat |= (
            {"template": _json(dict(self.chat_template_kwargs), "chat_template_kwargs")}
            if self.chat_template_kwargs
            else {}
        )
        values = {
            "chat_metadata": {key: value for key, value in chat.items() if value},
            "shown": frozenset(problem_key(problem) for problem, _ in shots),
            "before": "" if self.chat else "".join(f"{self.insert(problem)}{answer}\n\n" for problem, answer in shots),
        }
        values["metadata"] = values["chat_metadata"] if self.chat else {}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def apply(self, problem: str) -> str:
        """The text of a problem's prompt: after the few-shot rows, if there is no chat, and in the template."""
        return self.before + self.insert(problem)

    def insert(self, problem: str) -> str:
        """Insert a problem into the template. Not by str.format: problems are full of braces."""
        return self.template.replace("{problem}", problem)

    def _shot(self, row: Row) -> tuple[str, str]:
        return _text(row, self.problem_field), _text(row, "response" if "response" in row.fields else self.answer_field)


def _few_shot_rows(given: str | Sequence[Mapping[str, Any]]) -> list[Row]:
    if isinstance(given, str) and given:
        from stalewise.tasks.jsonl import read_jsonl  # here, since that module imports this one

        return list(read_jsonl(given))
    if wrong := [row for row in given if not isinstance(row, Mapping)]:
        raise TaskError(
            f"few_shot has {wrong[0]!r:.60}: expected rows with the fields of the data, or the name of a file"
        )
    return [Row(f"few_shot, row {number}", row) for number, row in enumerate(given) if isinstance(row, Mapping)]


@dataclass(frozen=True)
class RowOptions(PromptForm):
    """The options that every task over rows has. `verifier` is a verifier, or the name of one with its options."""

    verifier: str | Verifier = "number"
    verifier_options: Mapping[str, Any] | None = None


def takes_row_options(function: FunctionT) -> FunctionT:
    """List the fields of `RowOptions` in the signature of a function that passes its `**options` to it."""
    own = inspect.signature(function, eval_str=True)
    shared = inspect.signature(RowOptions, eval_str=True).parameters.values()
    listed = [*list(own.parameters.values())[:-1], *(option.replace(kind=option.KEYWORD_ONLY) for option in shared)]
    vars(function)["__signature__"] = own.replace(parameters=listed)
    return function


@dataclass(frozen=True, slots=True)
class _Question:
    row_id: str
    named: bool  # whether the id is the row's own
    problem: str
    answer: str
    where: str
    row: str = ""  # the whole row as JSON, where the verifier asks for it
    turns: tuple[Mapping[str, str], ...] | None = None  # messages before the last, of a row whose prompt is a list
    answer_field: str = ""  # where a function gets an answer that is not text


class RowsTask:
    """A finite task made of rows.

    Held out for evaluation are `evaluation_rows` or, without those, a fraction `held_out` of the rows. A hash of the
    ids chooses them: adding rows moves few others, and the seed none. A problem that is in both sets is left out of
    training. `exclude_ids` leaves rows out of both. With `rows` None there are no training prompts.

    A row's own id is its prompt id ("evaluation/" is prepended to ids from `evaluation_rows`, since files often use the
    same numbers). A row without one gets an id made of its content, and repeated rows count once.
    """

    def __init__(
        self,
        name: str,
        rows: Iterable[Row] | None,
        *,
        seed: int = 0,
        evaluation_rows: Iterable[Row] | None = None,
        held_out: float = 0.1,
        exclude_ids: Collection[str] = (),
        **options: Any,
    ):
        self.name, self._form = name, RowOptions(**options)
        excluded = {str(row_id) for row_id in exclude_ids}
        questions = [] if rows is None else self._read(rows, excluded)
        if evaluation_rows is None:
            (training, evaluation), prefix = _split(questions, held_out, name), ""
        else:
            training, evaluation, prefix = questions, self._read(evaluation_rows, excluded), EVALUATION
        seen = {problem_key(question.problem) for question in evaluation}
        kept = [question for question in training if problem_key(question.problem) not in seen]
        if training and not kept:
            raise TaskError(f"{name}: every training problem is also an evaluation problem; nothing is left")
        self.overlapping = len(training) - len(kept)
        order = [self._prompt(question) for question in kept]
        self._training = FinitePrompts(order, seed=seed, name=name) if order else None
        self._evaluation = [self._prompt(question, prefix) for question in sorted(evaluation, key=_order)]
        verifier, of_verifier = self._form.verifier, self._form.verifier_options or {}
        self.verifier = make_verifier(verifier, **of_verifier) if isinstance(verifier, str) else verifier

    @property
    def size(self) -> int:
        """The number of distinct training prompts."""
        return 0 if self._training is None else len(self._training)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`; epochs are shuffled by the seed."""
        if self._training is None:
            raise TaskError(f"{self.name} is there to evaluate on: it has no training prompts")
        return self._training.take(start, count)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, or all if there are fewer; the same for every seed."""
        check_range(0, count)
        if count and not self._evaluation:
            raise TaskError(f"{self.name} holds nothing out: set held_out above 0 or name evaluation rows")
        return self._evaluation[:count]

    def _read(self, rows: Iterable[Row], excluded: Collection[str]) -> list[_Question]:
        """Check the rows, leave out the excluded ones, and refuse ids that occur twice."""
        questions: dict[str, _Question] = {}
        for question in map(self._question, rows):
            first = questions.setdefault(question.row_id, question)
            if question.named and first is not question:
                raise TaskError(f"{question.where}: id {question.row_id!r} was already used by {first.where}")
        if not questions:
            raise TaskError(f"{self.name} has no rows")
        shown = self._form.shown
        kept = [question for question in questions.values() if question.row_id not in excluded]
        kept = [question for question in kept if problem_key(question.problem) not in shown]
        if not kept:
            which = "few_shot" if shown else "exclude_ids"
            raise TaskError(f"{self.name}: {which} leaves none of its {len(questions)} rows")
        return kept

    def _question(self, row: Row) -> _Question:
        is_list = isinstance(row.fields.get(self._form.problem_field), list)
        messages = _messages(row, self._form.problem_field) if is_list else []
        problem = messages[-1]["content"] if is_list else _text(row, self._form.problem_field)
        answer, answer_field = self._answer(row)
        named = row.fields.get(self._form.id_field) is not None
        whole_problem = json.dumps(messages) if len(messages) > 1 else problem
        row_id = _text(row, self._form.id_field) if named else content_id(whole_problem, answer)
        turns = tuple(messages[:-1]) if is_list else None
        whole = self._whole(row) if self._form.verifier in WHOLE_ROW else ""
        return _Question(row_id, named, problem, answer, row.where, whole, turns, answer_field)

    def _answer(self, row: Row) -> tuple[str, str]:
        """The answer as text, and the name of its field if a function gets another value than this text."""
        name = self._form.answer_field
        if not name:
            return "", ""
        value = row.fields.get(name, "")
        is_function = self._form.verifier in FUNCTIONS
        if is_function and name in row.fields and (value is None or isinstance(value, bool | list | Mapping)):
            where = f"{row.where}: field {name!r}"
            return "" if value is None else _plain_text(_json(value, where), where), name
        advice = "name another field in answer_field, or score with a reward function, which gets the value as it is"
        return _text(row, name, advice), name if is_function and not isinstance(value, str) else ""

    def _whole(self, row: Row) -> str:
        """The row as JSON. For the verifier python, fields that JSON cannot hold are left out: it may not need them."""
        if self._form.verifier != "python":
            return _json(dict(row.fields), row.where)
        return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in _held(row.fields)) + "}"

    def _prompt(self, question: _Question, prefix: str = "") -> Prompt:
        text, metadata = self._form.apply(question.problem), dict(self._form.metadata)
        if question.turns is not None:
            text, metadata = self._form.insert(question.problem), dict(self._form.chat_metadata)
            system = [turn["content"] for turn in question.turns if turn["role"] == "system"]
            metadata |= {"system": "\n\n".join(system)} if system else {}
            own = [turn for turn in question.turns if turn["role"] != "system"]
            turns = [*json.loads(metadata.get("history", "[]")), *own]
            metadata |= {"history": json.dumps(turns, ensure_ascii=False)} if turns else {}
        if text != question.problem:
            metadata = {**metadata, "problem": question.problem}
        if question.row:
            metadata = {**metadata, "row": question.row}
        if question.answer_field:
            metadata = {**metadata, "answer_field": question.answer_field}
        return Prompt(prefix + question.row_id, text, question.answer, metadata)


def _json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"{where} holds what JSON cannot: {error}; use text and numbers") from None


def _held(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and JSON of the fields that JSON can hold."""
    for name, value in fields.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            yield str(name), json.dumps(value, ensure_ascii=False)


def _messages(row: Row, name: str) -> list[dict[str, str]]:
    """Read a field that holds the messages of a chat, of which the last is the user's."""
    messages = row.fields[name]
    plain = [
        {"role": message["role"], "content": message["content"]}
        for message in messages
        if isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
    ]
    if len(plain) < len(messages) or not plain or plain[-1]["role"] != "user" or not plain[-1]["content"].strip():
        raise TaskError(
            f"{row.where}: field {name!r} is a list: expected messages with role and content, the last one the user's"
        )
    for message in plain:
        if message["content"]:
            _plain_text(message["content"], f"{row.where}: field {name!r}")
    return plain


def _text(row: Row, name: str, advice: str = "") -> str:
    """Read a field that must hold text or a number; `advice` says what to do if it holds something else."""
    if name not in row.fields:
        others = "problem_field (prompt_field in Python) and answer_field name other fields"
        known = nearest(name, map(str, row.fields))
        raise TaskError(f"{row.where}: there is no field {name!r}; {known}; {others}")
    value = row.fields[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problem = f"{row.where}: field {name!r} must be text or a number, not {type(value).__name__}"
        raise TaskError(f"{problem}: {advice}" if advice else problem)
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"{row.where}: field {name!r} is {value}, which nothing can equal")
    if isinstance(value, int) and abs(value) >= 10**4000:  # Python refuses to write out much longer ones
        raise TaskError(f"{row.where}: field {name!r} is a number of thousands of digits: write it as text")
    return _plain_text(str(value), f"{row.where}: field {name!r}")


def _plain_text(text: str, where: str) -> str:
    """Check that a text can be a prompt: not empty, not too long, and valid Unicode."""
    if not text.strip():
        raise TaskError(f"{where} is empty")
    if len(text) > MOST_CHARACTERS:
        raise TaskError(f"{where} has {len(text):,} characters: {MOST_CHARACTERS:,} are the most")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise TaskError(f"{where} has half of a surrogate pair, which is not text: remove it")
    return text


def _split(questions: list[_Question], fraction: float, name: str) -> tuple[list[_Question], list[_Question]]:
    """Hold out a fraction of the questions, at least one if the fraction is above 0."""
    if not 0 <= fraction < 1:
        raise TaskError(f"{name}: held_out={fraction} must be at least 0 and below 1")
    number = max(1, round(fraction * len(questions))) if fraction else 0
    if number and number >= len(questions):
        raise TaskError(
            f"{name}: {len(questions)} distinct row(s) are too few to hold {number} out: add rows, or name evaluation "
            "rows (evaluation_path; eval_dataset in Python)"
        )
    chosen = {question.row_id for question in sorted(questions, key=_order)[:number]}
    training = [question for question in questions if question.row_id not in chosen]
    return training, [question for question in questions if question.row_id in chosen]


def _order(question: _Question) -> tuple[float, str]:
    return fraction_of("held out/" + question.row_id), question.row_id
