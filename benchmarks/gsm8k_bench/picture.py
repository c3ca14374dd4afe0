"""The table that is printed, and accuracy against wall-clock as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import is_tuning, points, with_clocks
from .settings import ARMS, OURS, tuned_as

COLOURS = {
    "mu_grpo": "#1b6ca8",
    "mu_grpo_64": "#5fa8d8",
    "mu_grpo_128": "#a9d3ee",
    "p3o": "#2a9d5c",
    "p3o_64": "#8fce9f",
    "auto": "#7a4fb5",
    "mu_grpo_x2": "#0b3c5d",
    "auto_x2": "#4b2a7b",
    "synchronous": "#e0921b",
    "grpo_tight": "#9a9a9a",
    "random_reward": "#c9b79c",
    "trl_vllm": "#c0392b",
    "trl_generate": "#7f1d1d",
}

METHODS = {"mu_grpo": "µ-GRPO", "p3o": "P3O", "grpo_tight": "GRPO", "random_reward": "µ-GRPO, random rewards"}


def label(arm: str, seeds: int, settings: Mapping[str, Any]) -> str:
    """An arm in words.

    >>> label("mu_grpo_64", 4, {"stage_updates": 16, "mu": 4}), label("trl_vllm", 1, {"stage_updates": 16, "mu": 4})
    ('stalewise, µ-GRPO, µ = 64 (4 seeds)', 'TRL with vLLM, µ = 4 (1 seed)')
    >>> label("auto_x2", 3, {"stage_updates": 16, "mu": 4})
    'stalewise, recipe "auto", twice the updates (3 seeds)'
    """
    one = tuned_as(arm)
    method, _, updates = one.rpartition("_") if one.rpartition("_")[2].isdigit() else (one, "", "")
    words = {
        "trl_vllm": f"TRL with vLLM, µ = {settings['mu']}",
        "trl_generate": f"TRL with generate, µ = {settings['mu']}",
        "synchronous": f"stalewise, GRPO, µ = {settings['mu']}",
        "auto": 'stalewise, recipe "auto"',
    }
    staged = f"stalewise, {METHODS.get(method, method)}, µ = {updates or settings['stage_updates']}"
    twice = ", twice the updates" if one != arm else ""
    return f"{words.get(one, staged)}{twice} ({seeds} seed{'s' * (seeds > 1)})"


def table(head: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """One row for each arm, and one for the policy that all start from; `settings` are those that all jobs share."""
    also = Path(settings["also_test"]).stem
    times = ("to TRL's accuracy", "to a point below")
    columns = ("arm", "seconds", "accuracy", "greedy", *times, "difference", "switch", also)
    first = (_number(head["base_accuracy"], ".3f"), *[""] * 5, _number(head["base_accuracy_also"], ".3f"))
    rows: list[tuple[str, ...]] = [columns, ("before", "", *first)]
    for arm in ARMS:
        accuracy, greedy = head["final_accuracy"][arm], head["final_accuracy_greedy"][arm]
        if accuracy is None:
            continue
        rows.append(
            (
                arm + (" (best)" if arm == head["best_arm"] else ""),
                _number(head["seconds"][arm], ".1f"),
                _interval(accuracy, "mean", ".3f"),
                _interval(greedy, "mean", ".3f"),
                _interval(ratio := head["time_to_accuracy_ratio"].get(arm), "median", ".2f")
                + ("" if ratio is None else " ({} of {} seeds)".format(*ratio["reached"])),
                _interval(head["time_to_within_a_point_ratio"].get(arm), "median", ".2f"),
                _interval(head["final_difference"].get(arm), "difference", "+.3f"),
                _number(head["switch_share"][arm], ".1%"),
                _interval(head["final_accuracy_also"][arm], "mean", ".3f"),
            )
        )
    rows = rows if also else [row[:-1] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    title = f"{settings['model']}: {Path(settings['train']).stem} → {Path(settings['test']).stem}"
    below = [*_claim_lines(head["claims"]), *(f"note: {note}" for note in head["notes"])]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:], *below])


def _claim_lines(claims: Mapping[str, Any]) -> list[str]:
    """What was found for a claim, in one line each."""
    lines: list[str] = []
    for number, found in claims.items():
        parts = [
            f"{_interval(found[key], 'difference', '+.3f')} at equal {word}"
            for key, word in (("equal_updates", "updates"), ("equal_wallclock", "wall-clock"))
            if found[key]
        ]
        if parts:
            lines.append(f"claim {number}: {found['arms'][0]} less {found['arms'][1]}: {', '.join(parts)}")
    return lines


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _interval(found: Mapping[str, Any] | None, key: str, form: str) -> str:
    if found is None:
        return "–"
    if found["low"] is None:
        return format(found[key], form)
    return f"{found[key]:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def draw(
    jobs: Sequence[Mapping[str, Any]], head: Mapping[str, Any], path: Path, *, settings: Mapping[str, Any]
) -> bool:
    """Accuracy against wall-clock: a thin line for each seed, a thick one for their mean. False: nothing to draw.

    Seeds that ran beside others are drawn at the seconds of the timed ones.
    """
    judged = [job for job in jobs if job.get("curve") and not is_tuning(job)]
    drawn = {arm: with_clocks([job for job in judged if job["arm"] == arm]) for arm in ARMS}
    if not any(drawn.values()):
        return False
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gsm8k"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    for arm in ARMS:
        curves = [points(job) for job in drawn[arm]]
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=COLOURS[arm], linewidth=0.7, alpha=0.45)
        if curves:
            shortest = min(map(len, curves))
            mean = [
                tuple(statistics.fmean(curve[i][axis] for curve in curves) for axis in (0, 1)) for i in range(shortest)
            ]
            style = "-" if arm in OURS else "--"
            words = label(arm, len(curves), settings)
            axes.plot(*zip(*mean, strict=True), style, color=COLOURS[arm], linewidth=2.2, marker="o", label=words)
    if head["target_accuracy"] is not None:
        axes.axhline(head["target_accuracy"], color="#888888", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds since the first generation, without evaluations")
    axes.set_ylabel(f"accuracy on {Path(settings['test']).stem}, temperature 1")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
