"""stalewise.models.kernels.rope: kernels that rotate queries and keys, and write keys and values to a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rotations import DEVICE, one_token, plain_rotation, random

SIZES = [(5, 9, 3, 64), (5, 9, 3, 80), (5, 1, 1, 6), (5, 1, 1, 64), (40, 9, 3, 6), (150, 4, 2, 64)]


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
