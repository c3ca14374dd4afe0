"""Detection of evaluation prompts that were trained on, by their ids and by their problems."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stalewise.errors import TaskError
from stalewise.types import Prompt

EVALUATION = "evaluation/"  # prefix of prompt ids from an evaluation file: files often use the same numbers as ids
MIXTURE = "mixture"  # the name of a task of several tasks
IN_MIXTURE = "::"  # between the label of a task and the id of its prompt, in a mixture
_ID_FIELDS = ("id", "eval_id", "prompt_id")
_MEANING = re.compile(r"(?<=\d)\.(?=\d)|[^\W_]|[-+*/^=<>()!|%]")


def problem_key(problem: str) -> str:
    """What stays of a problem when it is copied: letters, digits, decimal points, operators and parentheses.

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
    """The ids and problems that training on these prompts has seen."""
    prompts = list(prompts)
    return Seen(named_ids(prompt.prompt_id for prompt in prompts), frozenset(map(_key_of, prompts)))


def named_ids(ids: Iterable[str]) -> frozenset[str]:
    """The ids that identify a problem in any file; one of digits alone is a row number, which every file has."""
    return frozenset(name for name in map(own_id, ids) if not name.isdecimal())


def own_id(prompt_id: str) -> str:
    """The id of a prompt in its own task."""
    label, separator, own = prompt_id.partition(IN_MIXTURE)
    return own if separator else label


def task_of(prompt_id: str) -> str:
    """The label of the task in a mixture that a prompt is of; empty outside of one."""
    label, separator, _ = prompt_id.partition(IN_MIXTURE)
    return label if separator else ""


def read_ids(path: str | Path) -> Seen:
    """Ids from a file: one on each line, or JSON objects with `id` or `eval_id`."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
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
