"""The plain forward pass that others are compared with, and what counts as rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from policies import POLICY
from stalewise.models.loading import load_model
from stalewise.models.plain_forward import Agreement, compare, failure, layer_count, plain_logits, tolerance


def test_logits_are_those_of_the_whole_sequence_by_itself() -> None:
    model = load_model(str(POLICY), device=torch.device("cpu"))
    prompt, response = [3, 13, 4, 15], [5, 6, 1]
    logits_NV = plain_logits(model, prompt, response)
    assert model.config._attn_implementation == "sdpa"  # as before
    whole = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    # Tokens 4, 5 and 6 are predicted from the outputs at 3, 4 and 5.
    torch.testing.assert_close(logits_NV, whole[3:6], rtol=0, atol=1e-4)
    assert layer_count(model) == model.config.num_hidden_layers


def test_a_way_of_running_is_judged_by_its_worst_sequence() -> None:
    expected = [np.zeros(4), np.zeros(4)]
    found = compare("decoding", [np.full(4, 1e-4), np.array([0.0, 0.0, 0.0, -0.8])], expected, 0.1)
    # 0.8 / 4 = 0.2 in the second sequence, over the 0.1 that is allowed; all eight tokens would have a mean of 0.1.
    assert (found.largest, found.mean) == (0.8, 0.2)
    assert not found.is_right and str(found) == "decoding differs by up to 0.8 nats"
    assert compare("decoding", expected, expected, 0.1).is_right


@pytest.mark.parametrize("one", [Agreement("x", math.nan, math.nan, 0.1), failure("x", ValueError("no\nmore"))])
def test_unknown_is_not_right(one: Agreement) -> None:
    assert not one.is_right


def test_a_failure_is_one_line() -> None:
    assert str(failure("decoding", ValueError("no cache\nmore"))) == "decoding fails: ValueError: no cache"


def test_rounding_grows_with_precision_depth_and_spread() -> None:
    # bfloat16: 12 · 2⁻⁷ · 3 = 0.28125, and √(64/16) = 2 times that for 64 layers; float32 would be 4.3e-6.
    assert tolerance(torch.bfloat16, 4, 3.0) == pytest.approx(0.28125)
    assert tolerance(torch.bfloat16, 64, 3.0) == pytest.approx(2 * 0.28125)
    assert tolerance(torch.float32, 4, 3.0) == 1e-3
