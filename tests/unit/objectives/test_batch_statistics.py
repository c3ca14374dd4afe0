from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stalewise.objectives.batch_statistics import (
    AnchorSums,
    SecondMomentSums,
    WeightSums,
    anchor_weights,
    harmful,
    sequence_weights,
    vcpo_factor,
)
from stalewise.objectives.tokens import make_tokens


def weights(*values: float) -> WeightSums:
    log_weight = torch.tensor(values, dtype=torch.float64).log()
    return WeightSums.of(log_weight, torch.ones(len(values), dtype=torch.bool))


def test_weight_sums_are_relative_to_the_largest_weight() -> None:
    # {1, 2, 4} / 4: sum 7/4, squares (1 + 4 + 16)/16.
    sums = weights(1, 2, 4)
    assert [x.item() for x in (sums.total, sums.total_squares, sums.count, sums.nonfinite)] == pytest.approx(
        [7 / 4, 21 / 16, 3, 0]
    )
    assert sums.log_scale.item() == pytest.approx(math.log(4))
    assert sums.effective_sample_size().item() == pytest.approx(49 / (3 * 21))


def test_merge_is_concatenation_in_either_order() -> None:
    whole = weights(1, 2, 4, 0.5)
    for merged in (weights(1, 2).merge(weights(4, 0.5)), weights(4, 0.5).merge(weights(1, 2))):
        assert merged.pack().tolist() == pytest.approx(whole.pack().tolist(), rel=1e-14)


def test_an_empty_part_changes_nothing() -> None:
    empty = WeightSums.of(torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bool))
    some = weights(1, 2)
    assert some.merge(empty).pack().tolist() == some.pack().tolist()
    assert empty.merge(some).pack().tolist() == some.pack().tolist()
    assert empty.merge(empty).effective_sample_size().isnan()
    # Two empty parts are an empty part, and still change nothing.
    assert empty.merge(empty).merge(some).pack().tolist() == some.pack().tolist()
    assert some.merge(empty.merge(empty)).pack().tolist() == some.pack().tolist()


def test_weights_that_would_overflow_have_an_effective_sample_size() -> None:
    # e^2000 and e^2000/2: as {1, ½}: (1.5)² / (2·1.25) = 0.9.
    huge = torch.tensor([2000.0, 2000.0 - math.log(2)], dtype=torch.float64)
    assert WeightSums.of(huge, torch.ones(2).bool()).effective_sample_size().item() == pytest.approx(0.9)
    assert WeightSums.of(-huge, torch.ones(2).bool()).effective_sample_size().item() == pytest.approx(0.9)


def test_rounding_does_not_lift_the_effective_sample_size_above_one() -> None:
    # Three equal weights whose squares were summed to one unit in the last place less than 3: 3² / (3·(3 − 4.4e-16)).
    total, squares = torch.tensor(3.0, dtype=torch.float64), math.nextafter(3.0, 0.0)
    assert 9.0 / (3.0 * squares) > 1.0
    rounded = replace(weights(1, 1, 1), total=total, total_squares=torch.tensor(squares, dtype=torch.float64))
    assert rounded.effective_sample_size().item() == 1.0


def test_unknown_is_never_fine() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        sums = WeightSums.of(torch.tensor([0.0, bad]), torch.tensor([True, True]))
        assert sums.nonfinite.item() == 1
        assert sums.count.item() == 1
        assert sums.effective_sample_size().isnan()
        assert weights(1, 1).merge(sums).effective_sample_size().isnan()
        ignored = WeightSums.of(torch.tensor([0.0, bad]), torch.tensor([True, False]))
        assert ignored.effective_sample_size().item() == 1.0


def test_weight_sums_carry_no_gradient() -> None:
    log_weight = torch.zeros(3, requires_grad=True)
    assert not WeightSums.of(log_weight, torch.ones(3).bool()).total.requires_grad


def test_packing_and_unpacking() -> None:
    sums = weights(1, 2, 4)
    assert WeightSums.unpack(sums.pack()) == sums
    pair = AnchorSums(sums, weights(3, 1))
    unpacked = AnchorSums.unpack(pair.pack())
    assert unpacked == pair
    merged = pair.merge(AnchorSums(weights(5), weights(7)))
    assert merged.behaviour.count.item() == 4
    assert merged.proximal.count.item() == 3
    moments = second_moments([0.01, 0.05, 0.2])
    packed = SecondMomentSums.unpack(moments.pack())
    assert packed.threshold == 0.04
    assert packed.pack().tolist() == moments.pack().tolist()


def second_moments(squares: list[float], threshold: float = 0.04) -> SecondMomentSums:
    tensor = torch.tensor(squares, dtype=torch.float64)
    return SecondMomentSums.of(tensor, torch.ones(len(squares), dtype=torch.bool), threshold)


def test_second_moments_keep_only_large_values_apart() -> None:
    sums = second_moments([0.01, 0.05, 0.03, 0.2])
    assert [sums.small_total.item(), sums.small_count.item(), sums.small_max.item()] == pytest.approx([0.04, 2, 0.03])
    assert sorted(sums.large_N.tolist()) == [0.05, 0.2]
    merged = sums.merge(second_moments([0.035, 0.3]))
    assert [merged.small_total.item(), merged.small_count.item(), merged.small_max.item()] == pytest.approx(
        [0.075, 3, 0.035]
    )
    assert sorted(merged.large_N.tolist()) == [0.05, 0.2, 0.3]
    assert merged.threshold == 0.04


