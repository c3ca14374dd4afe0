"""The collapse guard and its rollbacks: a run that collapsed continues from its last good policy.

`rollbacks/r000/` holds `rollback.json` (why, from where, to where), the records of the updates that were rolled back,
and under `rollouts/` the generation batches that no longer apply. Writing that directory commits a rollback. Files are
moved and removed after it. If this process is killed, the next one finishes that.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stalewise.config.sections import GuardSection
from stalewise.errors import StalewiseError
from stalewise.orchestrator.run_log import RunLog
from stalewise.staleness.collapse import INTERVAL, Assessment, Degradation, PolicyScore, assess, scores_from_rewards
from stalewise.staleness.schedule import Schedule
from stalewise.store import atomic, batch_directories, checkpoints, json_lines, ledger_path, parse_batch_name
from stalewise.store.records import (
    EVALUATION,
    JOURNAL,
    LEDGER,
    METRIC,
    ROLLBACK,
    STAGE,
    SUITE,
    RecordSchema,
    is_text,
    is_whole,
    list_of,
    read_record,
    read_records,
)

FORMAT = "stalewise.rollback/1"
DONE = "done.json"
ROLLBACK_OF_RUN = RecordSchema(
    {**ROLLBACK.required, "halved": is_whole, "batches": list_of(is_text)}, ROLLBACK.optional
)


class Collapsed(StalewiseError, ArithmeticError):
    """A run that collapsed and may not be rolled back, or not again."""

    exit_code = 4


class Rollbacks:
    """The rollbacks of one run directory, oldest first."""

    def __init__(self, run_log: RunLog) -> None:
        self.run_log = run_log
        self.directory = run_log.directory
        self.root = run_log.directory / "rollbacks"
        self.reload()

    def reload(self) -> None:
        """Read the records again."""
        directories = sorted(self.root.glob("r[0-9]*"))
        self.records: list[dict[str, Any]] = [
            read_record(path / "rollback.json", ROLLBACK_OF_RUN) for path in directories
        ]

    @property
    def learning_rate_factor(self) -> float:
        """Factor of the config's learning rate."""
        return 0.5 ** sum(record["halved"] for record in self.records)

    def attempt(self, generation_batch: int) -> int:
        """How often this generation batch was discarded. Each attempt has other seeds."""
        fresh = [record.get("fresh_from_batch") for record in self.records]
        return sum(first is not None and first <= generation_batch for first in fresh)

    def ended_at(self, version: int) -> bool:
        """Whether the last rollback went back to this version."""
        return bool(self.records) and self.records[-1]["to_version"] == version

    def roll_back(
        self, why: Degradation, to_version: int, *, halve: bool, fresh_from_batch: int | None, led_there: Sequence[int]
    ) -> None:
        """Commit a rollback to a version that exists, then carry it out."""
        moved: list[str] = []  # batches of a later policy, or that will be generated again
        for directory in batch_directories(self.directory / "rollouts"):
            generation_batch, version = parse_batch_name(directory.name)
            if version > to_version or (fresh_from_batch is not None and generation_batch >= fresh_from_batch):
                moved.append(directory.name)
        record = {
            "format": FORMAT,
            "time": time.time(),
            "reason": why.reason,
            "best": why.best,
            "value": why.value,
            "update": why.bad_version,
            "from_version": checkpoints.versions(self.directory)[-1],
            "to_version": to_version,
            "halved": halve,
            "learning_rate_factor": self.learning_rate_factor * (0.5 if halve else 1.0),
            "fresh_from_batch": fresh_from_batch,
            "led_there": list(led_there),
            "batches": moved,
        }
        final = self.root / f"r{len(self.records):03d}"
        temporary = atomic.temporary_name(final)
        atomic.make_directory(temporary)
        for path, schema, key, first in (
            (self.run_log.metrics_path, METRIC, "update", to_version),
            (ledger_path(self.directory), LEDGER, "update", to_version),
            (self.run_log.evaluations_path, EVALUATION, "version", to_version + 1),
            (self.run_log.suites_path, SUITE, "version", to_version + 1),
            (self.run_log.stages_path, STAGE, "first_update", to_version),
        ):
            lines = [line for line in read_records(path, schema) if line[key] >= first]
            json_lines.write_lines(temporary / path.name, lines)
        json_lines.commit_records(temporary)
        atomic.write_json_atomic(temporary / "rollback.json", record, sealed=True)
        atomic.commit_directory(temporary, final)
        self.reload()
        self.finish()

    def finish(self) -> None:
        """Carry out the rollbacks that were committed and are not done."""
        for index, record in enumerate(self.records):
            directory = self.root / f"r{index:03d}"
            if (directory / DONE).exists():
                continue
            events = [line for line in read_records(self.run_log.journal_path, JOURNAL) if line["event"] == "rollback"]
            if index in [line.get("rollback") for line in events]:  # carried out already: what came after it must stay
                atomic.write_json_atomic(directory / DONE, {"time": time.time()}, sealed=True)
                continue
            atomic.make_directory(directory / "rollouts")
            for name in record["batches"]:
                if (source := self.directory / "rollouts" / name).exists():
                    os.rename(source, directory / "rollouts" / name)
            atomic.fsync_directory(directory / "rollouts")
            last = record["to_version"]
            self.run_log.tokens.truncate(last, keep=directory / "tokens")
            self.run_log.drop_updates(first=last)
            for path in (self.run_log.evaluations_path, self.run_log.suites_path):
                json_lines.truncate_jsonl(path, lambda line, last=last: line["version"] <= last)
            json_lines.truncate_jsonl(self.run_log.stages_path, lambda line, last=last: line["first_update"] <= last)
            checkpoints.remove_after(self.directory, last)  # last: no record may be of a missing version
            self.run_log.reload()
            self.run_log.log_event("rollback", 0.0, rollback=index, to_version=last, reason=record["reason"])
            atomic.write_json_atomic(directory / DONE, {"time": time.time()}, sealed=True)


