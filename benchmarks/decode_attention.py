"""Decoding steps: attention by shape of launch (keys at a time, warps, stages of loads), and whole steps, on a GPU.

    python benchmarks/decode_attention.py [--out FILE] [--only long,longest]
    python benchmarks/decode_attention.py --parts [--out FILE]                       # how a row's keys are divided
    python benchmarks/decode_attention.py --step [--sizes 1.5b,7b] [--rows 8,64,128] # fused operators or none

Heads are those of SmolLM2-135M (9 for queries, 3 for keys of 64 numbers) for short rows, and those of Qwen2.5-1.5B (12,
2, 128) for long ones, in bfloat16. Eight rows share a prompt, rows and blocks are in random order, and each row has
between one key of its own and as many as there is room for. Caches of several layers take turns, so that none is still
near from the last call. Microseconds a call, and the rate at which keys and values are read; `SHORT` and `LONG` of
`kernels/decode_attention.py` are chosen by it. Launches of long rows end with the keys of a part, if several programs
share a row.

`--parts` measures values of `PART` and `MOST_PARTS` for rows of one length, with the heads of Qwen2.5-1.5B and 7B.
`--step` measures the steps of the `hf` engine with models of `versus_vllm.py`: milliseconds a step, the number of
kernels, and the ten that take longest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.versus_vllm import SHAPES, make_model  # noqa: E402

GROUP_SIZE = 8
WARM_UP, CALLS, REPLAYS = 4, 12, 4
SMOLLM2, QWEN, QWEN_7B = (9, 3, 64), (12, 2, 128), (28, 4, 128)
PART_HEADS = {"1.5b": QWEN, "7b": QWEN_7B}
PART_ROWS, PART_LENGTHS, PART_ROOM = (64, 16, 8), (2048, 8192, 16_384), 16_384  # room of a response; 128 of a prompt
PARTS = ((1024, 32), (512, 64), (256, 128))  # PART and MOST_PARTS
BANDWIDTH = 4.8e12  # bytes per second of an H200
STEP_TOKENS, NEW_TOKENS = 2048, 1024  # of a prompt; room of a response
STEPS, LONGEST = 64, 10


@dataclass(frozen=True)
class Rows:
    """So many, with room for keys of their own and of a prompt."""

    rows: int
    own_room: int
    prompt_room: int
    prefix: int
    layers: int
    heads: tuple[int, int, int]  # of queries and of keys, and their width
    launches: tuple[tuple[int, ...], ...] = ()
    block_size: int = 64
    length: int = 0  # of all rows, unless they differ


SHORT = ((32, 1, 3), (32, 1, 4), (16, 1, 3), (16, 1, 4), (16, 1, 5), (32, 2, 3))
MIDDLE = ((64, 2, 3), (32, 1, 3), (64, 4, 3), (64, 2, 4), (32, 2, 4))
LONG = ((64, 4, 3, 1024), (64, 4, 4, 1024), (64, 2, 3, 1024), (64, 4, 3, 512), (64, 4, 3, 2048), (64, 4, 3, 1 << 20))
CASES = {
    "short": Rows(8192, 64, 64, prefix=36, layers=8, heads=SMOLLM2, launches=SHORT),
    "middle": Rows(2048, 512, 128, prefix=127, layers=4, heads=QWEN, launches=MIDDLE),
    "long": Rows(256, 4096, 128, prefix=127, layers=4, heads=QWEN, launches=LONG),
    "longest": Rows(64, 16_384, 128, prefix=127, layers=4, heads=QWEN, launches=LONG),
}


def kernel() -> Any:
    """The module, which needs Triton."""
    from stalewise.models.kernels import decode_attention

    return decode_attention


def attention(case: Rows, device: str) -> tuple[Callable[[int], object], int]:
    """One call, for the layer of that number, and the bytes that it reads."""
    torch.manual_seed(0)
    decode, dtype = kernel(), torch.bfloat16 if device == "cuda" else torch.float32
    heads, kv_heads, width = case.heads
    own_blocks, prompt_blocks = -(-case.own_room // case.block_size), -(-case.prompt_room // case.block_size)
    prompts = -(-case.rows // GROUP_SIZE)
    number = torch.randperm(case.rows * own_blocks + prompts * prompt_blocks, device=device).int()
    own_SB, prompt_PB = number[: case.rows * own_blocks].view(case.rows, -1), number[case.rows * own_blocks :]
    prompt_S = torch.randperm(case.rows, device=device) // GROUP_SIZE
    block_SB = torch.cat([prompt_PB.view(prompts, -1)[prompt_S], own_SB], dim=1).contiguous()
    shape = (case.layers, 2, len(number) * case.block_size, kv_heads, width)
    caches = torch.randn(shape, device=device, dtype=dtype)
    query_RHD = torch.randn(case.rows, heads, width, device=device, dtype=dtype)
    slot_R = torch.arange(case.rows, device=device)
    prefix_R = torch.full_like(slot_R, case.prefix)
    length_R = prefix_R + torch.randint(1, case.own_room + 1, (case.rows,), device=device)
    if case.length:
        length_R = torch.full_like(slot_R, case.length)

    def call(number: int) -> object:
        key_TKD, value_TKD = caches[number % case.layers]
        return decode.decode_attention(
            *(query_RHD, key_TKD, value_TKD, slot_R, block_SB, prefix_R, length_R),
            block_size=case.block_size,
            prompt_blocks=prompt_blocks,
            room=case.prompt_room + case.own_room,
            scale=width**-0.5,
        )

    return call, int(length_R.sum()) * kv_heads * width * 2 * dtype.itemsize


def microseconds(call: Callable[[int], object]) -> float:
    for number in range(WARM_UP):
        call(number)
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call(0)
        return (time.perf_counter() - start) * 1e6
    graph = torch.cuda.CUDAGraph()  # as in a step: launched one by one, small calls would take as long as their launch
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(number)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / (REPLAYS * CALLS) * 1e3


def launch_shapes(names: Sequence[str]) -> dict[str, Any]:
    """Each case with each of its launches."""
    found: dict[str, Any] = {}
    decode: Any = kernel()
    usual, decode.MOST_PARTS, decode.PROGRAMS, decode.EVEN_PROGRAMS = decode.PART, 1 << 20, 0, 0
    for name in names:
        call, read = attention(CASES[name], "cuda")
        for launch in CASES[name].launches:
            decode.SHORT = decode.LONG = launch[:3]
            decode.PART = launch[3] if len(launch) > 3 else usual
            took = microseconds(call)
            found[f"{name} {launch}"] = {"microseconds": took, "gigabytes_per_second": read / took / 1e3}
            print(f"{name:8} {launch!s:20} {took:8.1f} µs {read / took / 1e3:8.0f} GB/s", flush=True)
    return found


def part_sizes(rows: Sequence[int] = PART_ROWS, lengths: Sequence[int] = PART_LENGTHS, room: int = PART_ROOM) -> Any:
    """Microseconds and share of the bandwidth by heads, rows, length, and division of a row's keys."""
    found: dict[str, Any] = {}
    decode: Any = kernel()
    usual = decode.PART, decode.MOST_PARTS, decode.PROGRAMS, decode.EVEN_PROGRAMS
    decode.PROGRAMS = decode.EVEN_PROGRAMS = 0  # so that the number of rows does not matter
    for name, heads in PART_HEADS.items():
        for count in rows:
            for length in lengths:
                case = Rows(count, room, 128, prefix=min(127, length), layers=4, heads=heads, length=length)
                call, read = attention(case, "cuda" if torch.cuda.is_available() else "cpu")
                for parts in PARTS:
                    decode.PART, decode.MOST_PARTS = parts
                    took = microseconds(call)
                    share = read / took * 1e6 / BANDWIDTH
                    key = f"{name} {count} rows of {length}: {parts[0]}/{parts[1]}"
                    keys = max(parts[0], 1 << (-(-(room + 128) // parts[1]) - 1).bit_length())
                    found[key] = {"microseconds": took, "share_of_bandwidth": share, "keys_of_a_part": keys}
                    print(f"{key:36} {took:8.1f} µs {share:6.1%}", flush=True)
    decode.PART, decode.MOST_PARTS, decode.PROGRAMS, decode.EVEN_PROGRAMS = usual
    return found


# ---------------------------------------------------------------- whole steps


def whole_steps(sizes: Sequence[str], rows: Sequence[int], work: Path, tokens: int = STEP_TOKENS) -> dict[str, Any]:
    """Steps of each size with each number of rows, with everything fused and with nothing."""
    from stalewise.rollout.engines.embedded import HFSampler
    from stalewise.types import SamplerSettings

    cuda, found = torch.cuda.is_available(), dict[str, Any]()
    for size in sizes:
        if not (work / size).exists():
            make_model(size, work / size)
            torch.set_default_dtype(torch.float32)
        for fused in (True, False):
            sampler = HFSampler(
                SamplerSettings(),
                max_new_tokens=NEW_TOKENS,
                device=torch.device("cuda" if cuda else "cpu"),
                dtype=torch.bfloat16 if cuda else torch.float32,
                slots=True,
                fused=fused,
            )
            sampler.load(work / size)
            sampler._stop_ids = sampler._stop_ids[:0]
            for count in rows:
                name = f"{size} {count} rows of {tokens}, {'fused' if fused else 'plain'}"
                found[name] = {**step(sampler, count, tokens, SHAPES[size].vocabulary), "operators": sampler.fused}
                print(f"{name:32} {found[name]['ms']:8.3f} ms {found[name]['kernels']:6.0f} kernels", flush=True)
            sampler.close()
    return found


@torch.inference_mode()
def step(sampler: Any, rows: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    """Milliseconds of a step, its kernels (operators without a GPU), and those that take longest."""
    from torch._C._autograd import DeviceType
    from torch.profiler import profile

    from stalewise.rollout.engines.request_queue import RequestQueue
    from stalewise.rollout.sampler import Request

    prompts = torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    queue = RequestQueue([Request(prompt, seed) for seed, prompt in enumerate(prompts)], NEW_TOKENS)
    decoder = sampler._slot_decoder(queue, sampler.settings)
    decoder.alive_S.zero_()
    decoder.board = type(decoder.board)(decoder.size)
    decoder.fill(queue)
    living = decoder.board.living
    made, slots = decoder.rows_for(living)
    if len(living) != rows or made != rows:
        raise RuntimeError(f"{rows} rows were asked for: {len(living)} are alive, and a step has {made}")

    def run(steps: int) -> float:
        start = _now()
        for _ in range(steps // decoder.steps_per_check):
            decoder.make_room(queue)
            decoder.run(made, slots, decoder.steps_per_check)
            decoder.board.tokens_S[living] += decoder.steps_per_check
        return (_now() - start) / steps

    run(decoder.steps_per_check)  # captures the step
    seconds, profiler = run(STEPS), profile()
    with profiler:
        run(decoder.steps_per_check)
    where = DeviceType.CUDA if decoder.device.type == "cuda" else DeviceType.CPU
    events: list[Any] = [event for event in profiler.key_averages() if event.device_type == where]
    times = {event.key[:80]: event.self_device_time_total or event.self_cpu_time_total for event in events}
    longest = {name: times[name] / 1e3 / decoder.steps_per_check for name in sorted(times, key=lambda x: -times[x])}
    kernels = sum(event.count for event in events) / decoder.steps_per_check
    return {"ms": seconds * 1e3, "kernels": kernels, "longest_ms": dict(list(longest.items())[:LONGEST])}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--parts", action="store_true", help="how a row's keys are divided")
    parser.add_argument("--step", action="store_true", help="whole steps")
    parser.add_argument("--sizes", default="1.5b,7b", help="of --step")
    parser.add_argument("--rows", default="8,64,128", help="of --step")
    parser.add_argument("--tokens", type=int, default=STEP_TOKENS, help="of each row, for --step")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "versus_vllm", help="for the models")
    given = parser.parse_args(argv)
    if given.step:
        rows = [int(count) for count in given.rows.split(",")]
        found = whole_steps(given.sizes.split(","), rows, given.work, given.tokens)
    else:
        found = part_sizes() if given.parts else launch_shapes(given.only.split(","))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
