"""How long the tail of a pool is: decoding steps by the order in which waiting requests get a slot.

    python benchmarks/schedule_tail.py [--prompts 256] [--tokens 16384] [--slots 256] [--draws 6]

Runs the sampler's own queue (`RequestQueue`) without a model: each step gives every slot one token, and a response ends
at its drawn length. Groups of 8 responses; lengths are long-tailed and alike within a group, as in versus_vllm.py.

    arrival                 in the order of the requests
    expected                longest expected first, as the sampler does it: with nothing known, and with the lengths of
                            an earlier pool, whose groups are alike and whose responses are other ones
    two of each first       two responses to each prompt before any third one, with nothing known; not in the sampler
    true                    longest first by the drawn lengths themselves, which nobody knows

No order ends in fewer steps than the larger of the longest response and all tokens divided by the slots. `busy` is the
share of slots that hold a response, over all steps. Counts steps, not seconds: one with few rows takes less time than
one with many, but not in proportion.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.versus_vllm import FEWEST_TOKENS, GROUP_SIZE, MEDIAN_SHARE, SPREAD

from stalewise.rollout.engines.paged_cache import SlotBlocks
from stalewise.rollout.engines.request_queue import LengthHistory, RequestQueue
from stalewise.rollout.sampler import Request

Order = Callable[[RequestQueue, int, np.ndarray], np.ndarray]


def drawn(prompts: int, tokens: int, draw: int, pool: int) -> np.ndarray:
    """Lengths of the responses of a pool, by request; pools of one draw have what a prompt's have in common."""
    of_prompt = np.repeat(np.random.default_rng([draw, prompts, tokens]).normal(size=prompts), GROUP_SIZE)
    own = np.random.default_rng([draw, prompts, tokens, 1 + pool]).normal(size=len(of_prompt))
    log = np.log(tokens * MEDIAN_SHARE) + SPREAD * np.sqrt(0.5) * (of_prompt + own)
    return np.clip(np.exp(log), FEWEST_TOKENS, tokens).astype(int)


def decode(lengths: np.ndarray, slots: int, tokens: int, order: Order, history: LengthHistory) -> int:
    """Steps until all have ended. What was learned of lengths is noted in the history."""
    requests = [Request((place // GROUP_SIZE, 0), seed=place) for place in range(len(lengths))]
    queue, blocks = RequestQueue(requests, tokens, history), SlotBlocks(slots, 1, 1, 16)
    running, made = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    steps = 0
    while queue or len(running):
        if queue and len(running) < slots:
            new = order(queue, slots - len(running), queue.expected_lengths(running, made))
            queue.start(new)
            running, made = np.concatenate([running, new]), np.concatenate([made, np.zeros(len(new), dtype=np.int64)])
        ahead = int((lengths[running] - made).min())  # until the next one ends
        steps, made = steps + ahead, made + ahead
        ended = made == lengths[running]
        queue.leave(running[ended])
        queue.end(running[ended], made[ended], blocks)
        running, made = running[~ended], made[~ended]
    history.note(queue.prompts, queue.mean_lengths().tolist())
    return steps


def compare(prompts: int, tokens: int, slots: int, draw: int) -> dict[str, tuple[float, float]]:
    """By order: by how much there are more steps than the fewest that are possible, and the share of busy slots."""
    before, lengths = (drawn(prompts, tokens, draw, pool) for pool in (0, 1))

    def in_order(queue: RequestQueue, most: int, expected_P: np.ndarray) -> np.ndarray:
        return np.flatnonzero(queue.waiting_Q)[:most]

    def two_first(queue: RequestQueue, most: int, expected_P: np.ndarray) -> np.ndarray:
        waiting = np.flatnonzero(queue.waiting_Q)
        prompt = queue.prompt_Q[waiting]
        is_third = waiting % GROUP_SIZE >= 2
        return waiting[np.lexsort((waiting % GROUP_SIZE, -expected_P[prompt], is_third))][:most]

    def by_truth(queue: RequestQueue, most: int, expected_P: np.ndarray) -> np.ndarray:
        waiting = np.flatnonzero(queue.waiting_Q)
        return waiting[np.argsort(-lengths[waiting], kind="stable")][:most]

    known = LengthHistory()
    decode(before, slots, tokens, RequestQueue.next, known)
    fewest = max(int(lengths.max()), -(-int(lengths.sum()) // slots))
    orders: dict[str, tuple[Order, LengthHistory]] = {
        "arrival": (in_order, LengthHistory()),
        "expected, nothing known": (RequestQueue.next, LengthHistory()),
        "two of each first, nothing known": (two_first, LengthHistory()),
        "expected, an earlier pool known": (RequestQueue.next, known),
        "true": (by_truth, LengthHistory()),
    }
    steps = {name: decode(lengths, slots, tokens, order, history) for name, (order, history) in orders.items()}
    return {name: (count / fewest - 1, int(lengths.sum()) / (count * slots)) for name, count in steps.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--draws", type=int, default=6, help="pools of other lengths; the figures are means over them")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    draws = [compare(arguments.prompts, arguments.tokens, arguments.slots, draw) for draw in range(arguments.draws)]
    found = {
        name: {"more_steps": [one[name][0] for one in draws], "busy": [one[name][1] for one in draws]}
        for name in draws[0]
    }
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), "orders": found}, indent=1))
        return 0
    print(
        f"{arguments.prompts * GROUP_SIZE:,} responses of up to {arguments.tokens:,} tokens, {arguments.slots} slots\n"
    )
    print("| order | more steps than the fewest | busy slots |\n|---|---|---|")
    for name, run in found.items():
        least, most = min(run["more_steps"]), max(run["more_steps"])
        print(f"| {name} | {np.mean(run['more_steps']):.0%} ({least:.0%} to {most:.0%}) | {np.mean(run['busy']):.0%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
