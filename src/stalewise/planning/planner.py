"""Plans from a calibration: the largest safe learning rate of a config, whether its own is safe, and its costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from stalewise.config import RunConfig
from stalewise.errors import CalibrationError
from stalewise.planning.calibration import Calibration, MeasuredOn, find_calibration, measured_here
from stalewise.planning.grid import rate_name
from stalewise.staleness.law import Fit
from stalewise.staleness.plan import ROUNDING, Plan, largest_learning_rate, largest_staleness
from stalewise.staleness.schedule import Schedule
from stalewise.statistics import format_duration


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes of a run."""

    learn: float
    generate: float
    switch: float
    evaluate: float
    rollout_bytes: float
    checkpoint_bytes: float

    @property
    def seconds(self) -> float:
        """All seconds."""
        return self.learn + self.generate + self.switch + self.evaluate

    @property
    def disk_bytes(self) -> float:
        """All rollouts, and the checkpoints that exist at a time."""
        return self.rollout_bytes + self.checkpoint_bytes


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """A schedule of µ updates per generation batch: its safe η, and the time to drift as far as the config."""

    updates_per_generation: int
    staleness: int
    plan: Plan | None  # None if the sweep does not reach this staleness
    seconds: float | None  # of all updates of the config
    drift_updates: int | None  # updates at the safe η that move as far as the config's would
    drift_seconds: float | None


