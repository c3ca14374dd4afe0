"""The staleness law on its experiment: the fit, predictions across halves of the grid, and the measured bias."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from experiments.lab.finding import UNKNOWN, Finding, below, judged
from experiments.lab.results import Mean, Results, mean_of, student
from experiments.lab.run_summary import RULE

from stalewise.errors import CalibrationError
from stalewise.planning.grid import resolution_of
from stalewise.staleness.law import Fit, Law, Observation, fit, log_likelihood
from stalewise.staleness.plan import largest_learning_rate

BIAS_OF = "relaxed clip"  # objective whose bias is judged: it clips no ratio
CLEAR = 1.2  # cosines estimated from halves beyond this size are noise, and so are their norms
NOISE = 0.1  # relative bias that one seed can detect
RISK = 0.05  # of a plan; the default of a config


@dataclass(frozen=True, slots=True)
class Observed:
    """One run of the grid with its column and row."""

    run: Observation
    cell: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """How well constants fitted on one half of the grid predict collapse in the other."""

    runs: int
    right: int  # outcomes given a probability above one half
    per_run: float  # log-likelihood of the outcomes
    base_rate: float  # the same for a coin with the first half's share of collapses


def observations(results: Results) -> list[Observed]:
    """Runs of the grid, without those that never moved."""
    stale, rates = (sorted(set(results.values(axis)), key=float) for axis in ("S", "rate"))
    found: list[Observed] = []
    for arm in results.arms:
        if "S" not in arm.axes:
            continue
        cell = (stale.index(arm.axes["S"]), rates.index(arm.axes["rate"]))
        for run in arm.runs.values():
            norm, updates = run.get("update_norm_per_lr"), int(arm.axes["T"])
            if norm:
                collapsed_at = run["collapsed_at"] and min(max(run["collapsed_at"], 1), updates)
                resolution = resolution_of(run["evaluations"]["version"], collapsed_at, RULE)
                one = Observation(int(arm.axes["S"]), float(arm.axes["rate"]), updates, collapsed_at, norm, resolution)
                found.append(Observed(one, cell))
    return found


def halves(found: Sequence[Observed]) -> tuple[list[Observation], list[Observation]]:
    """Split the grid like a chessboard: each half has every S and every η."""
    white = [one.run for one in found if sum(one.cell) % 2 == 0]
    return white, [one.run for one in found if sum(one.cell) % 2 == 1]


def predict(known: Sequence[Observation], unknown: Sequence[Observation]) -> Prediction:
    """Fit on `known`, predict `unknown`."""
    fitted = fit(known, resamples=0)
    batch, critical = (r.value if r.known else math.inf for r in (fitted.batch_radius, fitted.critical_radius))
    law = Law(batch, critical, fitted.scatter)
    share = (sum(run.collapsed_at is not None for run in known) + 0.5) / (len(known) + 1)
    survives = [
        math.exp(
            log_likelihood(law, [Observation(r.staleness, r.learning_rate, r.updates, None, r.update_norm_per_lr)])
        )
        for r in unknown
    ]
    survives = [min(max(p, 1e-3), 1 - 1e-3) for p in survives]
    did = [run.collapsed_at is None for run in unknown]
    right = sum((p > 0.5) == survived for p, survived in zip(survives, did, strict=True))
    loglik = [math.log(p if survived else 1 - p) for p, survived in zip(survives, did, strict=True)]
    base = [math.log(1 - share if survived else share) for survived in did]
    return Prediction(len(unknown), right, float(np.mean(loglik)), float(np.mean(base)))


def largest_stable(found: Sequence[Observed]) -> dict[tuple[int, int], float]:
    """By (T, S): the largest η such that at it and every smaller η more than half of the runs survived."""
    groups: dict[tuple[int, int], dict[float, list[bool]]] = {}
    for one in found:
        by_rate = groups.setdefault((one.run.updates, one.run.staleness), {})
        by_rate.setdefault(one.run.learning_rate, []).append(one.run.collapsed_at is None)
    stable: dict[tuple[int, int], float] = {}
    for place, by_rate in groups.items():
        largest = math.nan
        for rate in sorted(by_rate):
            if np.mean(by_rate[rate]) <= 0.5:
                break
            largest = rate
        stable[place] = largest
    return stable


def bias_cells(results: Results, objective: str, key: str = "bias") -> dict[float, dict[int, float]]:
    """A gradient measure by S·η and seed; for the bias its signed square, which noise can make negative."""
    cells: dict[float, dict[int, float]] = {}
    for arm in results.arms:
        for seed, run in arm.runs.items() if arm.kind == "bias" else ():
            for row in run["rows"]:
                known = key == "bias" or abs(row["cosine"] or math.inf) <= CLEAR
                if row["objective"] == objective and known and (value := row.get(key)) is not None:
                    place = round(row["age"] * run["learning_rate"], 9)
                    cells.setdefault(place, {})[seed] = value * abs(value) if key == "bias" else value
    return cells


def bias_points(results: Results, objective: str = BIAS_OF, key: str = "bias") -> list[tuple[float, float]]:
    """(S·η, mean over seeds); for the bias only points that stand out from the noise."""
    cells = bias_cells(results, objective, key)
    if key != "bias":
        return [(x, float(np.mean(list(values.values())))) for x, values in sorted(cells.items())]
    return _resolved([(x, list(values.values())) for x, values in sorted(cells.items())])


def _resolved(cells: Sequence[tuple[float, Sequence[float]]]) -> list[tuple[float, float]]:
    """Roots of mean squares above two standard errors, or above 0.1² for one seed."""
    found: list[tuple[float, float]] = []
    for x, squares in cells:
        mean = float(np.mean(squares))
        error = float(np.std(squares, ddof=1)) / math.sqrt(len(squares)) if len(squares) > 1 else NOISE**2 / 2
        if mean > 2 * error:
            found.append((x, math.sqrt(mean)))
    return found


def _power(points: Sequence[tuple[float, float]]) -> float | None:
    if len(points) < 4:
        return None
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def bias_slope(results: Results) -> Mean:
    """Exponent of the bias in S·η, which is 1 by the law, with a jackknife interval over seeds (Student's t).

    Points are selected once with all seeds. Selecting them again without each seed would make the exponent depend
    more on the selection than on the measurements.
    """
    points, cells = bias_points(results), bias_cells(results, BIAS_OF)
    whole = _power(points)
    seeds = sorted({seed for values in cells.values() for seed in values})
    if whole is None:
        return mean_of([])
    if len(seeds) < 3:
        return Mean(whole, math.nan, math.nan, 1)
    without: list[float] = []
    for left_out in seeds:
        squares = [(x, [square for seed, square in cells[x].items() if seed != left_out]) for x, _ in points]
        found = [(x, math.sqrt(np.mean(values))) for x, values in squares if values and np.mean(values) > 0]
        without.append(_power(found) or math.nan)
    n = len(seeds)
    spread = math.sqrt((n - 1) ** 2 / n * float(np.var(without, ddof=1)))
    half = student(n - 1) * spread
    return Mean(whole, whole - half, whole + half, n)


def describe_fit(found: Sequence[Observed]) -> tuple[Fit | None, str]:
    """The fit, and its constants with intervals as text."""
    try:
        fitted = fit([one.run for one in found], resamples=100)
    except CalibrationError as error:
        return None, f"No fit: {error}."
    return fitted, fitted.describe()


def the_law(results: Results) -> Finding:
    """Shown where constants that are fitted on one half of the grid (its white fields) predict who collapses in the
    other half better than a coin with the first half's share of collapses (log-likelihood per run), in both
    directions; and, where the bias was measured, it grows in S·η with a power whose interval holds 1 or that is from
    0.5 to 1.5. Opposite where the coin is better in both directions, or the bias does not grow (power below 0.25,
    beyond doubt). Otherwise not shown.
    """
    found = observations(results)
    white, black = halves(found)
    try:
        both = [predict(white, black), predict(black, white)]
    except (CalibrationError, ValueError) as error:
        fell = sum(one.run.collapsed_at is not None for one in found)
        return Finding(UNKNOWN, f"{fell} of {len(found)} runs collapsed; on halves of them: {error}")
    fitted, words = describe_fit(found)
    slope = bias_slope(results)
    better = [one.per_run > one.base_rate for one in both]
    grows = slope.seeds == 0 or 0.5 <= slope.value <= 1.5 or (slope.low <= 1 <= slope.high)
    runs, right = sum(one.runs for one in both), sum(one.right for one in both)
    lines = [words]
    lines += [
        f"Fitted on one half, {one.right} of {one.runs} outcomes of the other predicted; log-likelihood per run "
        f"{one.per_run:.3f}, of the coin {one.base_rate:.3f}."
        for one in both
    ]
    lines += _by_horizon([one.run for one in found])
    stable = largest_stable(found)
    lines.append(
        "Largest stable η: " + ", ".join(f"{rate:g} at S={S}, T={T}" for (T, S), rate in sorted(stable.items())) + "."
    )
    lines += _products(found)
    lines += _allowed(fitted, found)
    power = f"{slope}" if slope.seeds else "not measured"
    lines.append(f"Power with which the bias of the gradient grows in S·η ({BIAS_OF}): {power}.")
    ours = f"{right} of {runs} collapses and survivals predicted"
    ours += f"; bias ∝ (S·η)^b, b = {slope}" if slope.seeds else ""
    if fitted is not None and fitted.critical_radius.known:
        radius = fitted.critical_radius
        ours += f"; R_crit {radius.value:.3g}, 90% interval {radius.low:.3g} to {radius.high:.3g}"
    flat = slope.seeds > 1 and below(slope, 0.25)
    return Finding(judged(all(better) and grows, not any(better) or flat), ours, lines)


def _by_horizon(runs: Sequence[Observation]) -> list[str]:
    """The constants from runs of each length, and predictions across lengths. Not part of the rule."""
    horizons = sorted({run.updates for run in runs})
    alone = {T: [run for run in runs if run.updates == T] for T in horizons}
    lines: list[str] = []
    for T in horizons if len(horizons) > 1 else ():
        with contextlib.suppress(CalibrationError, ValueError):
            lines.append(f"From runs of T={T} alone: {fit(alone[T], resamples=100).describe()}")
    for known, unknown in permutations(horizons, 2):
        with contextlib.suppress(CalibrationError, ValueError):
            one = predict(alone[known], alone[unknown])
            lines.append(
                f"Fitted on T={known}, {one.right} of {one.runs} outcomes of T={unknown} predicted; log-likelihood per "
                f"run {one.per_run:.3f}, of the coin {one.base_rate:.3f}."
            )
    return lines


def _allowed(fitted: Fit | None, found: Sequence[Observed]) -> list[str]:
    """The learning rates a plan allows for the longest runs at each S."""
    if fitted is None:
        return []
    norm = float(np.median([one.run.update_norm_per_lr for one in found]))
    longest = max(one.run.updates for one in found)
    try:
        plans = [
            largest_learning_rate(fitted, staleness=S, updates=longest, update_norm_per_lr=norm, risk=RISK)
            for S in sorted({one.run.staleness for one in found})
        ]
    except CalibrationError as error:
        return [f"A plan cannot be made of it: {error}."]
    told = ", ".join(f"{plan.learning_rate:.2g} at S={plan.staleness} ({plan.binding})" for plan in plans)
    return [f"Largest η that a plan of all these runs allows for T={longest}, at a risk of {RISK:.0%}: {told}."]


def _products(found: Sequence[Observed]) -> list[str]:
    """t·η at collapse by S."""
    by_lag: dict[int, list[float]] = {}
    for one in found:
        if one.run.collapsed_at is not None:
            by_lag.setdefault(one.run.staleness, []).append(one.run.collapsed_at * one.run.learning_rate)
    parts = [f"S={S}: {np.mean(v):.3g} ± {np.std(v):.2g} ({len(v)} runs)" for S, v in sorted(by_lag.items())]
    if not parts:
        return ["No run collapsed."]
    return ["t·η at collapse, which is M_collapse·(S+1)·η with M cycles of S+1 updates: " + "; ".join(parts) + "."]
