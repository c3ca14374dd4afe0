"""The sampler's model with joined products and sums within products: the same logits, and refusal where it is not."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.granite.configuration_granite import GraniteConfig
from transformers.models.granite.modeling_granite import GraniteForCausalLM
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2ForCausalLM

from policies import POLICY, SIZE, moved, requests, tokens_of
from sampling import CPU
from stalewise.models import fused_norms, fused_ops
from stalewise.models.fused_ops import fuse_for_decoding
from stalewise.rollout.engines.embedded import HFSampler, QuantizableWeights
from stalewise.types import SamplerSettings

GPT2_SIZE: dict[str, Any] = {"vocab_size": 18, "n_embd": 32, "n_layer": 2, "n_head": 4}
# Class, config, and what is fused on a CPU. Norms of Gemma add 1 to their weights, OLMo's and Cohere's are layer norms.
ALL = ("norms", "linears", "sums")
MODELS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZE), ALL),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SIZE, attention_bias=True), ALL[:2]),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZE), ALL),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZE, head_dim=12), ALL),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZE), ALL),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SIZE, head_dim=8), ALL[1:]),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZE, head_dim=8), ("linears",)),
    "olmo": (OlmoForCausalLM, OlmoConfig(**SIZE), ALL[1:]),
    "olmo that clips": (OlmoForCausalLM, OlmoConfig(**SIZE, clip_qkv=0.05), ALL[1:]),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZE), ALL[:2]),
    "granite": (GraniteForCausalLM, GraniteConfig(**SIZE, residual_multiplier=0.5), ALL[:2]),
    "cohere": (CohereForCausalLM, CohereConfig(**SIZE), ("linears",)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZE, num_local_experts=2), ALL[:2]),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2_SIZE), ()),
}
FULL = ["llama", "qwen2", "qwen3"]


def made(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """All weights are large enough, and no biases 0, so that nothing that is left out goes unnoticed."""
    torch.manual_seed(0)
    model_class, config, _ = MODELS[kind]
    model: Any = model_class(config)
    for name, weight in model.named_parameters():
        low, high = (0.5, 2.0) if "norm" in name else (-0.4, 0.4)
        torch.nn.init.uniform_(weight, low, high)
    return model.to(dtype).eval()


def ids(rows: int = 2, tokens: int = 6) -> Tensor:
    return torch.arange(rows * tokens).view(rows, tokens) * 5 % 18


@torch.no_grad()
def logits(model: Any, **given: Any) -> Tensor:
    return model(input_ids=ids(), **given).logits


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


class Products(TorchDispatchMode):
    """Counts products and sums of whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", list(MODELS))
def test_logits_are_those_of_the_model_itself(kind: str) -> None:
    plain, fused = made(kind), made(kind)
    assert fuse_for_decoding(fused) == MODELS[kind][2]
    assert close(logits(fused), logits(plain))
    assert list(fused.state_dict()) == list(plain.state_dict())
    for name, weight in fused.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name])


@pytest.mark.parametrize("kind", FULL)
def test_a_cache_and_one_token_a_row(kind: str) -> None:
    plain, fused = made(kind), made(kind)
    fuse_for_decoding(fused)
    found: list[Tensor] = []
    for model in (plain, fused):
        with torch.inference_mode():
            prompt = model(input_ids=ids()[:, :-1], use_cache=True)
            step = model(input_ids=ids()[:, -1:], past_key_values=prompt.past_key_values)
        found.append(torch.cat([prompt.logits, step.logits], dim=1))
    assert close(found[1], found[0])


@pytest.mark.parametrize("kind", FULL)
def test_four_products_a_layer_and_no_sums(kind: str) -> None:
    counts: list[tuple[int, int]] = []
    for fused in (False, True):
        model = made(kind)
        if fused:
            fuse_for_decoding(model)
        with Products() as products:
            logits(model, use_cache=False)
        sums = products.seen.count("add") + products.seen.count("add_")
        counts.append((sum(name in ("mm", "addmm", "addmm_") for name in products.seen), sums))
    layers = SIZE["num_hidden_layers"]
    assert counts[0][0] == 7 * layers + 1 and counts[1][0] == 4 * layers + 1
    # On a CPU the norm's operator adds its epsilon as the module does; what is missing are two residual sums a layer.
    assert counts[0][1] - counts[1][1] == 2 * layers


def test_in_bfloat16_too() -> None:
    plain, fused, exact = (made("qwen2", dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32))
    assert fuse_for_decoding(fused) == ALL
    far, usual = ((logits(model).float() - logits(exact)).norm() for model in (fused, plain))
    assert far <= 1.1 * usual


