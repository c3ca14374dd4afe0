"""Planning from a fit of the staleness law: the largest safe learning rate or staleness, or a refusal that says why.

Every answer uses the lower end of a radius' interval, less a margin for the scatter between runs:

    usable radius = R.low · exp(-z·σ),    z the normal quantile of 1 - risk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from stalewise.errors import CalibrationError
from stalewise.staleness.law import CalibrationIdentity, Estimate, Fit, require_count, require_positive

ROUNDING = 1e-9  # relative; so that a planned learning rate, asked back, gives the staleness it was planned for


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting the fit vouches for. `batch_limit` and `horizon_limit`: the η each constraint allows at this S and T.

    `binding` is what stops it from being larger: a constraint, or "domain" where the law would allow more than was
    ever tried. `notes` says what the plan rests on that was not measured.
    """

    learning_rate: float
    staleness: int
    updates: int
    binding: Literal["batch", "horizon", "domain"]
    batch_limit: float
    horizon_limit: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of each radius a run has used, as a fraction, and which of the two it is nearer to."""

    batch: float
    horizon: float
    nearer: Literal["batch", "horizon"]


def require_calibration(
    fit: Fit | None, *, identity: CalibrationIdentity, calibrated_for: CalibrationIdentity | None
) -> Fit:
    """Return the fit if it belongs to `identity`; otherwise raise CalibrationError, saying what to run."""
    what = f"model {identity.model}, task {identity.task}, optimizer {identity.optimizer}"
    what = f"{what}, batch {identity.batch}, objective {identity.objective}"
    if fit is None or calibrated_for is None:
        raise CalibrationError(f"no calibration for {what}: run `stalewise sweep` to make one")
    differences = identity.differences(calibrated_for)
    if differences:
        reason = f"the calibration at hand is for another ({'; '.join(differences)})"
        raise CalibrationError(f"no calibration for {what}: {reason}; run `stalewise sweep` to make one")
    return fit


def _require_inside(name: str, value: float, span: tuple[float, float]) -> None:
    if not span[0] <= value <= span[1]:
        observed = f"the sweep covers {span[0]:g} to {span[1]:g}"
        raise CalibrationError(f"{name} = {value:g} is outside the calibration: {observed}; run a sweep that covers it")


def _usable(name: str, radius: Estimate, fit: Fit, risk: float) -> float:
    """Return R.low · exp(-z·σ), the drift at which a run breaks this constraint with probability `risk`."""
    if not 0.0 < risk <= 0.5:
        raise ValueError(f"risk must be above 0 and at most 0.5, got {risk}")
    if radius.low <= 0.0:
        reason = (
            f"no run survived ({fit.domain.collapsed} of {fit.domain.runs} collapsed), so nothing bounds it from below"
        )
        raise CalibrationError(f"{name} is unknown: {reason}; run a sweep with smaller learning rates")
    return radius.low * math.exp(NormalDist().inv_cdf(risk) * fit.scatter)  # inv_cdf(risk) = -z


def _notes(fit: Fit) -> tuple[str, ...]:
    notes = [
        f"{name} is not determined; planned with its lower bound {radius.low:.3g}, the largest drift that survived"
        for name, radius in (("R_batch", fit.batch_radius), ("R_crit", fit.critical_radius))
        if not radius.known
    ]
    if not fit.scatter_known:
        notes.append(f"the scatter between runs is not determined; {fit.scatter:g} is assumed")
    return tuple(notes)


def _limits(fit: Fit, staleness: int, updates: int, update_norm_per_lr: float, risk: float) -> tuple[float, float]:
    """Return η_batch = usable R_batch/(S·G) and η_horizon = usable R_crit/(T·G)."""
    batch = _usable("R_batch", fit.batch_radius, fit, risk) / (staleness * update_norm_per_lr)
    horizon = _usable("R_crit", fit.critical_radius, fit, risk) / (updates * update_norm_per_lr)
    return batch, horizon


def largest_learning_rate(
    fit: Fit, *, staleness: int, updates: int, update_norm_per_lr: float, risk: float = 0.05
) -> Plan:
    """Return the largest η at which each constraint breaks with probability `risk` at most (so both, 2·risk at most):

    η = min( R_batch.low·exp(-z·σ)/(S·G),  R_crit.low·exp(-z·σ)/(T·G),  largest η of the sweep ).

    S and T outside what the sweep covered are refused.
    """
    require_count("staleness", staleness)
    require_count("updates", updates)
    require_positive("update_norm_per_lr", update_norm_per_lr)
    _require_inside("staleness S", staleness, fit.domain.staleness)
    _require_inside("updates T", updates, fit.domain.updates)
    batch, horizon = _limits(fit, staleness, updates, update_norm_per_lr, risk)
    largest_tried = fit.domain.learning_rate[1]
    learning_rate = min(batch, horizon, largest_tried)
    binding = "domain" if largest_tried < min(batch, horizon) else "batch" if batch <= horizon else "horizon"
    return Plan(learning_rate, staleness, updates, binding, batch, horizon, _notes(fit))


def largest_staleness(
    fit: Fit, *, learning_rate: float, updates: int, update_norm_per_lr: float, risk: float = 0.05
) -> Plan:
    """Return the plan with the largest S at which η is safe: S = floor( R_batch.low·exp(-z·σ)/(η·G) ).

    S is capped at the largest of the sweep. Refused: T or η that the sweep does not reach, an η that breaks R_crit
    within T whatever S is, and an η at which not even the smallest S of the sweep is safe.
    """
    require_count("updates", updates)
    require_positive("learning_rate", learning_rate)
    require_positive("update_norm_per_lr", update_norm_per_lr)
    _require_inside("updates T", updates, fit.domain.updates)
    # A smaller learning rate than any tried drifts less and is safe; a larger one is not known to be.
    _require_inside("learning rate η", learning_rate, (0.0, fit.domain.learning_rate[1]))
    smallest, largest = fit.domain.staleness
    asked = learning_rate / (1.0 + ROUNDING)
    batch, horizon = _limits(fit, smallest, updates, update_norm_per_lr, risk)
    if asked > horizon:
        detail = f"T·η·G = {updates * learning_rate * update_norm_per_lr:.3g} with T = {updates}"
        raise CalibrationError(
            f"learning rate {learning_rate:g} breaks the horizon constraint at any staleness: {detail}, "
            f"and R_crit allows η <= {horizon:.3g}; lower the learning rate or the updates"
        )
    if asked > batch:
        raise CalibrationError(
            f"learning rate {learning_rate:g} breaks the batch constraint even at S = {smallest}, the smallest tried: "
            f"S·η·G = {smallest * learning_rate * update_norm_per_lr:.3g}, and R_batch allows η <= {batch:.3g} there"
        )
    allowed = math.floor(smallest * batch / asked)
    staleness = min(allowed, largest)
    batch_limit = batch * smallest / staleness
    binding = "domain" if allowed > largest else "batch"
    return Plan(learning_rate, staleness, updates, binding, batch_limit, horizon, _notes(fit))


def budget_used(fit: Fit, *, batch_drift: float, cumulative_drift: float) -> Budget:
    """Return S·η·G/R_batch.low and (drift since the start)/R_crit.low: 1 is where runs of this kind may break.

    The lower ends of the intervals are the radii here, as in planning, but without its margin for the scatter.
    """
    for name, value in (("batch_drift", batch_drift), ("cumulative_drift", cumulative_drift)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    even = 0.5  # at a risk of one half the margin exp(-z·σ) is 1
    batch = batch_drift / _usable("R_batch", fit.batch_radius, fit, even)
    horizon = cumulative_drift / _usable("R_crit", fit.critical_radius, fit, even)
    return Budget(batch, horizon, "batch" if batch >= horizon else "horizon")
