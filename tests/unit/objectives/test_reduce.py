"""Reduction of token losses."""

from __future__ import annotations

import pytest
import torch

from stalewise.objectives.tokens import constant_denominator, make_tokens, natural_denominator, reduced

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
TOKENS = make_tokens(logp=torch.zeros(3, 4), behaviour_logp=torch.zeros(3, 4), advantage=torch.ones(3), mask=MASK)
LOSS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 7.0, 100.0, 100.0], [100.0] * 4])


def test_tokens_are_summed_and_responses_averaged_first() -> None:
    # Tokens: 10 + 12 = 22. Responses: 10/4 + 12/2 = 8.5; the empty one adds nothing.
    assert reduced(LOSS, TOKENS, "token", 2.0).item() == 11.0
    assert reduced(LOSS, TOKENS, "sequence", 1.0).item() == 8.5


def test_the_natural_denominator_counts_tokens_or_responses() -> None:
    assert natural_denominator(TOKENS, "token").item() == 6
    assert natural_denominator(TOKENS, "sequence").item() == 2


def test_a_constant_denominator_needs_tokens() -> None:
    assert constant_denominator(2, 8) == 16.0
    for sequences, tokens in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="expected at least 1 of each"):
            constant_denominator(sequences, tokens)