@pytest.mark.parametrize("kind", FULL)
def test_weights_are_copied_in_place_and_read_at_once(kind: str) -> None:
    plain, fused = made(kind), made(kind)
    fuse_for_decoding(fused)
    places = {name: weight.data_ptr() for name, weight in fused.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in plain.state_dict().items():
            weight.copy_(torch.empty_like(weight).uniform_(-0.4, 0.4, generator=generator))
            fused.state_dict()[name].copy_(weight)
    assert not close(logits(made(kind)), logits(plain), 0.01)
    assert close(logits(fused), logits(plain))
    assert places == {name: weight.data_ptr() for name, weight in fused.named_parameters()}


def test_weights_are_rounded_and_restored() -> None:
    plain, fused = made("qwen2"), made("qwen2")
    fuse_for_decoding(fused)
    exact = logits(fused)
    ours, theirs = QuantizableWeights(fused), QuantizableWeights(plain)
    for kind in ("fp8", "int8", "exact"):
        ours.use(kind)
        theirs.use(kind)
        assert close(logits(fused), logits(plain))
        assert torch.equal(logits(fused), exact) == (kind == "exact")


def test_weights_that_were_moved_are_not_read_from_where_they_were() -> None:
    fused, plain = made("qwen2"), made("qwen2")
    fuse_for_decoding(fused)
    for model in (fused, plain):
        for weight in model.parameters():
            weight.data = 0.9 * weight.data
    assert close(logits(fused), logits(plain))


@pytest.mark.parametrize("kind", FULL)
def test_with_gradients_it_is_the_model_itself(kind: str) -> None:
    plain, fused = made(kind), made(kind)
    fuse_for_decoding(fused)
    for model in (plain, fused):
        model(input_ids=ids()).logits.square().mean().backward()
    for (name, one), (_, other) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert close(one.grad, other.grad, 1e-3), name


def test_under_autocast_the_residual_keeps_its_precision() -> None:
    plain, fused = made("llama"), made("llama")
    fuse_for_decoding(fused)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (model.model.layers[0] for model in (fused, plain))
        assert close(logits(fused).float(), logits(plain).float(), 0.05)
    with torch.no_grad():
        x = torch.randn(2, 3, 32).bfloat16()  # not the precision of the weights
        end, own = found.self_attn.o_proj, expected.self_attn.o_proj
        residual = torch.randn(2, 3, 32)
        with torch.autocast("cpu", torch.bfloat16):
            summed = end.forward.added(residual.clone(), lambda: end(x))
            assert torch.equal(summed, residual + own(x)) and summed.dtype is torch.float32


def test_layers_that_do_not_read_the_same_are_computed_one_by_one() -> None:
    plain, fused = made("llama").model.layers[0].mlp, made("llama")
    fuse_for_decoding(fused)
    layer, x = fused.model.layers[0].mlp, torch.randn(3, 32)
    with torch.no_grad():
        gate = layer.gate_proj(x)
        other = layer.up_proj(2 * x)  # another tensor than the first layer read
        torch.testing.assert_close(gate, plain.gate_proj(x))
        torch.testing.assert_close(other, plain.up_proj(2 * x))
        torch.testing.assert_close(layer.up_proj(x), plain.up_proj(x))


def test_weights_with_another_use_and_odd_biases_stay() -> None:
    tied, odd = made("llama"), made("llama")
    tied.model.layers[0].self_attn.k_proj.weight = tied.model.layers[1].self_attn.k_proj.weight
    odd.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(48))
    for model, joined in ((tied, 2), (odd, 3)):
        expected = logits(model)
        assert fused_ops.fuse_linears(model) == joined
        assert close(logits(model), expected)


def test_a_gated_layer_is_one_after_joining_too() -> None:
    model = made("llama")
    fused_ops.fuse_linears(model)
    assert all(fused_ops._is_gated(layer.mlp) for layer in model.model.layers)


def test_structures_are_refused_before_anything_is_tried() -> None:
    assert fused_ops.fuse_linears(made("olmo that clips")) == 2  # of gated layers alone
    for kind in ("llama with biases", "granite", "gemma2", "olmo2", "cohere", "mixtral", "gpt2"):
        assert fused_ops.fuse_sums(made(kind)) == 0, kind
    assert fused_ops.fuse_sums(made("llama")) == 2


