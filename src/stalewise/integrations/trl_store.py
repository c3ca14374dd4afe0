"""Writes TRL's rollouts to the store, and feeds stored rollouts to TRL's trainer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset

from stalewise import store
from stalewise.errors import ConfigError, StoreError
from stalewise.types import POLICY, FinishReason, Rollout, SamplerSettings, Segment

TASK = "trl"
UNSCORED = "no reward function gave a reward"


@dataclass(frozen=True, slots=True)
class RolloutWriter:
    """Appends each generation batch of a trainer to `directory`, for `stalewise learn --rollouts`. Rank 0 writes."""

    directory: Path
    tokenizer: Any
    sampler: SamplerSettings
    group_size: int
    stops: Set[int]  # tokens that end a response
    seed: int

    def write(
        self,
        inputs: Sequence[Mapping[str, Any]],
        output: Mapping[str, Any],
        *,
        rewards: Sequence[float],
        parts: Mapping[str, Sequence[float]],
        version: int,
        seconds: float,
    ) -> None:
        """Commit a batch: `inputs` and `output` of TRL's scoring on this rank, `rewards` and `parts` of all ranks."""
        if "pixel_values" in output:
            raise ConfigError("the store cannot hold images: train without store=")
        drafts = gather_object(self._drafts(inputs, output))
        if not PartialState().is_main_process:
            return
        number, first = self._next()
        rollouts = [
            Rollout(
                **draft,
                rollout_id=first + i,
                group=(first + i) // self.group_size,
                reward=rewards[i],
                reward_parts={name: values[i] for name, values in parts.items() if not math.isnan(values[i])},
                reward_error=UNSCORED if math.isnan(rewards[i]) else "",
                version_first=version,
                version_last=version,
                sampler=self.sampler,
                seed=self.seed,
            )
            for i, draft in enumerate(drafts)
        ]
        directory = store.batch_directory(self.directory / "rollouts", version=version, generation_batch=number)
        directory.mkdir(parents=True)
        store.write_shard(directory, 0, rollouts, seconds=seconds)
        store.commit_batch(directory, shards=1, task=TASK)

    def _drafts(self, inputs: Sequence[Mapping[str, Any]], output: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rollouts of this rank as plain Python, to be gathered."""
        drafts: list[dict[str, Any]] = []
        for row, source in enumerate(inputs):
            prompt_ids = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
            is_token = output["completion_mask"][row].bool()
            response_ids = output["completion_ids"][row][is_token].tolist()
            digest = hashlib.sha256(np.asarray(prompt_ids, dtype=np.int64).tobytes()).hexdigest()
            stopped = bool(response_ids) and response_ids[-1] in self.stops
            logp, segments = output["behaviour_logp"][row][is_token].tolist(), ()
            if "tool_mask" in output:
                is_own = output["tool_mask"][row][is_token].bool().tolist()
                runs = [(own, len(list(run))) for own, run in groupby(is_own)]
                segments = tuple(Segment(POLICY if own else "tool", tokens) for own, tokens in runs)
                logp = [value if own else 0.0 for value, own in zip(logp, is_own, strict=True)]
            drafts.append(
                {
                    "prompt_id": str(source.get("prompt_id", f"{TASK}/{digest[:16]}")),
                    "prompt_ids": tuple(prompt_ids),
                    "response_ids": tuple(response_ids),
                    "behaviour_logp": tuple(logp),
                    "segments": segments,
                    "finish_reason": FinishReason.STOP if stopped else FinishReason.LENGTH,
                    "text": self.tokenizer.decode(response_ids, skip_special_tokens=True),
                }
            )
        return drafts

    def check_new(self, updates: int) -> None:
        """Refuse a directory with batches of another training; one that resumes has made `updates` already."""
        if not updates and store.batch_directories(self.directory / "rollouts"):
            raise StoreError(
                f"store={self.directory} holds batches of another training: name another directory, or resume that "
                "training with trainer.train(resume_from_checkpoint=True)"
            )

    def _next(self) -> tuple[int, int]:
        """The number of the next generation batch, and its first rollout id, a multiple of the group size."""
        present = store.batch_directories(self.directory / "rollouts")
        number = store.parse_batch_name(present[-1]).generation_batch + 1 if present else 0
        manifests = [store.read_batch_manifest(path) for path in present if store.is_committed(path)]
        stop = max((manifest.shards[-1].rollout_last + 1 for manifest in manifests), default=0)
        return number, -(-stop // self.group_size) * self.group_size


class StoredRollouts:
    """Stored rollouts in place of generated ones: TRL's trainer takes `dataset`, `rollouts` and `reward`.

    `directory` is a run directory, or the `store` of a trainer. `GRPOConfig.num_generations` has to be `group_size`. An
    epoch of `dataset` reads each rollout once.
    """

    def __init__(self, directory: str | Path) -> None:
        present = [path for path in store.batch_directories(Path(directory) / "rollouts") if store.is_committed(path)]
        if not present:
            raise StoreError(f"{directory} has no committed generation batch: name a directory with rollouts")
        self.rows = store.concatenate([rows for path in present for rows in store.open_batch(path).iter_rows()])
        batch = np.repeat(np.arange(len(present)), [store.read_batch_manifest(path).rows for path in present])
        self.groups: dict[str, list[int]] = {}  # rows of each group
        for row, (number, group) in enumerate(zip(batch, self.rows.group, strict=True)):
            self.groups.setdefault(f"{number}/{group}", []).append(row)
        sizes = {len(rows) for rows in self.groups.values()}
        if len(sizes) > 1:
            raise StoreError(f"{directory} has groups of {min(sizes)} to {max(sizes)} rollouts: TRL needs equal groups")
        self.group_size = sizes.pop()

    @property
    def dataset(self) -> Dataset:
        """One row per group; its `prompt` is the name of the group, not the text for the model."""
        return Dataset.from_dict({"prompt": list(self.groups)})

    def rollouts(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: the stored rollouts of these groups; a group is named once for each rollout."""
        if trainer.num_generations != self.group_size:
            what = f"num_generations is {trainer.num_generations}, but stored groups have {self.group_size} rollouts"
            raise ConfigError(f"{what}: set it to {self.group_size}")
        first = trainer.accelerator.process_index * len(prompts)
        chosen = [self.groups[key][(first + row) % self.group_size] for row, key in enumerate(prompts)]
        return {
            "prompt_ids": [self.rows.prompt(row).tolist() for row in chosen],
            "completion_ids": [self.rows.response(row).tolist() for row in chosen],
            "logprobs": [self.rows.logp(row).tolist() for row in chosen],
            "env_mask": [self.rows.is_trained(row).astype(int).tolist() for row in chosen],
            "stored_reward": self.rows.reward[chosen].tolist(),
        }

    @staticmethod
    def reward(completions: Any, stored_reward: Sequence[float], **_: Any) -> list[float | None]:
        """TRL's reward function: the stored rewards; None where the verifier failed."""
        return [None if math.isnan(value) else value for value in stored_reward]
