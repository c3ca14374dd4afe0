"""Attention of one new token per row against a cache in blocks, as Triton kernels.

A program takes the few queries that share a key-value head, and loops over the keys that exist: those of the prompt,
which responses share, then the row's own. Kernels for many queries would waste most of a decoding step on padding.
Where rows can be long, several programs share a row's keys and a second kernel merges what they found: a step must not
wait for one program and its thousands of keys. The length of a part depends on the number of rows, as the kernels of a
model's other products do, and not on how long the rows are. Axes: R rows, S slots, B blocks of a slot, H heads, T
tokens of the cache, K key-value heads, D numbers per head.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Keys at a time, warps, and stages of loads. With few keys per row, many small programs hide each other's latency.
SHORT, LONG = (16, 1, 3), (64, 4, 3)
SHORT_ROOM, LONG_WIDTH = 256, 128  # wider heads leave no room for more keys
FEWEST_QUERIES = 16  # the minimum of the matrix units
# Keys of a part where rows are many, and at least; parts of a row at most, twice as many where rows are few.
PART, SHORTEST_PART, MOST_PARTS = 1024, 256, 64
# Parts of 1,024 keys are halved if there are fewer programs than the first, those of 512 if fewer than the second:
# two for each multiprocessor of a large GPU.
EVEN_PROGRAMS, PROGRAMS = 4096, 256


def decode_attention(
    query_RHD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    slot_R: Tensor,
    block_SB: Tensor,
    prefix_R: Tensor,
    length_R: Tensor,
    *,
    block_size: int,
    prompt_blocks: int,
    room: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Row r attends to the last `window` of `length_R[r]` keys, at most `room`; [R, H, D].

    The first `prefix_R[r]` are in the blocks `block_SB[slot_R[r], :prompt_blocks]`, the others in those after them; a
    block has `block_size` tokens, a power of two of at least 16.
    """
    rows, heads, width = query_RHD.shape
    kv_heads = key_TKD.shape[1]
    if value_TKD.shape != key_TKD.shape:
        raise NotImplementedError("decode attention needs keys and values of one shape")
    keys, warps, stages = LONG if room > SHORT_ROOM and width <= LONG_WIDTH and block_size >= LONG[0] else SHORT
    if block_size % keys:
        raise ValueError(f"decode attention reads {keys} keys at a time: blocks of {block_size} must be multiples")
    part = _part(rows * kv_heads, room)
    # Prompt and response begin a block each, so a row may have one chunk more than its keys fill.
    parts = triton.cdiv(room + keys, part) if room > part else 1
    query_RHD, output_RHD = query_RHD.contiguous(), torch.empty_like(query_RHD, memory_format=torch.contiguous_format)
    found = output_RHD if parts == 1 else query_RHD.new_empty(rows, heads, parts, width, dtype=torch.float32)
    weight = output_RHD if parts == 1 else query_RHD.new_empty(2, rows, heads, parts, dtype=torch.float32)
    places = slot_R, block_SB, prefix_R, length_R
    shapes = {"HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "BLOCK_WIDTH": triton.next_power_of_2(width)}
    division = {"KEYS": keys, "PARTS": parts, "CHUNKS": part // keys if parts > 1 else 1 << 30}
    limits = scale, window if window is not None else 1 << 30
    _decode[(parts, rows, kv_heads)](  # pyright: ignore[reportIndexIssue]
        *(query_RHD, key_TKD, value_TKD, output_RHD, found, weight, *places, rows * heads * parts, *limits),
        COLUMNS=block_SB.shape[1],
        BLOCK_SIZE=block_size,
        PROMPT_BLOCKS=prompt_blocks,
        QUERIES=max(FEWEST_QUERIES, triton.next_power_of_2(heads // kv_heads)),
        **shapes,
        **division,
        num_warps=warps,
        num_stages=stages,
    )
    if parts > 1:
        most = triton.next_power_of_2(parts)
        _merge[(rows, heads)](  # pyright: ignore[reportIndexIssue]
            *(output_RHD, found, weight, prefix_R, length_R, rows * heads * parts, limits[1]),
            MOST=most,
            **{name: value for name, value in shapes.items() if name != "KV_HEADS"},
            **division,
            num_warps=max(2, most * shapes["BLOCK_WIDTH"] // 4096),  # so that a thread's numbers fit its registers
        )
    return output_RHD


def _part(rows: int, room: int) -> int:
    """Keys of a part; `rows` counts each key-value head. Programs are counted as if rows were half as long as room."""
    part = max(PART, triton.next_power_of_2(triton.cdiv(room + LONG[0], MOST_PARTS)))
    if room <= PART:  # one program has all keys of such a row
        return part
    shortest = max(SHORTEST_PART, triton.next_power_of_2(triton.cdiv(room + LONG[0], 2 * MOST_PARTS)))
    while part > shortest and rows * triton.cdiv(room, 2 * part) < (EVEN_PROGRAMS if part >= PART else PROGRAMS):
        part //= 2
    return part


@triton.jit
def _chunks(prefix, length, window, KEYS: tl.constexpr):
    """Keys of the prompt that count, its chunks, the first chunk within the window, and the end of all chunks."""
    of_prompt = tl.minimum(prefix, length)
    begin = tl.maximum(length - window, 0)
    prompt_chunks = tl.cdiv(of_prompt, KEYS)
    first = tl.where(begin < of_prompt, begin // KEYS, prompt_chunks + (begin - of_prompt) // KEYS)
    return of_prompt, prompt_chunks, first, prompt_chunks + tl.cdiv(length - of_prompt, KEYS)


@triton.jit
def _column(chunk, prompt_chunks, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PROMPT_BLOCKS: tl.constexpr):
    """The place of a chunk's block in its slot's row; a chunk is within one block."""
    is_own = chunk >= prompt_chunks
    return (chunk - tl.where(is_own, prompt_chunks, 0)) * KEYS // BLOCK_SIZE + tl.where(is_own, PROMPT_BLOCKS, 0)


@triton.jit(do_not_specialize=["all_parts"])
def _decode(
    query,
    key,
    value,
    output,
    found,
    weight_of,
    slot,
    block,
    prefix,
    length,
    all_parts,
    scale,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PROMPT_BLOCKS: tl.constexpr,
):
    part, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    keys_there = tl.load(length + row).to(tl.int32)
    of_prompt, prompt_chunks, first, last = _chunks(tl.load(prefix + row).to(tl.int32), keys_there, window, KEYS)
    first += part * CHUNKS
    if first >= last:
        return
    last = tl.minimum(first + CHUNKS, last)
    block += tl.load(slot + row) * COLUMNS
    queries, numbers = tl.arange(0, QUERIES), tl.arange(0, BLOCK_WIDTH)
    of_group = (queries[:, None] < group) & (numbers[None, :] < WIDTH)
    head_row = row * HEADS + head * group + queries
    here = head_row[:, None] * WIDTH + numbers[None, :]
    q = tl.load(query + here, mask=of_group, other=0.0)
    largest, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK_WIDTH], tl.float32)
    number = tl.load(block + _column(first, prompt_chunks, KEYS, BLOCK_SIZE, PROMPT_BLOCKS))
    for chunk in range(first, last):
        place, is_there = _places(chunk, number, prompt_chunks, of_prompt, keys_there, window, KEYS, BLOCK_SIZE)
        # One iteration ahead: otherwise the compiler would prefetch block numbers instead of keys.
        following = tl.minimum(chunk + 1, last - 1)
        number = tl.load(block + _column(following, prompt_chunks, KEYS, BLOCK_SIZE, PROMPT_BLOCKS))
        source = (place * KV_HEADS + head)[:, None] * WIDTH + numbers[None, :]
        readable = is_there[:, None] & (numbers[None, :] < WIDTH)
        k, v = tl.load(key + source, mask=readable, other=0.0), tl.load(value + source, mask=readable, other=0.0)
        largest, total, mixed = _mix(q, k, v, is_there, scale, largest, total, mixed)
    result = mixed / total[:, None]
    if PARTS == 1:
        tl.store(output + here, result.to(output.dtype.element_ty), mask=of_group)
    else:
        place_of = head_row.to(tl.int64) * PARTS + part
        tl.store(found + place_of[:, None] * WIDTH + numbers[None, :], result, mask=of_group)
        tl.store(weight_of + place_of, largest, mask=queries < group)
        tl.store(weight_of + all_parts + place_of, total, mask=queries < group)


@triton.jit
def _places(chunk, number, prompt_chunks, of_prompt, keys_there, window, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the keys of a chunk are, which is in the block of that number, and which of them count."""
    is_own = chunk >= prompt_chunks
    start = (chunk - tl.where(is_own, prompt_chunks, 0)) * KEYS
    token = start + tl.arange(0, KEYS)
    is_there = token < tl.where(is_own, keys_there - of_prompt, of_prompt)
    is_there &= token + tl.where(is_own, of_prompt, 0) >= keys_there - window
    return number.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, KEYS), is_there


@triton.jit
def _mix(q, k, v, is_there, scale, largest, total, mixed):
    """Add a chunk of keys and values to what was found so far: largest score, sum of weights, weighted values."""
    score = tl.where(is_there[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, axis=1))
    weight = tl.exp(score - new_largest[:, None])
    shrink = tl.exp(largest - new_largest)
    total = total * shrink + tl.sum(weight, axis=1)
    return new_largest, total, mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)


@triton.jit(do_not_specialize=["all_parts"])
def _merge(
    output,
    found,
    weight_of,
    prefix,
    length,
    all_parts,
    window,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    MOST: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    keys_there, of_prompt = tl.load(length + row).to(tl.int32), tl.load(prefix + row).to(tl.int32)
    _, _, first, last = _chunks(of_prompt, keys_there, window, KEYS)
    parts, numbers = tl.arange(0, MOST), tl.arange(0, BLOCK_WIDTH)
    is_part = parts < tl.cdiv(last - first, CHUNKS)
    place = (row.to(tl.int64) * HEADS + head) * PARTS + parts
    largest = tl.load(weight_of + place, mask=is_part, other=float("-inf"))
    total = tl.load(weight_of + all_parts + place, mask=is_part, other=0.0)
    share = total * tl.exp(largest - tl.max(largest, axis=0))
    share = share / tl.sum(share, axis=0)
    readable = is_part[:, None] & (numbers[None, :] < WIDTH)
    x = tl.load(found + place[:, None] * WIDTH + numbers[None, :], mask=readable, other=0.0)
    here = (row.to(tl.int64) * HEADS + head) * WIDTH + numbers
    mixed = tl.sum(x * share[:, None], axis=0)
    tl.store(output + here, mixed.to(output.dtype.element_ty), mask=numbers < WIDTH)
