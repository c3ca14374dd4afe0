from __future__ import annotations

import math

import pytest
import torch

from batches import random_batch
from stalewise.objectives import make_tokens
from stalewise.objectives.diagnostics import SUMS, TokenSums, age_statistics, drift_statistics, token_sums
from stalewise.objectives.tokens import Tokens


def tokens_with(ratio: list[list[float]], advantage: list[float], mask: list[list[int]], logp: float = -1.0) -> Tokens:
    log_ratio = torch.tensor(ratio, dtype=torch.float64).log()
    return make_tokens(
        logp=torch.full_like(log_ratio, logp),
        behaviour_logp=logp - log_ratio,
        advantage=torch.tensor(advantage, dtype=torch.float64),
        mask=torch.tensor(mask),
        check_values=False,
    )


def test_every_statistic_by_hand() -> None:
    # Row 1 (A = 1): r = {2, ½}; row 2 (A = −1): r = {4}, one padded token; row 3 (A = 0): r = {1}.
    tokens = tokens_with([[2.0, 0.5], [4.0, 9.0], [1.0, 9.0]], [1.0, -1.0, 0.0], [[1, 1], [1, 0], [1, 0]], logp=-2.0)
    clipped = torch.tensor([[True, False], [False, False], [False, False]])
    vetoed = torch.tensor([[True, True], [True, False], [False, False]])
    stats = token_sums(tokens, clipped_BT=clipped, vetoed_BT=vetoed).summary()
    log2 = math.log(2)
    expected = {
        "ess": 7.5**2 / (4 * 21.25),  # Σr = 7.5, Σr² = 4 + ¼ + 16 + 1
        "ess_sequence": 6**2 / (3 * 18),  # products {1, 4, 1}
        "ratio_mean_positive": 1.25,
        "ratio_mean_negative": 4.0,
        "ratio_max_positive": 2.0,
        "ratio_max_negative": 4.0,
        "log_ratio_max_abs": 2 * log2,
        "log_ratio_mean_abs": log2,  # {log 2, log 2, 2 log 2, 0}
        "m2_harmful": log2**2,  # r = 2 at A > 0 alone: r = 4 at A < 0 is harmless
        "clip_fraction": 1 / 4,
        "veto_fraction": 3 / 4,
        "veto_response_fraction": 2 / 3,
        # r − 1 − log r: {1 − log 2, −½ + log 2, 3 − 2 log 2, 0}
        "kl_behaviour_policy": (3.5 - 2 * log2) / 4,
        # r log r − r + 1: {2 log 2 − 1, −½ log 2 + ½, 8 log 2 − 3, 0}
        "kl_policy_behaviour": (9.5 * log2 - 3.5) / 4,
        "entropy": 7.5 * 2 / 4,  # E_b[−r·ℓ]
        "response_length": 4 / 3,
        "tokens": 4,
        "responses": 3,
        "nonfinite": 0,
    }
    assert stats == pytest.approx(expected, rel=1e-12)


def test_the_largest_log_ratio_may_be_a_negative_one() -> None:
    # r = {2, 1/8}: |log r| = {log 2, 3·log 2}.
    stats = token_sums(tokens_with([[2.0, 0.125]], [1.0], [[1, 1]])).summary()
    assert stats["log_ratio_max_abs"] == pytest.approx(3 * math.log(2))


def test_exact_entropy_is_taken_where_it_is_given() -> None:
    tokens = tokens_with([[2.0, 1.0]], [1.0], [[1, 1]])
    entropy = torch.tensor([[0.5, 1.5]], dtype=torch.float64)
    assert token_sums(tokens, entropy_BT=entropy).summary()["entropy"] == 1.0
    entropy = torch.tensor([[0.5, math.nan]], dtype=torch.float64)
    assert token_sums(tokens, entropy_BT=entropy).summary()["entropy"] == 0.5


def test_nothing_to_take_a_mean_of_is_nan_and_not_zero() -> None:
    stats = token_sums(tokens_with([[1.0]], [0.0], [[1]])).summary()
    unknown = {name for name, value in stats.items() if math.isnan(value)}
    assert unknown == {
        "ratio_mean_positive",
        "ratio_mean_negative",
        "ratio_max_positive",
        "ratio_max_negative",
        "m2_harmful",
    }


