"""Tasks from Hugging Face datasets: by name from the hub or from a local copy, or from a directory or file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import need
from stalewise.tasks.jsonl import read_jsonl
from stalewise.tasks.rows import Row, RowsTask, takes_row_options

COPIES = "STALEWISE_DATASETS"  # a directory with copies of datasets under their names, for machines without network
HUB_S = 5.0  # seconds in which a hub must answer
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


class HuggingFaceTask(RowsTask):
    """A task from the split `split` of a dataset, evaluated on `evaluation_split` or on a held-out part of `split`.

    `path` is a name on the hub (with `config` if the dataset has several), a directory from `save_to_disk` or from a
    download, or a Parquet, JSON or CSV file. The other options are those of the JSONL task.
    """

    @takes_row_options
    def __init__(
        self,
        path: str,
        *,
        seed: int = 0,
        config: str | None = None,
        split: str = "train",
        evaluation_split: str | None = None,
        held_out: float = 0.1,
        exclude_ids: Collection[str] = (),
        **options: Any,
    ):
        need("datasets", "datasets", "the task hf")
        rows = read_dataset(path, config, split)
        evaluation_rows = None if evaluation_split is None else read_dataset(path, config, evaluation_split)
        options |= {"seed": seed, "held_out": held_out, "exclude_ids": exclude_ids}
        super().__init__(path.rstrip("/").rpartition("/")[2], rows, evaluation_rows=evaluation_rows, **options)


def read_dataset(path: str, config: str | None, split: str) -> Iterator[Row]:
    """Read the rows of one split."""
    try:
        dataset = _load(path, config, split)
    except TaskError:
        raise
    except Exception as problem:  # the library has dozens of ways to fail: network, names, scripts, formats
        message = " ".join(str(problem).split())
        if isinstance(problem, ConnectionError):
            message += (
                f"; without network, download it elsewhere (`hf download {path} --repo-type dataset --local-dir "
                f'DIRECTORY`) and set path = "DIRECTORY", or put that directory at {path} under ${COPIES}'
            )
        raise TaskError(f"cannot load the split {split!r} of {path}: {type(problem).__name__}: {message}") from problem
    for number, fields in enumerate(dataset):
        yield Row(f"{path}, split {split}, row {number}", fields)


def rows_of(dataset: Any, *, config: str | None = None, split: str = "train") -> list[dict[str, Any]]:
    """The rows of a data set that a program has: a list of dicts, a `datasets.Dataset`, a file or a hub name."""
    if isinstance(dataset, str | os.PathLike):
        path = os.fspath(dataset)
        is_lines = Path(path).suffix == ".jsonl" and Path(path).is_file() and split == "train"
        rows = [row.fields for row in (read_jsonl(path) if is_lines else _named(path, config, split))]
    elif isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        advice = f"pass one split, as in dataset[{split!r}], or name it with split=…"
        raise TaskError(f"the data set is a dict with {names}: {advice}")
    elif type(dataset).__name__ == "DataFrame":  # pandas or polars: its items are columns
        rows = "to_dicts()" if hasattr(dataset, "to_dicts") else "to_dict('records')"
        raise TaskError(f"the data set is a DataFrame: pass its rows, as in dataset.{rows}")
    elif isinstance(dataset, Iterable):
        rows = list(dataset)
    else:
        raise TaskError(f"a data set is a list of dicts, a datasets.Dataset, a file or a name, not {dataset!r:.80}")
    if not rows:
        raise TaskError("the data set has no rows")
    return [_plain_row(number, row) for number, row in enumerate(rows)]


def split_of(splits: Mapping[str, Any], name: str) -> Any:
    """One split of a `DatasetDict`, or of another dict of data sets."""
    if name not in splits:
        raise TaskError(f"the data set has no split {name!r}; {nearest(name, map(str, splits))}")
    return splits[name]


def _named(path: str, config: str | None, split: str) -> Iterator[Row]:
    need("datasets", "datasets", f"the data set {path}")
    return read_dataset(path, config, split)


def _plain_row(number: int, row: Any) -> dict[str, Any]:
    """A row as JSON has it; numpy's numbers and arrays become Python's."""
    if not isinstance(row, Mapping):
        raise TaskError(f"row {number} of the data set is {row!r:.80}: expected a dict with prompt and answer")
    plain = {str(key): value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()}
    for key, value in plain.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f"field {key!r} of row {number} holds what JSON cannot ({error})"
            raise TaskError(f"{problem}: remove the column, or turn it into text or numbers") from None
    return plain


def _load(path: str, config: str | None, split: str) -> Any:
    import datasets  # imported here: it takes a second, and it is optional

    local = _on_disk(path)
    if local is None:
        _check_hub(path)
        return datasets.load_dataset(path, config, split=split)
    if local.is_file():
        if local.suffix not in FORMATS:
            raise TaskError(f"{local} is not a dataset: name a directory, or a file that ends in {', '.join(FORMATS)}")
        if split != "train":
            raise TaskError(f"{local} is a single file and has no split {split!r}")
        return datasets.load_dataset(FORMATS[local.suffix], data_files=str(local), split=split)
    if not any((local / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_dataset(str(local), config, split=split)
    stored = datasets.load_from_disk(str(local))
    if not isinstance(stored, datasets.DatasetDict):
        if split != "train":
            raise TaskError(f"{path} holds a single dataset and has no split {split!r}")
        return stored
    if split not in stored:
        raise TaskError(f"{path} has no split {split!r}; {nearest(split, map(str, stored))}")
    return stored[split]


def _check_hub(path: str) -> None:
    """Raise at once if the hub does not answer and no cache has this dataset, since loading would retry for minutes."""
    from datasets import config
    from huggingface_hub import constants

    prepared = Path(config.HF_DATASETS_CACHE) / path.replace("/", "___")
    downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{path.replace('/', '--')}"
    if constants.is_offline_mode() or downloaded.is_dir() or prepared.is_dir():
        return
    check_answers(constants.ENDPOINT)


def check_answers(url: str) -> None:
    """Raise a ConnectionError if the hub at this URL does not answer; the first result is cached."""
    if not _answers(url):
        raise ConnectionError(f"{url} does not answer within {HUB_S:g} s")


@lru_cache
def _answers(url: str) -> bool:
    try:
        with urlopen(Request(url, method="HEAD"), timeout=HUB_S):
            return True
    except HTTPError:
        return True  # an error of the hub is an answer
    except (OSError, ValueError):
        return False


def _on_disk(path: str) -> Path | None:
    """The local path of a dataset: `path` itself, or its copy under $STALEWISE_DATASETS; None: it is on the hub."""
    candidates = [Path(path).expanduser()]
    if copies := os.environ.get(COPIES):
        candidates.append(Path(copies).expanduser() / path)
    for candidate in candidates:
        if candidate.exists():
            return candidate
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in FORMATS:
        raise TaskError(f"there is no file or directory {path}: correct path, or name a dataset on the hub")
    return None
