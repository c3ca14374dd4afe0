"""The tables of the config that control staleness: when rollouts are made, what a run may spend, what undoes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stalewise.config.sections import Section
from stalewise.staleness.schedule import Schedule, pipelined, staged, synchronous


class ScheduleSection(Section):
    """When rollouts are made."""

    kind: Literal["staged", "synchronous", "pipelined"] = Field(
        default="staged",
        description="A few large stages; a fresh batch every few updates; or generation ahead of learning.",
    )
    updates: int = Field(default=128, ge=1, description="Optimizer updates of the whole run.")
    stages: int | None = Field(default=None, ge=1, description="Stages of a staged run; 4 unless said.")
    updates_per_generation: int | None = Field(
        default=None,
        ge=1,
        description="Updates on one generation batch (µ) of a synchronous or pipelined run; 4 unless said.",
    )
    lag: int | None = Field(
        default=None, ge=1, le=8, description="Generation batches that a pipelined run is behind; 1 unless said."
    )
    generator_device: str | None = Field(
        default=None, description="Device that a pipelined run generates on, as in cuda:1; model.device unless said."
    )
    end: Literal["count", "spent"] = Field(
        default="count",
        description="When a stage ends: after its updates, or when what is left of its rollouts is worth too little.",
    )
    spent_ess: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="For end = spent: rollouts are worth too little below this effective sample size; 0.9 unless said.",
    )

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        allowed = {
            "staged": {"stages"},
            "synchronous": {"updates_per_generation"},
            "pipelined": {"updates_per_generation", "lag", "generator_device"},
        }[self.kind]
        for name in ("stages", "updates_per_generation", "lag", "generator_device"):
            if name not in allowed and getattr(self, name) is not None:
                raise ValueError(f"{name} has no meaning in a {self.kind} schedule: remove it or change kind")
        if self.end == "spent" and (self.kind != "staged" or self.stages is not None):
            raise ValueError('end = "spent" finds the stages of a staged run itself: remove stages, say kind = staged')
        if self.end == "count" and self.spent_ess is not None:
            raise ValueError('spent_ess has no meaning without end = "spent": remove it')
        batches = -(-self.updates // (self.updates_per_generation or 4))
        if self.kind == "pipelined" and (self.lag or 1) >= batches:
            raise ValueError(
                f"lag is {self.lag or 1}, but {self.updates} updates have only {batches} generation batches: the first "
                "policy would make all of them; lower lag or updates_per_generation, or raise updates"
            )
        if self.stages is not None and self.stages > self.updates:
            raise ValueError(f"stages is {self.stages} but there are only {self.updates} updates")
        return self

    def schedule(self) -> Schedule:
        """The pure schedule that these settings mean, as far as it is known before the run."""
        if self.kind == "staged":
            return staged(self.updates, self.stages if self.stages is not None else min(4, self.updates))
        per_generation = self.updates_per_generation or 4
        if self.kind == "synchronous":
            return synchronous(self.updates, per_generation)
        return pipelined(self.updates, per_generation, self.lag or 1)


class GuardSection(Section):
    """What is done when a run collapses: docs/control.md says how that is found."""

    action: Literal["off", "stop", "halve", "fresh", "both"] = Field(
        default="off",
        description="Nothing; stop the run; or go back to the last good checkpoint and on from there with half the "
        "learning rate, with fresh rollouts, or with both.",
    )
    rollbacks: int = Field(default=4, ge=1, description="Times that a run may be taken back.")
    fraction: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="A policy is bad whose reward or accuracy is below this fraction of the best so far, beyond doubt.",
    )
    window: int = Field(default=8, ge=1, description="Updates that must rest on bad policies, one after the other.")


class PlanSection(Section):
    """What is known of how much staleness a run bears."""

    calibration: str = Field(
        default="", description="Calibration file; empty: the one that fits, of those in `calibrations` under `runs`."
    )
    learning_rate: Literal["given", "planned", "planned-if-calibrated"] = Field(
        default="given",
        description="optimizer.learning_rate as it stands; or the largest that is safe by the calibration, always or "
        "where there is one.",
    )
    risk: float = Field(
        default=0.05, gt=0, le=0.5, description="Probability with which a planned run may break each constraint."
    )
    strict: bool = Field(default=False, description="Refuse to train where the plan says that it is not safe.")


# What docs/control.md recommends, for every setting that a config does not say itself.
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
    """The tables of a config with the settings of its recipe filled in.

    >>> with_recipe({"recipe": "auto", "guard": {"action": "halve"}})["guard"]
    {'action': 'halve'}
    """
    filled = dict(record)
    for table, settings in RECIPES.get(str(record.get("recipe", "none")), {}).items():
        said = filled.get(table, {})
        if isinstance(said, Mapping) and not (table == "schedule" and _has_stages(said)):
            filled[table] = {**settings, **said}
    return filled


def _has_stages(schedule: Mapping[str, Any]) -> bool:
    """Whether a config says itself when rollouts are made."""
    return schedule.get("kind", "staged") != "staged" or schedule.get("stages") is not None