class CollapseGuard:
    """Assesses the policies of a run by accuracy and, where `uses_rewards`, by the rewards of their rollouts."""

    def __init__(self, section: GuardSection, run_log: RunLog, *, evaluated_every: int, uses_rewards: bool) -> None:
        self.section, self.run_log, self.rollbacks = section, run_log, Rollbacks(run_log)
        self.evaluated_every, self.uses_rewards = evaluated_every, uses_rewards
        self.is_on = section.action != "off"
        self.halves = section.action in ("halve", "both")
        self.regenerates = section.action in ("fresh", "both")

    def assess(
        self, schedule: Schedule, version: int, coming: Sequence[tuple[float, float]], *, evaluated: bool = True
    ) -> Assessment:
        """Which policies up to `version` are good; `coming` has rewards and errors of the next updates.

        Without `evaluated`, the evaluation of `version` itself is ignored, as when its checkpoint is written.
        """
        fraction, window = self.section.fraction, self.section.window
        evaluations = [record for record in self.run_log.evaluations if evaluated or record["version"] < version]
        accuracies = [self._score(record, schedule) for record in evaluations]
        by_accuracy = assess(accuracies, fraction=fraction, window=window, reason="held-out accuracy fell")
        if not self.uses_rewards:
            return by_accuracy
        rewards = [
            (schedule.version_of(update.generation_batch), update.reward, update.reward_error)
            for update in self.run_log.updates
            if update.update < version
        ]
        rewards += [(schedule.at(version + i).version, *reward) for i, reward in enumerate(coming)]
        scores = scores_from_rewards(rewards, window)
        return by_accuracy | assess(scores, fraction=fraction, window=window, reason="the reward fell")

    def _score(self, record: Mapping[str, Any], schedule: Schedule) -> PolicyScore:
        """An evaluation counts for the updates up to the next one; the last for a whole window, and more strictly."""
        accuracy, is_last = record["accuracy"], record["version"] == schedule.updates
        updates = self.section.window if is_last else self.evaluated_every
        error = (accuracy["high"] - accuracy["low"]) / INTERVAL
        can_roll_back = self.section.action != "stop" and len(self.rollbacks.records) < self.section.rollbacks
        return PolicyScore((record["version"],), updates, accuracy["value"], error, is_last and can_roll_back)

    def needed_versions(self, schedule: Schedule, version: int) -> set[int]:
        """Checkpoints to which a run at `version` may roll back; none if the guard is off.

        The best by each kind of score are among them, since a degradation always comes after these. Later records do
        not count: the run may be at a later version when this is called.
        """
        if not self.is_on:
            return set()
        known = self.assess(schedule, version, (), evaluated=False)
        possible = [v for v in self._possible_targets(schedule) if v <= version]
        good = [v for v in possible if v in {schedule.begins_at, *known.good}]
        return {*good[-1:], *(v for v in possible if v in known.best)}

    def roll_back(self, schedule: Schedule, why: Degradation, assessment: Assessment) -> int:
        """Roll back to the latest good version and return it; or raise Collapsed.

        Versions that were tried least often come first: one from which the run got worse again after a rollback may
        have been harmed before its scores showed it.
        """
        good = {v for v in {schedule.begins_at, *assessment.good, *assessment.best} if v < why.bad_version}
        targets = [v for v in self._possible_targets(schedule) if v in good]
        done = len(self.rollbacks.records)
        last = "no policy is known to be good"
        if targets:
            last = f"the last policy known to be good is version {max(targets)}"
        if self.section.action == "stop":
            raise Collapsed(f"the run collapsed: {why.describe()}; {last}")
        if done >= self.section.rollbacks or not targets:
            again = f" once more after {done} rollbacks" if done else ""
            advice = "start a new run with a lower optimizer.learning_rate"
            raise Collapsed(f"the run collapsed{again}: {why.describe()}; {last}: {advice}")
        tried = Counter(record["to_version"] for record in self.rollbacks.records)
        to_version = max(targets, key=lambda v: (-tried[v], v))
        consumed = {update.generation_batch for update in self.run_log.updates if update.update >= to_version}
        self.rollbacks.roll_back(
            why,
            to_version,
            halve=self.halves,
            fresh_from_batch=schedule.at(to_version).generation_batch if self.regenerates else None,
            led_there=sorted(consumed),
        )
        return to_version

    def _possible_targets(self, schedule: Schedule) -> list[int]:
        """Checkpoints on disk; if rollouts will be generated again, only those at which a batch begins."""
        starts = {schedule.updates_of(g).start for g in range(schedule.generation_batches)}
        existing = [v for v in checkpoints.versions(self.run_log.directory) if v >= schedule.begins_at]
        return [v for v in existing if v in starts or not self.regenerates]
