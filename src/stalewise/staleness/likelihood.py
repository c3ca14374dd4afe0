"""Arithmetic of the staleness law on arrays: likelihood, its maximum and profile, and draws.

Parameters are always (log R_batch, log R_crit, log σ); `rate` is η·G, the drift per update; a collapse index of 0 is a
survivor.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import NormalDist
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NO_LIMIT = 700.0  # log of a radius that no run reaches; finite, so that gradients stay finite
LOG_SQRT_TWO_PI = 0.5 * math.log(2.0 * math.pi)
SCATTER_RANGE = (0.02, 2.0)  # bounds of σ; runs that allow the lower bound do not determine it

# scipy takes half a second to import: it is imported where it is used, since a plan from a stored fit needs none.


def log_ndtr(z: Array) -> Array:
    """Return log Φ(z) of the standard normal."""
    import scipy.special  # pyright: ignore[reportMissingTypeStubs]

    return cast(Any, scipy.special).log_ndtr(z)


class Drifts(NamedTuple):
    """Logarithms of drifts, separately for survivors and collapsed runs."""

    survived_batch: Array
    survived_horizon: Array
    collapsed_batch: Array
    collapsed_before: Array  # log((t - r)·η·G): the run was still alive here …
    collapsed_by: Array  # … and no longer here, log(t·η·G)
    collapsed_log_share: Array  # log(r/T): the share of the run that lies between


def log_drifts(staleness: Array, rate: Array, updates: Array, resolution: Array, collapsed_at: Array) -> Drifts:
    """The logarithms of the drifts of runs; `rate` is η·G and `collapsed_at` 0 for a survivor."""
    collapsed = collapsed_at > 0
    batch, horizon = np.log(staleness * rate), np.log(updates * rate)
    time, speed = collapsed_at[collapsed], rate[collapsed]
    alive = np.maximum(time - resolution[collapsed], 0.0)
    with np.errstate(divide="ignore"):  # a collapse at the first check: alive at drift 0, whose log is -inf
        before = np.log(alive * speed)
    by, log_share = np.log(time * speed), np.log((time - alive) / updates[collapsed])
    return Drifts(batch[~collapsed], horizon[~collapsed], batch[collapsed], before, by, log_share)


def seen_at(collapsed_at: Array, updates: Array, resolution: Array) -> Array:
    """The update at which a collapse is seen, with a check every `resolution` updates and at the end; 0 stays 0."""
    return np.minimum(np.ceil(collapsed_at / resolution) * resolution, updates)


def log_density_of(z: Array) -> Array:
    """Return log φ(z) of the standard normal."""
    return -0.5 * z * z - LOG_SQRT_TWO_PI


def log_mass(low: Array, high: Array) -> Array:
    """Logarithm of Φ(high) - Φ(low), in whichever tail the difference keeps its digits."""
    upper = low > 0.0
    near, far = np.where(upper, -low, high), np.where(upper, -high, low)
    log_near = log_ndtr(near)
    return log_near + np.log(-np.expm1(log_ndtr(far) - log_near))


def log_likelihood(parameters: Array, data: Drifts) -> tuple[float, Array]:
    """Log-likelihood of the runs, and its gradient in (log R_batch, log R_crit, log σ)."""
    batch_centre, horizon_centre, scatter = parameters[0], parameters[1], math.exp(parameters[2])
    # Survivors: both radii lie above the run's drifts.
    batch, horizon = (data.survived_batch - batch_centre) / scatter, (data.survived_horizon - horizon_centre) / scatter
    log_valid, log_alive = log_ndtr(-batch), log_ndtr(-horizon)
    batch_slope, horizon_slope = np.exp(log_density_of(batch) - log_valid), np.exp(log_density_of(horizon) - log_alive)
    total = float(np.sum(log_valid + log_alive))
    gradient = np.array([batch_slope.sum(), horizon_slope.sum(), batch_slope @ batch + horizon_slope @ horizon])
    # Collapsed: either R_batch was crossed (at any update of T alike), or only R_crit was, since the last check.
    batch = (data.collapsed_batch - batch_centre) / scatter
    low, high = (data.collapsed_before - horizon_centre) / scatter, (data.collapsed_by - horizon_centre) / scatter
    log_broken, log_valid, log_crossed = log_ndtr(batch), log_ndtr(-batch), log_mass(low, high)
    log_by_batch, log_by_horizon = log_broken + data.collapsed_log_share, log_valid + log_crossed
    log_total = np.logaddexp(log_by_batch, log_by_horizon)
    total += float(np.sum(log_total))
    by_batch, by_horizon = np.exp(log_by_batch - log_total), np.exp(log_by_horizon - log_total)
    log_density = log_density_of(batch)
    batch_slope = by_horizon * np.exp(log_density - log_valid) - by_batch * np.exp(log_density - log_broken)
    low_slope = by_horizon * np.exp(log_density_of(low) - log_crossed)
    high_slope = by_horizon * np.exp(log_density_of(high) - log_crossed)
    finite_low = np.where(np.isfinite(low), low, 0.0)  # its slope is 0 at -inf; 0·inf would be NaN
    scatter_slope = batch_slope @ batch + low_slope @ finite_low - high_slope @ high
    gradient += np.array([batch_slope.sum(), (low_slope - high_slope).sum(), scatter_slope])
    return total, gradient / np.array([scatter, scatter, 1.0])


def draw(parameters: Array, staleness: Array, rate: Array, updates: Array, generator: np.random.Generator) -> Array:
    """Draw the update at which each run collapses, 0 where it survives."""
    scatter, normals = math.exp(parameters[2]), generator.standard_normal((2, len(rate)))
    broken = np.log(staleness * rate) > parameters[0] + scatter * normals[0]
    any_update = generator.integers(1, updates.astype(np.int64), endpoint=True)
    log_crossed_at = np.minimum(parameters[1] + scatter * normals[1] - np.log(rate), NO_LIMIT)
    crossed_at = np.maximum(np.ceil(np.exp(log_crossed_at)), 1.0)
    return np.where(broken, any_update, np.where(crossed_at <= updates, crossed_at, 0.0))


class Peak(NamedTuple):
    """A maximum of the likelihood and where it is."""

    parameters: Array
    log_likelihood: float


def maximise(data: Drifts, box: Array, starts: list[Array]) -> Peak:
    """Find the best of the maxima that are reached from `starts`; a parameter whose bounds are equal is fixed."""
    import scipy.optimize  # pyright: ignore[reportMissingTypeStubs]

    minimize = cast(Any, scipy.optimize).minimize

    def loss(parameters: Array) -> tuple[float, Array]:
        value, gradient = log_likelihood(parameters, data)
        return -value, -gradient

    inside = np.unique(np.clip(np.array(starts), *box.T), axis=0)  # where a parameter is fixed, many starts coincide
    results = [minimize(loss, start, jac=True, method="L-BFGS-B", bounds=box) for start in inside]
    best = min(results, key=lambda result: float(result.fun))
    return Peak(best.x, -float(best.fun))


def fixed(box: Array, index: int, value: float) -> Array:
    """Return a copy of `box` in which one parameter is fixed."""
    changed = box.copy()
    changed[index] = value
    return changed


def starting_points(batch: Array, collapsed_by: Array) -> list[Array]:
    """Return nine starts among the drifts, with σ = 0.2: the likelihood has more than one maximum."""
    batch_radii, critical_radii = (np.quantile(drifts, (0.1, 0.5, 0.9)) for drifts in (batch, collapsed_by))
    return [np.array([*radii, math.log(0.2)]) for radii in product(batch_radii, critical_radii)]


def select_model(data: Drifts, starts: list[Array]) -> tuple[Peak, Array, list[int]]:
    """Fit the law without R_batch, without R_crit and with both, and keep the best by Akaike's criterion.

    Returns the peak, its box, and the indices of the radii that are in the law.
    """
    batch = np.concatenate([data.survived_batch, data.collapsed_batch])
    horizon = np.concatenate([data.survived_horizon, data.collapsed_by])
    reach = 3.0 * SCATTER_RANGE[1]  # beyond it a radius is as good as 0 or infinity, whatever the scatter
    box = np.array([[x.min() - reach, x.max() + reach] for x in (batch, horizon)] + [np.log(SCATTER_RANGE)])
    candidates = [(fixed(box, 0, NO_LIMIT), [1]), (fixed(box, 1, NO_LIMIT), [0]), (box, [0, 1])]
    fitted = [(maximise(data, bounds, starts), bounds, radii) for bounds, radii in candidates]
    return max(fitted, key=lambda candidate: candidate[0].log_likelihood - len(candidate[2]))


def large_sample_threshold(confidence: float) -> float:
    """Return half the χ² quantile with one degree of freedom, z((1 + confidence)/2)²/2."""
    return 0.5 * NormalDist().inv_cdf(0.5 + 0.5 * confidence) ** 2


def thresholds(
    peak: Peak, box: Array, radii: list[int], columns: tuple[Array, ...], confidence: float, resamples: int, seed: int
) -> Array:
    """How far the profile log-likelihood of each radius may drop within its interval.

    In the limit of many runs this is half the χ²(1) quantile. A small sweep may need more: the quantile of the drop at
    the truth, over `resamples` data sets drawn from the fitted law.
    """
    staleness, rate, updates, resolution = columns
    generator = np.random.default_rng(seed)
    drops = np.zeros((max(resamples, 1), len(radii)))
    for row in drops[:resamples]:
        drawn = draw(peak.parameters, staleness, rate, updates, generator)
        data = log_drifts(staleness, rate, updates, resolution, seen_at(drawn, updates, resolution))
        top = maximise(data, box, [peak.parameters]).log_likelihood
        for column, index in enumerate(radii):
            at_truth = fixed(box, index, peak.parameters[index])
            row[column] = top - maximise(data, at_truth, [peak.parameters]).log_likelihood
    return np.maximum(large_sample_threshold(confidence), np.quantile(drops, confidence, axis=0))


def profile_drop(data: Drifts, peak: Peak, box: Array, index: int, value: float, starts: list[Array]) -> float:
    """How far the maximum of the log-likelihood drops if one parameter is fixed at `value`: its profile."""
    return peak.log_likelihood - maximise(data, fixed(box, index, value), [peak.parameters, *starts]).log_likelihood


def interval(
    data: Drifts, peak: Peak, box: Array, index: int, threshold: float, starts: list[Array]
) -> tuple[float, float]:
    """The ends at which the profile log-likelihood of one radius drops by `threshold`; 0 or ∞ where it never does."""
    import scipy.optimize  # pyright: ignore[reportMissingTypeStubs]

    brentq = cast(Any, scipy.optimize).brentq

    def excess(value: float) -> float:
        return profile_drop(data, peak, box, index, value, []) - threshold

    ends: list[float] = []
    for limit, open_end in zip(box[index], (0.0, math.inf), strict=True):
        bounded = profile_drop(data, peak, box, index, limit, starts) > threshold
        ends.append(math.exp(brentq(excess, peak.parameters[index], limit, xtol=1e-4)) if bounded else open_end)
    return ends[0], ends[1]
