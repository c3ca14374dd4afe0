"""Norms that are fused compute what they did; those that do something else are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from policies import SIZE
from stalewise.models.fused_ops import fuse_norms

# Gemma's norms add 1 to their weight, OLMo's have none; Qwen 3 has some for queries and keys, too.
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZE), 5),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZE, head_dim=8), 9),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SIZE, head_dim=8), 0),
    "olmo": (OlmoForCausalLM, OlmoConfig(**SIZE), 0),
}


def made(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model_class, config, _ = MODELS[kind]
    model: Any = model_class(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return model.to(dtype).eval()


@pytest.mark.parametrize("kind", list(MODELS))
def test_logits_and_gradients_are_those_of_the_model_itself(kind: str) -> None:
    plain, fused = made(kind), made(kind)
    assert fuse_norms(fused) == MODELS[kind][2]
    ids = torch.arange(12).view(2, 6)
    for model in (plain, fused):
        model(input_ids=ids).logits.square().sum().backward()
    torch.testing.assert_close(fused(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4 * float(other.grad.abs().max()))
    assert list(fused.state_dict()) == list(plain.state_dict())


def test_the_weight_is_the_one_that_the_module_has_now() -> None:
    model = made("llama")
    fuse_norms(model)
    norm, x = model.model.norm, torch.randn(3, 32)
    before = norm(x)
    norm._parameters["weight"] = torch.nn.Parameter(2 * norm.weight.detach())
    torch.testing.assert_close(norm(x), 2 * before)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_in_bfloat16_too(kind: str) -> None:
    plain, fused, ids = made(kind, torch.bfloat16), made(kind, torch.bfloat16), torch.arange(12).view(2, 6)
    assert fuse_norms(fused) == MODELS[kind][2]
    exact = made(kind)(input_ids=ids).logits
    far, usual = ((model(input_ids=ids).logits.float() - exact).norm() for model in (fused, plain))
    assert far <= 1.1 * usual


def test_a_norm_of_another_precision_than_its_input_is_the_modules_own() -> None:
    plain, fused = made("llama"), made("llama")
    fuse_norms(fused)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    found, expected = fused.model.norm(x), plain.model.norm(x)
    assert found.dtype is expected.dtype is torch.float32 and torch.equal(found, expected)


def test_a_norm_that_does_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    model.model.norm.eps = 1e-2
    monkeypatch.delattr(model.model.norm, "variance_epsilon")
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x * self.weight)
    assert fuse_norms(model) == 0
