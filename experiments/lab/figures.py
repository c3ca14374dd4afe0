"""Figures of each experiment from its kept results: SVG text by file name suffix."""

from __future__ import annotations

import math

from experiments.lab.draw import COLOURS, Panel, Point, Row, Rows, Series, draw_panels, draw_rows
from experiments.lab.law import observations
from experiments.lab.results import ArmResult, Results
from experiments.lab.statistics import mean_of

Figures = dict[str, str]
TOPS = 0.2, 0.5, 1.0  # of an axis of accuracies


def with_rate(arm: ArmResult) -> str:
    """The arm's name with its learning rate, unless the name has it."""
    return arm.name if "η=" in arm.name else f"{arm.name}, η {arm.rate:g}"


def figures(rule: str, results: Results) -> Figures:
    """The figure of an experiment, and one of the scores of its arms."""
    special = {"the_law": the_law, "pass_at_k": pass_at_k}
    if rule in special:
        return {"": special[rule](results)}
    runs = [arm for arm in results.arms if arm.kind == "train"]
    return {"": curves(runs), "-scores": scores(runs)} if runs else {}


def curves(arms: list[ArmResult]) -> str:
    """Accuracy by update, at most eight arms in a panel."""
    named = [Series(with_rate(arm), arm.curve()) for arm in arms]
    y_range = 0.0, _top(max((high for series in named for *_, high in series.points), default=1.0))
    panels = [
        Panel("accuracy", named[first : first + 8], "update", "held-out accuracy", y_range=y_range)
        for first in range(0, len(named), 8)
    ]
    return draw_panels("Held-out accuracy on judged seeds; bands from least to largest seed", panels)


def scores(arms: list[ArmResult]) -> str:
    """Mean of the last three evaluations with its interval, by arm."""
    rows: list[Row] = []
    for place, arm in enumerate(arms):
        mean = arm.mean
        name = with_rate(arm)
        rows.append(Row(name, mean.value, mean.low, mean.high, str(mean), COLOURS[place % len(COLOURS)]))
    lowest = min((row.low for row in rows if not math.isnan(row.low)), default=0.0)  # unknown with a single seed
    highest = max((row.high for row in rows if not math.isnan(row.high)), default=1.0)
    x_range = max(0.0, math.floor(10 * lowest) / 10), _top(highest)
    return draw_rows("Scores: mean of the last three evaluations, 95% over seeds", [Rows("", rows, x_range=x_range)])


def _top(highest: float) -> float:
    """Where an axis of accuracies ends: small ones would lie at its foot."""
    return next((top for top in TOPS if highest <= top), 1.0)


def the_law(results: Results) -> str:
    """Who survived, by length and learning rate, for each staleness."""
    found = observations(results)
    panels: list[Panel] = []
    for lag in dict.fromkeys(one.lag for one in found):
        series: list[Series] = []
        for name, mark, fell in (("survived", "dot", False), ("collapsed", "cross", True)):
            points: list[Point] = []
            for one in (o for o in found if o.lag == lag and o.collapsed is fell):
                x = one.updates * 1.06 ** (one.seed % 4)  # so that seeds do not hide each other
                points.append((x, one.rate, one.rate, one.rate))
            series.append(Series(name, points, mark))  # type: ignore[arg-type]
        panels.append(Panel(lag, series, "updates T", "learning rate η", x_log=True, y_log=True))
    return draw_panels("The law: who survived", panels)


def pass_at_k(results: Results) -> str:
    """pass@k against k, before and after."""
    series: list[Series] = []
    for arm in results.arms:
        runs = [run["pass_at"] for run in arm.runs.values() if "pass_at" in run]
        points: list[Point] = []
        for k in sorted(runs[0], key=int) if runs else ():
            mean = mean_of([run[k]["value"] for run in runs])
            low, high = (mean.low, mean.high) if mean.seeds > 1 else (mean.value, mean.value)
            points.append((float(k), mean.value, low, high))
        series.append(Series(arm.name, points, "dashed" if arm.name == "before" else "line"))
    panel = Panel("pass@k", series, "k", "share of questions", x_log=True, y_range=(0.0, 1.0))
    return draw_panels("pass@k before and after training; bands are 95% intervals over seeds", [panel], 1)
