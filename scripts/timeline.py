"""Draw when each run generated, learned and switched, as one SVG. The picture of the README:

stalewise demo --runs runs/demo && python scripts/timeline.py runs/demo/{grpo,mu_grpo,p3o} > docs/images/demo.svg
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from stalewise.store.json_lines import read_jsonl

COLOURS = {"generate": "#4c78a8", "learn": "#54a24b", "switch": "#e45756"}
WIDTH, LEFT, RIGHT, ROW, BAR = 960, 90, 150, 46, 26


def blocks(run: Path) -> list[tuple[str, float]]:
    """What the run did, one after the other; evaluation is left out, since it is the same in each."""
    return [(r["event"], r["seconds"]) for r in read_jsonl(run / "journal.jsonl") if r["event"] in COLOURS]


def row(run: Path, top: float, scale: float) -> list[str]:
    parts = [f'<text x="{LEFT - 8}" y="{top + 18}" text-anchor="end">{escape(run.name)}</text>']
    x = float(LEFT)
    for event, seconds in blocks(run):
        width = seconds * scale
        parts.append(f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{BAR}" fill="{COLOURS[event]}"/>')
        x += width
    evaluations = read_jsonl(run / "eval.jsonl")
    first, last = evaluations[0]["accuracy"]["value"], evaluations[-1]["accuracy"]["value"]
    total = sum(seconds for _, seconds in blocks(run))
    parts.append(f'<text x="{x + 8:.2f}" y="{top + 18}">{total:.0f} s, {first:.2f} → {last:.2f}</text>')
    return parts


def draw(runs: list[Path]) -> str:
    longest = max(sum(seconds for _, seconds in blocks(run)) for run in runs)
    scale = (WIDTH - LEFT - RIGHT) / longest
    body = [part for place, run in enumerate(runs) for part in row(run, 40 + place * ROW, scale)]
    legend = []
    for place, (event, colour) in enumerate(COLOURS.items()):
        x = LEFT + place * 110
        legend += [
            f'<rect x="{x}" y="8" width="14" height="14" fill="{colour}"/>',
            f'<text x="{x + 20}" y="20">{event}</text>',
        ]
    height = 40 + len(runs) * ROW
    style = 'font-family="system-ui, sans-serif" font-size="14" fill="#333"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" {style}>',
            "<title>Where the time of each run went: generating, learning, switching</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            *legend,
            *body,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    print(draw([Path(argument) for argument in sys.argv[1:]]))
