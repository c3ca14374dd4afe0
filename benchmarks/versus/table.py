"""The figures as a Markdown table, against what they must reach, and in words where one is missing or missed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

# key: (words, bound on a GPU, bound on a CPU, whether a smaller figure is better)
ROWS: dict[str, tuple[str, float | None, float | None, bool]] = {
    "learner_ratio": ("learner tokens/s against TRL's training step on the same tokens", 3, None, False),
    "mfu": ("model FLOP utilisation of the learner", 0.25, None, False),
    "sampler_ratio": ("`hf` sampler tokens/s with log-probabilities against `generate` at its best", 4, None, False),
    "time_to_accuracy_ratio": ("wall-clock to GRPO's final accuracy against TRL µ = 4", 3, None, False),
    "time_to_accuracy_ratio_same_mu": ("the same against TRL with our µ", 1.5, None, False),
    "memory_ratio": ("peak learner memory at equal tokens per step against TRL", 0.5, None, True),
    "idle_share": ("idle share of the device in the learning phase", 0.02, None, True),
    "wallclock_ratio": ("wall-clock for equal updates against TRL µ = 4", None, 1.5, False),
}
SHARES = ("mfu", "idle_share")


def on_gpu(record: Record) -> bool:
    return str(record["settings"]["device"]).startswith("cuda")


def bound(key: str, record: Record) -> float | None:
    """What a figure must reach on this kind of machine; None: nothing was promised."""
    _, gpu, cpu, _ = ROWS[key]
    return gpu if on_gpu(record) else cpu


def reaches(key: str, value: float, limit: float) -> bool:
    return value <= limit if ROWS[key][3] else value >= limit


def shown(key: str, value: float | None) -> str:
    """A figure as a person reads it.

    >>> shown("mfu", 0.3141), shown("learner_ratio", 3.14159), shown("memory_ratio", None)
    ('31.4%', '3.14×', 'n/a')
    """
    if value is None:
        return "n/a"
    return f"{value:.1%}" if key in SHARES else f"{value:.2f}×"


def markdown(record: Record) -> str:
    """One row for each figure, then where and when it was measured."""
    lines = ["| figure | must reach | measured | |", "|---|---|---|---|"]
    for key, (words, _, _, smaller) in ROWS.items():
        value, limit = record.get(key), bound(key, record)
        if value is None and limit is None:
            continue
        wanted = f"{'≤' if smaller else '≥'} {shown(key, limit)}" if limit is not None else ""
        verdict = "" if limit is None else "unknown" if value is None else "yes" if reaches(key, value, limit) else "no"
        extent = record.get(f"{key}_range")
        measured = shown(key, value)
        if extent and extent[0] != extent[1]:
            measured += f" ({shown(key, extent[0])} to {shown(key, extent[1])})"
        lines.append(f"| {words} | {wanted} | {measured} | {verdict} |")
    return "\n".join([*lines, "", provenance(record)])


def provenance(record: Record) -> str:
    """Date, machine, versions and commands of every sitting."""
    lines: list[str] = []
    for sitting in record.get("sittings", []):
        versions = ", ".join(f"{name} {value}" for name, value in sitting["versions"].items() if value)
        lines.append(
            f"{sitting['date'][:10]}, {sitting['device']}, {sitting['cores']} cores, Python {sitting['python']}, "
            f"{versions}: `{_short(sitting['command'])}`"
        )
    return "\n".join(dict.fromkeys(lines))


def _short(command: str) -> str:
    script, _, rest = command.partition(" ")
    return f"python benchmarks/{script.rpartition('/')[2]} {rest}".strip()


def problems(record: Record) -> list[str]:
    """Figures that miss their bound, and everything the figures say in words."""
    found: list[str] = []
    for key in ROWS:
        value, limit = record.get(key), bound(key, record)
        if value is not None and limit is not None and not reaches(key, value, limit):
            found.append(f"{key} is {shown(key, value)}, not {shown(key, limit)}")
    return [*found, *record.get("notes", [])]
