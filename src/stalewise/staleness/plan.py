"""Planning from a fit of the staleness law: the largest safe learning rate or staleness.

Plans use the lower end of a radius' interval, less a margin for the scatter between runs:

    usable radius = R.low · exp(-z·σ),    z the normal quantile of 1 - risk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from stalewise.errors import CalibrationError
from stalewise.staleness.law import Estimate, Fit, require_count, require_positive

ROUNDING = 1e-9  # relative tolerance: `largest_staleness` of a planned learning rate gives back its staleness


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting that is safe by the fit."""

    learning_rate: float
    staleness: int
    updates: int
    binding: Literal["batch", "horizon", "domain"]  # what limits it; "domain": the law would allow more than was tried
    batch_limit: float  # the η that this constraint allows at this S and T
    horizon_limit: float
    notes: tuple[str, ...]  # assumptions that were not measured


@dataclass(frozen=True, slots=True)
class Budget:
    """The fraction of each radius that a run has used, and the one to which it is nearer."""

    batch: float
    horizon: float
    nearer: Literal["batch", "horizon"]


def _require_tried(name: str, value: float, span: tuple[float, float]) -> None:
    """Refuse a value above all values of the sweep; smaller values drift less, so they are allowed."""
    if not value <= span[1]:
        raise CalibrationError(
            f"{name} = {value:g} is outside the calibration: the sweep covers {span[0]:g} to {span[1]:g}; run a sweep "
            "that covers it"
        )


def _at_least_tried(name: str, value: int, span: tuple[int, int]) -> tuple[int, tuple[str, ...]]:
    """Return the S or T to plan with, at least the smallest of the sweep, and a note if it was raised."""
    _require_tried(name, value, span)
    if value >= span[0]:
        return value, ()
    return span[0], (f"{name} = {value} is less than was ever tried; planned as for {span[0]}, which drifts more",)


def _usable(name: str, radius: Estimate, fit: Fit, risk: float) -> float:
    """Return R.low · exp(-z·σ), the drift at which a run breaks this constraint with probability `risk`."""
    if not 0.0 < risk <= 0.5:
        raise ValueError(f"risk must be above 0 and at most 0.5, got {risk}")
    if radius.low <= 0.0:
        raise CalibrationError(
            f"{name} is unknown: no run survived ({fit.domain.collapsed} of {fit.domain.runs} collapsed), so nothing "
            "bounds it from below; run a sweep with smaller learning rates"
        )
    return radius.low * math.exp(NormalDist().inv_cdf(risk) * fit.scatter)  # inv_cdf(risk) = -z


def _notes(fit: Fit, updates: int) -> tuple[str, ...]:
    notes = [
        f"{name} is not determined; planned with its lower bound {radius.low:.3g}, the largest drift that survived"
        for name, radius in (("R_batch", fit.batch_radius), ("R_crit", fit.critical_radius))
        if not radius.known
    ]
    if not fit.scatter_known:
        notes.append(f"the scatter between runs is not determined; {fit.scatter:g} is assumed")
    if 2 * updates < fit.domain.updates[1]:
        notes.append(
            f"the sweep has runs of up to {fit.domain.updates[1]} updates; if collapses depend less on T than the law "
            f"says, this plan is too bold for {updates}: sweep with the T that you train with"
        )
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

    An S or T above those of the sweep is refused; one below counts as the smallest of the sweep. S may be 0.
    """
    if staleness != 0:
        require_count("staleness", staleness)
    require_count("updates", updates)
    require_positive("update_norm_per_lr", update_norm_per_lr)
    lag, small_lag = _at_least_tried("staleness S", staleness, fit.domain.staleness)
    horizon_updates, small_horizon = _at_least_tried("updates T", updates, fit.domain.updates)
    batch, horizon = _limits(fit, lag, horizon_updates, update_norm_per_lr, risk)
    largest_tried = fit.domain.learning_rate[1]
    learning_rate = min(batch, horizon, largest_tried)
    binding = "domain" if largest_tried < min(batch, horizon) else "batch" if batch <= horizon else "horizon"
    notes = (*small_lag, *small_horizon, *_notes(fit, updates))
    return Plan(learning_rate, staleness, updates, binding, batch, horizon, notes)


def largest_staleness(
    fit: Fit, *, learning_rate: float, updates: int, update_norm_per_lr: float, risk: float = 0.05
) -> Plan:
    """Return the plan with the largest S at which η is safe: S = floor( R_batch.low·exp(-z·σ)/(η·G) ).

    S is capped at the largest of the sweep. A CalibrationError refuses a T or η above those of the sweep, an η that
    breaks R_crit within T at any S, and an η at which not even the smallest S of the sweep is safe.
    """
    require_count("updates", updates)
    require_positive("learning_rate", learning_rate)
    require_positive("update_norm_per_lr", update_norm_per_lr)
    horizon_updates, notes = _at_least_tried("updates T", updates, fit.domain.updates)
    _require_tried("learning rate η", learning_rate, fit.domain.learning_rate)
    smallest, largest = fit.domain.staleness
    tolerant_rate = learning_rate / (1.0 + ROUNDING)
    batch, horizon = _limits(fit, smallest, horizon_updates, update_norm_per_lr, risk)
    if tolerant_rate > horizon:
        raise CalibrationError(
            f"learning rate {learning_rate:g} breaks the horizon constraint at any staleness: T·η·G = "
            f"{updates * learning_rate * update_norm_per_lr:.3g} with T = {updates}, and R_crit allows "
            f"η <= {horizon:.3g}; lower the learning rate or the updates"
        )
    if tolerant_rate > batch:
        raise CalibrationError(
            f"learning rate {learning_rate:g} breaks the batch constraint even at S = {smallest}, the smallest tried: "
            f"S·η·G = {smallest * learning_rate * update_norm_per_lr:.3g}, and R_batch allows η <= {batch:.3g} there"
        )
    allowed = math.floor(smallest * batch / tolerant_rate)
    staleness, binding = min(allowed, largest), "domain" if allowed > largest else "batch"
    limits = (batch * smallest / staleness, horizon)
    return Plan(learning_rate, staleness, updates, binding, *limits, (*notes, *_notes(fit, updates)))


def budget_used(fit: Fit, *, batch_drift: float, cumulative_drift: float) -> Budget:
    """Return S·η·G/R_batch.low and (drift since the start)/R_crit.low, without the margin for the scatter.

    From a value of 1 on, runs like this may collapse.
    """
    for name, value in (("batch_drift", batch_drift), ("cumulative_drift", cumulative_drift)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    risk = 0.5  # then the margin exp(-z·σ) is 1
    batch = batch_drift / _usable("R_batch", fit.batch_radius, fit, risk)
    horizon = cumulative_drift / _usable("R_crit", fit.critical_radius, fit, risk)
    return Budget(batch, horizon, "batch" if batch >= horizon else "horizon")
