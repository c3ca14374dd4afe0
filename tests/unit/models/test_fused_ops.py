"""The rotation of one new token a row, and writing it to a cache: the kernels against what they stand in for, and when
they do. Kernels run on a GPU, or anywhere with Triton and TRITON_INTERPRET=1; all else with a rotation in torch.
"""

from __future__ import annotations

import os
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
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from policies import SIZE
from stalewise.models import fused_ops as rotation
from stalewise.models.fused_ops import fused_rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(5, 9, 3, 64), (5, 9, 3, 80), (5, 1, 1, 6), (5, 1, 1, 64), (40, 9, 3, 6), (150, 4, 2, 64)]
plain_rotation: Any = modeling_llama.apply_rotary_pos_emb


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and no TRITON_INTERPRET=1")
    from stalewise.models.kernels import rope as rotate

    return rotate


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def one_token(rows: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries and keys as attention makes them, and angles; halves of the angles differ, to tell them apart."""
    query, key = (random(rows, 1, n, width, dtype=dtype, seed=n).transpose(1, 2) for n in (heads, kv_heads))
    angle = random(rows, 1, width, seed=99)
    return [query, key, angle.cos().to(dtype), angle.sin().to(dtype)]


# ------------------------------------------------------------ kernels


@pytest.mark.parametrize(("rows", "heads", "kv_heads", "width"), SIZES)
def test_the_kernel_rotates_as_transformers_does(
    rows: int, heads: int, kv_heads: int, width: int, kernels: Any
) -> None:
    arguments = one_token(rows, heads, kv_heads, width)
    for found, expected in zip(kernels.rotate_on_device(*arguments), plain_rotation(*arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert found.is_contiguous()


@pytest.mark.parametrize("width", [64, 80])
def test_bfloat16_is_rounded_once(width: int, kernels: Any) -> None:
    arguments = one_token(30, 9, 3, width, torch.bfloat16)
    exact = plain_rotation(*(x.double() for x in arguments))
    # Half of a step at most, so none of bfloat16's numbers is closer; Triton's interpreter cuts off where GPUs round.
    share = 2**-8 if DEVICE == "cuda" else 2**-7
    for found, plain, right in zip(
        kernels.rotate_on_device(*arguments), plain_rotation(*arguments), exact, strict=True
    ):
        allowed = share * right.abs() + 1e-6
        assert found.dtype is torch.bfloat16
        assert ((found - right).abs() <= allowed).all()
        assert not ((plain - right).abs() <= allowed).all()


def test_queries_and_keys_may_be_views_of_one_projection(kernels: Any) -> None:
    rows, heads, kv_heads, width = 7, 4, 2, 16
    joint = random(rows, 1, heads + 2 * kv_heads, width)
    query, key, _ = joint.split([heads, kv_heads, kv_heads], dim=2)
    *_, cos, sin = one_token(rows, heads, kv_heads, width)
    every_other = random(rows, heads, 1, 2 * width)[..., ::2]  # numbers of a head that do not follow one another
    heads_first = random(heads, rows, 1, width).transpose(0, 1)
    apart_cos, apart_sin = torch.stack([cos, sin], dim=2).unbind(dim=2)
    before = joint.clone()
    for arguments in (
        (query.transpose(1, 2), key.transpose(1, 2), apart_cos, apart_sin),
        (every_other, key.transpose(1, 2), cos, sin),
        (heads_first, key.transpose(1, 2), cos, sin),
    ):
        for found, expected in zip(kernels.rotate_on_device(*arguments), plain_rotation(*arguments), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(joint, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "key_size", "value_size"),
    [
        (5, (3, 64), (3, 64)),
        (5, (1, 6), (1, 6)),
        (50, (3, 80), (3, 80)),
        (50, (2, 24), (2, 64)),
        (90, (4, 64), (1, 6)),
    ],
)
def test_keys_and_values_are_written_where_they_belong(
    rows: int, key_size: tuple[int, int], value_size: tuple[int, int], dtype: torch.dtype, kernels: Any
) -> None:
    tokens = 3 * rows
    place_R = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))[:rows].to(DEVICE)
    new = [random(rows, heads, 2, width, dtype=dtype, seed=width)[:, :, 0] for heads, width in (key_size, value_size)]
    found = [random(tokens, *size, dtype=dtype, seed=7) for size in (key_size, value_size)]
    expected = [x.clone().index_copy_(0, place_R, y) for x, y in zip(found, new, strict=True)]
    kernels.write_on_device(*found, place_R, *new)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_prompts_are_written_from_heads_that_lie_apart(kernels: Any) -> None:
    read = [random(1, 3, 40, 16, seed=n)[0].transpose(0, 1) for n in range(2)]
    caches = [torch.zeros(50, 3, 16, device=DEVICE) for _ in range(2)]
    place_R = torch.arange(9, 49, device=DEVICE).repeat_interleave(2)[::2]
    kernels.write_on_device(*caches, place_R, *read)
    for cache, new in zip(caches, read, strict=True):
        assert torch.equal(cache[9:49], new)
        assert not cache[:9].any() and not cache[49:].any()


@pytest.mark.skipif(DEVICE == "cpu", reason="takes 9 GB")
def test_a_cache_may_have_more_numbers_than_32_bits_can_count(kernels: Any) -> None:
    tokens = 2**31 // 64 + 8
    caches = [torch.zeros(tokens, 1, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    new = [random(2, 1, 64, dtype=torch.bfloat16, seed=n) for n in range(2)]
    place_R = torch.tensor([tokens - 1, 3], device=DEVICE)
    kernels.write_on_device(*caches, place_R, *new)
    for cache, x in zip(caches, new, strict=True):
        assert torch.equal(cache[place_R], x)
        assert int(cache.any(dim=2).sum()) == 2


def test_a_cache_with_gaps_is_refused(kernels: Any) -> None:
    new = random(2, 1, 8)
    whole, gaps = torch.zeros(4, 1, 8, device=DEVICE), torch.zeros(8, 1, 8, device=DEVICE)[::2]
    for caches in ((whole, gaps), (gaps, whole)):
        with pytest.raises(ValueError, match="contiguous"):
            kernels.write_on_device(*caches, torch.arange(2, device=DEVICE), new, new)


def test_heads_without_a_middle_are_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match="even"):
        kernels.rotate_on_device(*one_token(2, 1, 1, 7))


def test_no_rows_are_no_work(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_rotate", "_write"):
        monkeypatch.setattr(kernels, name, None)  # which cannot be launched
    query, key = kernels.rotate_on_device(*one_token(0, 9, 3, 64))
    assert query.shape == (0, 9, 1, 64) and key.shape == (0, 3, 1, 64)
    cache, nothing = torch.zeros(4, 3, 8, device=DEVICE), torch.empty(0, 3, 8, device=DEVICE)
    kernels.write_on_device(cache, cache, torch.empty(0, dtype=torch.long, device=DEVICE), nothing, nothing)
    assert not cache.any()


# ------------------------------------------------------------ when they are used


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
