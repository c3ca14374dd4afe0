"""Sampling with room for a part of the keys and values: long responses in little memory, none of them lost.

    python benchmarks/few_blocks.py --gb 4 --out benchmarks/results/few_blocks-h200.json
    python benchmarks/few_blocks.py --size tiny --tokens 128 --requests 64 --gb 0.01    # in seconds, on a CPU

Responses of up to `--tokens` tokens with lengths from a long-tailed distribution, as in versus_vllm.py, random weights.
After a warm-up the engine samples them with all of the memory, then with `--gb` gigabytes for keys and values and what
else its slots need. It reports tokens a second of both passes, how often responses were put back into the queue for
want of blocks, and how many responses are the same in both: all of them on a CPU; on a GPU steps with other numbers of
rows round differently.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.child_processes import when
from benchmarks.versus_vllm import SHAPES, Part, lengths, limited_sampler, make_model

from stalewise.rollout.engines.slot_decode import SlotDecoder
from stalewise.store.atomic import write_json_atomic


def measure(size: str, tokens: int, requests: int, bytes_at_most: float, model: Path) -> dict[str, Any]:
    """Both passes over the same requests."""
    part, limits = Part(requests, 16, (1,)), lengths("drawn", requests, tokens)
    sampler, sample = limited_sampler(size, tokens, model)
    put_back = [0]
    made = SlotDecoder._put_back

    def counted(self: SlotDecoder, queue: Any, slots: Any) -> Any:
        put_back[0] += len(slots)
        return made(self, queue, slots)

    sample(part, [row % 48 + 1 for row in range(requests)], 1)  # warm-up, with steps of all numbers of rows
    found: dict[str, Any] = {**when(), "size": size, "tokens": tokens, "requests": requests, "longest": max(limits)}
    responses: list[list[Any]] = []
    SlotDecoder._put_back = counted
    try:
        for name, most in (("all", math.inf), ("few", bytes_at_most)):
            sampler._decoder, sampler.most_bytes, put_back[0] = None, most, 0
            seconds, answers = sample(part, limits, 2)
            if [len(one.token_ids) for one in answers] != limits:
                raise RuntimeError("responses do not have the lengths that were asked for")
            responses.append([one.token_ids.tolist() for one in answers])
            decoder: Any = sampler._decoder
            slots = {"slots": str(decoder.size), "put_back": put_back[0]}
            found[name] = {**slots, "seconds": seconds, "tokens_per_second": sum(limits) / seconds}
    finally:
        SlotDecoder._put_back = made
    same = sum(one == other for one, other in zip(*responses, strict=True))
    return {**found, "new_tokens": sum(limits), "same_responses": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="0.5b")
    parser.add_argument("--tokens", type=int, default=32_000, help="of a response at most")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--gb", type=float, default=4.0, help="for keys and values in the second pass")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "versus_vllm", help="for the models")
    parser.add_argument("--out", type=Path, help="also write what was found here, as JSON")
    given = parser.parse_args()
    if not (model := given.work / given.size).exists():
        make_model(given.size, model)
    found = measure(given.size, given.tokens, given.requests, given.gb * 1e9, model)
    if given.out:
        write_json_atomic(given.out, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
