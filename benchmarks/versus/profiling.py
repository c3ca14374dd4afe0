"""What a GPU did in a span of time, from torch.profiler: how long it was busy, with what, and where it waited.

The profiler instruments every CUDA graph when that is first launched, which holds up the host: what it sees in a first
span is thrown away.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from .figures import device_intervals, gap_places, gaps, union


def begin_profile() -> Any:
    """A profiler at the beginning of the span that is thrown away."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
    )
    profiler.start()
    return profiler


def keep_profile(profiler: Any) -> None:
    """What comes from here on is kept."""
    profiler.step()
    torch.ones(1, device="cuda").add_(1)  # the first launch that is kept takes longer than any other


def traced(profiler: Any, work: Path) -> list[tuple[float, float, str]]:
    """Begin, end and name of everything on the device, of a profiler that was stopped."""
    with tempfile.NamedTemporaryFile(suffix=".json", dir=work) as file:
        profiler.export_chrome_trace(file.name)
        intervals = device_intervals(json.loads(Path(file.name).read_text(errors="replace")))
    if not intervals:
        raise RuntimeError("the profiler saw no kernel: may this process trace the device (CUPTI)?")
    return intervals


def device_figures(intervals: list[tuple[float, float, str]], seconds: float) -> dict[str, Any]:
    """Of a span of so many seconds: the idle share, where the gaps are, and what took longest."""
    spans = [(start, end) for start, end, _ in intervals]
    busy = union(spans) / 1e6
    ms: dict[str, float] = {}
    for start, end, name in intervals:
        ms[name] = ms.get(name, 0.0) + (end - start) / 1e3
    calls = Counter(name for _, _, name in intervals)
    longest = sorted(ms, key=lambda name: -ms[name])[:15]
    holes = gaps(spans)
    buckets = {f"over_{bound}_us": [hole for hole in holes if hole > bound] for bound in (0, 10, 100, 1000, 10_000)}
    return {
        "idle_share": 1 - busy / seconds,
        "busy_seconds": busy,
        "kernels": len(intervals),
        "idle_share_gaps_over_10_us": sum(buckets["over_10_us"]) / 1e6 / seconds,
        "gap_places": gap_places(intervals, longer_than=10.0),
        "all_gap_places": gap_places(intervals, longer_than=0.0, most=40),
        "gaps": {name: {"count": len(found), "ms": sum(found) / 1e3} for name, found in buckets.items()},
        "top_kernels": [{"name": name[:120], "ms": round(ms[name], 3), "calls": calls[name]} for name in longest],
    }
