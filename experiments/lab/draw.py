"""SVG figures: panels of curves or points, and rows of means with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f2a541", "#8a63d2", "#2aa1a1", "#c9589a", "#7f8a94", "#a0672e", "#1f3b57")
WIDTH, PANEL_HEIGHT, ROW_HEIGHT = 960, 260, 22
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44  # margins of a panel
LEGEND_ROW = 20

Point = tuple[float, float, float, float]  # x, y, low, high; low = high = y without an interval


@dataclass(frozen=True, slots=True)
class Series:
    """One curve or set of points."""

    name: str
    points: Sequence[Point]
    mark: Literal["line", "dot", "cross", "dashed"] = "line"
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Series on one pair of axes."""

    title: str
    series: Sequence[Series]
    x_title: str = ""
    y_title: str = ""
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A labelled mean with its interval; `colour` groups rows."""

    name: str
    value: float
    low: float
    high: float
    note: str = ""
    colour: str = COLOURS[0]


@dataclass(frozen=True, slots=True)
class Rows:
    """A block of rows."""

    title: str
    rows: Sequence[Row]
    x_title: str = "held-out accuracy"
    x_range: tuple[float, float] = (0.0, 1.0)


@dataclass(slots=True)
class _Sheet:
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 12, weight: str = "") -> None:
        bold = f' font-weight="{weight}"' if weight else ""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{bold}'
        self.parts.append(f"<text {place}>{escape(words)}</text>")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> None:
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width}" fill="none"/>'
        )


def draw_panels(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """Panels side by side above one legend; a name has the same colour in all panels."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series if series.name))
    given = {series.name: series.colour for panel in panels for series in panel.series if series.colour}
    colours = {name: given.get(name) or COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    columns = min(columns, len(panels))
    width = WIDTH / columns
    lines = -(-len(panels) // columns)
    legend = _legend_places(names)
    height = 30 + lines * PANEL_HEIGHT + LEGEND_ROW * (1 + max((row for _, row in legend.values()), default=-1)) + 8
    sheet = _Sheet()
    for place, panel in enumerate(panels):
        left, top = width * (place % columns), 30 + PANEL_HEIGHT * (place // columns)
        _panel(sheet, panel, left, top, width, colours)
    for name, (x, row) in legend.items():
        y = 30 + lines * PANEL_HEIGHT + 14 + row * LEGEND_ROW
        sheet.parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colours[name]}"/>')
        sheet.text(x + 18, y, name)
    return _whole(title, height, sheet)


def draw_rows(title: str, blocks: Sequence[Rows]) -> str:
    """Blocks of rows under each other, each with its own scale."""
    height = 30.0
    sheet = _Sheet()
    longest = max((len(row.name) for block in blocks for row in block.rows), default=0)
    left = min(430.0, 30 + 6.6 * longest)
    right = WIDTH - 150.0
    for block in blocks:
        sheet.text(8, height + 20, block.title, weight="bold")
        height += 30
        low, high = block.x_range
        x = _scale(low, high, left, right, False)
        bottom = height + len(block.rows) * ROW_HEIGHT
        for tick in _ticks(low, high):
            sheet.line(x(tick), height, x(tick), bottom, "#ddd")
            sheet.text(x(tick), bottom + 15, _short(tick), "middle", 11)
        for place, row in enumerate(block.rows):
            y = height + (place + 0.5) * ROW_HEIGHT
            sheet.text(left - 10, y + 4, row.name, "end")
            if not math.isfinite(row.value):
                continue
            if math.isfinite(row.low) and math.isfinite(row.high):
                sheet.line(x(max(row.low, low)), y, x(min(row.high, high)), y, row.colour, 2.5)
            sheet.parts.append(
                f'<circle cx="{x(min(max(row.value, low), high)):.1f}" cy="{y:.1f}" r="4.5" fill="{row.colour}"/>'
            )
            sheet.text(right + 12, y + 4, row.note or f"{row.value:.3f}")
        sheet.text((left + right) / 2, bottom + 31, block.x_title, "middle", 11)
        height = bottom + 38
    return _whole(title, height + 4, sheet)


def _whole(title: str, height: float, sheet: _Sheet) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#333">'
    )
    body = [f"<title>{escape(title)}</title>", f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>']
    heading = f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, *body, heading, *sheet.parts, "</svg>", ""])