def test_non_finite_tokens_are_counted_and_in_no_mean() -> None:
    tokens = tokens_with([[2.0, math.inf, math.nan, 1.0]], [1.0], [[1, 1, 1, 0]])
    stats = token_sums(tokens).summary()
    assert stats["nonfinite"] == 2
    assert stats["tokens"] == 3
    assert stats["ratio_mean_positive"] == pytest.approx(2.0)
    assert stats["kl_behaviour_policy"] == pytest.approx(1 - math.log(2))
    assert math.isnan(stats["ess"])
    assert math.isnan(stats["ess_sequence"])


def test_merge_is_concatenation_and_packing_is_lossless() -> None:
    batch = random_batch(sequences=12)
    whole = token_sums(make_tokens(**batch))
    parts = [token_sums(make_tokens(**{k: v[rows] for k, v in batch.items()})) for rows in (slice(0, 5), slice(5, 12))]
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert merged.summary() == pytest.approx(whole.summary(), rel=1e-12)
    assert TokenSums.unpack(whole.pack()).summary() == whole.summary()


def test_divergences_are_unbiased_for_samples_of_the_behaviour_policy() -> None:
    # Eight outcomes, both policies far apart; 200,000 samples of the behaviour policy; four standard errors.
    generator = torch.Generator().manual_seed(3)
    behaviour = torch.softmax(torch.randn(8, generator=generator, dtype=torch.float64), 0)
    policy = torch.softmax(torch.randn(8, generator=generator, dtype=torch.float64), 0)
    samples = torch.multinomial(behaviour, 200_000, replacement=True, generator=generator).reshape(1000, 200)
    tokens = make_tokens(
        logp=policy.log()[samples],
        behaviour_logp=behaviour.log()[samples],
        advantage=torch.zeros(1000, dtype=torch.float64),
        mask=torch.ones(1000, 200),
    )
    stats = token_sums(tokens).summary()
    ratio = policy / behaviour
    exact = {
        "kl_behaviour_policy": ((behaviour * (behaviour / policy).log()).sum(), ratio - 1 - ratio.log()),
        "kl_policy_behaviour": ((policy * ratio.log()).sum(), ratio * ratio.log() - ratio + 1),
        "entropy": (-(policy * policy.log()).sum(), -ratio * policy.log()),
    }
    # The two directions must be told apart, or the test would pass with them exchanged.
    assert abs(exact["kl_behaviour_policy"][0] - exact["kl_policy_behaviour"][0]) > 0.05
    for name, (expected, estimator) in exact.items():
        variance = (behaviour * estimator**2).sum() - (behaviour * estimator).sum() ** 2
        standard_error = math.sqrt(variance.item() / 200_000)
        assert stats[name] == pytest.approx(expected.item(), abs=4 * standard_error), name


def test_drift() -> None:
    assert drift_statistics(0.5, 0.01, 2.0) == {"update_norm": 0.5, "update_norm_per_lr": 50.0, "drift": 2.5}
    assert math.isnan(drift_statistics(0.5, 0.0, 2.0)["update_norm_per_lr"])


def test_age_is_computed_at_use_and_never_negative() -> None:
    assert age_statistics(10, torch.tensor([4, 9, 10])) == {"age_mean": pytest.approx(7 / 3), "age_max": 6.0}
    with pytest.raises(ValueError, match="versions go up to 11; expected none after update 10"):
        age_statistics(10, torch.tensor([4, 11]))


def test_sums_have_one_order_in_every_process() -> None:
    assert list(SUMS) == sorted(SUMS)  # ranks add them by position


def test_the_divergence_from_a_reference_is_that_of_its_tokens() -> None:
    logp = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    batch = {"logp": logp, "behaviour_logp": logp, "advantage": torch.zeros(2), "mask": mask}
    tokens = make_tokens(**batch, check_values=False, reference_logp=logp + torch.tensor([[0.5, -0.5], [0.0, 100.0]]))
    # exp(x) − x − 1 at f − ℓ = {½, −½, 0}; the padded token counts nowhere.
    expected = (math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 3
    assert token_sums(tokens).summary()["kl_reference"] == pytest.approx(expected, rel=1e-12)
