"""Tokens are drawn from the stated distribution, and their log-probabilities are of exactly that one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from policies import sampling_logp
from stalewise.rollout.token_sampling import device_uniforms, draw, rollout_seed, uniforms
from stalewise.types import SamplerSettings

LOGITS = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])


def probabilities(**settings: float) -> list[float]:
    return sampling_logp(LOGITS, SamplerSettings(**settings)).exp()[0].tolist()  # type: ignore[arg-type]


def test_the_convention_of_temperature_and_truncation() -> None:
    assert probabilities() == pytest.approx([0.5, 0.3, 0.2])
    # Temperature ½ squares the probabilities: .25 : .09 : .04, sum .38.
    assert probabilities(temperature=0.5) == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38])
    assert probabilities(top_k=2) == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0.0])
    assert probabilities(top_k=3) == probabilities(top_k=99) == probabilities()
    # The smallest set with probability ≥ .6 is {.5, .3}; a bound that the first token reaches alone leaves it alone.
    assert probabilities(top_p=0.6) == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0.0])
    assert probabilities(top_p=0.5) == pytest.approx([1.0, 0.0, 0.0])
    assert probabilities(top_p=0.01) == pytest.approx([1.0, 0.0, 0.0])
    # Temperature comes first: at ½ the first token has .658 and reaches .6 alone.
    assert probabilities(temperature=0.5, top_p=0.6) == pytest.approx([1.0, 0.0, 0.0])
    # top_k comes before top_p: of {.5, .3} renormalised, .625 reaches .6.
    assert probabilities(top_k=2, top_p=0.6) == pytest.approx([1.0, 0.0, 0.0])


def test_draws_invert_the_distribution_function() -> None:
    logp = sampling_logp(LOGITS, SamplerSettings()).expand(5, 3)
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.799, 0.999999])
    assert draw(logp, uniform)[0].tolist() == [0, 0, 1, 1, 2]


def test_a_token_that_was_cut_away_is_never_drawn() -> None:
    logp = sampling_logp(LOGITS.flip(1), SamplerSettings(top_k=1)).expand(3, 3)
    assert draw(logp, torch.tensor([0.0, 0.5, 1.0 - 1e-12], dtype=torch.float64))[0].tolist() == [2, 2, 2]


def test_draws_have_the_stated_frequencies() -> None:
    count = 50_000
    uniform = torch.from_numpy(uniforms([7], count)[0])
    logp = sampling_logp(LOGITS, SamplerSettings(temperature=0.5))
    drawn, _ = draw(logp.expand(count, 3), uniform)
    frequency = np.bincount(drawn.numpy(), minlength=3) / count
    # Four standard errors of a frequency near ½: 4·√(¼/50,000) = .009.
    assert frequency == pytest.approx(logp.exp()[0].numpy(), abs=0.009)


def test_seeds_differ_by_run_rollout_and_purpose_and_fit_the_store() -> None:
    seeds = {rollout_seed(run, rollout, purpose) for run in range(4) for rollout in range(50) for purpose in (0, 1)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert uniforms([5, 6], 3)[1].tolist() == uniforms([6], 3)[0].tolist()


def test_uniform_numbers_are_the_same_on_the_device() -> None:
    seeds = [rollout_seed(0, i) for i in range(50)]
    expected = uniforms(seeds, 7)
    for position in range(7):
        found = device_uniforms(torch.tensor(seeds), torch.full((50,), position))
        assert found.tolist() == expected[:, position].tolist()


def test_draws_go_through_blocks_of_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 1000)
    uniform = torch.rand(64, dtype=torch.float64)
    token, logp = draw(logits, uniform)
    cumulative = logits.double().softmax(1).cumsum(1)
    assert token.tolist() == torch.searchsorted(cumulative, uniform[:, None], right=True).squeeze(1).tolist()
    assert logp.tolist() == pytest.approx(logits.log_softmax(1).gather(1, token[:, None]).squeeze(1).tolist(), abs=1e-5)


def test_logits_that_are_not_numbers_draw_a_token_with_no_log_probability() -> None:
    token, logp = draw(torch.full((2, 300), math.nan), torch.tensor([0.1, 0.9]))
    assert (token < 300).all() and not logp.isfinite().any()
