"""Layers of the learner that sum in their norm: kernels run on a GPU, or with Triton and TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.granite.configuration_granite import GraniteConfig
from transformers.models.granite.modeling_granite import GraniteForCausalLM

from policies import SIZE

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models import fused_norms, fused_ops
from stalewise.models.kernels import elementwise
from stalewise.trainer.execution import recompute_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def learner(monkeypatch: pytest.MonkeyPatch, kind: str = "llama", low: torch.dtype = torch.float32) -> Any:
    """A model whose norms are fused, in which everything is as on a GPU with autocast to `low`."""
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "granite": (GraniteConfig, GraniteForCausalLM)}
    config, model_class = kinds[kind]
    torch.manual_seed(0)
    model: Any = model_class(config(**SIZE)).to(DEVICE).eval()
    for one in (fused_ops, fused_norms):
        monkeypatch.setattr(one, "is_rounded_next", lambda x: True)
    monkeypatch.setattr(fused_ops, "can_compile", lambda: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: low)
    assert fused_norms.fuse_norms(model) == 5
    return model


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    return model(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=-1)[..., 3].sum()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_layer_that_sums_in_its_norm_has_equal_gradients(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = learner(monkeypatch)
    weights = list(model.parameters())
    plain = loss_of(model)
    wanted = torch.autograd.grad(plain, weights)
    if recomputes:
        recompute_activations(model)
    assert fused_ops.fuse_training_sums(model) == 2
    kernel, calls = elementwise.added_normed_on_device, list[int]()
    monkeypatch.setattr(elementwise, "added_normed_on_device", lambda *given: calls.append(1) or kernel(*given))
    loss = loss_of(model)
    found = torch.autograd.grad(loss, weights)
    assert len(calls) == (4 if recomputes else 2)
    torch.testing.assert_close(loss, plain)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_layers_that_scale_their_sums_keep_their_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused_ops.fuse_training_sums(learner(monkeypatch, "granite")) == 0
    monkeypatch.setattr(fused_ops, "_has_parts", lambda layer: type(layer).__name__ == "GraniteDecoderLayer")
    model = learner(monkeypatch, "granite")
    for layer in model.model.layers:
        layer.residual_multiplier = 0.2
    model.set_attn_implementation("eager")
    assert fused_ops.fuse_training_sums(model) == 0  # by the trial
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    assert model.config._attn_implementation == "eager"  # as before


def test_without_rounding_a_layer_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = learner(monkeypatch)
    assert fused_ops.fuse_training_sums(model) == 2
    for one in (fused_ops, fused_norms):
        monkeypatch.setattr(one, "is_rounded_next", lambda x: False)
    monkeypatch.setattr(elementwise, "added_normed_on_device", None)
    loss_of(model)


@torch.no_grad()
def test_a_norm_of_a_decoding_step_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    norm: Any = torch.nn.Module()
    norm.weight, norm.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 1.5, 24, device=DEVICE)), 1e-6
    x = torch.randn(3, 1, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    monkeypatch.setattr(fused_norms, "is_rounded_next", lambda x: False)
    monkeypatch.setattr(fused_norms, "_is_decoding", lambda x: True)
    found = fused_norms._FusedNorm(norm)(x)
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (24,), norm.weight, 1e-6))
    calls: list[int] = []
    kernel = elementwise.normed_on_device
    monkeypatch.setattr(elementwise, "normed_on_device", lambda *given: calls.append(1) or kernel(*given))
    fused_norms._FusedNorm(norm)(x)
    assert calls == [1]
