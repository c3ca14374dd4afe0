"""What a calibration says of a config: its largest safe learning rate, whether its own is safe, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from stalewise.config import RunConfig
from stalewise.errors import CalibrationError
from stalewise.planning.calibration import Calibration, CalibrationKey, find_calibration, place_of
from stalewise.planning.costs import Costs, costs
from stalewise.planning.grid import rate_name
from stalewise.staleness.law import Fit
from stalewise.staleness.plan import ROUNDING, Plan, largest_learning_rate, largest_staleness
from stalewise.statistics import format_duration


@dataclass(frozen=True, slots=True)
class Choice:
    """A run with µ updates on each generation batch: its safe η, and what it costs to get as far as the config."""

    updates_per_generation: int
    staleness: int
    plan: Plan | None  # None where the sweep does not reach this staleness
    seconds: float | None  # of all updates of the config
    drift_updates: int | None  # updates at the safe η that move as far as the config's would
    drift_seconds: float | None


@dataclass(frozen=True, slots=True)
class ConfigPlan:
    """The plan of a config. `problem` says why no safe learning rate is known, where that is so."""

    staleness: int
    updates: int
    learning_rate: float
    risk: float
    safe: Plan | None
    problem: str
    staleness_allowed: int | None  # largest S at which the config's own learning rate is safe
    staleness_problem: str  # why there is none
    cost: Costs | None
    choices: list[Choice]
    fastest: int | None  # the µ that gets as far as the config in the least time
    drift_reduced: bool  # the config goes further than is safe, and the choices are compared at what is safe
    elsewhere: list[str]  # what was measured on something else than this config runs on, or is left out

    @property
    def is_safe(self) -> bool | None:
        """Whether the config's own learning rate is; None where nobody knows."""
        return None if self.safe is None else self.learning_rate <= self.safe.learning_rate * (1 + ROUNDING)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What is said before a run starts. `is_safe` is None where nobody knows."""

    lines: list[str]
    is_safe: bool | None


def sweep_command(config: RunConfig) -> str:
    """A sweep around what a config asks for."""
    lag, rate = max(1, config.schedule.schedule().worst_age), config.optimizer.learning_rate
    lags = ",".join(map(str, sorted({max(1, lag // 16), max(1, lag // 4), lag})))
    rates = ",".join(rate_name(float(f"{rate * factor:.1e}")) for factor in (1, 3, 10, 30))
    return f"stalewise sweep CONFIG --staleness {lags} --lr {rates}"


def require_calibration(config: RunConfig) -> Calibration:
    """The calibration of a config, or a CalibrationError with the command that makes one."""
    found = find_calibration(config)
    if found is None:
        raise CalibrationError(
            f"no calibration for this model, task and optimizer: make one with `{sweep_command(config)}`"
        )
    return found


def _fit(config: RunConfig, calibration: Calibration) -> tuple[Fit, float]:
    """The fit and the G of a stable run."""
    sweep = calibration.sweep
    if sweep is None:
        raise CalibrationError(
            f"no safe learning rate is known: the calibration has a probe alone; `{sweep_command(config)}` finds one"
        )
    if sweep.fit is None:
        raise CalibrationError(f"no safe learning rate is known: {sweep.problem}")
    return sweep.fit, sweep.update_norm_per_lr


def _safe(config: RunConfig, calibration: Calibration, staleness: int, updates: int) -> Plan:
    found, norm = _fit(config, calibration)
    return largest_learning_rate(
        found, staleness=staleness, updates=updates, update_norm_per_lr=norm, risk=config.plan.risk
    )


def staleness_of(config: RunConfig) -> int:
    """S to plan with: 0 where stages end when they are spent, since there R_batch is kept while the run goes on."""
    return 0 if config.schedule.end == "spent" else config.schedule.schedule().worst_age


def _horizon_limit(config: RunConfig, calibration: Calibration) -> float:
    """The largest η that R_crit allows over all updates, whatever S is; infinite where that is not known."""
    try:
        return _safe(config, calibration, 0, config.schedule.updates).horizon_limit
    except CalibrationError:
        return math.inf


def plan_config(config: RunConfig, calibration: Calibration) -> ConfigPlan:
    """Everything that a calibration says of a config; nothing is raised for what it does not say."""
    schedule = config.schedule.schedule()
    updates, rate = schedule.updates, config.optimizer.learning_rate
    safe, problem = None, ""
    allowed, staleness_problem = None, ""
    try:
        safe = _safe(config, calibration, staleness_of(config), updates)
        found, norm = _fit(config, calibration)
    except CalibrationError as error:
        problem = str(error)
    else:
        try:
            allowed = largest_staleness(
                found, learning_rate=rate, updates=updates, update_norm_per_lr=norm, risk=config.plan.risk
            ).staleness
        except CalibrationError as error:
            staleness_problem = str(error)
    probe = calibration.probe
    per_generation = schedule.updates_per_generation
    cost = costs(probe, config, updates=updates, updates_per_generation=per_generation) if probe else None
    limit = _horizon_limit(config, calibration)
    choices = [choice(config, calibration, size, rate=min(rate, limit)) for size in sizes(updates)]
    timed = [found for found in choices if found.drift_seconds is not None]
    fastest = min(timed, key=lambda found: found.drift_seconds or math.inf, default=None)
    return ConfigPlan(
        staleness=staleness_of(config),
        updates=updates,
        learning_rate=rate,
        risk=config.plan.risk,
        safe=safe,
        problem=problem,
        staleness_allowed=allowed,
        staleness_problem=staleness_problem,
        cost=cost,
        choices=choices,
        fastest=fastest.updates_per_generation if fastest is not None else None,
        drift_reduced=rate > limit,
        elsewhere=[*measured_elsewhere(calibration, place_of(config)), *(cost_notes(config) if cost else ())],
    )


def measured_elsewhere(calibration: Calibration, here: CalibrationKey) -> list[str]:
    """What of a calibration was measured on another device or engine; of an old one that is not known."""
    found: list[str] = []
    probed, swept = (calibration.places.get(part) for part in ("probe", "sweep"))
    if calibration.probe is not None and probed is not None and not probed.is_as_fast_as(here):
        found.append(
            f"the probe was made on {probed}, and this is {here}: its times do not hold here; `stalewise probe CONFIG` "
            "measures them again"
        )
    if calibration.sweep is not None and swept is not None and swept.device != here.device:
        found.append(
            f"the sweep was made on {swept}, and this is {here}: the constants of the law are about the policy and may "
            "hold here, but were not measured here"
        )
    return found


def sizes(updates: int) -> list[int]:
    """1, 2, 4, … and all of the updates.

    >>> sizes(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({updates, *(2**power for power in range(updates.bit_length()) if 2**power <= updates)})


def choice(config: RunConfig, calibration: Calibration, size: int, *, rate: float) -> Choice:
    """What a run with µ = size comes to: all updates, or as many as move as far as T updates at `rate`."""
    updates, staleness = config.schedule.updates, size - 1
    try:
        plan = _safe(config, calibration, staleness, updates)
    except CalibrationError:
        plan = None
    needed = math.ceil(updates * rate / plan.learning_rate * (1 - ROUNDING)) if plan is not None else None
    if needed is not None and needed > _fit(config, calibration)[0].domain.updates[1]:
        needed = None  # a longer run than any that was tried
    probe = calibration.probe
    if probe is None:
        return Choice(size, staleness, plan, None, needed, None)
    seconds = costs(probe, config, updates=updates, updates_per_generation=size).seconds
    as_far = costs(probe, config, updates=needed, updates_per_generation=size).seconds if needed is not None else None
    return Choice(size, staleness, plan, seconds, needed, as_far)


def law_learning_rate(config: RunConfig) -> float:
    """The largest learning rate that the law calls safe for a config; CalibrationError where it cannot say."""
    return _safe(config, require_calibration(config), staleness_of(config), config.schedule.updates).learning_rate


def rests_on_collapses(config: RunConfig) -> bool:
    """Whether runs of the sweep say that more than that learning rate is not safe.

    Where nothing collapsed, the rate that the law calls safe is no more than that: larger ones may be safe as well.
    """
    calibration = require_calibration(config)
    binding = _safe(config, calibration, staleness_of(config), config.schedule.updates).binding
    found, _ = _fit(config, calibration)
    radius = {"batch": found.batch_radius, "horizon": found.critical_radius}.get(binding)
    return radius is not None and radius.known


def budget_limits(config: RunConfig) -> tuple[float, float] | None:
    """The lower ends of R_batch and R_crit, to watch a run against, 0 for one that is unknown; None where both are."""
    found = find_calibration(config)
    if found is None or found.sweep is None or found.sweep.fit is None:
        return None
    low = found.sweep.fit.batch_radius.low, found.sweep.fit.critical_radius.low
    return low if max(low) > 0.0 else None


def describe_safety(plan: ConfigPlan) -> list[str]:
    """Whether a config is safe, in a line or two; what to change where it is not."""
    what = f"S = {plan.staleness}, T = {plan.updates}, η = {rate_name(float(f'{plan.learning_rate:.3g}'))}"
    if plan.safe is None:
        return [f"plan: {what}: {plan.problem}"]
    limit = {"batch": "R_batch binds", "horizon": "R_crit binds", "domain": "more was never tried"}[plan.safe.binding]
    largest_rate = rounded_down(plan.safe.learning_rate)
    largest = f"η up to {largest_rate} is safe at {plan.risk:.0%} risk for each constraint ({limit})"
    if plan.is_safe:
        return [f"plan: {what}: safe; {largest}"]
    way = f"lower optimizer.learning_rate to {largest_rate}"
    if plan.staleness_allowed is not None:
        way += f", or make rollouts more often, S = {plan.staleness_allowed} at most"
    return [f"plan: {what}: NOT safe; {largest}", f"plan: {way}"]


def plan_for_training(config: RunConfig) -> TrainingPlan:
    """What to say before training; with plan.strict a CalibrationError where the config is not known to be safe."""
    found = find_calibration(config)
    if found is None:
        if config.plan.strict:
            require_calibration(config)
        return TrainingPlan(
            [f"no calibration: nobody knows which η is safe; `{sweep_command(config)}` finds out"], None
        )
    plan = plan_config(config, found)
    lines = describe_safety(plan)
    if plan.cost is not None:
        lines.append(f"plan: about {format_duration(plan.cost.seconds)}, {plan.cost.disk_bytes / 1e6:,.1f} MB on disk")
    lines += [f"plan: {note}" for note in plan.elsewhere]
    if config.plan.strict and not plan.is_safe:
        raise CalibrationError(" ".join(line.removeprefix("plan: ") for line in describe_safety(plan)))
    return TrainingPlan(lines, plan.is_safe)


def cost_notes(config: RunConfig) -> list[str]:
    """What time and disk of a plan leave out."""
    if config.schedule.end != "spent":
        return []
    stages = config.schedule.schedule().generation_batches
    return [
        f"time and disk are those of {stages} stages that are used up; where rollouts are spent before, there are more "
        "stages, and what is left of each is made and kept, but not learned from"
    ]


def rounded_down(learning_rate: float) -> str:
    """Two digits of a learning rate, never more than it.

    >>> rounded_down(0.000597), rounded_down(0.001)
    ('5.9e-4', '1e-3')
    """
    unit = Decimal(1).scaleb(Decimal(repr(learning_rate)).adjusted() - 1)
    return rate_name(float(Decimal(repr(learning_rate)).quantize(unit, rounding=ROUND_FLOOR)))
