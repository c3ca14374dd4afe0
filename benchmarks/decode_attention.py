"""Attention of one decoding step by shape of launch (keys at a time, warps, stages of loads), on a GPU.

    python benchmarks/decode_attention.py [--out FILE] [--only long,longest]

Heads are those of SmolLM2-135M (9 for queries, 3 for keys of 64 numbers) for short rows, and those of Qwen2.5-1.5B (12,
2, 128) for long ones, in bfloat16. Eight rows share a prompt, rows and blocks are in random order, and each row has
between one key of its own and as many as there is room for. Caches of several layers take turns, so that none is still
near from the last call. Microseconds a call, and the rate at which keys and values are read; `SHORT` and `LONG` of
`kernels/decode_attention.py` are chosen by it. Launches of long rows end with the keys of a part, if several programs
share a row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stalewise.models.kernels import decode_attention as decode

GROUP_SIZE = 8
WARM_UP, CALLS = 4, 24
SMOLLM2, QWEN = (9, 3, 64), (12, 2, 128)


@dataclass(frozen=True)
class Rows:
    """So many, with room for keys of their own and of a prompt."""

    rows: int
    own_room: int
    prompt_room: int
    prefix: int
    layers: int
    heads: tuple[int, int, int]  # of queries and of keys, and their width
    launches: tuple[tuple[int, ...], ...]
    block_size: int = 64


SHORT = ((32, 1, 3), (32, 1, 4), (16, 1, 3), (16, 1, 4), (16, 1, 5), (32, 2, 3))
MIDDLE = ((64, 2, 3), (32, 1, 3), (64, 4, 3), (64, 2, 4), (32, 2, 4))
LONG = ((64, 4, 3, 1024), (64, 4, 4, 1024), (64, 2, 3, 1024), (64, 4, 3, 512), (64, 4, 3, 2048), (64, 4, 3, 1 << 20))
CASES = {
    "short": Rows(8192, 64, 64, prefix=36, layers=8, heads=SMOLLM2, launches=SHORT),
    "middle": Rows(2048, 512, 128, prefix=127, layers=4, heads=QWEN, launches=MIDDLE),
    "long": Rows(256, 4096, 128, prefix=127, layers=4, heads=QWEN, launches=LONG),
    "longest": Rows(64, 16_384, 128, prefix=127, layers=4, heads=QWEN, launches=LONG),
}


def attention(case: Rows, device: str) -> tuple[Callable[[int], object], int]:
    """One call, for the layer of that number, and the bytes that it reads."""
    torch.manual_seed(0)
    heads, kv_heads, width = case.heads
    own_blocks, prompt_blocks = -(-case.own_room // case.block_size), -(-case.prompt_room // case.block_size)
    prompts = case.rows // GROUP_SIZE
    number = torch.randperm(case.rows * own_blocks + prompts * prompt_blocks, device=device).int()
    own_SB, prompt_PB = number[: case.rows * own_blocks].view(case.rows, -1), number[case.rows * own_blocks :]
    prompt_S = torch.randperm(case.rows, device=device) // GROUP_SIZE
    block_SB = torch.cat([prompt_PB.view(prompts, -1)[prompt_S], own_SB], dim=1).contiguous()
    shape = (case.layers, 2, len(number) * case.block_size, kv_heads, width)
    caches = torch.randn(shape, device=device, dtype=torch.bfloat16)
    query_RHD = torch.randn(case.rows, heads, width, device=device, dtype=torch.bfloat16)
    slot_R = torch.arange(case.rows, device=device)
    prefix_R = torch.full_like(slot_R, case.prefix)
    length_R = prefix_R + torch.randint(1, case.own_room + 1, (case.rows,), device=device)

    def call(number: int) -> object:
        key_TKD, value_TKD = caches[number % case.layers]
        return decode.decode_attention(
            *(query_RHD, key_TKD, value_TKD, slot_R, block_SB, prefix_R, length_R),
            block_size=case.block_size,
            prompt_blocks=prompt_blocks,
            room=case.prompt_room + case.own_room,
            scale=width**-0.5,
        )

    return call, int(length_R.sum()) * kv_heads * width * 2 * 2


def microseconds(call: Callable[[int], object]) -> float:
    for number in range(WARM_UP):
        call(number)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for number in range(CALLS):
        call(number)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results")
    parser.add_argument("--only", default=",".join(CASES))
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    usual, decode.MOST_PARTS = decode.PART, 1 << 20
    for name in arguments.only.split(","):
        call, read = attention(CASES[name], "cuda")
        for launch in CASES[name].launches:
            decode.SHORT = decode.LONG = launch[:3]
            decode.PART = launch[3] if len(launch) > 3 else usual
            took = microseconds(call)
            found[f"{name} {launch}"] = {"microseconds": took, "gigabytes_per_second": read / took / 1e3}
            print(f"{name:8} {launch!s:20} {took:8.1f} µs {read / took / 1e3:8.0f} GB/s", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
