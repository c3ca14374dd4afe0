"""The rotation of one new token a row, and writing it to a cache: the kernels against what they stand in for, and when
they do. Kernels run on a GPU, or anywhere with Triton and TRITON_INTERPRET=1; all else with a rotation in torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from policies import SIZE
from rotations import DEVICE, one_token, plain_rotation, random
from stalewise.models import fused_norms
from stalewise.models import fused_ops as rotation
from stalewise.models.fused_ops import fuse_norms, fused_rotation


def halves(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in torch."""
    cos, sin = cos.float()[:, None], sin.float()[:, None]

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)

    return turned(query), turned(key)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Of other architectures: each number is turned with its neighbour."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2) * sin

    return turned(q), turned(k)


def one_at_a_time(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return plain_rotation(x, x, cos, sin, unsqueeze_dim)[0]


def then(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        query, key = plain_rotation(q, k, cos, sin, unsqueeze_dim)
        return query, change(key)

    return rotate


def made(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    model_class, config_class = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
        "cohere": (CohereForCausalLM, CohereConfig),
    }[kind]
    torch.manual_seed(0)
    head = {"head_dim": 12} if kind == "qwen3" else {}
    model: Any = model_class(config_class(**SIZE, **head))
    return model.to(DEVICE, dtype).eval()


class Counted:
    """A rotation that stands in for the plain one wherever it is asked for, and says how often."""

    def __init__(self, rotate: Callable[..., Any]) -> None:
        self.rotate, self.calls = rotate, 0

    def __call__(self, *args: Tensor) -> Any:
        self.calls += 1
        return self.rotate(*args)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    rotate = Counted(halves)
    monkeypatch.setattr(rotation, "_rotate_on", lambda device: rotate)
    return rotate


@torch.no_grad()
def decoded(model: Any) -> tuple[Tensor, Tensor]:
    """Logits of prompts, and of a token after them: positions are given row by row, as when decoding in slots."""
    ids = torch.arange(21, device=DEVICE).view(3, 7) % 18
    position = torch.arange(7, device=DEVICE).expand(3, 7)
    prompt = model(input_ids=ids[:, :-1], position_ids=position[:, :-1], use_cache=True)
    step = model(input_ids=ids[:, -1:], position_ids=position[:, -1:], past_key_values=prompt.past_key_values)
    return prompt.logits, step.logits


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_decoding_step_is_rotated_otherwise_and_a_prompt_is_not(kind: str, counted: Counted) -> None:
    model = made(kind)
    expected = decoded(model)
    assert not counted.calls
    with fused_rotation(model):
        counted.calls = 0  # it has been tried out
        found = decoded(model)
    assert counted.calls == SIZE["num_hidden_layers"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    decoded(model)
    assert counted.calls == SIZE["num_hidden_layers"]


def test_a_decoding_step_with_the_kernel_has_the_same_logits(kernels: Any, counted: Counted) -> None:
    counted.rotate = kernels.rotate_on_device
    model = made()
    expected = decoded(model)
    with fused_rotation(model):
        assert counted.calls == 1
        found = decoded(model)
    assert counted.calls == 1 + SIZE["num_hidden_layers"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="there the plain function stays")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernel_is_used(dtype: torch.dtype, kernels: Any) -> None:
    with fused_rotation(made(dtype=dtype)):
        assert modeling_llama.apply_rotary_pos_emb is not plain_rotation


def test_the_function_is_put_back_whatever_happens(counted: Counted) -> None:
    with pytest.raises(ZeroDivisionError), fused_rotation(made()):
        assert modeling_llama.apply_rotary_pos_emb is not plain_rotation
        raise ZeroDivisionError
    assert modeling_llama.apply_rotary_pos_emb is plain_rotation


def test_trying_it_out_leaves_random_numbers_as_they_are(counted: Counted) -> None:
    model, before = made(), torch.random.get_rng_state()
    with fused_rotation(model):
        assert counted.calls == 1
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("function", "dtype", "replaced"),
    [
        (plain_rotation, torch.float32, True),
        (plain_rotation, torch.bfloat16, True),
        (plain_rotation, torch.float16, True),
        (plain_rotation, torch.float64, False),
        (interleaved, torch.float32, False),
        (interleaved, torch.bfloat16, False),
        (one_at_a_time, torch.float32, False),
        (then(lambda key: key * (1 + 1e-6)), torch.float32, True),
        (then(lambda key: key * (1 + 1e-3)), torch.float32, False),
        (then(lambda key: key * 1.2), torch.bfloat16, False),
        (then(lambda key: key * torch.nan), torch.float32, False),
        (then(lambda key: key.double()), torch.bfloat16, False),
        (then(lambda key: key[None]), torch.float32, False),
        (partial(plain_rotation), torch.float32, False),  # no function of the file's
    ],
)
def test_only_what_computes_the_same_is_replaced(
    function: Any, dtype: torch.dtype, replaced: bool, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
    with fused_rotation(made(dtype=dtype)):
        assert (modeling_llama.apply_rotary_pos_emb is not function) is replaced
    assert modeling_llama.apply_rotary_pos_emb is function


@pytest.mark.parametrize(("kind", "home"), [("qwen3", modeling_qwen3), ("cohere", modeling_cohere)])
def test_which_models_are_rotated_by_halves(kind: str, home: Any, counted: Counted) -> None:
    function = home.apply_rotary_pos_emb
    with fused_rotation(made(kind)):
        assert (home.apply_rotary_pos_emb is not function) is (kind == "qwen3")


def test_a_model_without_a_known_width_of_heads_or_such_a_function_is_left_alone(counted: Counted) -> None:
    model = made()
    known = {"device": model.device, "dtype": model.dtype}
    unknown = SimpleNamespace(base_model=model.base_model, config=SimpleNamespace(num_attention_heads=4), **known)
    elsewhere = SimpleNamespace(base_model=torch.nn.Identity(), config=model.config, **known)
    for other in (unknown, elsewhere):
        with fused_rotation(other):
            assert modeling_llama.apply_rotary_pos_emb is plain_rotation
    assert not counted.calls


def test_calls_that_the_kernel_is_not_made_for_go_to_the_plain_function() -> None:
    def plain(*args: Any, **kwargs: Any) -> str:
        return "plain"

    def fused(*args: Any) -> Any:
        return "fused"

    rotate: Any = rotation._dispatch(plain, fused, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"))
    query, key, cos, sin = arguments = one_token(5, 4, 2, 8)
    tokens = random(5, 4, 3, 8)
    assert rotate(query, key, cos, sin) == "fused"
    assert rotate(*(x.bfloat16() for x in arguments)) == "fused"
    with torch.inference_mode():
        assert rotate(query.clone().requires_grad_(), key, cos, sin) == "fused"
    others: dict[str, tuple[Any, ...]] = {
        "a prompt": (tokens, tokens, cos.expand(5, 3, 8), sin.expand(5, 3, 8)),
        "a prompt's queries": (tokens, key, cos, sin),
        "a prompt's keys": (query, tokens, cos, sin),
        "a prompt's cosines": (query, key, cos.expand(5, 3, 8), sin),
        "a prompt's sines": (query, key, cos, sin.expand(5, 3, 8)),
        "heads last": (query.transpose(1, 2), key.transpose(1, 2), cos, sin),
        "float64": tuple(x.double() for x in arguments),
        "angles of another precision": (query.half(), key.half(), cos, sin),
        "a part of each head": (query, key, cos[..., :4], sin[..., :4]),
        "heads of two widths": (query, key[..., :4], cos, sin),
        "positions of all rows": (query, key, cos[:1], sin[:1]),
        "keys of other rows": (query, key[:1], cos, sin),
        "an odd width": tuple(x[..., :7] for x in arguments),
        "more axes of queries": (query[None], key, cos, sin),
        "fewer axes of keys": (query, key[0, 0, 0], cos, sin),
        "a gradient": (query.clone().requires_grad_(), key, cos, sin),
        "another device": tuple(x.to("meta") for x in arguments),
        "no keys": (query, None, cos, sin),
        "another order": (*arguments, 2),
    }
    assert {what: rotate(*call) for what, call in others.items()} == dict.fromkeys(others, "plain")
    assert rotate(query, key, cos, sin, unsqueeze_dim=2) == rotate(query, key, cos=cos, sin=sin) == "plain"


def test_the_kernel_is_for_gpus_where_one_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stalewise.models.kernels.rope", SimpleNamespace(rotate_on_device=halves))
    for can_compile, device, expected in ((True, "cuda", halves), (True, "cpu", None), (False, "cuda", None)):
        monkeypatch.setattr(rotation, "can_compile", lambda can=can_compile: can)
        assert rotation._rotate_on(torch.device(device)) is expected


# Gemma's norms add 1 to their weight, OLMo's have none; Qwen 3 has some for queries and keys, too.
NORMED = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZE), 5),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZE, head_dim=8), 9),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SIZE, head_dim=8), 0),
    "olmo": (OlmoForCausalLM, OlmoConfig(**SIZE), 0),
}