def test_a_sum_that_cannot_be_right_is_an_error_and_leaves_nothing_behind() -> None:
    model = made("llama")
    fused_ops.fuse_sums(model)
    end, x = model.model.layers[0].self_attn.o_proj, torch.randn(3, 32)
    with torch.no_grad():
        product = end(x)
        with pytest.raises(RuntimeError, match="modifies the output"):
            end.forward.added(torch.ones(3, 32), lambda: 2 * end(x))
        with pytest.raises(ZeroDivisionError):
            end.forward.added(torch.ones(3, 32), lambda: 1 // 0)
        assert torch.equal(end(x), product)


def test_what_computes_something_else_gets_its_forward_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, change in (("mlp", "LlamaMLP", 2.0), ("self_attn", "LlamaAttention", 0.5)):
        with monkeypatch.context() as patch:
            model = made("llama")
            kind = type(getattr(model.model.layers[0], module))
            assert kind.__name__ == name
            own = kind.forward

            def changed(self: Any, *args: Any, own: Any = own, change: float = change, **kwargs: Any) -> Any:
                output = own(self, *args, **kwargs)
                return (change * output[0], *output[1:]) if isinstance(output, tuple) else change * output

            patch.setattr(kind, "forward", changed)
            expected = logits(model)
            assert fuse_for_decoding(model) == ("norms", "linears")
            assert close(logits(model), expected)
            assert all("forward" not in vars(layer) for layer in model.model.layers)
            assert all("forward" not in vars(layer.mlp.down_proj) for layer in model.model.layers)
            assert "forward" in vars(model.model.layers[0].mlp.up_proj)


def test_a_kernel_for_single_tokens_is_tried_with_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fused_norms.rms_norm

    def wrong_in_a_step(x: Tensor, *arguments: Any) -> Tensor:
        return own(x, *arguments) * (2.0 if x.shape[-2] == 1 else 1.0)

    monkeypatch.setattr(fused_norms, "rms_norm", wrong_in_a_step)
    assert fuse_for_decoding(made("llama")) == ("linears", "sums")


def test_a_layer_that_scales_its_sums_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("granite")
    expected = logits(model)
    monkeypatch.setattr(fused_ops, "_has_plain_sums", lambda layer: type(layer).__name__ == "GraniteDecoderLayer")
    assert fused_ops.fuse_sums(made("granite")) == 2
    assert fuse_for_decoding(model) == ("norms", "linears")
    assert torch.equal(logits(model), logits(model)) and close(logits(model), expected)


# ---------------------------------------------------------------- in the sampler


def sampler_of(*, fused: bool | None, slots: bool = True) -> HFSampler:
    """A sampler on the CPU whose model is fused as on a GPU, or not."""
    sampler = HFSampler(SamplerSettings(), max_new_tokens=8, device=CPU, dtype=torch.float32, slots=slots, fused=fused)
    sampler.load(POLICY)
    assert bool(sampler.slots_problem) != slots and sampler.fused == (ALL if fused else ())
    return sampler


@pytest.mark.parametrize("slots", [True, False])
def test_the_same_tokens_and_those_of_other_weights_after_them(slots: bool, tmp_path: Path) -> None:
    plain, fused = sampler_of(fused=None, slots=slots), sampler_of(fused=True, slots=slots)
    wanted = requests(12)

    def same() -> list[list[int]]:
        expected, found = plain.sample(wanted), fused.sample(wanted)
        assert tokens_of(found) == tokens_of(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.logp == pytest.approx(other.logp, abs=2e-5)
        return tokens_of(found)

    first, model = same(), fused.model
    other = moved(POLICY, tmp_path / "other", by=1.0)
    for sampler in (plain, fused):
        sampler.load(other)  # replaces the weights
    assert fused.model is model and same() != first
    weights = {name: weight.clone() for name, weight in sampler_of(fused=False).model.state_dict().items()}
    for sampler in (plain, fused):
        assert sampler.take(weights, key="first")
    assert same() == first
    fused.close()
    fused.load(POLICY)
    assert fused.model is not model and same() == first


def test_closing_frees_the_weights_at_once() -> None:
    sampler = sampler_of(fused=True)
    sampler.sample(requests(2))
    layer = sampler.model.model.layers[0]
    layer.mlp.forward = fused_ops._FusedGate(layer.mlp)  # as on a GPU
    kept = [weakref.ref(module) for module in (layer, layer.mlp, layer.mlp.up_proj, layer.self_attn.q_proj)]
    del layer
    gc.collect()
    gc.disable()
    try:
        sampler.close()
        assert [module() for module in kept] == [None] * 4
    finally:
        gc.enable()
