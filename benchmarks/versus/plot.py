"""Two panels in one SVG: accuracy against wall-clock of every run, and each figure against what it must reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from .table import ROWS, bound, reaches, shown

Record = Mapping[str, Any]

COLOURS = {"trl": "#e45756", "trl_same_mu": "#d18700", "stalewise": "#2f6db3"}
WIDTH, HEIGHT, TOP, BOTTOM = 960, 400, 56, 48
LEFT, SPLIT = 56, 470  # the first panel reaches from LEFT to SPLIT


def draw(record: Record) -> str:
    """The whole picture."""
    title = "stalewise against TRL: accuracy by wall-clock, and each figure against what it must reach"
    return _picture(title, WIDTH, HEIGHT, [*_curves(record, SPLIT - 20, HEIGHT), *_bars(record)])


def _picture(title: str, width: int, height: int, parts: list[str]) -> str:
    box = f'viewBox="0 0 {width} {height}"'
    style = 'font-family="system-ui, sans-serif" font-size="13" fill="#333"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" {box} role="img" {style}>',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>",
        ]
    )


def _curves(record: Record, right: int, height: int) -> list[str]:
    runs = {name: run for name, run in record["runs"].items() if name.startswith("accuracy/") and run.get("curves")}
    if not runs:
        return []
    longest = max(run["times"][-1] for run in runs.values())
    step = _nice(longest / 5)

    def x(seconds: float) -> float:
        return LEFT + (right - LEFT) * seconds / longest

    def y(accuracy: float) -> float:
        return height - BOTTOM - (height - BOTTOM - TOP) * accuracy

    parts = [_text(LEFT, 20, "held-out accuracy, one line per seed")]
    parts.append(_text((LEFT + right) / 2, height - BOTTOM + 40, "seconds of training", "middle"))
    for tick in range(6):
        parts.append(_line(LEFT, y(tick / 5), right, y(tick / 5), "#ddd"))
        parts.append(_text(LEFT - 8, y(tick / 5) + 4, f"{tick / 5:.1f}", "end"))
    for tick in range(int(longest / step) + 1):
        parts.append(_text(x(tick * step), height - BOTTOM + 20, f"{tick * step:g}", "middle"))
    for name, run in runs.items():
        method = name.split("/")[1]
        places = [(x(t), y(a)) for t, a in zip(run["times"], run["curves"]["held_out"], strict=True)]
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        colour, (end, final) = COLOURS[method], places[-1]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{end:.1f}" cy="{final:.1f}" r="4" fill="{colour}"/>')
    return [*parts, *_legend(record)]


def _legend(record: Record) -> list[str]:
    settings = record["settings"]
    mu = settings["updates"] // settings["stages"]
    words = {
        "stalewise": f"stalewise, µ = {mu}",
        "trl": f"TRL, µ = {settings['trl_mu']}",
        "trl_same_mu": f"TRL, µ = {mu}",
    }
    parts: list[str] = []
    left = LEFT
    for method, text in words.items():
        parts.append(f'<rect x="{left}" y="30" width="12" height="12" fill="{COLOURS[method]}"/>')
        parts.append(_text(left + 18, 41, text))
        left += 34 + 7 * len(text)  # a letter is about 7 wide
    return parts


def _bars(record: Record) -> list[str]:
    """Length: how many times the bound is reached; the dashed line is the bound itself."""
    figures = {key: (record[key], bound(key, record)) for key in ROWS if record.get(key) is not None}
    if not figures:
        return []
    left, right = SPLIT + 250, WIDTH - 76
    row = min(40, (HEIGHT - TOP - BOTTOM) / len(figures))
    parts = [_text(SPLIT + 20, 20, "measured, against the bound (dashed)")]
    for place, (key, (value, limit)) in enumerate(figures.items()):
        top = TOP + place * row
        score = _score(key, value, limit)
        colour = "#999" if limit is None else "#54a24b" if reaches(key, value, limit) else "#e45756"
        width = (right - left) * min(score, 2.0) / 2
        parts.append(_text(left - 8, top + 0.3 * row + 5, key.replace("_", " "), "end"))
        parts.append(f'<rect x="{left}" y="{top:.1f}" width="{width:.1f}" height="{row * 0.6:.1f}" fill="{colour}"/>')
        parts.append(_text(right + 12, top + 0.3 * row + 5, shown(key, value)))
    middle = (left + right) / 2
    end = TOP + len(figures) * row
    parts.append(f'<path d="M{middle} {TOP - 6}V{end:.1f}" stroke="#333" stroke-dasharray="4 3" fill="none"/>')
    return parts


def _score(key: str, value: float, limit: float | None) -> float:
    """1 at the bound, more where it is better; 2 where no bound was set, since nothing is missed."""
    if limit is None:
        return 1.0
    if ROWS[key][3]:
        return limit / value if value > 0 else 2.0
    return max(0.0, value / limit)


def _nice(step: float) -> float:
    power = 10 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" fill="none"/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
