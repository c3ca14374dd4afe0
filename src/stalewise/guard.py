"""The collapse guard: judges what is on record, and says to which version a run that collapsed should go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stalewise.checkpoints import versions
from stalewise.config import RunConfig
from stalewise.errors import StalewiseError
from stalewise.records import Records
from stalewise.rollbacks import Rollbacks
from stalewise.staleness.judgement import INTERVAL, Evidence, Judgement, Trouble, judge, rewards_as_evidence
from stalewise.staleness.schedule import Schedule


class Collapsed(StalewiseError, ArithmeticError):
    """A run that collapsed and is not taken back, or not once more."""

    exit_code = 4


class Guard:
    """Looks at rewards and evaluations of a run; `off` where the config does not ask for it."""

    def __init__(self, config: RunConfig, records: Records) -> None:
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
