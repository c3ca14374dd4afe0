"""Attention of one new token per row, as a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stalewise.models.attention import slot_attention

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels import decode_attention as kernel
from stalewise.models.kernels.decode_attention import decode_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PREFIX, LENGTH = [70, 70, 0, 3, 64, 0], [71, 100, 1, 1, 104, 90]
SLOT = [3, 0, 1, 4, 2, 6]


def inputs(heads: int, kv_heads: int, width: int, block_size: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Query, keys and values, and where they are: two rows share a prompt, one has none, and one has ended."""
    torch.manual_seed(0)
    prompt_blocks, own_blocks = -(-80 // block_size), -(-110 // block_size)
    blocks = torch.randperm(7 * (prompt_blocks + own_blocks)).view(7, -1).int()
    blocks[0, :prompt_blocks] = blocks[3, :prompt_blocks]
    query = torch.randn(len(SLOT), heads, 1, width)
    cache = torch.randn(2, blocks.numel() * block_size, kv_heads, width)
    places = {"slot_R": SLOT, "prefix_R": PREFIX, "length_R": LENGTH}
    arguments: dict[str, Any] = {name: torch.tensor(place, device=DEVICE) for name, place in places.items()}
    arguments |= {"block_SB": blocks.to(DEVICE), "block_size": block_size, "prompt_blocks": prompt_blocks}
    return [x.to(DEVICE) for x in (query, *cache)], arguments


def keys_of(row: int, cache: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """The keys of a row's first head, one after the other."""
    size, table = arguments["block_size"], arguments["block_SB"][SLOT[row]].tolist()
    prefix, length = min(PREFIX[row], LENGTH[row]), LENGTH[row]
    places = [table[i // size] * size + i % size for i in range(prefix)]
    own = table[arguments["prompt_blocks"] :]
    places += [own[i // size] * size + i % size for i in range(length - prefix)]
    return cache[places, 0]


@pytest.mark.parametrize(("room", "block_size"), [(190, 16), (300, 64)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (2, 2, 40)])
def test_a_new_token_attends_to_its_prompt_and_to_its_own(
    heads: int, kv_heads: int, width: int, window: int | None, room: int, block_size: int
) -> None:
    (query_RH1D, key_TKD, value_TKD), arguments = inputs(heads, kv_heads, width, block_size)
    expected, _ = slot_attention(
        SimpleNamespace(config=SimpleNamespace()),
        *(query_RH1D, key_TKD, value_TKD, None),
        **arguments,
        room=room,
        scaling=0.2,
        sliding_window=window,
    )
    found = decode_attention(
        query_RH1D.squeeze(2), key_TKD, value_TKD, **arguments, room=room, scale=0.2, window=window
    )
    # On a GPU products of float32 are rounded to fewer bits.
    torch.testing.assert_close(found, expected.squeeze(1), rtol=0, atol=1e-5 if DEVICE == "cpu" else 5e-3)
    for row in range(len(SLOT)):
        keys, values = (keys_of(row, x, arguments)[-(window or 999) :] for x in (key_TKD, value_TKD))
        mixed = (query_RH1D[row, :1, 0] @ keys.T * 0.2).softmax(dim=1) @ values
        torch.testing.assert_close(expected[row, 0, :1], mixed, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("part", "window"), [(32, None), (32, 60)])
def test_programs_that_share_a_row_find_what_one_finds(
    part: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (query_RH1D, *cache), arguments = inputs(4, 2, 32, 32)
    sizes: dict[str, Any] = {"room": 190, "scale": 0.2, "window": window}
    alone = decode_attention(query_RH1D.squeeze(2), *cache, **arguments, **sizes)
    monkeypatch.setattr(kernel, "PART", part)
    monkeypatch.setattr(kernel, "SHORTEST_PART", part)
    monkeypatch.setattr(kernel, "MOST_PARTS", 99)
    shared = decode_attention(query_RH1D.squeeze(2), *cache, **arguments, **sizes)
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-5 if DEVICE == "cpu" else 5e-3)


def test_few_rows_are_divided_into_more_parts() -> None:
    assert [kernel._part(rows, 4096) for rows in (8, 32, 64, 2000, 2048)] == [256, 256, 512, 512, 1024]
    assert kernel._part(16, 16384) == 512  # 16 parts of 16 rows where they are half as long
    assert kernel._part(8, 16384) == 256 and kernel._part(4, 65536) == 1024
    assert [kernel._part(9999, room) for room in (32_640, 32_705, 65_536)] == [1024, 1024, 2048]  # at most 64 parts
    assert [kernel._part(8, room) for room in (640, 1024, 1025)] == [1024, 1024, 256]  # short rows are not divided


def test_parts_of_a_row_are_as_many_as_can_be_merged() -> None:
    for rows in (1, 8, 300, 100_000):
        for room in (1024, 1025, 4096, 16_512, 32_704, 32_705, 32_768, 65_472, 65_536, 131_072):
            parts = -(-(room + kernel.LONG[0]) // kernel._part(rows, room)) if room > kernel.PART else 1
            assert parts <= (64 if rows > 300 else 128), (rows, room)


def test_a_row_does_not_depend_on_what_the_other_rows_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PART", 32)
    monkeypatch.setattr(kernel, "SHORTEST_PART", 32)
    monkeypatch.setattr(kernel, "MOST_PARTS", 99)
    (query_RH1D, *cache), arguments = inputs(4, 2, 32, 16)
    together = decode_attention(query_RH1D.squeeze(2), *cache, **arguments, room=190, scale=0.2)
    arguments |= {name: arguments[name][1:2] for name in ("slot_R", "prefix_R", "length_R")}
    alone = decode_attention(query_RH1D[1:2].squeeze(2), *cache, **arguments, room=190, scale=0.2)
    assert torch.equal(alone, together[1:2])


def test_blocks_that_chunks_do_not_divide_are_refused() -> None:
    (query_RH1D, *cache), arguments = inputs(2, 2, 40, 16)
    with pytest.raises(ValueError, match="blocks of 24 must be multiples"):
        decode_attention(query_RH1D.squeeze(2), *cache, **arguments | {"block_size": 24}, room=300, scale=0.2)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stalewise.models.kernels.decode_attention import LONG, _decode

kinds = {name: "*bf16" for name in ("query", "key", "value", "output")}
kinds |= {"found": "*fp32", "weight_of": "*fp32", "slot": "*i64", "block": "*i32", "prefix": "*i64", "length": "*i64"}
kinds |= {"all_parts": "i32", "scale": "fp32", "window": "i32"}
sizes = {"HEADS": 12, "KV_HEADS": 2, "WIDTH": 128, "BLOCK_WIDTH": 128, "QUERIES": 16, "KEYS": LONG[0], "PARTS": 5}
sizes |= {"CHUNKS": 16, "COLUMNS": 66, "BLOCK_SIZE": 64, "PROMPT_BLOCKS": 2}
pointers = [i for i, name in enumerate(_decode.arg_names) if kinds.get(name, "").startswith("*")]
aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
source = ASTSource(_decode, kinds | dict.fromkeys(sizes, "constexpr"), sizes, aligned)
made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": LONG[1], "num_stages": LONG[2]})
print(made.asm["ttgir"])
"""


def test_the_next_keys_are_loaded_while_these_are_computed_with(compiled: Callable[[str], str]) -> None:
    """A compiler that prefetches the numbers of blocks instead has memory for the keys of one chunk only."""
    # Three stages: of keys and of values, two chunks are under way.
    assert compiled(COMPILE).count("local_alloc : () -> !ttg.memdesc<2x64x128xbf16") == 2
