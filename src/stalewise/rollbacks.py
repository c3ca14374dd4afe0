"""Taking a run back: what went wrong is kept, whole and out of the way, and the run stands where it was good.

`rollbacks/r000/` holds `rollback.json` (why, from where, to where), the records of the updates that were taken back,
and under `rollouts/` the generation batches of a policy that is no more. That directory is what commits a rollback.
Moving and removing come after it, and are finished by the next sitting where this one ends in the middle.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stalewise.checkpoints import remove_after, versions
from stalewise.files import (
    commit_directory,
    fsync_directory,
    make_directory,
    read_json,
    read_jsonl,
    temporary_name,
    truncate_jsonl,
    write_atomic,
    write_json_atomic,
)
from stalewise.records import Records
from stalewise.staleness.judgement import Trouble
from stalewise.store import batch_directories, ledger_path, parse_batch_name

FORMAT = "stalewise.rollback/1"
DONE = "done.json"


class Rollbacks:
    """The rollbacks of one run directory, oldest first."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.root = records.directory / "rollbacks"
        self.read_again()

    def read_again(self) -> None:
        """Look at what is on disk."""
        places = sorted(self.root.glob("r[0-9]*")) if self.root.is_dir() else []
        self.taken: list[dict[str, Any]] = [read_json(place / "rollback.json") for place in places]

    @property
    def learning_rate_factor(self) -> float:
        """What the config's learning rate is multiplied by."""
        return 0.5 ** sum(record["halved"] for record in self.taken)

    def attempt(self, generation_batch: int) -> int:
        """How often this generation batch was asked for anew: its rollouts have other seeds each time."""
        fresh = [record["fresh_from_batch"] for record in self.taken]
        return sum(first is not None and first <= generation_batch for first in fresh)

    def take_back(
        self, trouble: Trouble, to_version: int, *, halve: bool, fresh_from_batch: int | None, led_there: Sequence[int]
    ) -> None:
        """Write down why, then go back to a version that is there."""
        rollouts = self.records.directory / "rollouts"
        moved = [
            directory.name
            for directory in batch_directories(rollouts)
            if is_taken_back(directory, to_version=to_version, fresh_from_batch=fresh_from_batch)
        ]
        record = {
            "format": FORMAT,
            "time": time.time(),
            "reason": trouble.reason,
            "best": trouble.best,
            "value": trouble.value,
            "update": trouble.bad_version,
            "from_version": versions(self.records.directory)[-1],
            "to_version": to_version,
            "halved": halve,
            "learning_rate_factor": self.learning_rate_factor * (0.5 if halve else 1.0),
            "fresh_from_batch": fresh_from_batch,
            "led_there": list(led_there),
            "batches": moved,
        }
        final = self.root / f"r{len(self.taken):03d}"
        temporary = temporary_name(final)
        make_directory(temporary)
        for path, key in self._tails():
            lines = [one for one in read_jsonl(path) if one[key] >= to_version + (key == "version")]
            write_atomic(temporary / path.name, "".join(f"{json.dumps(line)}\n" for line in lines))
        write_json_atomic(temporary / "rollback.json", record)
        commit_directory(temporary, final)
        self.read_again()
        self.finish()

    def finish(self) -> None:
        """Do what rollbacks that were decided still lack."""
        for index, record in enumerate(self.taken):
            place = self.root / f"r{index:03d}"
            if (place / DONE).exists():
                continue
            self._move(record["batches"], place / "rollouts")
            to_version = record["to_version"]
            remove_after(self.records.directory, to_version)
            self.records.tokens.truncate(to_version, keep=place / "tokens")
            self.records.forget_updates(to_version)
            truncate_jsonl(self.records.evaluations_path, lambda one, last=to_version: one["version"] <= last)
            truncate_jsonl(self.records.stages_path, lambda one, last=to_version: one["first_update"] <= last)
            self.records.read_again()
            self._journal(index, record)
            write_json_atomic(place / DONE, {"time": time.time()})

    def _journal(self, index: int, record: Mapping[str, Any]) -> None:
        done = [one.get("rollback") for one in read_jsonl(self.records.journal_path) if one["event"] == "rollback"]
        if index not in done:
            notes = {"to_version": record["to_version"], "reason": record["reason"]}
            self.records.journal("rollback", 0.0, rollback=index, **notes)

    def _tails(self) -> list[tuple[Path, str]]:
        records = self.records
        return [
            (records.metrics_path, "update"),
            (ledger_path(records.directory), "update"),
            (records.evaluations_path, "version"),
            (records.stages_path, "first_update"),
        ]

    def _move(self, names: Sequence[str], place: Path) -> None:
        make_directory(place)
        for name in names:
            source = self.records.directory / "rollouts" / name
            if source.exists():
                os.rename(source, place / name)
        fsync_directory(place)


def is_taken_back(directory: Path, *, to_version: int, fresh_from_batch: int | None) -> bool:
    """Whether a generation batch goes: a policy after `to_version` made it, or its place is to be filled anew."""
    generation_batch, version = parse_batch_name(directory.name)
    return version > to_version or (fresh_from_batch is not None and generation_batch >= fresh_from_batch)
