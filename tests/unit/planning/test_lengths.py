"""Response lengths: formulas against random draws."""

from __future__ import annotations

import numpy as np
import pytest

from stalewise.planning.cluster_hardware import ResponseLengths, cumulative


@pytest.mark.parametrize(
    "lengths",
    [ResponseLengths(500.0, 0.7, 2048), ResponseLengths(4000.0, 1.2, 8192), ResponseLengths(300.0, 0.1, 4096)],
)
def test_drawn_lengths_are_those_of_the_formulas(lengths: ResponseLengths) -> None:
    drawn = lengths.draw(64 * 4000, np.random.default_rng(0)).reshape(-1, 64)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert drawn.std() == pytest.approx(lengths.deviation(), rel=0.02)
    assert drawn.max(axis=1).mean() == pytest.approx(lengths.longest(64), rel=0.01)
    assert (drawn**2).mean() / (2 * drawn.mean()) == pytest.approx(lengths.mean_residual(), rel=0.02)
    assert lengths.mean_residual() < lengths.longest_residual(64) < lengths.most


def test_a_slot_ends_as_many_responses_as_the_renewal_equation_says() -> None:
    lengths = ResponseLengths(500.0, 0.7, 2048)
    ends = np.cumsum(lengths.draw(20000 * 40, np.random.default_rng(0)).reshape(-1, 40), axis=1)
    for count in (0.2, 1.0, 2.5, 12.0):
        steps = lengths.renewal(count)
        assert (ends <= steps).sum(axis=1).mean() == pytest.approx(count, rel=0.02)


def test_an_integral_starts_at_zero() -> None:
    assert cumulative(np.array([1.0, 1.0, 3.0])).tolist() == [0.0, 1.0, 3.0]
