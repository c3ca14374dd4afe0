"""The collapse guard: judges what is on record, and says to which version a run that collapsed should go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stalewise.checkpoints import versions
from stalewise.config import RunConfig
from stalewise.errors import StalewiseError
from stalewise.records import Records
from stalewise.rollbacks import Rollbacks
from stalewise.staleness.judgement import Evidence, Judgement, Trouble, judge, rewards_as_evidence
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
        remembered = self.records.remembered
        rewards = [(schedule.version_of(one.generation_batch), one.reward, one.reward_error) for one in remembered]
        rewards += [(schedule.at(version + i).version, *reward) for i, reward in enumerate(ahead)]
        fraction, window = self.section.fraction, self.section.window
        by_reward = judge(rewards_as_evidence(rewards), fraction=fraction, window=window, reason="the reward fell")
        accuracies = [self._evidence(record, schedule) for record in self.records.evaluations]
        by_accuracy = judge(accuracies, fraction=fraction, window=window, reason="held-out accuracy fell")
        troubles = [found.trouble for found in (by_reward, by_accuracy) if found.trouble is not None]
        trouble = min(troubles, key=lambda one: one.bad_version, default=None)
        return Judgement(trouble, by_reward.good_versions | by_accuracy.good_versions)

    def _evidence(self, record: Mapping[str, Any], schedule: Schedule) -> Evidence:
        """An evaluation stands for the updates up to the next one; on the last one everything rests."""
        version, accuracy = record["version"], record["accuracy"]
        is_last = version == schedule.updates
        updates = self.section.window if is_last else self.evaluated_every
        return Evidence(version, updates, accuracy["value"], accuracy["low"], accuracy["high"], is_last)

    def needed_versions(self, schedule: Schedule, version: int) -> set[int]:
        """The checkpoint that a run which is at `version` would go back to; none where the guard is off."""
        if not self.is_on:
            return set()
        good = {0, *self.judge(schedule, version, ()).good_versions}
        fits = [v for v in versions(self.records.directory) if v in good and self._may_go_back_to(schedule, v)]
        return set(fits[-1:])

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
        self.records.journal("rollback", 0.0, to_version=to_version, reason=trouble.reason)
        return to_version

    def _way_back(self, schedule: Schedule, trouble: Trouble, judgement: Judgement) -> int:
        good = {v for v in (0, *judgement.good_versions) if v < trouble.bad_version}
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
