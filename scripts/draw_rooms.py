"""Draw the rooms of the package and who imports whom: `python scripts/draw_rooms.py` writes docs/images/rooms.svg.

A room is a folder or a file directly under `src/stalewise`. Arrows come from the import statements, those inside of
functions included. An arrow that follows from two others is left out, so that the picture shows the order of the rooms.
"""

from __future__ import annotations

import argparse
import ast
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stalewise"
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 132, 44, 22, 46, 16

PURPOSE = {
    "cli": "parse, call, print",
    "api": "the public functions",
    "orchestrator": "what a run does next",
    "planning": "cost, memory, law",
    "integrations": "TRL, verl, hub",
    "reporting": "reads runs, no torch",
    "rollout": "checkpoint → rollouts",
    "trainer": "rollouts → policy",
    "models": "loading, kernels",
    "distributed": "ranks",
    "config": "what a run is",
    "store": "committed to disk",
    "tasks": "prompts, verifiers",
    "objectives": "pure: losses",
    "staleness": "pure: schedule, law",
    "types": "records",
    "errors": "messages",
    "statistics": "intervals",
}


def room_of(path: Path) -> str:
    """The room that a file belongs to."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports() -> dict[str, set[str]]:
    """For each room the rooms that its files import."""
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")} - {"__init__", "__main__"}
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for path in SOURCE.rglob("*.py"):
        room = room_of(path)
        if room not in found:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            targets = {name.split(".")[1] for name in names if name.startswith("stalewise.")}
            found[room] |= (targets & rooms) - {room}
    return found


def below(room: str, graph: dict[str, set[str]]) -> set[str]:
    """All rooms that a room reaches."""
    seen: set[str] = set()
    stack = [room]
    while stack:
        for other in graph[stack.pop()] - seen:
            seen.add(other)
            stack.append(other)
    return seen


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without arrows that follow from others."""
    return {
        room: {other for other in others if not any(other in below(third, graph) for third in others - {other})}
        for room, others in graph.items()
    }


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rooms from top to bottom; each is above everything that it imports."""
    depth: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():  # raises CycleError where two rooms import each other
        depth[room] = 1 + max((depth[other] for other in graph[room]), default=-1)
    return [sorted(r for r in depth if depth[r] == level) for level in range(max(depth.values()), -1, -1)]


def draw(graph: dict[str, set[str]]) -> str:
    """The picture as SVG."""
    rows = levels(graph)
    widest = max(len(row) for row in rows)
    width = 2 * MARGIN + widest * WIDTH + (widest - 1) * GAP_X
    height = 2 * MARGIN + len(rows) * HEIGHT + (len(rows) - 1) * GAP_Y
    where: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP_X) / 2
        for column, room in enumerate(row):
            where[room] = (left + column * (WIDTH + GAP_X), MARGIN + number * (HEIGHT + GAP_Y))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
    ]
    for room, others in sorted(reduced(graph).items()):
        for other in sorted(others):
            (x1, y1), (x2, y2) = where[room], where[other]
            start, end = (x1 + WIDTH / 2, y1 + HEIGHT), (x2 + WIDTH / 2, y2 - 1)
            parts.append(
                f'<path d="M{start[0]:g} {start[1]:g}C{start[0]:g} {start[1] + 24:g} {end[0]:g} {end[1] - 24:g} '
                f'{end[0]:g} {end[1]:g}" fill="none" stroke="#99a" stroke-width="1.2" marker-end="url(#tip)"/>'
            )
    for room, (x, y) in sorted(where.items()):
        fill = "#eef3fb" if (SOURCE / room).is_dir() else "#f6f6f4"
        parts += [
            f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#556"/>',
            _text(x, y + 19, room, 'font-size="14" font-weight="600" fill="#223"'),
            _text(x, y + 35, PURPOSE.get(room, ""), 'font-size="10.5" fill="#445"'),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x + WIDTH / 2:g}" y="{y:g}" text-anchor="middle" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "rooms.svg")
    arguments = parser.parse_args()
    arguments.out.write_text(draw(imports()))
    print(arguments.out)