@dataclass(frozen=True, slots=True)
class ConfigPlan:
    """The plan of a config. `problem` is the reason if no safe learning rate is known."""

    staleness: int
    updates: int
    learning_rate: float
    risk: float
    safe: Plan | None
    problem: str
    staleness_allowed: int | None  # largest S at which the config's own learning rate is safe
    staleness_problem: str  # why there is none
    cost: Costs | None
    choices: list[ScheduleChoice]
    fastest: int | None  # the µ that drifts as far as the config in the least time
    drift_reduced: bool  # the config drifts further than is safe; choices are compared at the safe drift
    elsewhere: list[str]  # notes on what was measured on other hardware, or is left out

    @property
    def is_safe(self) -> bool | None:
        """Whether the config's own learning rate is safe; None if unknown."""
        return None if self.safe is None else self.learning_rate <= self.safe.learning_rate * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Messages before a run starts. `is_safe` is None if unknown."""

    lines: list[str]
    is_safe: bool | None


@dataclass(frozen=True, slots=True)
class Planner:
    """A config together with its calibration."""

    config: RunConfig
    calibration: Calibration

    @property
    def staleness(self) -> int:
        """S to plan with: 0 if stages end when spent, since such a run keeps R_batch by itself."""
        schedule = self.config.schedule
        return 0 if schedule.end == "spent" else schedule.schedule().worst_age

    def fit(self) -> tuple[Fit, float]:
        """The fit, and G of a stable run; a CalibrationError without a fit."""
        sweep = self.calibration.sweep
        if sweep is None:
            command = sweep_command(self.config.schedule.schedule(), self.config.optimizer.learning_rate)
            raise CalibrationError(f"no safe learning rate is known: there is a probe, but no sweep; run `{command}`")
        if sweep.fit is None:
            raise CalibrationError(f"no safe learning rate is known: {sweep.problem}")
        return sweep.fit, sweep.update_norm_per_lr

    def safe(self, staleness: int | None = None) -> Plan:
        """The largest safe learning rate at this staleness, or at the config's own."""
        fit, norm = self.fit()
        return largest_learning_rate(
            fit,
            staleness=self.staleness if staleness is None else staleness,
            updates=self.config.schedule.updates,
            update_norm_per_lr=norm,
            risk=self.config.plan.risk,
        )

    def costs(self, updates: int, updates_per_generation: int) -> Costs | None:
        """Costs of the config's run with another T and µ; None without a probe.

        T·learn + rollouts·slope + generations·fixed + stops·switch + evaluations; each checkpoint is a stop.
        """
        if (probe := self.calibration.probe) is None:
            return None
        batch, checkpoints, evaluation = self.config.batch, self.config.checkpoints, self.config.evaluation
        rollouts = updates * batch.prompts * batch.group_size
        generations = -(-updates // updates_per_generation)
        stops = count_stops(updates, updates_per_generation, checkpoints.every, evaluation.every)
        responses = (1 + count_stops(updates, evaluation.every)) * evaluation.prompts * evaluation.samples
        kept = min(checkpoints.keep + 1, stops + 1)  # and the one that makes the next rollouts
        return Costs(
            learn=updates * probe.seconds_per_update,
            generate=generations * probe.seconds_per_generation + rollouts * probe.seconds_per_rollout,
            switch=probe.seconds_to_start + stops * probe.seconds_per_switch,
            evaluate=responses * probe.seconds_per_evaluated_response,
            rollout_bytes=rollouts * probe.bytes_per_rollout,
            checkpoint_bytes=kept * probe.bytes_per_checkpoint,
        )

    def choice(self, size: int, rate: float) -> ScheduleChoice:
        """A run with µ = size: all updates, and as many as drift as far as T updates at `rate`."""
        updates = self.config.schedule.updates
        plan, _ = _or_problem(lambda: self.safe(size - 1))
        needed = math.ceil(updates * rate / plan.learning_rate * (1 - ROUNDING)) if plan is not None else None
        if needed is not None and needed > self.fit()[0].domain.updates[1]:
            needed = None  # longer than any run of the sweep
        cost = self.costs(updates, size)
        drift_cost = self.costs(needed, size) if needed is not None else None
        seconds, drift_seconds = (None if costs is None else costs.seconds for costs in (cost, drift_cost))
        return ScheduleChoice(size, size - 1, plan, seconds, needed, drift_seconds)

    def plan(self) -> ConfigPlan:
        """Everything that the calibration says about the config; None, with the reason, for what it does not say."""
        schedule, rate = self.config.schedule.schedule(), self.config.optimizer.learning_rate
        updates, risk = schedule.updates, self.config.plan.risk
        safe, problem = _or_problem(self.safe)
        allowed, staleness_problem = None, ""
        if safe is not None:
            fit, norm = self.fit()
            allowed, staleness_problem = _or_problem(
                lambda: largest_staleness(fit, learning_rate=rate, updates=updates, update_norm_per_lr=norm, risk=risk)
            )
        at_once, _ = _or_problem(lambda: self.safe(0))
        # The largest η that R_crit allows over all updates, whatever S is.
        limit = math.inf if at_once is None else at_once.horizon_limit
        choices = [self.choice(size, min(rate, limit)) for size in sizes(updates)]
        timed = {
            choice.updates_per_generation: choice.drift_seconds
            for choice in choices
            if choice.drift_seconds is not None
        }
        return ConfigPlan(
            staleness=self.staleness,
            updates=updates,
            learning_rate=rate,
            risk=risk,
            safe=safe,
            problem=problem,
            staleness_allowed=None if allowed is None else allowed.staleness,
            staleness_problem=staleness_problem,
            cost=self.costs(updates, schedule.updates_per_generation),
            choices=choices,
            fastest=min(timed, key=timed.__getitem__, default=None),
            drift_reduced=rate > limit,
            elsewhere=list(self._notes(schedule)),
        )

    def _notes(self, schedule: Schedule) -> Iterator[str]:
        here = measured_here(self.config.model, self.config.sampler.engine)
        yield from measured_elsewhere(self.calibration, here)
        if self.calibration.probe is not None and self.config.schedule.end == "spent":
            yield (
                f"time and disk are for {schedule.generation_batches} stages that are used up; if rollouts are spent "
                "earlier there are more stages, and their unused rollouts are generated and kept, but not learned from"
            )


def _or_problem(make: Callable[[], Plan]) -> tuple[Plan | None, str]:
    """The plan and no problem, or None and the reason why there is none."""
    try:
        return make(), ""
    except CalibrationError as error:
        return None, str(error)


def count_stops(updates: int, *periods: int) -> int:
    """How many of 1..updates are the last one or a multiple of a period; a period of 0 has no multiples."""
    return len({updates, *(stop for period in periods if period for stop in range(period, updates + 1, period))})


def measured_elsewhere(calibration: Calibration, here: MeasuredOn) -> Iterator[str]:
    """Notes on parts of a calibration that were measured on another device or engine. Old files do not record it."""
    probed, swept = (calibration.places.get(part) for part in ("probe", "sweep"))
    if calibration.probe is not None and probed is not None and not probed.is_as_fast_as(here):
        yield (
            f"the probe was made on {probed}, and this is {here}: its times do not hold here; `stalewise probe CONFIG` "
            "measures them again"
        )
    if calibration.sweep is not None and swept is not None and swept.device != here.device:
        yield (
            f"the sweep was made on {swept}, and this is {here}: the constants of the law describe the policy and may "
            "hold here, but were not measured here"
        )


def sizes(updates: int) -> list[int]:
    """1, 2, 4, … and all of the updates."""
    return sorted({updates, *(2**power for power in range(updates.bit_length()))})


def sweep_command(schedule: Schedule, learning_rate: float) -> str:
    """The command of a sweep around a schedule and a learning rate."""
    lag = max(1, schedule.worst_age)
    lags = ",".join(map(str, sorted({max(1, lag // 16), max(1, lag // 4), lag})))
    rates = ",".join(rate_name(float(f"{learning_rate * factor:.1e}")) for factor in (1, 3, 10, 30))
    return f"stalewise sweep CONFIG --staleness {lags} --lr {rates}"


class _NoCalibration(CalibrationError):
    pass


def make_planner(config: RunConfig) -> Planner:
    """A planner with the calibration of a config; without one, a CalibrationError with the command that makes one."""
    if (calibration := find_calibration(config)) is not None:
        return Planner(config, calibration)
    missing = "no calibration found for this model, task and optimizer: no safe learning rate is known"
    command = sweep_command(config.schedule.schedule(), config.optimizer.learning_rate)
    raise _NoCalibration(f"{missing}; run `{command}`")


def law_learning_rate(config: RunConfig) -> float:
    """The largest learning rate that the law calls safe for a config; a CalibrationError if it is unknown."""
    return make_planner(config).safe().learning_rate


def rests_on_collapses(config: RunConfig) -> bool:
    """Whether that learning rate is limited by runs that collapsed. If none did, larger ones may be safe as well."""
    planner = make_planner(config)
    fit, _ = planner.fit()
    radius = {"batch": fit.batch_radius, "horizon": fit.critical_radius}.get(planner.safe().binding)
    return radius is not None and radius.known


def budget_limits(config: RunConfig) -> tuple[float, float] | None:
    """Lower ends of R_batch and R_crit to watch a run against, 0 for an unknown one; None if both are unknown."""
    calibration = find_calibration(config)
    if calibration is None or calibration.sweep is None or calibration.sweep.fit is None:
        return None
    fit = calibration.sweep.fit
    limits = fit.batch_radius.low, fit.critical_radius.low
    return limits if max(limits) > 0.0 else None


def plan_for_training(config: RunConfig) -> TrainingPlan:
    """Messages before training; with plan.strict a CalibrationError if the config is not known to be safe."""
    try:
        plan = make_planner(config).plan()
    except _NoCalibration:
        if config.plan.strict:
            raise
        rate = rate_name(config.optimizer.learning_rate)
        command = sweep_command(config.schedule.schedule(), config.optimizer.learning_rate)
        unknown = "a calibration (optional, dozens of runs) would say if it is safe"
        return TrainingPlan([f"plan: training with optimizer.learning_rate = {rate}; {unknown}: `{command}`"], None)
    lines = describe_safety(plan)
    if config.plan.strict and not plan.is_safe:
        raise CalibrationError(" ".join(line.removeprefix("plan: ") for line in lines))
    if plan.cost is not None:
        lines.append(f"plan: about {format_duration(plan.cost.seconds)}, {plan.cost.disk_bytes / 1e6:,.1f} MB on disk")
    return TrainingPlan([*lines, *(f"plan: {note}" for note in plan.elsewhere)], plan.is_safe)


def describe_safety(plan: ConfigPlan) -> list[str]:
    """One or two lines: whether a config is safe, and what to change if not."""
    settings = f"S = {plan.staleness}, T = {plan.updates}, η = {rate_name(float(f'{plan.learning_rate:.3g}'))}"
    if plan.safe is None:
        return [f"plan: {settings}: {plan.problem}"]
    limit = {"batch": "R_batch binds", "horizon": "R_crit binds", "domain": "more was never tried"}[plan.safe.binding]
    largest_rate = rounded_down(plan.safe.learning_rate)
    largest = f"η up to {largest_rate} is safe at {plan.risk:.0%} risk for each constraint ({limit})"
    if plan.is_safe:
        return [f"plan: {settings}: safe; {largest}"]
    change = f"lower optimizer.learning_rate to {largest_rate}"
    if plan.staleness_allowed is not None:
        change += f", or generate more often, with S = {plan.staleness_allowed} at most"
    return [f"plan: {settings}: NOT safe; {largest}", f"plan: {change}"]


def rounded_down(learning_rate: float) -> str:
    """Two digits of a learning rate, never more than it, as in 5.9e-4."""
    unit = Decimal(1).scaleb(Decimal(repr(learning_rate)).adjusted() - 1)
    return rate_name(float(Decimal(repr(learning_rate)).quantize(unit, rounding=ROUND_FLOOR)))
