"""Three models of who collapses, fitted on some runs and judged on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from experiments.lab.plan import is_collapsed
from experiments.lab.results import Results
from experiments.lab.statistics import Difference, by_cluster, fit_probit, paired

SHORT = (64, 128)  # lengths that the models are fitted on; they predict the others


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


def judge_models(found: Sequence[Observed]) -> LawScores:
    """Long runs from short ones, which decides; and halves by seed, which stand beside it."""
    middle = float(np.median(sorted({one.seed for one in found})))
    splits = {
        "long runs from short ones": (
            [o for o in found if o.updates in SHORT],
            [o for o in found if o.updates not in SHORT],
        ),
        "late seeds from early ones": ([o for o in found if o.seed < middle], [o for o in found if o.seed >= middle]),
        "early seeds from late ones": ([o for o in found if o.seed >= middle], [o for o in found if o.seed < middle]),
    }
    lines: list[str] = []
    decided: dict[str, np.ndarray] = {}
    for name, (known, unknown) in splits.items():
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
