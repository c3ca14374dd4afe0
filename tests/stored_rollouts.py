"""Rollouts and generation batches for tests of the store."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from stalewise import store
from stalewise.types import FinishReason, Rollout, SamplerSettings

SOURCE = str(Path(store.__file__).parents[2])


def make_rollouts(first: int, count: int, tokens: int = 9) -> list[Rollout]:
    """Rollouts that are a function of their ids: a resumed batch can be compared with an undisturbed one."""
    return [
        Rollout(
            rollout_id=i,
            prompt_id=f"task/{i // 4}",
            group=i // 4,
            prompt_ids=tuple(range(i % 5)),
            response_ids=tuple((i * 7919 + k) % 50_000 for k in range(i % (tokens + 1))),
            behaviour_logp=tuple(-((i + k) % 64) / 32 for k in range(i % (tokens + 1))),
            reward=float("nan") if i % 11 == 10 else float(i % 2),
            reward_parts={"correct": float(i % 2), "format": 0.25},
            reward_error="verifier hung" if i % 11 == 10 else "",
            finish_reason=FinishReason.LENGTH if i % 3 == 0 else FinishReason.STOP,
            version_first=64,
            version_last=64,
            sampler=SamplerSettings(name="hf", precision="bfloat16", temperature=0.7, top_p=0.9, top_k=5),
            seed=2**62 + i,
            text=f"µ {i} \x00\t\n 😀",
        )
        for i in range(first, first + count)
    ]


def same(left: Rollout, right: Rollout) -> bool:
    """Equality with NaN equal to itself."""
    both_failed = math.isnan(left.reward) and math.isnan(right.reward)
    return left == (dataclasses.replace(right, reward=left.reward) if both_failed else right)


def make_batch(root: Path, shards: int = 3, rows: int = 600, tokens: int = 9, version: int = 64) -> Path:
    directory = store.batch_directory(root, version=version, generation_batch=3)
    for index in range(shards):
        store.write_shard(directory, index, make_rollouts(1000 + index * rows, rows, tokens), seconds=1.5)
    store.commit_batch(directory, shards=shards, task="arithmetic", extra={"note": "x"})
    return directory
