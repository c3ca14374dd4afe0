"""Tasks from Hugging Face datasets: by name from the hub or from a copy on this disk, or from a directory or file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import Verifier, need
from stalewise.tasks.rows import PromptForm, Row, RowsTask

COPIES = "STALEWISE_DATASETS"  # a directory with copies of datasets under their names, for machines without network
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


class HuggingFaceTask(RowsTask):
    """A task from the split `split` of a dataset, evaluated on `evaluation_split` or on a share held out of `split`.

    `path` is a name on the hub (with `config` where the dataset has several), a directory that `save_to_disk` wrote or
    that was downloaded from a hub, or a Parquet, JSON or CSV file. The other options are those of the JSONL task.
    """

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
        problem_field: str = "problem",
        answer_field: str = "answer",
        id_field: str = "id",
        template: str = "{problem}",
        chat: bool = False,
        system: str = "",
        verifier: str | Verifier = "number",
        verifier_options: Mapping[str, Any] | None = None,
    ):
        need("datasets", "datasets", "the task hf")
        super().__init__(
            path.rstrip("/").rpartition("/")[2],
            read_dataset(path, config, split),
            seed=seed,
            form=PromptForm(problem_field, answer_field, id_field, template, chat, system),
            evaluation_rows=None if evaluation_split is None else read_dataset(path, config, evaluation_split),
            held_out=held_out,
            exclude_ids=exclude_ids,
            verifier=verifier,
            verifier_options=verifier_options,
        )


def read_dataset(path: str, config: str | None, split: str) -> Iterator[Row]:
    """Read the rows of one split."""
    try:
        dataset = _load(path, config, split)
    except TaskError:
        raise
    except Exception as problem:  # the library has dozens of ways to fail: network, names, scripts, formats
        message = " ".join(str(problem).split())
        way_out = _without_network(path) if isinstance(problem, ConnectionError) else ""
        raise TaskError(
            f"cannot load the split {split!r} of {path}: {type(problem).__name__}: {message}{way_out}"
        ) from problem
    for number, fields in enumerate(dataset):
        yield Row(f"{path}, split {split}, row {number}", fields)


def _load(path: str, config: str | None, split: str) -> Any:
    import datasets  # imported here: it takes a second, and it is optional

    place = _on_disk(path)
    if place is None:
        return datasets.load_dataset(path, config, split=split)
    if place.is_file():
        return _load_file(place, split)
    if not any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_dataset(str(place), config, split=split)
    stored = datasets.load_from_disk(str(place))
    if not isinstance(stored, datasets.DatasetDict):
        if split != "train":
            raise TaskError(f"{path} holds a single dataset and has no split {split!r}")
        return stored
    if split not in stored:
        raise TaskError(f"{path} has no split {split!r}; {nearest(split, map(str, stored))}")
    return stored[split]


def _load_file(file: Path, split: str) -> Any:
    import datasets

    if file.suffix not in FORMATS:
        raise TaskError(f"{file} is no dataset: name a directory, or a file that ends in {', '.join(FORMATS)}")
    if split != "train":
        raise TaskError(f"{file} is a single file and has no split {split!r}")
    return datasets.load_dataset(FORMATS[file.suffix], data_files=str(file), split=split)


def _on_disk(path: str) -> Path | None:
    """Where a dataset lies on this disk: where `path` says, or among the copies; None for what only a hub can have."""
    given, copies = Path(path).expanduser(), os.environ.get(COPIES)
    for place in [given, Path(copies).expanduser() / path] if copies else [given]:
        if place.exists():
            return place
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in FORMATS:
        raise TaskError(f"there is no file or directory {path}: correct path, or name a dataset on the hub")
    return None


def _without_network(path: str) -> str:
    return (
        f"; without network, fetch it elsewhere (`hf download {path} --repo-type dataset --local-dir DIRECTORY`) and "
        f'say path = "DIRECTORY", or put that directory at {path} under ${COPIES}'
    )
