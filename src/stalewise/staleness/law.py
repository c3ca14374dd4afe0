"""The staleness–learning-rate law and its fit to the runs of a sweep.

A run with staleness S, learning rate η, T updates and update norm per unit learning rate G is stable while

    S·η·G <= R_batch    (drift inside one generation batch)    and    T·η·G <= R_crit    (drift over the whole run).

docs/staleness.md derives the statistical model, with a worked example.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from stalewise.errors import CalibrationError
from stalewise.staleness import likelihood
from stalewise.staleness.likelihood import Array

MINIMUM_RUNS = 6  # two per constant of the law (R_batch, R_crit, σ)
ASSUMED_SCATTER = 0.5  # σ where the runs do not determine it: a 95% margin is then a factor exp(-0.82) = 0.44


def require_positive(name: str, value: float) -> None:
    """Raise ValueError unless 0 < value < ∞."""
    if not 0.0 < value < math.inf:  # NaN fails this comparison too
        raise ValueError(f"{name} must be positive and finite, got {value}")


def require_count(name: str, value: int) -> None:
    """Raise ValueError unless the value is a whole number of at least 1."""
    if value != int(value) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value}")


@dataclass(frozen=True, slots=True)
class Observation:
    """One run of a sweep: its S, η, T and G, and the update at which it collapsed (None: it survived).

    Collapse is checked every `resolution` updates, so the run was still alive that many updates earlier.
    """

    staleness: int
    learning_rate: float
    updates: int
    collapsed_at: int | None
    update_norm_per_lr: float
    resolution: int = 1

    def __post_init__(self) -> None:
        for name in ("staleness", "updates", "resolution"):
            require_count(name, getattr(self, name))
        for name in ("learning_rate", "update_norm_per_lr"):
            require_positive(name, getattr(self, name))
        if self.collapsed_at is not None and self.collapsed_at not in range(1, self.updates + 1):
            raise ValueError(f"collapsed_at must be in 1..updates = 1..{self.updates}, got {self.collapsed_at}")

    @property
    def batch_drift(self) -> float:
        """S·η·G: drift over the lag of the oldest rollout."""
        return self.staleness * self.learning_rate * self.update_norm_per_lr

    @property
    def horizon_drift(self) -> float:
        """T·η·G: drift over the whole run."""
        return self.updates * self.learning_rate * self.update_norm_per_lr

    @property
    def collapse_drift(self) -> float | None:
        """t·η·G at the update t at which the run collapsed; None for a run that survived."""
        at = self.collapsed_at
        return None if at is None else at * self.learning_rate * self.update_norm_per_lr


@dataclass(frozen=True, slots=True)
class Law:
    """Medians R_batch and R_crit of the runs' radii (∞: no constraint), and σ, the scatter of their logarithms."""

    batch_radius: float
    critical_radius: float
    scatter: float

    def __post_init__(self) -> None:
        require_positive("scatter", self.scatter)
        for name in ("batch_radius", "critical_radius"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def parameters(self) -> Array:
        """Return (log R_batch, log R_crit, log σ), the coordinates in which the likelihood is maximised."""
        return np.minimum(np.log([self.batch_radius, self.critical_radius, self.scatter]), likelihood.NO_LIMIT)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A radius with its interval; where the runs do not determine it, `value` is NaN and low and high are bounds."""

    value: float
    low: float
    high: float
    known: bool


@dataclass(frozen=True, slots=True)
class Domain:
    """Smallest and largest values of the sweep: the fit holds between them."""

    staleness: tuple[int, int]
    learning_rate: tuple[float, float]
    updates: tuple[int, int]
    batch_drift: tuple[float, float]
    horizon_drift: tuple[float, float]
    runs: int
    collapsed: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The law fitted to a sweep. `scatter` is at least `ASSUMED_SCATTER` where `scatter_known` is false."""

    batch_radius: Estimate
    critical_radius: Estimate
    scatter: float
    scatter_known: bool
    domain: Domain
    observations: int
    confidence: float
    log_likelihood: float

    def describe(self) -> str:
        """A few sentences: which constants are known, and which are not."""
        scatter = f"Scatter {self.scatter:.2g}" + ("." if self.scatter_known else ", assumed: not determined.")
        parts = [f"{self.domain.runs} runs, {self.domain.collapsed} collapsed."]
        for name, radius in (("R_batch", self.batch_radius), ("R_crit", self.critical_radius)):
            if radius.known:
                interval = f"{self.confidence:.0%} interval {radius.low:.3g} to {radius.high:.3g}"
                parts.append(f"{name} = {radius.value:.3g} ({interval}).")
            elif radius.low > 0.0:
                parts.append(f"{name} is not determined: at least {radius.low:.3g}, the largest drift that survived.")
            elif radius.high < math.inf:
                limit = f"at most {radius.high:.3g} if it is what broke them"
                parts.append(f"{name} is not determined: every run collapsed, so {limit}.")
            else:
                parts.append(f"{name} is not determined: no run survived, and none broke it.")
        return " ".join([*parts, scatter])


def _columns(observations: Sequence[Observation]) -> tuple[Array, Array, Array, Array, Array]:
    rows = [
        (o.staleness, o.learning_rate * o.update_norm_per_lr, o.updates, o.resolution, o.collapsed_at or 0)
        for o in observations
    ]
    staleness, rate, updates, resolution, collapsed_at = np.array(rows, dtype=np.float64).T
    return staleness, rate, updates, resolution, collapsed_at


def log_likelihood(law: Law, observations: Iterable[Observation]) -> float:
    """Log-probability of the outcomes of the runs: with z(x) = log(x/R)/σ and Φ the normal distribution function,

        survived:        log Φ(-z_batch(S·η·G)) + log Φ(-z_crit(T·η·G))
        collapsed at t:  log( P·r/T + (1 - P)·[Φ(z_crit(t·η·G)) - Φ(z_crit((t-r)·η·G))] ),   P = Φ(z_batch(S·η·G))

    with r the resolution, at most t. The bracket is the probability that R_crit was crossed since the run was last seen
    alive. It is an integrated density, so it is exact for the first updates too and bounded as σ goes to 0.
    """
    return likelihood.log_likelihood(law.parameters(), likelihood.log_drifts(*_columns(list(observations))))[0]


def simulate(
    law: Law, *, staleness: int, learning_rate: float, updates: int, update_norm_per_lr: float, generator: Generator
) -> Observation:
    """Draw one run. Its own radii are R_batch·exp(σ·ε₁) and R_crit·exp(σ·ε₂), ε standard normal.

    Where S·η·G is above the first, it collapses at an update drawn uniformly from 1..T; otherwise at the first t with
    t·η·G at or above the second, if that is within T.
    """
    run = Observation(staleness, learning_rate, updates, None, update_norm_per_lr)
    collapsed_at = int(likelihood.draw(law.parameters(), *_columns([run])[:3], generator)[0])
    return replace(run, collapsed_at=collapsed_at or None)


def _domain(runs: Sequence[Observation]) -> Domain:
    names = ("staleness", "learning_rate", "updates", "batch_drift", "horizon_drift")
    columns: list[list[Any]] = [[getattr(run, name) for run in runs] for name in names]
    collapsed = sum(run.collapsed_at is not None for run in runs)
    return Domain(*((min(column), max(column)) for column in columns), runs=len(runs), collapsed=collapsed)


def _undetermined(runs: Sequence[Observation], name: str, other_known: bool) -> Estimate:
    """Bound a radius that is not determined by the largest drift that survived, or the smallest that did not."""
    survived = [getattr(run, name) for run in runs if run.collapsed_at is None]
    if survived:
        return Estimate(math.nan, max(survived), math.inf, known=False)
    if other_known:  # then the other constraint explains the collapses, and they say nothing about this one
        return Estimate(math.nan, 0.0, math.inf, known=False)
    at_collapse = "collapse_drift" if name == "horizon_drift" else name
    return Estimate(math.nan, 0.0, min(getattr(run, at_collapse) for run in runs), known=False)


def fit(observations: Iterable[Observation], *, confidence: float = 0.9, resamples: int = 200, seed: int = 0) -> Fit:
    """Estimate (R_batch, R_crit, σ) by maximum likelihood, and decide which of them the runs determine.

    A radius is in the law where it raises the log-likelihood by more than 1 (Akaike). Its interval holds every value R
    with max over the others of log L(R) >= log L(best) - threshold. The threshold is from a parametric bootstrap with
    `seed`; `resamples=0` takes the large-sample one. docs/staleness.md has the reasons and the measured coverage.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    if resamples < 0:
        raise ValueError(f"resamples must not be negative, got {resamples}")
    runs = sorted(
        observations, key=lambda o: (o.staleness, o.learning_rate, o.updates, o.update_norm_per_lr, o.collapsed_at or 0)
    )
    if len(runs) < MINIMUM_RUNS:
        raise CalibrationError(f"{len(runs)} runs cannot calibrate the law: at least {MINIMUM_RUNS} are needed")
    if len({(run.staleness, run.learning_rate, run.updates, run.update_norm_per_lr) for run in runs}) == 1:
        point = f"S = {runs[0].staleness}, η = {runs[0].learning_rate:g}, T = {runs[0].updates}"
        raise CalibrationError(f"all {len(runs)} runs are at one point ({point}): vary the learning rate and staleness")
    domain = _domain(runs)
    estimates: dict[int, Estimate] = {}
    # If nothing collapsed, radii that are large enough make that certain: the log-likelihood is 0.
    scatter, scatter_known, best_log_likelihood = 0.0, False, 0.0
    if domain.collapsed:
        columns = _columns(runs)
        data = likelihood.log_drifts(*columns)
        starts = likelihood.starting_points(np.log(columns[0] * columns[1]), data.collapsed_by)
        peak, box, radii = likelihood.select_model(data, starts)
        thresholds = likelihood.thresholds(peak, box, radii, columns[:4], confidence, resamples, seed)
        for index, threshold in zip(radii, thresholds, strict=True):
            low, high = likelihood.interval(data, peak, box, index, threshold, starts)
            if low > 0.0:
                estimates[index] = Estimate(math.exp(peak.parameters[index]), low, high, known=True)
        scatter, best_log_likelihood = math.exp(peak.parameters[2]), peak.log_likelihood
        # If a law without scatter explains the runs equally well, the runs do not determine the scatter.
        without = likelihood.profile_drop(data, peak, box, 2, math.log(likelihood.SCATTER_RANGE[0]), starts)
        scatter_known = bool(estimates) and without > likelihood.large_sample_threshold(confidence)
    return Fit(
        batch_radius=estimates.get(0) or _undetermined(runs, "batch_drift", bool(estimates)),
        critical_radius=estimates.get(1) or _undetermined(runs, "horizon_drift", bool(estimates)),
        scatter=scatter if scatter_known else max(scatter, ASSUMED_SCATTER),
        scatter_known=scatter_known,
        domain=domain,
        observations=len(runs),
        confidence=confidence,
        log_likelihood=best_log_likelihood,
    )
