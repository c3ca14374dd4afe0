"""Curves with fewer points and numbers with fewer digits. Imports numpy only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

POINTS = 64  # of a curve, at most


def downsampled(x: Sequence[float] | Any, y: Sequence[float] | Any, points: int) -> list[list[float | None]]:
    """Means over equally many neighbours, ignoring non-finite values; None where all are non-finite.

    >>> downsampled([0, 1, 2, 3], [1.0, 3.0, float("nan"), 5.0], 2)
    [[0.5, 2.5], [2.0, 5.0]]
    """
    x, y = np.asarray(x, np.float64), np.asarray([math.nan if v is None else v for v in y], np.float64)
    width = -(-len(x) // points) if len(x) else 1
    starts = range(0, len(x), width)
    parts = [y[start : start + width] for start in starts]
    means = [rounded(float(part[np.isfinite(part)].mean())) if np.isfinite(part).any() else None for part in parts]
    return [[rounded(float(x[start : start + width].mean())) for start in starts], means]


def rounded(value: float) -> float | None:
    """Round to four significant digits, more than any figure shows.

    >>> rounded(0.123456), rounded(float("nan"))
    (0.1235, None)
    """
    return float(f"{value:.4g}") if math.isfinite(value) else None


def downsample_record(record: Mapping[str, Any], metrics: Sequence[str], points: int) -> dict[str, Any]:
    """A run record with the curves of these metrics only, at most `points` points each."""
    found = record.get("series", {})
    curves = {key: downsampled(found[key][0], found[key][1], points) for key in metrics if key in found}
    return {**record, "series": curves}
