"""Weights rounded to 8 bits, and log-probabilities of the rounded policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from policies import POLICY, requests
from sampling import CPU, CUT, check_logp, policy_of, short_sampler
from stalewise.errors import ModelError
from stalewise.models.loading import load_model
from stalewise.rollout.engines.embedded import QuantizableWeights, fake_quantize, linear_matrices
from stalewise.types import SamplerSettings


def test_weights_are_rounded_with_one_scale_for_each_output() -> None:
    # The largest weight of each row sets its scale to 1, to 2, and for the row of zeros to anything.
    int8 = torch.tensor([[127.0, 1.4, -0.6, -127.0], [254.0, 1.4, -0.6, 3.1], [0.0, 0.0, 0.0, 0.0]])
    assert fake_quantize(int8, "int8").tolist() == [[127, 1, -1, -127], [254, 2, 0, 4], [0, 0, 0, 0]]
    # e4m3 has 3 bits after the first: steps of 2 from 16 to 32, of 1/8 from 1 to 2; ties go to the even one.
    fp8 = torch.tensor([[448.0, 17.0, 19.0, 1.2], [-896.0, 34.0, 38.0, 2.4], [0.0, 0.0, 0.0, 0.0]])
    expected = [[448, 16, 20, 1.25], [-896, 32, 40, 2.5], [0, 0, 0, 0]]
    assert fake_quantize(fp8, "fp8").tolist() == expected
    assert fake_quantize(fp8.bfloat16(), "fp8").tolist() == expected
    assert fake_quantize(fp8.bfloat16(), "fp8").dtype is torch.bfloat16


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_weights_of_any_size_stay_near(kind: str, size: float) -> None:
    weight = size * torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    error = (fake_quantize(weight, kind) - weight).abs()
    largest = weight.abs().amax(dim=1, keepdim=True)
    # int8: half a step of 1/127. fp8: half a step of 1/8, relative, until it has no smaller numbers.
    bound = largest / 254 if kind == "int8" else torch.maximum(weight.abs() / 16, largest / 448 * 2**-10)
    assert (error <= 1.001 * bound + 1e-38 * (size < 1e-38)).all()
    if size > 1e-38:
        assert 0.001 < (error / largest).max() < 0.04


def test_only_the_matrices_of_linear_layers_are_rounded_and_in_place() -> None:
    model = load_model(str(POLICY), device=CPU)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    weights = QuantizableWeights(model)
    for kind in ("fp8", "int8", "int8", "exact", "fp8", "exact"):
        weights.use(kind)
        for name, parameter in model.named_parameters():
            is_rounded = kind != "exact" and "_proj." in name
            assert torch.equal(parameter, fake_quantize(before[name], kind) if is_rounded else before[name])
            assert torch.equal(parameter, before[name]) != is_rounded
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == addresses
    assert len(linear_matrices(model)) == 14 == sum("_proj." in name for name in before)


def test_layers_that_store_their_matrix_the_other_way_round_have_a_scale_for_each_output_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=18, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    weight = model.get_parameter("transformer.h.0.mlp.c_fc.weight")  # inputs × outputs
    before = weight.detach().clone()
    QuantizableWeights(model).use("int8")
    assert torch.equal(weight, fake_quantize(before.T, "int8").T)
    assert not torch.equal(weight, before)


def test_matrices_outside_of_linear_layers_are_refused_and_never_left_exact_in_silence() -> None:
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    experts: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=18, **shape, **experts))
    weights = QuantizableWeights(model)
    weights.use("exact")
    with pytest.raises(ModelError, match=r'Mixtral.*experts holds matrices .* set sampler\.weights = "exact"'):
        weights.use("fp8")


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("weights", ["exact", "fp8", "int8"])
@pytest.mark.parametrize(
    "settings", [SamplerSettings(), pytest.param(SamplerSettings(temperature=1.4), marks=pytest.mark.nightly), CUT]
)
def test_log_probabilities_are_of_the_rounded_policy_at_that_temperature_and_truncation(
    settings: SamplerSettings, weights: str, slots: bool
) -> None:
    settings = replace(settings, weights=weights)
    asked, model = requests(24), policy_of(POLICY, weights)
    for request, response in zip(asked, short_sampler(settings, slots=slots).sample(asked), strict=True):
        check_logp(model, request.prompt_ids, response.token_ids, response.logp, settings)


@pytest.mark.parametrize("slots", [False, True])
def test_each_call_has_the_weights_that_its_settings_name(slots: bool, other: Path) -> None:
    asked, sampler = requests(24), short_sampler(replace(CUT, weights="fp8"), slots=slots)
    first = sampler.sample(asked)
    decoder = sampler._decoder
    exact = sampler.sample(asked, CUT)  # as an evaluation does
    assert sampler._decoder is decoder  # the slots, and on a GPU the graphs, are those of before
    assert exact == short_sampler(CUT, slots=slots).sample(asked)
    assert sampler.sample(asked) == first != exact
    assert sampler.sample(asked, replace(CUT, weights="int8")) not in (first, exact)
    sampler.load(other)  # while rounded weights are in use
    fresh = short_sampler(CUT, slots=slots)
    fresh.load(other)
    assert sampler.sample(asked, CUT) == fresh.sample(asked)
    assert sampler.sample(asked) == fresh.sample(asked, replace(CUT, weights="fp8")) != first
