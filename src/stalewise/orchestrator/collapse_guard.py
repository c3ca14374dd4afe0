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

from stalewise.config import RunConfig
from stalewise.errors import StalewiseError
from stalewise.orchestrator.run_log import RunLog
from stalewise.staleness.collapse import INTERVAL, Evidence, Judgement, Trouble, judge, rewards_as_evidence
from stalewise.staleness.schedule import Schedule
from stalewise.store import batch_directories, ledger_path, parse_batch_name
from stalewise.store.atomic import (
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
from stalewise.store.checkpoints import remove_after, versions

FORMAT = "stalewise.rollback/1"
DONE = "done.json"


class Rollbacks:
    """The rollbacks of one run directory, oldest first."""

    def __init__(self, records: RunLog) -> None:
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


# The collapse guard: judges what is on record, and says to which version a run that collapsed should go back.


class Collapsed(StalewiseError, ArithmeticError):
    """A run that collapsed and is not taken back, or not once more."""

    exit_code = 4


class CollapseGuard:
    """Looks at rewards and evaluations of a run; `off` where the config does not ask for it."""

    def __init__(self, config: RunConfig, records: RunLog) -> None:
        self.section = config.guard
        self.evaluated_every = config.evaluation.every
        self.records = records
        self.rollbacks = Rollbacks(records)
        self.judges_rewards = True  # no, where rollouts are not of this run's own policies

    @property
    def is_on(self) -> bool:
        """Whether anything is done about a collapse."""
        return self.section.action != "off"

    @property
    def halves(self) -> bool:
        """Whether the learning rate is halved when a run is taken back."""
        return self.section.action in ("halve", "both")

    @property
    def refreshes(self) -> bool:
        """Whether rollouts are made anew when a run is taken back."""
        return self.section.action in ("fresh", "both")

    def judge(self, schedule: Schedule, version: int, ahead: Sequence[tuple[float, float]]) -> Judgement:
        """What is known about the policies up to `version`; `ahead`: rewards of the updates that come next."""
        fraction, window = self.section.fraction, self.section.window
        accuracies = [self._evidence(record, schedule) for record in self.records.evaluations]
        by_accuracy = judge(accuracies, fraction=fraction, window=window, reason="held-out accuracy fell")
        if not self.judges_rewards:
            return by_accuracy
        past = [one for one in self.records.remembered if one.update < version]
        rewards = [(schedule.version_of(one.generation_batch), one.reward, one.reward_error) for one in past]
        rewards += [(schedule.at(version + i).version, *reward) for i, reward in enumerate(ahead)]
        evidence = rewards_as_evidence(rewards, window)
        return by_accuracy | judge(evidence, fraction=fraction, window=window, reason="the reward fell")

    def _evidence(self, record: Mapping[str, Any], schedule: Schedule) -> Evidence:
        """An evaluation stands for the updates up to the next one; on the last one everything rests.

        The last is judged more strictly, as long as something can be done about it.
        """
        accuracy, is_last = record["accuracy"], record["version"] == schedule.updates
        updates = self.section.window if is_last else self.evaluated_every
        error = (accuracy["high"] - accuracy["low"]) / INTERVAL
        return Evidence((record["version"],), updates, accuracy["value"], error, is_last and self._can_go_back)

    @property
    def _can_go_back(self) -> bool:
        return self.section.action != "stop" and len(self.rollbacks.taken) < self.section.rollbacks

    def needed_versions(self, schedule: Schedule, version: int) -> set[int]:
        """Checkpoints that a run which is at `version` may have to go back to; none where the guard is off.

        The best by each kind of evidence are among them: whatever trouble comes, it comes after them.
        """
        if not self.is_on:
            return set()
        known = self.judge(schedule, version, ())
        fits = [v for v in versions(self.records.directory) if self._may_go_back_to(schedule, v)]
        good = [v for v in fits if v in {0, *known.good}]
        return {*good[-1:], *(v for v in fits if v in known.best)}

    def take_back(self, schedule: Schedule, trouble: Trouble, judgement: Judgement) -> int:
        """Go back to the latest version that is known to be good, and say which; or raise Collapsed."""
        to_version = self._way_back(schedule, trouble, judgement)
        consumed = {one.generation_batch for one in self.records.remembered if one.update >= to_version}
        self.rollbacks.take_back(
            trouble,
            to_version,
            halve=self.halves,
            fresh_from_batch=schedule.at(to_version).generation_batch if self.refreshes else None,
            led_there=sorted(consumed),
        )
        return to_version

    def _way_back(self, schedule: Schedule, trouble: Trouble, judgement: Judgement) -> int:
        good = {v for v in {0, *judgement.good, *judgement.best} if v < trouble.bad_version}
        fits = [v for v in versions(self.records.directory) if v in good and self._may_go_back_to(schedule, v)]
        last = f"the last policy known to be good is version {max(fits)}" if fits else "no policy is known to be good"
        taken = len(self.rollbacks.taken)
        if self.section.action == "stop":
            raise Collapsed(f"the run collapsed: {trouble.describe()}; {last}")
        if taken >= self.section.rollbacks or not fits:
            again = f" once more after {taken} rollbacks" if taken else ""
            raise Collapsed(
                f"the run collapsed{again}: {trouble.describe()}; {last}: start a new run with a lower "
                "optimizer.learning_rate"
            )
        return max(fits)

    def _may_go_back_to(self, schedule: Schedule, version: int) -> bool:
        """Rollouts are made anew by the batch, so a run that wants that goes back to where one begins."""
        if not self.refreshes:
            return True
        return any(version == schedule.updates_of(g).start for g in range(schedule.generation_batches))
