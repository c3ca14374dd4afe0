from __future__ import annotations

import math

import pytest
import torch

from stalewise.objectives.advantages import group_advantages


def test_group_divides_by_the_population_std() -> None:
    # R = {1, 0, 0, 0}: mean ¼, variance (9/16 + 3/16)/4 = 3/16, std √3/4 = .4330127.
    result = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.long))
    std = math.sqrt(3) / 4 + 1e-6
    assert result.advantage_N.tolist() == pytest.approx([0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std], rel=1e-12)
    assert (result.groups, result.degenerate_groups) == (1, 0)


def test_mean_only_and_leave_one_out() -> None:
    reward = torch.tensor([1.0, 0.0, 0.0, 3.0], dtype=torch.float64)
    group = torch.tensor([5, 5, 5, 5])
    # Mean 1: centred {0, −1, −1, 2}. Leave one out: R − mean of the others: 1 − 1, 0 − 4/3, 0 − 4/3, 3 − 1/3.
    assert group_advantages(reward, group, kind="mean").advantage_N.tolist() == [0, -1, -1, 2]
    assert group_advantages(reward, group, kind="leave_one_out").advantage_N.tolist() == pytest.approx(
        [0, -4 / 3, -4 / 3, 8 / 3]
    )


def test_batch_divides_by_the_std_of_all_rewards() -> None:
    # Mean of all 2, variance (1 + 1 + 4 + 4) / 4; each group is centred by its own mean, which is 2 as well.
    reward, group = torch.tensor([1.0, 3.0, 0.0, 4.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    found = group_advantages(reward, group, kind="batch").advantage_N.tolist()
    assert found == pytest.approx([one / math.sqrt(2.5) for one in (-1, 1, -2, 2)], rel=1e-5)


def test_groups_may_be_interleaved_and_of_different_size() -> None:
    reward = torch.tensor([1.0, 10.0, 3.0, 20.0, 30.0])
    group = torch.tensor([9, -2, 9, -2, -2])
    # Group 9: mean 2. Group −2: mean 20.
    assert group_advantages(reward, group, kind="mean").advantage_N.tolist() == [-1, -10, 1, 0, 10]
    assert group_advantages(reward, group).groups == 2


@pytest.mark.parametrize("kind", ["group", "mean", "leave_one_out"])
def test_a_group_without_variance_is_exactly_zero_and_counted(kind: str) -> None:
    # The float32 mean of seven times 0.1 is not 0.1: without the rule the advantage would be rounding noise over 1e-6.
    reward = torch.tensor([0.1] * 7 + [1.0, 0.0])
    group = torch.tensor([0] * 7 + [1, 1])
    result = group_advantages(reward, group, kind=kind)  # type: ignore[arg-type]
    assert result.advantage_N[:7].tolist() == [0.0] * 7
    assert result.degenerate_N.tolist() == [True] * 7 + [False] * 2
    assert (result.groups, result.degenerate_groups) == (2, 1)


def test_equal_rewards_are_degenerate_whatever_their_sign() -> None:
    # Group 0: −2, −2; group 1: 3, 3; group 2: −1, 0, which differ.
    reward = torch.tensor([-2.0, -2.0, 3.0, 3.0, -1.0, 0.0])
    result = group_advantages(reward, torch.tensor([0, 0, 1, 1, 2, 2]), kind="mean")
    assert result.degenerate_N.tolist() == [True, True, True, True, False, False]
    assert result.advantage_N.tolist() == [0, 0, 0, 0, -0.5, 0.5]
    assert result.degenerate_groups == 2


def test_a_group_of_one_is_degenerate() -> None:
    result = group_advantages(torch.tensor([3.0]), torch.tensor([0]), kind="leave_one_out")
    assert result.advantage_N.tolist() == [0.0]
    assert result.degenerate_groups == 1


def test_truncated_rules() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.0, 3.0]), torch.zeros(4, dtype=torch.long)
    truncated = torch.tensor([False, True, False, False])
    keep = group_advantages(reward, group, kind="mean", truncated=truncated)
    assert keep.advantage_N.tolist() == [0, -1, -1, 2]
    assert keep.keep_N.tolist() == [True] * 4
    zero = group_advantages(reward, group, kind="mean", truncated=truncated, truncated_rule="zero")
    assert zero.advantage_N.tolist() == [0, 0, -1, 2]  # the reward stays in the mean
    assert zero.keep_N.tolist() == [True] * 4
    mask = group_advantages(reward, group, kind="mean", truncated=truncated, truncated_rule="mask")
    assert mask.advantage_N.tolist() == [0, -1, -1, 2]
    assert mask.keep_N.tolist() == [True, False, True, True]


def test_half_precision_rewards_are_raised() -> None:
    assert group_advantages(torch.tensor([1.0, 0.0]).half(), torch.tensor([0, 0])).advantage_N.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": torch.zeros(2, 2)}, r"reward has shape \[2, 2\]; expected \[N\]"),
        ({"reward": torch.zeros(0), "group": torch.zeros(0).long()}, r"reward has shape \[0\]"),
        ({"group": torch.zeros(3).long()}, r"group has shape \[3\]; expected \[2\]"),
        ({"group": torch.zeros(2)}, "group has dtype torch.float32; expected integers"),
        ({"reward": torch.tensor([math.nan, 1.0])}, r"reward has shape \[2\] and 1 non-finite values, first at \[0\]"),
        ({"truncated_rule": "zero"}, "truncated is None; truncated_rule 'zero' expects"),
        ({"truncated": torch.zeros(3).bool()}, r"truncated has shape \[3\]; expected \[2\]"),
        ({"truncated": torch.zeros(2).long()}, "truncated has dtype torch.int64; expected bool"),
        ({"kind": "nope"}, "kind is 'nope'; expected one of group, mean, leave_one_out"),
        ({"truncated_rule": "nope"}, "truncated_rule is 'nope'; expected one of keep, zero, mask"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"reward": torch.tensor([1.0, 0.0]), "group": torch.tensor([0, 0])}
    with pytest.raises(ValueError, match=message):
        group_advantages(**(good | arguments))  # type: ignore[arg-type]


def test_the_first_five_bad_rewards_are_named_and_all_are_counted() -> None:
    reward = torch.tensor([0.0] + [math.nan] * 6)
    with pytest.raises(ValueError, match=r"and 6 non-finite values, first at \[1, 2, 3, 4, 5\];"):
        group_advantages(reward, torch.zeros(7).long())
