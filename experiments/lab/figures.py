"""Figures of each experiment from its kept results: SVG text by file name suffix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from experiments.lab.comparisons import tuned
from experiments.lab.draw import COLOURS, Panel, Point, Row, Rows, Series, draw_panels, draw_rows
from experiments.lab.law import Observed, bias_points, describe_fit, largest_stable, observations
from experiments.lab.results import ArmResult, Measure, Results, final

Figures = dict[str, str]
ACCURACY = {"x_title": "update", "y_title": "held-out accuracy", "y_range": (0.0, 1.0)}


def _curves(arms: Sequence[ArmResult], label: Callable[[ArmResult], str], key: str = "accuracy", x: str = "version"):
    return [Series(label(arm), arm.curve(key, x)) for arm in arms]


def _rows(title: str, arms: Sequence[ArmResult], label: Callable[[ArmResult], str], measure: Measure = final) -> Rows:
    found: list[Row] = []
    for place, arm in enumerate(arms):
        mean = arm.mean(measure)
        found.append(Row(label(arm), mean.value, mean.low, mean.high, str(mean), COLOURS[place % len(COLOURS)]))
    return Rows(title, found)


def clipping_dilemma(results: Results) -> Figures:
    """Accuracy and clipped tokens of both clips at every µ and η."""
    panels: list[Panel] = []
    for rate in results.values("rate"):
        arms = results.where(rate=rate)
        name = _named("clip", "mu")
        panels.append(Panel(f"accuracy, η {rate}", _curves(arms, name), **ACCURACY))
        clipped = _curves(arms, name, "clip_fraction")
        panels.append(Panel(f"clipped tokens, η {rate}", clipped, x_title="update", y_title="share"))
    return {"": draw_panels("Tight clip [0.8, 1.2] and relaxed clip [0, 5]; bands from least to largest seed", panels)}


def _named(first: str, second: str) -> Callable[[ArmResult], str]:
    def name(arm: ArmResult) -> str:
        if first in arm.axes:
            return f"{arm.axes[first]} clip, µ={arm.axes[second]}"
        return arm.name

    return name


def where_the_harm_is(results: Results) -> Figures:
    """Accuracy, ratios of negative responses and vetoed tokens by scope; and the region."""
    arms = [arm for arm in results.arms if "region" not in arm.axes]
    keys = {
        "ratio_mean_negative": ("mean ratio where A < 0", ""),
        "log_ratio_mean_abs": ("mean |log ratio|", ""),
        "veto_fraction": ("vetoed tokens", "share"),
    }
    panels = [Panel("accuracy", _curves(arms, _axis("scope")), **ACCURACY)]
    for key, (title, unit) in keys.items():
        curves = _curves(arms, _axis("scope"), key)
        panels.append(Panel(title, curves, x_title="update", y_title=unit))
    figures = {"": draw_panels("Veto scopes under the relaxed clip; bands from least to largest seed", panels)}
    blocks: list[Rows] = []
    for mu in results.values("mu"):
        for rate in results.values("rate"):
            there = results.where(mu=mu, rate=rate, region="yes")
            if there:
                blocks.append(_rows(f"µ {mu}, η {rate}", there, _axis("scope")))
    return figures | ({"-region": draw_rows("Final accuracy by scope over the region", blocks)} if blocks else {})


def _axis(axis: str) -> Callable[[ArmResult], str]:
    return lambda arm: arm.axes.get(axis, arm.name)


def accuracy_at_speed(results: Results) -> Figures:
    """Accuracy against seconds with each method at its best η, and the final accuracy of every arm."""
    trained = [arm for arm in results.arms if arm.kind == "train" and "method" in arm.axes]
    hard = [arm for arm in results.arms if "hard" in arm.axes]
    chosen: list[ArmResult] = []
    for method in results.values("method"):
        for stages in results.values("stages"):
            if (arm := tuned(results.where(method=method, stages=stages))) is not None and stages in ("fresh", "4"):
                chosen.append(arm)
    by_time = _curves(chosen, lambda arm: arm.name, x="seconds")
    panels = [
        Panel("by seconds of training", by_time, **{**ACCURACY, "x_title": "seconds"}),
        Panel("by updates", _curves(chosen, lambda arm: arm.name), **ACCURACY),
    ]
    if hard:
        panels.append(
            Panel("two-digit sums", _curves(hard, _axis("hard"), x="seconds"), **{**ACCURACY, "x_title": "seconds"})
        )
    blocks = [_rows("final accuracy at equal updates", trained, lambda arm: arm.name)]
    return {
        "": draw_panels("Accuracy at speed, each method at its best η; bands from least to largest seed", panels),
        "-arms": draw_rows("Every arm, mean and 95% interval over seeds", blocks),
    }


def no_knob(results: Results) -> Figures:
    """Accuracy of P3O and of GRPO at each ε."""
    panels: list[Panel] = []
    for rate, mu in product((None, *results.values("rate")), results.values("mu")):
        arms = [arm for arm in results.where(mu=mu) if arm.axes.get("rate") == rate]
        if arms:
            panels.append(
                Panel(f"µ {mu}" + (f", η {rate}" if rate else ""), _curves(arms, _axis("method")), **ACCURACY)
            )
    return {"": draw_panels("GRPO with three clipping ranges, and P3O; bands from least to largest seed", panels, 3)}


def mismatch(results: Results) -> Figures:
    """Final accuracy by mismatch and method."""
    blocks = [_rows(kind, results.where(mismatch=kind), _axis("method")) for kind in results.values("mismatch")]
    return {"": draw_rows("Final accuracy by mismatch, mean and 95% interval over seeds", blocks)}


def two_anchors(results: Results) -> Figures:
    """Accuracy of one and two anchors at each temperature and η."""
    panels = [
        Panel(
            f"temperature {t}, η {rate}", _curves(results.where(temperature=t, rate=rate), _axis("method")), **ACCURACY
        )
        for rate in results.values("rate")
        for t in results.values("temperature")
    ]
    return {"": draw_panels("P3O with one and with two anchors; bands from least to largest seed", panels)}


def the_law(results: Results) -> Figures:
    """Survival by S and η with the fitted constraints, and the bias of the gradient against S·η."""
    found = observations(results)
    fitted, _ = describe_fit(found)
    panels: list[Panel] = []
    for updates in sorted({one.run.updates for one in found}, reverse=True):
        here = [one.run for one in found if one.run.updates == updates]
        series: list[Series] = []
        for name, mark, colour, lost in (
            ("survived", "dot", COLOURS[2], False),
            ("collapsed", "cross", COLOURS[1], True),
        ):
            runs = [run for run in here if (run.collapsed_at is not None) == lost]
            points = _side_by_side([(float(run.staleness), run.learning_rate) for run in runs])
            series.append(Series(name, points, mark, colour))  # pyright: ignore[reportArgumentType]
        if fitted is not None:
            norm = float(np.median([run.update_norm_per_lr for run in here]))
            lags = (min(run.staleness for run in here), max(run.staleness for run in here))
            top = max(run.learning_rate for run in here) * 1.3
            if fitted.batch_radius.known:
                line = [(float(S), fitted.batch_radius.value / (S * norm)) for S in np.geomspace(*lags, 30)]
                drawn = [_point(x, y) for x, y in line if y <= top]
                series.append(Series("R_batch/(S·G)", drawn, "line", COLOURS[0]))
            if fitted.critical_radius.known:
                level = fitted.critical_radius.value / (updates * norm)
                series.append(Series("R_crit/(T·G)", [_point(float(S), level) for S in lags], "dashed", COLOURS[3]))
        panels.append(Panel(f"T = {updates}", series, "staleness S", "learning rate η", x_log=True, y_log=True))
    panels += _collapse_panels(found)
    if any(arm.kind == "bias" for arm in results.arms):
        panels += _bias_panels(results)
    return {"": draw_panels("The law: who survived, and the bias of stale gradients", panels)}


def _collapse_panels(found: Sequence[Observed]) -> list[Panel]:
    """The largest stable η by S, and t·η at collapse by S, which is M_collapse·(S+1)·η; for each T."""
    largest = largest_stable(found)
    stable: list[Series] = []
    fell: list[Series] = []
    for place, updates in enumerate(sorted({T for T, _ in largest}, reverse=True)):
        colour = COLOURS[8 + place % 2]
        points = [_point(float(S), rate) for (T, S), rate in sorted(largest.items()) if updates == T and rate == rate]
        stable.append(Series(f"T = {updates}", points, "line", colour))
        here = [one.run for one in found if one.run.updates == updates and one.run.collapsed_at is not None]
        products = [(float(run.staleness), (run.collapsed_at or 0) * run.learning_rate) for run in here]
        fell.append(Series(f"T = {updates}", _side_by_side(products), "dot", colour))
    panels = [("largest stable η", stable, "learning rate η"), ("t·η at collapse", fell, "updates × η")]
    return [
        Panel(title, series, "staleness S", unit, x_log=True, y_log=True)
        for title, series, unit in panels
        if any(one.points for one in series)
    ]


def _bias_panels(results: Results) -> list[Panel]:
    objectives = ("relaxed clip", "tight clip", "µ-GRPO", "P3O")
    made: list[Panel] = []
    for key, title, log in (
        ("bias", "‖stale − fresh‖ / ‖fresh‖", True),
        ("cosine", "cosine of stale and fresh", False),
        ("norm_ratio", "‖stale‖ / ‖fresh‖", True),
    ):
        series = [
            Series(name, sorted(_point(x, y) for x, y in bias_points(results, name, key)), "dot", COLOURS[4 + place])
            for place, name in enumerate(objectives)
        ]
        made.append(Panel(title, series, "S·η", "", x_log=True, y_log=log))
    return made


def _point(x: float, y: float) -> Point:
    return x, y, y, y


def _side_by_side(points: Sequence[tuple[float, float]]) -> list[Point]:
    """Shift equal points so that seeds do not hide each other."""
    seen: dict[tuple[float, float], int] = {}
    placed: list[Point] = []
    for x, y in points:
        nth = seen.get((x, y), 0)
        seen[x, y] = nth + 1
        placed.append(_point(x * 1.08**nth, y))
    return placed


def pass_at_k(results: Results) -> Figures:
    """pass@k against k, before and after."""
    series: list[Series] = []
    for arm in results.arms:
        if arm.kind == "evaluate":
            ks = sorted(next(iter(arm.runs.values()))["pass_at"], key=int)
            points: list[Point] = []
            for k in ks:
                mean = arm.mean(lambda run, k=k: run["pass_at"][k]["value"])
                low, high = (mean.low, mean.high) if math.isfinite(mean.low) else (mean.value, mean.value)
                points.append((float(k), mean.value, low, high))
            series.append(Series(arm.name, points, "dashed" if arm.name == "before" else "line"))
    panel = Panel("pass@k", series, "k", "share of questions", x_log=True, y_range=(0.0, 1.0))
    return {"": draw_panels("pass@k before and after training; bands are 95% intervals over seeds", [panel], 1)}


def ours(results: Results) -> Figures:
    """Accuracy by seconds at every η, and final accuracies after one stored stage."""
    panels = [
        Panel(
            f"η {rate}",
            _curves(results.where(rate=rate), _axis("method"), x="seconds"),
            **{**ACCURACY, "x_title": "seconds"},
        )
        for rate in results.values("rate")
    ]
    stage = sorted((arm for arm in results.arms if arm.kind == "learn"), key=lambda arm: -arm.mean(final).value)
    figures = {"": draw_panels("`auto` and single methods by seconds; bands from least to largest seed", panels, 3)}
    if stage:
        rows = _rows("final accuracy after one stored stage", stage, _axis("objective"))
        figures["-stage"] = draw_rows("The same rollouts, every objective", [rows])
    return figures


def figures() -> dict[str, Callable[[Results], Figures]]:
    """Figure functions by the name of the rule."""
    listed = (clipping_dilemma, where_the_harm_is, accuracy_at_speed, no_knob, mismatch, two_anchors, the_law)
    return {made.__name__: made for made in (*listed, pass_at_k, ours)}
