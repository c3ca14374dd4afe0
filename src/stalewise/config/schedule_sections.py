"""The tables of a config that control staleness: schedule, collapse guard, plan; and the recipes that fill them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from stalewise.config.sections import Section
from stalewise.staleness.schedule import Schedule, pipelined, staged, synchronous


class ScheduleSection(Section):
    """When rollouts are generated."""

    kind: Literal["staged", "synchronous", "pipelined"] = Field(
        default="staged", description="A few large stages; a fresh batch every few updates; or generation ahead."
    )
    updates: int = Field(default=128, ge=1, description="Optimizer updates of the whole run.")
    stages: int | None = Field(default=None, ge=1, description="Stages of a staged run; default: 4.")
    updates_per_generation: int | None = Field(
        default=None, ge=1, description="Updates per generation batch (µ), synchronous or pipelined; default: 4."
    )
    lag: int | None = Field(default=None, ge=1, le=8, description="Generation batches that training lags; default: 1.")
    generator_device: str | None = Field(default=None, description="Of a pipelined run; default: model.device.")
    end: Literal["count", "spent"] = Field(
        default="count",
        description="A stage ends after its updates (count), or when its rollouts are too stale (spent).",
    )
    spent_ess: float | None = Field(
        default=None, gt=0, lt=1, description="For end = spent: the effective sample size that ends it; default: 0.9."
    )

    def _contradictions(self) -> Iterator[str]:
        allowed = {
            "staged": {"stages"},
            "synchronous": {"updates_per_generation"},
            "pipelined": {"updates_per_generation", "lag", "generator_device"},
        }[self.kind]
        for name in ("stages", "updates_per_generation", "lag", "generator_device"):
            if name not in allowed and getattr(self, name) is not None:
                yield f"{name} has no meaning in a {self.kind} schedule: remove it or change kind"
        if self.end == "spent" and (self.kind != "staged" or self.stages is not None):
            yield 'end = "spent" determines the stages of a staged run: remove stages, set kind = "staged"'
        if self.end == "count" and self.spent_ess is not None:
            yield 'spent_ess has no meaning without end = "spent": remove it'
        batches = -(-self.updates // (self.updates_per_generation or 4))
        if self.kind == "pipelined" and (self.lag or 1) >= batches:
            yield (
                f"lag is {self.lag or 1}, but {self.updates} updates have only {batches} generation batches: the first "
                "policy would make all of them; lower lag or updates_per_generation, or raise updates"
            )
        if self.stages is not None and self.stages > self.updates:
            yield f"stages is {self.stages} but there are only {self.updates} updates"

    def schedule(self) -> Schedule:
        """The schedule of these settings, as far as it is known before the run."""
        if self.kind == "staged":
            return staged(self.updates, self.stages if self.stages is not None else min(4, self.updates))
        per_generation = self.updates_per_generation or 4
        if self.kind == "synchronous":
            return synchronous(self.updates, per_generation)
        return pipelined(self.updates, per_generation, self.lag or 1)


class GuardSection(Section):
    """What happens when a run collapses; docs/control.md explains the detection."""

    action: Literal["off", "stop", "halve", "fresh", "both"] = Field(
        default="off",
        description="Nothing; stop; or roll back to the last good checkpoint and halve the rate, refresh, or both.",
    )
    rollbacks: int = Field(default=4, ge=1, description="Maximum number of rollbacks of a run.")
    fraction: float = Field(
        default=0.9, gt=0, lt=1, description="Bad: reward or accuracy significantly below this fraction of the best."
    )
    window: int = Field(default=8, ge=1, description="Consecutive updates on bad policies that count as a collapse.")


class PlanSection(Section):
    """How a calibration limits the learning rate."""

    calibration: str = Field(default="", description="File; empty: the matching one in `calibrations` under `runs`.")
    learning_rate: Literal["given", "planned", "planned-if-calibrated"] = Field(
        default="given", description="optimizer.learning_rate as given, or the largest that the calibration calls safe."
    )
    risk: float = Field(default=0.05, gt=0, le=0.5, description="Largest probability of breaking each constraint.")
    strict: bool = Field(default=False, description="Refuse to train if the plan is not safe.")


# What docs/control.md recommends, for every setting that a config does not set itself.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "auto": {
        "objective": {"name": "mu_grpo"},
        "schedule": {"end": "spent"},
        "guard": {"action": "halve"},
        "plan": {"learning_rate": "planned-if-calibrated"},
    },
}


def with_recipe(record: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a config with the settings of its recipe filled in; a schedule with stages of its own is kept."""
    filled = dict(record)
    for table, settings in RECIPES.get(str(record.get("recipe", "none")), {}).items():
        given = filled.get(table, {})
        if not isinstance(given, Mapping):
            continue
        has_stages = given.get("kind", "staged") != "staged" or given.get("stages") is not None
        if not (table == "schedule" and has_stages):
            filled[table] = {**settings, **given}
    return filled
