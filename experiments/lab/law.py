"""Three models of who collapses, fitted on some runs and judged on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from experiments.lab.plan import is_collapsed
from experiments.lab.results import Results
from experiments.lab.statistics import Difference, by_cluster, fit_probit, paired
from scipy.special import log_ndtr

OLDEST = {"µ=1": 0, "µ=1, lag 8": 8, "µ=8, lag 1": 15, "µ=8, lag 4": 39}  # the worst age of a rollout, S
OLDEST |= {"µ=4": 3, "µ=4, lag 3": 15}  # with SmolLM2
RESAMPLES = 200
NEWTON_STEPS, PRIOR = 12, 1e-3


@dataclass(frozen=True, slots=True)
class Observed:
    """One run: its settings, G, and whether it collapsed."""

    lag: str
    rate: float
    updates: int
    seed: int
    norm_per_rate: float
    collapsed: bool

    @property
    def cell(self) -> tuple[str, float, int]:
        """Settings without the seed."""
        return self.lag, self.rate, self.updates


MODELS: dict[str, Callable[[Observed], float]] = {
    "law": lambda one: one.rate * one.norm_per_rate * one.updates,
    "displacement": lambda one: one.rate * one.norm_per_rate * one.updates**0.5,
    "rate": lambda one: one.rate,
}


@dataclass(frozen=True, slots=True)
class LawScores:
    """How well each model predicts long runs from short ones, and lines for the page."""

    per_run: dict[str, float]
    law_less_displacement: Difference
    law_less_rate: Difference
    lines: list[str]


def observations(results: Results) -> list[Observed]:
    """The runs in which G could be measured."""
    return [
        Observed(
            arm.axes["lag"],
            float(arm.axes["rate"]),
            int(arm.axes["T"]),
            seed,
            float(run["early_norm_per_lr"]),
            is_collapsed(run),
        )
        for arm in results.arms
        for seed, run in arm.runs.items()
        if run["early_norm_per_lr"]
    ]


def predict(model: str, known: Sequence[Observed], unknown: Sequence[Observed]) -> np.ndarray:
    """Log-probability of each outcome of `unknown` under a model fitted on `known`."""
    fitted = fit_probit([MODELS[model](one) for one in known], [one.collapsed for one in known])
    return fitted.log_scores([MODELS[model](one) for one in unknown], [one.collapsed for one in unknown])


def lengths_of(found: Sequence[Observed]) -> tuple[list[int], list[int]]:
    """The shorter lengths, which the models are fitted on, and the longer ones, which they predict."""
    lengths = sorted({one.updates for one in found})
    return lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]


def judge_models(found: Sequence[Observed]) -> LawScores:
    """Long runs from short ones, which decides; and halves by seed, which stand beside it."""
    middle, short = float(np.median(sorted({one.seed for one in found}))), lengths_of(found)[0]
    splits = {
        "long runs from short ones": (
            [o for o in found if o.updates in short],
            [o for o in found if o.updates not in short],
        ),
        "late seeds from early ones": ([o for o in found if o.seed < middle], [o for o in found if o.seed >= middle]),
        "early seeds from late ones": ([o for o in found if o.seed >= middle], [o for o in found if o.seed < middle]),
    }
    lines: list[str] = []
    decided: dict[str, np.ndarray] = {}
    for name, (known, unknown) in splits.items():
        if not (known and unknown):  # all runs have one seed
            continue
        scores = {model: predict(model, known, unknown) for model in MODELS}
        decided = decided or scores
        told = ", ".join(f"{model} {values.mean():.3f}" for model, values in scores.items())
        lines.append(f"Log-likelihood per run, {name} ({len(known)} and {len(unknown)} runs): {told}.")
    cells = [one.cell for one in splits["long runs from short ones"][1]]

    def less(one: str, other: str) -> Difference:
        return paired(by_cluster(list(decided[one] - decided[other]), cells))

    for one, other in (("law", "displacement"), ("law", "rate"), ("displacement", "rate")):
        lines.append(f"Long runs from short ones, {one} less {other}, over cells: {less(one, other)}.")
    lines += _thresholds(found) + _by_lag(found)
    per_run = {model: float(values.mean()) for model, values in decided.items()}
    return LawScores(per_run, less("law", "displacement"), less("law", "rate"), lines)


def _thresholds(found: Sequence[Observed]) -> list[str]:
    """The fitted threshold of each model at each length: the same at all lengths if the model is right."""
    lines: list[str] = []
    for model, value in MODELS.items():
        parts: list[str] = []
        for updates in sorted({one.updates for one in found}):
            here = [one for one in found if one.updates == updates]
            if 0 < sum(one.collapsed for one in here) < len(here):
                fitted = fit_probit([value(one) for one in here], [one.collapsed for one in here])
                parts.append(f"{np.exp(fitted.location):.3g} at T={updates} (scatter {fitted.scale:.2f})")
        lines.append(f"Threshold of {model}, fitted at each length: {', '.join(parts)}.")
    return lines


def exponent_lines(found: Sequence[Observed]) -> list[str]:
    """How the threshold of η goes with T and S, fitted afterwards; intervals from resampled cells."""
    if any(one.lag not in OLDEST for one in found):
        return []
    return [
        f"Fitted afterwards to all runs, and not part of the rule: {resampled_exponents(found).told}; the law has "
        "a = 1 where T binds and b = 1 where S does."
    ]


@dataclass(frozen=True, slots=True)
class Exponents:
    """a and b of a threshold that goes as T^-a·(1+S)^-b: fitted to all runs, and to cells drawn again, a row each."""

    fitted: np.ndarray
    drawn: np.ndarray

    @property
    def told(self) -> str:
        """Both with their 95% intervals."""
        low, high = np.quantile(self.drawn, (0.025, 0.975), axis=0)
        ends = zip(self.fitted, low, high, strict=True)
        a, b = (f"{value:.2f} [{least:.2f}, {most:.2f}]" for value, least, most in ends)
        return f"the threshold of η goes as T^-a·(1+S)^-b with a = {a} and b = {b} (95%, cells resampled)"

    def p_above(self, bound: float) -> float:
        """One-sided p-value of "a is at most `bound`"."""
        return (1 + int((self.drawn[:, 0] <= bound).sum())) / (1 + len(self.drawn))

    def p_below(self, bound: float) -> float:
        """One-sided p-value of "a is at least `bound`"."""
        return (1 + int((self.drawn[:, 0] >= bound).sum())) / (1 + len(self.drawn))


def resampled_exponents(found: Sequence[Observed], times: int = RESAMPLES) -> Exponents:
    """A probit on all runs, and on cells that are drawn again."""
    x = np.log([(one.rate, one.updates, 1 + OLDEST[one.lag]) for one in found])
    fell = np.array([one.collapsed for one in found])
    cells: dict[tuple[str, float, int], list[int]] = {}
    for row, one in enumerate(found):
        cells.setdefault(one.cell, []).append(row)
    rows, generator = list(cells.values()), np.random.default_rng(0)
    drawn: list[np.ndarray] = []
    for _ in range(times):
        chosen = np.concatenate([rows[i] for i in generator.integers(len(rows), size=len(rows))])
        drawn.append(exponents(x[chosen], fell[chosen]))
    return Exponents(exponents(x, fell), np.array(drawn))


def exponents(x: np.ndarray, fell: np.ndarray) -> np.ndarray:
    """(a, b) of a probit on log η + a·log T + b·log(1+S); `x` has these three logarithms in its columns."""
    signs, columns = np.where(fell, 1.0, -1.0), np.column_stack([x - x.mean(axis=0), np.ones(len(x))])
    slopes = np.zeros(4)
    for _ in range(NEWTON_STEPS):  # the likelihood is concave; a weak prior keeps separable runs finite
        z = signs * (columns @ slopes)
        hazard = np.exp(-0.5 * z * z - 0.5 * np.log(2 * np.pi) - log_ndtr(z))  # φ(z)/Φ(z)
        gradient = columns.T @ (signs * hazard) - PRIOR * slopes
        curvature = (columns * (hazard * (hazard + z))[:, None]).T @ columns + PRIOR * np.eye(4)
        slopes = slopes + np.linalg.solve(curvature, gradient)
    return slopes[1:3] / slopes[0]


def _by_lag(found: Sequence[Observed]) -> list[str]:
    """Collapses by staleness, and G of runs that collapsed and survived."""
    lags = list(dict.fromkeys(one.lag for one in found))
    parts = [
        f"{lag}: {sum(o.collapsed for o in found if o.lag == lag)} of {sum(o.lag == lag for o in found)}"
        for lag in lags
    ]
    norms = {
        word: [one.norm_per_rate for one in found if one.collapsed is fell]
        for word, fell in (("collapsed", True), ("survived", False))
    }
    told = ", ".join(f"{np.median(values):.0f} where runs {word}" for word, values in norms.items() if values)
    return [f"Collapsed by staleness: {'; '.join(parts)}.", f"Median G over updates 4 to 19: {told}."]
