"""What one call of each objective costs on a million tokens, against grpo in the same run.

    python benchmarks/objectives.py [--tokens 1048576] [--repeats 5] [--json]

A call is loss, diagnostics and backward. The batch is 4096 responses of 256 tokens at a log-ratio spread of 0.3. Each
round times every objective once, so that a slow minute of the machine hits all of them; the fastest round counts.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor

from stalewise.objectives import OBJECTIVES, evaluate

SETTINGS = [
    *((name, {}) for name in OBJECTIVES if name != "m2po"),
    ("m2po", {"variant": "paper"}),
    ("m2po", {"variant": "released"}),
]


def make_batch(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (tokens // 256, 256)
    behaviour = -torch.rand(shape, generator=generator) * 3
    drift = 0.3 * torch.randn(shape, generator=generator)
    return {
        "logp": (behaviour + drift).requires_grad_(),
        "behaviour_logp": behaviour,
        "proximal_logp": behaviour + drift / 2,
        "advantage": torch.randn(shape[0], generator=generator),
        "mask": torch.rand(shape, generator=generator) < 0.9,
    }


def seconds_of_one_call(name: str, params: dict[str, str], batch: dict[str, Any]) -> float:
    batch["logp"].grad = None
    start = time.perf_counter()
    evaluate(name, **batch, params=params).loss.backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    batch = make_batch(arguments.tokens)
    names = [f"{name}{'/' + params['variant'] if params else ''}" for name, params in SETTINGS]
    best = dict.fromkeys(names, float("inf"))
    for _ in range(arguments.repeats + 1):  # the first round warms the allocator up, and is never the fastest
        for label, (name, params) in zip(names, SETTINGS, strict=True):
            best[label] = min(best[label], seconds_of_one_call(name, params, batch))
    rows = {label: {"seconds": s, "times_grpo": s / best["grpo"]} for label, s in best.items()}
    if arguments.json:
        print(json.dumps({"tokens": arguments.tokens, "threads": torch.get_num_threads(), "objectives": rows}))
        return
    for label, row in rows.items():
        print(f"{label:16} {1000 * row['seconds']:8.1f} ms {row['times_grpo']:6.2f} × grpo")


if __name__ == "__main__":
    main()
