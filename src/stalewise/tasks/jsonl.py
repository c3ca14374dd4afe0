"""Tasks from JSONL files: one JSON object per line, with a problem and an answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.rows import Row, RowsTask, takes_row_options

MOST_CHARACTERS = 2**24  # longest line: parsing it takes many times its size in memory
# Files in which `stalewise.train` keeps the rows of a program: one line each, none empty.
_WRITTEN = re.compile(r"(?:^|/)data/[0-9a-f]{12}/([^/]+)\.jsonl$")
FORM = "every row must be a JSON object on a line of its own"


class JsonlTask(RowsTask):
    """A task from the file `path`, evaluated on the file `evaluation_path` or on a held-out part of `path`.

    With `chat` each problem is a user message (after the `system` message); otherwise the filled-in template goes to
    the tokenizer. The other options are those of `RowOptions`.
    """

    @takes_row_options
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        seed: int = 0,
        evaluation_path: str | os.PathLike[str] | None = None,
        held_out: float = 0.1,
        exclude_ids: Collection[str] = (),
        **options: Any,
    ):
        evaluation_rows = None if evaluation_path is None else read_jsonl(evaluation_path, "eval_dataset")
        options |= {"seed": seed, "held_out": held_out, "exclude_ids": exclude_ids}
        super().__init__(Path(path).stem, read_jsonl(path), evaluation_rows=evaluation_rows, **options)


@takes_row_options
def evaluation_file(path: str | os.PathLike[str], **options: Any) -> RowsTask:
    """A task to evaluate on, made of all rows of a file; the options are those of the JSONL task."""
    return RowsTask(Path(path).stem, None, evaluation_rows=read_jsonl(path), **options)


def read_jsonl(path: str | os.PathLike[str], argument: str = "dataset") -> Iterator[Row]:
    """Read the rows of a JSONL file. Empty lines are skipped; any other line must be an object.

    In messages, a row that a program passed to `stalewise.train` is named by its index in `argument`.
    """
    empty = True
    written = _WRITTEN.search(Path(path).as_posix())
    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows editors put a byte order mark first
            for number, line in enumerate(iter(lambda: file.readline(MOST_CHARACTERS + 1), ""), start=1):
                if len(line) > MOST_CHARACTERS:
                    raise TaskError(f"{path}, line {number} has more than {MOST_CHARACTERS:,} characters: shorten it")
                if line.strip():
                    empty = False
                    yield _row(_place(written[1], argument, number - 1) if written else f"{path}, line {number}", line)
    except TaskError:  # which is a ValueError, too
        raise
    except FileNotFoundError:
        where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        raise TaskError(f"there is no file {path}{where}: correct its path") from None
    except UnicodeError as problem:
        if not isinstance(problem, UnicodeDecodeError):  # the path itself cannot be encoded
            raise TaskError(f"{str(path)!r:.200} cannot be a path") from None
        where = f"{path}, line {_undecodable(path)}"
        raise TaskError(f"{where} is not UTF-8 text: {problem.reason}; save the file as UTF-8") from None
    except OSError as problem:
        raise TaskError(f"{str(path)[:200]} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise TaskError(f"{str(path)!r:.200} cannot be a path: {problem}") from None
    if empty:
        raise TaskError(f"{path} is empty: write one JSON object per line")


def _place(name: str, argument: str, index: int) -> str:
    return f"{argument}[{index}]" if name == "rows" else f"{argument} {name}, row {index}, counted from 0"


def _undecodable(path: str | os.PathLike[str]) -> int:
    """The number of the first line that is not UTF-8; text is decoded ahead of its lines."""
    lines = 0
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path, "rb") as file:
        for line in file:
            lines += 1
            line.decode()
    return lines


def _row(where: str, line: str) -> Row:
    try:
        fields = json.loads(line.rstrip())  # with its end, the place would be in the next line
    except json.JSONDecodeError as problem:
        raise TaskError(f"{where}: not JSON: {problem.msg} at character {problem.colno}; {FORM}") from None
    except (ValueError, RecursionError) as problem:
        raise TaskError(f"{where}: not JSON: {problem}") from None
    if not isinstance(fields, dict):
        raise TaskError(f"{where}: must be a JSON object, not {type(fields).__name__}; {FORM}")
    return Row(where, fields)
