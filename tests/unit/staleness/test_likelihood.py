"""The arithmetic behind the staleness law: gradient, draws and where the search for a maximum goes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stalewise.staleness.law import Law
from stalewise.staleness.likelihood import (
    draw,
    large_sample_threshold,
    log_drifts,
    log_likelihood,
    select_model,
    starting_points,
)


@pytest.mark.parametrize("parameters", [(-2.0, -0.3, -1.2), (-3.5, 0.4, -0.5), (700.0, 0.0, -2.0), (-2.0, 700.0, -1.0)])
def test_the_gradient_is_that_of_the_likelihood(parameters: tuple[float, float, float]) -> None:
    data = log_drifts(
        np.array([8.0, 16.0, 4.0, 64.0, 8.0]),
        np.array([0.01, 0.02, 0.005, 0.01, 0.3]),
        np.array([100.0, 50.0, 200.0, 100.0, 100.0]),
        np.array([1.0, 10.0, 1.0, 1.0, 32.0]),
        np.array([0.0, 30.0, 0.0, 40.0, 1.0]),
    )
    here = np.array(parameters)
    for index in range(3):
        step = np.eye(3)[index] * 1e-5
        slope = (log_likelihood(here + step, data)[0] - log_likelihood(here - step, data)[0]) / 2e-5
        assert log_likelihood(here, data)[1][index] == pytest.approx(slope, rel=1e-5, abs=1e-5)


def test_a_broken_batch_collapses_at_any_update_alike() -> None:
    columns = np.full(4000, 8.0), np.full(4000, 1.0), np.full(4000, 4.0)
    drawn = draw(Law(1e-3, math.inf, 0.1).parameters(), *columns, np.random.default_rng(0))
    counts = np.bincount(drawn.astype(int), minlength=5)
    assert counts[0] == 0
    assert np.all(np.abs(counts[1:] - 1000) < 4 * math.sqrt(4000 * 0.25 * 0.75))  # binomial, 4 standard deviations


def test_a_radius_is_crossed_in_the_first_update_at_the_earliest() -> None:
    ones = np.ones(3)
    assert draw(
        Law(math.inf, 1e-300, 0.1).parameters(), ones, ones * 1e200, ones * 9, np.random.default_rng(0)
    ).tolist() == [1.0, 1.0, 1.0]


def test_a_draw_is_two_normals_and_then_an_update() -> None:
    columns = np.full(50, 8.0), np.full(50, 0.0125), np.full(50, 60.0)  # S·η·G = 0.1
    drawn = draw(Law(0.1, 0.5, 0.3).parameters(), *columns, np.random.default_rng(7))
    generator = np.random.default_rng(7)
    batch, critical = generator.standard_normal((2, 50))
    at_random = generator.integers(1, 61, size=50)
    crossed = np.ceil(0.5 * np.exp(0.3 * critical) / 0.0125)
    expected = np.where(batch < 0, at_random, np.where(crossed <= 60, crossed, 0))  # R_batch,i < 0.1 where its ε < 0
    assert drawn.tolist() == expected.tolist()


def test_the_search_starts_among_the_drifts() -> None:
    tenths = np.linspace(0.0, 1.0, 11)
    expected = [(batch, 2 + critical, math.log(0.2)) for batch in (0.1, 0.5, 0.9) for critical in (0.1, 0.5, 0.9)]
    assert np.array(starting_points(tenths, 2 + tenths)) == pytest.approx(np.array(expected), abs=1e-12)


def test_the_search_reaches_three_of_the_largest_scatters_beyond_the_drifts() -> None:
    staleness, rate = np.array([8.0, 4.0, 64.0, 64.0] * 3), np.array([0.001, 0.02, 0.01, 0.02] * 3)
    # (8, 0.001) survives; (4, 0.02) collapses at t·η·G = 1; the others, of large S·η·G, at times that say nothing
    times = np.array([0, 50, 3, 90, 0, 50, 77, 12, 0, 50, 31, 60.0])
    data = log_drifts(staleness, rate, np.full(12, 100.0), np.ones(12), times)
    _, box, radii = select_model(data, starting_points(np.log(staleness * rate), data.collapsed_by))
    assert radii == [0, 1]
    assert box[0] == pytest.approx([math.log(0.008) - 6, math.log(1.28) + 6])  # S·η·G of 8 · 0.001 and 64 · 0.02
    # drifts survived or collapsed at: 100 · 0.001 for the survivors, 3 · 0.01 and 90 · 0.02 at the ends
    assert box[1] == pytest.approx([math.log(0.03) - 6, math.log(1.8) + 6])
    assert box[2] == pytest.approx([math.log(0.02), math.log(2.0)])


def test_the_threshold_of_many_runs_is_half_the_quantile_of_chi_squared() -> None:
    assert large_sample_threshold(0.9) == pytest.approx(1.3528, abs=5e-5)  # 1.6449² / 2
