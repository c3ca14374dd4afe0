"""Numbers that Trinity-RFT's own tests publish for its PPO and GSPO losses (tests/algorithm/policy_loss_test.py).

Its inputs: `manual_seed(42)`, uniform [5, 20] tensors in [−1, 1], drawn in the order logprob, old, reference, mask
above 0.5 (uniform in [0, 1]), advantage. It has one advantage per token where we have one per response: for PPO each
token becomes a response of its own; for GSPO −min(s·A, clip(s)·A) is linear in A on either side of 0, so each response
is taken twice, with the sum of its positive and with the sum of its negative advantages.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stalewise.objectives import evaluate


def trinity_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(42)

    def draw() -> Tensor:
        return torch.rand(5, 20, generator=generator)

    logprob, old, _, mask, advantage = 2 * draw() - 1, 2 * draw() - 1, draw(), draw(), 2 * draw() - 1
    return logprob, old, mask > 0.5, advantage


def test_ppo() -> None:
    logprob, old, mask, advantage = (value.reshape(100, 1) for value in trinity_batch())
    result = evaluate("grpo", logp=logprob, behaviour_logp=old, mask=mask, advantage=advantage[:, 0])
    assert result.loss.item() == pytest.approx(0.28560468554496765, abs=1e-7)
    assert result.stats["clip_fraction"] == pytest.approx(0.3541666567325592, abs=1e-6)


def test_ppo_with_dual_clip() -> None:
    # Later releases cut r at 3 where A < 0 ("dual clip", 0.0625 of the tokens); grpo has no such bound, so it is put
    # into the ratio here.
    logprob, old, mask, advantage = (value.reshape(100, 1) for value in trinity_batch())
    cut = (advantage < 0) & (logprob - old > math.log(3)) & mask
    assert cut.sum() / mask.sum() == pytest.approx(0.0625)
    logprob = torch.where(cut, old + math.log(3), logprob)
    result = evaluate("grpo", logp=logprob, behaviour_logp=old, mask=mask, advantage=advantage[:, 0])
    assert result.loss.item() == pytest.approx(0.2688956, abs=1e-6)


def test_gspo() -> None:
    logprob, old, mask, advantage = trinity_batch()
    tokens = mask.sum(dim=1)
    positive = (advantage.clamp(min=0) * mask).sum(dim=1) / tokens
    negative = (advantage.clamp(max=0) * mask).sum(dim=1) / tokens
    result = evaluate(
        "gspo",
        logp=torch.cat([logprob, logprob]),
        behaviour_logp=torch.cat([old, old]),
        mask=torch.cat([mask, mask]),
        advantage=torch.cat([positive, negative]),
        denominator=5.0,
    )
    assert result.loss.item() == pytest.approx(0.2723511, abs=1e-6)