def _panel(sheet: _Sheet, panel: Panel, left: float, top: float, width: float, colours: dict[str, str]) -> None:
    points = [point for series in panel.series for point in series.points]
    x1, x2, y1, y2 = left + LEFT, left + width - RIGHT, top + PANEL_HEIGHT - BOTTOM, top + TOP
    sheet.text(x1, top + 20, panel.title, weight="bold")
    sheet.text((x1 + x2) / 2, y1 + 34, panel.x_title, "middle", 11)
    if panel.y_title:
        middle = (y1 + y2) / 2
        sheet.parts.append(
            f'<text transform="translate({left + 14:.1f} {middle:.1f}) rotate(-90)" text-anchor="middle" '
            f'font-size="11">{escape(panel.y_title)}</text>'
        )
    if not points:
        sheet.text((x1 + x2) / 2, (y1 + y2) / 2, "no results yet", "middle")
        return
    x_low, x_high = _span([p[0] for p in points], panel.x_log)
    y_low, y_high = panel.y_range or _span([v for p in points for v in p[1:]], panel.y_log)
    x, y = _scale(x_low, x_high, x1, x2, panel.x_log), _scale(y_low, y_high, y1, y2, panel.y_log)
    for tick in _ticks(y_low, y_high, panel.y_log):
        sheet.line(x1, y(tick), x2, y(tick), "#ddd")
        sheet.text(x1 - 6, y(tick) + 4, _short(tick), "end", 11)
    for tick in _ticks(x_low, x_high, panel.x_log):
        sheet.line(x(tick), y1, x(tick), y1 + 4, "#999")
        sheet.text(x(tick), y1 + 17, _short(tick), "middle", 11)
    sheet.line(x1, y1, x2, y1, "#999")

    def place_y(value: float) -> float:
        return y(min(max(value, y_low), y_high))

    for series in panel.series:
        _series(sheet, series, x, place_y, series.colour or colours.get(series.name, COLOURS[0]))


def _series(
    sheet: _Sheet, series: Series, x: Callable[[float], float], y: Callable[[float], float], colour: str
) -> None:
    points = [point for point in series.points if all(map(math.isfinite, point[:2]))]
    if series.mark in ("line", "dashed"):
        upper = [f"{x(p[0]):.1f},{y(p[3]):.1f}" for p in points]
        lower = [f"{x(p[0]):.1f},{y(p[2]):.1f}" for p in reversed(points)]
        if any(p[2] != p[3] for p in points):
            sheet.parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.15"/>')
        path = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in points)
        dash = ' stroke-dasharray="5 4"' if series.mark == "dashed" else ""
        sheet.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        return
    for point in points:
        px, py = x(point[0]), y(point[1])
        if series.mark == "cross":
            sheet.line(px - 4, py - 4, px + 4, py + 4, colour, 2)
            sheet.line(px - 4, py + 4, px + 4, py - 4, colour, 2)
        else:
            sheet.parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}" opacity="0.8"/>')
        if point[2] != point[3] and math.isfinite(point[2]) and math.isfinite(point[3]):
            sheet.line(px, y(point[2]), px, y(point[3]), colour, 1.5)


def _legend_places(names: Sequence[str]) -> dict[str, tuple[float, int]]:
    places: dict[str, tuple[float, int]] = {}
    x, row = 56.0, 0
    for name in names:
        width = 34 + 6.6 * len(name)
        if x + width > WIDTH and x > 56:
            x, row = 56.0, row + 1
        places[name] = (x, row)
        x += width
    return places


def _span(values: Sequence[float], log: bool) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if log:
        return low / 1.3, high * 1.3
    return (low - 0.5, high + 0.5) if low == high else (low, high)


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    def place(value: float) -> float:
        a, b, v = (math.log(max(n, 1e-300)) for n in (low, high, value)) if log else (low, high, value)
        return start + (end - start) * (v - a) / (b - a)

    return place


def _ticks(low: float, high: float, log: bool = False) -> list[float]:
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        wide = high / low > 200
        found = [10.0**power * factor for power in powers for factor in ((1,) if wide else (1, 2, 5))]
        return [tick for tick in found if low <= tick <= high]
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.0e}".replace("e-0", "e-")
