"""Attention of one decoding step by shape of launch (keys at a time, warps, stages of loads), on a GPU.

    python benchmarks/decode_attention.py [--out FILE]

Heads are those of SmolLM2-135M: 9 for queries, 3 for keys of 64 numbers, in bfloat16. Eight rows share a prompt, rows
are in random order, and each has between one key of its own and as many as there is room for. Caches of several layers
take turns, so that none is still near from the last call. Microseconds a call; what `kernels/decode.py` has is chosen
by it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stalewise.models.kernels import decode_attention as decode

HEADS, KV_HEADS, WIDTH = 9, 3, 64
GROUP_SIZE = 8
WARM_UP, CALLS = 4, 24


@dataclass(frozen=True)
class Rows:
    """So many, with room for keys of their own and of a prompt."""

    rows: int
    own_room: int
    prompt_room: int
    prefix: int
    layers: int
    launches: tuple[tuple[int, int, int], ...]


SHORT = ((32, 1, 3), (32, 1, 4), (16, 1, 3), (16, 1, 4), (16, 1, 5), (32, 2, 3))
LONG = ((64, 2, 3), (32, 1, 3), (64, 4, 3), (128, 4, 3), (64, 2, 4))
CASES = {
    "short": Rows(8192, 64, 64, prefix=36, layers=8, launches=SHORT),
    "long": Rows(1024, 1024, 128, prefix=100, layers=4, launches=LONG),
    "few": Rows(64, 4096, 128, prefix=100, layers=4, launches=LONG),
}


def attention(case: Rows, device: str) -> Callable[[int], object]:
    """One call, for the layer of that number."""
    torch.manual_seed(0)
    prompts = case.rows // GROUP_SIZE
    tokens = case.rows * case.own_room + prompts * case.prompt_room
    shape = (case.layers, 2, tokens, KV_HEADS, WIDTH)
    caches = torch.randn(shape, device=device, dtype=torch.bfloat16)
    query_RHD = torch.randn(case.rows, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    row_R = torch.arange(case.rows, device=device)
    prompt_R = (
        case.rows * case.own_room + row_R[torch.randperm(case.rows, device=device)] // GROUP_SIZE * case.prompt_room
    )
    prefix_R = torch.full_like(row_R, case.prefix)
    length_R = prefix_R + torch.randint(1, case.own_room + 1, (case.rows,), device=device)
    own_R, room = row_R * case.own_room, case.prompt_room + case.own_room

    def call(number: int) -> object:
        key_TKD, value_TKD = caches[number % case.layers]
        return decode.decode_attention(
            query_RHD, key_TKD, value_TKD, prompt_R, prefix_R, own_R, length_R, room=room, scale=0.125
        )

    return call


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
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    for name, case in CASES.items():
        call = attention(case, "cuda")
        for launch in case.launches:
            decode.SHORT = decode.LONG = launch
            found[f"{name} {launch}"] = microseconds(call)
            print(f"{name:6} {launch!s:12} {found[f'{name} {launch}']:8.1f} µs", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