def test_a_nan_square_is_large_so_that_it_cannot_pass() -> None:
    assert len(second_moments([0.01, math.nan]).large_N) == 1


@pytest.mark.parametrize(
    ("squares", "drop_from", "clip_above"),
    [
        ([0.01, 0.03], math.inf, math.inf),  # mean .02
        ([0.125, 0.5], 0.125, 0.0),  # nothing may stay; k = 0
        ([0.01, 0.01, 0.01, 0.06, 0.5], 0.5, 0.06),  # .09/4 ≤ .04 stays; Σmin = .15 < .2 at .06, .59 at .5: τ² = .06
        ([0.01, 0.01, 0.25, 0.25], 0.25, 0.01),  # .27/3 > .04; at .25 Σmin = .52 ≥ .16: τ² = .01, the largest small one
        ([0.0, 0.0, 0.0, 0.08, 0.08], math.inf, math.inf),  # mean .032
        ([0.0, 0.0, 0.125, 0.125], 0.125, 0.0),  # .125/3 > .04: equal values go together
    ],
)
def test_where_m2po_cuts(squares: list[float], drop_from: float, clip_above: float) -> None:
    sums = second_moments(squares)
    assert sums.drop_from().item() == drop_from
    assert sums.clip_above().item() == clip_above


def test_without_harmful_tokens_nothing_is_cut() -> None:
    sums = SecondMomentSums.of(torch.tensor([9.0]), torch.tensor([False]), 0.04)
    assert sums.drop_from().item() == sums.clip_above().item() == math.inf


def test_a_mean_exactly_at_the_budget_is_within_it() -> None:
    # ½ and ¼ are exact in binary: mean of {¼, ¾} is ½.
    sums = second_moments([0.25, 0.75], threshold=0.5)
    assert sums.drop_from().item() == math.inf
    assert sums.clip_above().item() == math.inf
    # Dropping {1.0} of {¼, ¾, 1} leaves a mean of exactly ½; clipping: at k = 1, ¼ + ¾ + ¾ = 1.75 ≥ 1.5: τ² = ¼.
    sums = second_moments([0.25, 0.75, 1.0], threshold=0.5)
    assert sums.drop_from().item() == 1.0
    assert sums.clip_above().item() == 0.25


def test_a_capped_sum_exactly_at_the_budget_counts_as_reached() -> None:
    # {0, ½, 1, 1}, budget ½·4 = 2, mean .625: k = 1: 0 + ½·3 = 1.5 < 2; k = 2: 0 + ½ + 1·2 = 2.5 ≥ 2: τ² = ½.
    assert second_moments([0.0, 0.5, 1.0, 1.0], threshold=0.5).clip_above().item() == 0.5
    # {½, ½, 2}: budget 1.5: k = 0: ½·3 = 1.5 ≥ 1.5 already: τ² = 0.
    assert second_moments([0.5, 0.5, 2.0], threshold=0.5).clip_above().item() == 0.0


def tokens_of(log_ratio: Tensor, advantage: Tensor, mask: Tensor):
    return make_tokens(
        logp=log_ratio - 1.0,
        behaviour_logp=torch.full_like(log_ratio, -1.0),
        proximal_logp=torch.full_like(log_ratio, -1.0) - math.log(2),
        advantage=advantage,
        mask=mask,
    )


def test_harmful_tokens_have_gone_where_their_advantage_pushes() -> None:
    log_ratio = torch.tensor([[0.1, -0.1, 0.0, 0.1]] * 3)
    mask = torch.tensor([[1, 1, 1, 0]] * 3)
    marked = harmful(tokens_of(log_ratio, torch.tensor([2.0, -2.0, 0.0]), mask))
    assert marked.int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_sequence_weights_are_products_over_responses_that_have_tokens() -> None:
    log_ratio = torch.tensor([[0.1, 0.2], [0.3, 9.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    sums = sequence_weights(tokens_of(log_ratio, torch.zeros(3), mask))
    assert sums.count.item() == 2
    assert sums.effective_sample_size().item() == pytest.approx(1.0)


def test_anchor_weights_read_both_policies() -> None:
    sums = anchor_weights(tokens_of(torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2)))
    assert sums.behaviour.log_scale.item() == pytest.approx(0.0)
    assert sums.proximal.log_scale.item() == pytest.approx(math.log(2), rel=1e-6)


def test_vcpo_factor_is_the_root_of_the_effective_sample_size() -> None:
    # w = {1, 1, 1, 5}: ρ = 64 / (4·28) = .571429; √ρ = .755929.
    weights = WeightSums.of(torch.tensor([1.0, 1.0, 1.0, 5.0], dtype=torch.float64).log(), torch.ones(4).bool())
    assert vcpo_factor(weights).item() == pytest.approx(math.sqrt(64 / 112))


def test_fresh_data_takes_the_whole_step() -> None:
    assert vcpo_factor(WeightSums.of(torch.zeros(5), torch.ones(5).bool())).item() == 1.0
