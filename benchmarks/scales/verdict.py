"""The pure part: is a cost flat over a series of sizes, and if not, does what must be done per unit explain it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCE = 0.25  # a cost that rises by no more counts as flat

# series (the name of a run is series/size): what is measured there, in words
SERIES = {
    "store/rollouts": "store, by rollouts of a generation batch",
    "store/length": "store, by response tokens",
    "learner/rollouts": "learner, by rollouts of a generation batch",
    "learner/length": "learner, by response tokens",
    "sampler/rollouts": "sampler, by rollouts",
    "sampler/length": "sampler, by response tokens",
}


def rise(costs: Sequence[float]) -> float:
    """The largest relative rise from a smaller size to a larger one; 0 where the cost only falls.

    >>> rise([10.0, 8.0, 10.0])
    0.25
    """
    largest, smallest = 0.0, costs[0]
    for cost in costs:
        largest = max(largest, cost / smallest - 1)
        smallest = min(smallest, cost)
    return largest


def verdict(costs: Sequence[float], expected: Sequence[float] | None = None) -> dict[str, Any]:
    """Flat, explained or neither. `expected` is proportional to the work (or bytes) that one unit asks for."""
    found: dict[str, Any] = {"rise": rise(costs)}
    if found["rise"] <= TOLERANCE:
        falls = costs[0] / costs[-1] - 1
        words = f"flat within {found['rise']:.0%}" if falls <= TOLERANCE else f"falls by {1 - costs[-1] / costs[0]:.0%}"
        return {**found, "flat": True, "words": words}
    if expected is not None:
        found["expected_rise"] = rise(expected)
        found["unexplained_rise"] = rise([cost / work for cost, work in zip(costs, expected, strict=True)])
        if found["unexplained_rise"] <= TOLERANCE:
            words = f"rises by {found['rise']:.0%}; what a token asks for rises by {found['expected_rise']:.0%}"
            return {**found, "flat": False, "explained": True, "words": words}
    return {**found, "flat": False, "explained": False, "words": f"rises by {found['rise']:.0%}"}


def series_of(runs: Mapping[str, Mapping[str, Any]], series: str) -> list[tuple[int, Mapping[str, Any]]]:
    """(size, run) of a series by size, without those that failed."""
    found = [(int(name.rpartition("/")[2]), run) for name, run in runs.items() if name.startswith(series + "/")]
    return sorted(((size, run) for size, run in found if "costs" in run), key=lambda pair: pair[0])


def headline(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A verdict for every cost of every series."""
    verdicts: dict[str, Any] = {}
    for series in SERIES:
        points = series_of(runs, series)
        for cost in points[0][1]["costs"] if points else ():
            values = [run["costs"][cost] for _, run in points]
            expected = [run["expected"] for _, run in points] if all(run.get("expected") for _, run in points) else None
            verdicts[f"{series}: {cost}"] = {
                "sizes": [size for size, _ in points],
                "costs": values,
                **verdict(values, expected),
            }
    errors = [f"{name}: {run['error'].splitlines()[-1]}" for name, run in runs.items() if run.get("error")]
    return {"verdicts": verdicts, "notes": errors}


def markdown(record: Mapping[str, Any]) -> str:
    """One row for each cost."""
    lines = ["| cost | by size | verdict |", "|---|---|---|"]
    for name, found in record["verdicts"].items():
        series, _, cost = name.partition(": ")
        points = ", ".join(
            f"{size:,}: {value:,.0f}" for size, value in zip(found["sizes"], found["costs"], strict=True)
        )
        lines.append(f"| {SERIES[series]}: {cost} | {points} | {found['words']} |")
    return "\n".join(lines)