def with_norms(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model_class, config, _ = NORMED[kind]
    model: Any = model_class(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return model.to(dtype).eval()


@pytest.mark.parametrize("kind", list(NORMED))
def test_logits_and_gradients_are_those_of_the_model_itself(kind: str) -> None:
    plain, fused = with_norms(kind), with_norms(kind)
    assert fuse_norms(fused) == NORMED[kind][2]
    ids = torch.arange(12).view(2, 6)
    for model in (plain, fused):
        model(input_ids=ids).logits.square().sum().backward()
    torch.testing.assert_close(fused(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4 * float(other.grad.abs().max()))
    assert list(fused.state_dict()) == list(plain.state_dict())


def test_the_weight_is_the_one_that_the_module_has_now() -> None:
    model = with_norms("llama")
    fuse_norms(model)
    norm, x = model.model.norm, torch.randn(3, 32)
    before = norm(x)
    norm._parameters["weight"] = torch.nn.Parameter(2 * norm.weight.detach())
    torch.testing.assert_close(norm(x), 2 * before)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_in_bfloat16_too(kind: str) -> None:
    plain, fused, ids = with_norms(kind, torch.bfloat16), with_norms(kind, torch.bfloat16), torch.arange(12).view(2, 6)
    assert fuse_norms(fused) == NORMED[kind][2]
    exact = with_norms(kind)(input_ids=ids).logits
    far, usual = ((model(input_ids=ids).logits.float() - exact).norm() for model in (fused, plain))
    assert far <= 1.1 * usual


def test_a_norm_of_another_precision_than_its_input_is_the_modules_own() -> None:
    plain, fused = with_norms("llama"), with_norms("llama")
    fuse_norms(fused)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    found, expected = fused.model.norm(x), plain.model.norm(x)
    assert found.dtype is expected.dtype is torch.float32 and torch.equal(found, expected)


def test_a_norm_that_does_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_norms("llama")
    model.model.norm.eps = 1e-2
    monkeypatch.delattr(model.model.norm, "variance_epsilon")
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x * self.weight)
    assert fuse_norms(model) == 0


# ---------------------------------------------------------------- packed tokens with a gradient


def packed_tokens(width: int = 12) -> list[Tensor]:
    """Queries and keys of one row of tokens as attention makes them under autocast; halves of the angles differ."""
    query, key = (random(1, 7, n, width, dtype=torch.bfloat16, seed=n).transpose(1, 2) for n in (4, 2))
    angle = random(1, 7, width, seed=99)
    return [query.requires_grad_(), key.requires_grad_(), angle.cos(), angle.sin()]


def test_the_gradient_of_a_rotation_is_rotated_back() -> None:
    found, expected = packed_tokens(), packed_tokens()
    rotated: Any = rotation._RotatedTokens.apply(halves, *found)
    plain = [x.to(torch.bfloat16) for x in plain_rotation(*expected)]
    gradients = [random(*x.shape, seed=3).to(torch.bfloat16) for x in plain]
    for one, other in zip(rotated, plain, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(
        torch.autograd.grad(rotated, found[:2], gradients),
        torch.autograd.grad(plain, expected[:2], gradients),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_the_learner_rotates_by_the_kernel_only_where_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    model, used = made(), Counted(halves)
    monkeypatch.setattr(modeling_llama, rotation.ROTATION, plain_rotation)
    monkeypatch.setattr(rotation, "_rotate_on", lambda device: used)
    assert rotation.fuse_training_rotation(model) and rotation.fuse_training_rotation(model)
    calls = used.calls  # of the comparison
    replaced = modeling_llama.apply_rotary_pos_emb
    query, key, cos, sin = packed_tokens()
    assert [x.dtype for x in replaced(query, key, cos, sin)] == [torch.bfloat16] * 2
    assert used.calls == calls + 1
    with torch.no_grad():
        replaced(query, key, cos, sin)
    replaced(query.float(), key.float(), cos, sin)
    assert used.calls == calls + 1
    monkeypatch.setattr(modeling_llama, rotation.ROTATION, interleaved)
    assert not rotation.fuse_training_rotation(model)
    assert modeling_llama.apply_rotary_pos_emb is interleaved


def test_gated_layers_are_recognised_by_what_they_compute() -> None:
    layers = [made().model.layers[0].mlp, made("qwen3").model.layers[0].mlp]
    assert all(rotation._is_gated(layer) for layer in layers)
    assert not rotation._is_gated(made().model.layers[0].self_attn)
    layers[0].act_fn = torch.nn.GELU()
    assert not rotation._is_gated(layers[0])


def test_a_fused_gate_computes_what_the_layer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made().model.layers[0].mlp
    x = random(1, 5, layer.gate_proj.in_features)
    expected = layer(x)
    layer.forward = rotation._FusedGate(layer)
    assert torch.equal(layer(x), expected)  # float32 takes the plain way


def test_a_gate_and_its_gradients_by_kernels(kernels: Any) -> None:
    from stalewise.models.kernels import elementwise

    assert elementwise is not None
    gate, up = (random(1, 5, 40, seed=seed).requires_grad_() for seed in (1, 2))
    expected = torch.nn.functional.silu(gate) * up
    gradient = random(1, 5, 40, seed=3)
    found: Any = rotation._Gated.apply(gate, up)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (gate, up), gradient),
        torch.autograd.grad(expected, (gate, up), gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_halves_of_one_product_and_norms_by_kernels(kernels: Any) -> None:
    product = random(1, 5, 80).requires_grad_()
    gate, up = product.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    gradient = random(1, 5, 40, seed=3)
    found: Any = rotation._GatedProduct.apply(product)
    torch.testing.assert_close(found, expected)
    (one,), (other,) = (torch.autograd.grad(x, product, gradient) for x in (found, expected))
    torch.testing.assert_close(one, other)
    x, weight = random(1, 5, 24).requires_grad_(), random(24, seed=1).requires_grad_()
    plain = torch.nn.functional.rms_norm(x, (24,), weight, 1e-6)
    normed: Any = fused_norms._Normed.apply(x, weight, 1e-6, torch.float32)
    torch.testing.assert_close(normed, plain)
    gradient = random(1, 5, 24, seed=5)
    ours = torch.autograd.grad(normed, (x, weight), gradient)
    for one, other in zip(ours, torch.autograd.grad(plain, (x, weight), gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
