"""TRL's rollouts in our store, and rollouts of our store in TRL's trainer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset

from stalewise.errors import ConfigError, StoreError
from stalewise.store import (
    RolloutColumns,
    batch_directories,
    batch_directory,
    commit_batch,
    concatenate,
    is_committed,
    open_batch,
    parse_batch_name,
    read_batch_manifest,
    write_shard,
)
from stalewise.types import FinishReason, Rollout, SamplerSettings

TASK = "trl"
UNSCORED = "no reward function gave a reward"


class RolloutWriter:
    """Writes each generation batch of a trainer under `directory`, after those that are there already.

    Its rank 0 writes for all ranks. The directory is what `stalewise learn --rollouts` takes.
    """

    def __init__(self, directory: str | Path, tokenizer: Any, sampler: SamplerSettings) -> None:
        self.root = Path(directory) / "rollouts"
        self.tokenizer = tokenizer
        self.sampler = sampler

    def write(
        self,
        inputs: Sequence[Mapping[str, Any]],
        output: Mapping[str, Any],
        *,
        rewards: Sequence[float],
        parts: Mapping[str, Sequence[float]],
        group_size: int,
        version: int,
        stops: Set[int],
        seed: int,
        seconds: float,
    ) -> None:
        """Commit one generation batch.

        `inputs` and `output` are what TRL's scoring takes and returns on this rank; `rewards` and `parts`, the rewards
        of single functions, are those of all ranks. `stops` are the tokens that end a response.
        """
        if "tool_mask" in output or "pixel_values" in output:
            raise ConfigError("the store holds no images and no tokens of tools: train without store=")
        drafts = gather_object(self._drafts(inputs, output, stops))
        if not PartialState().is_main_process:
            return
        number, first = self._next(group_size)
        rollouts = [
            Rollout(
                **draft,
                rollout_id=first + place,
                group=(first + place) // group_size,
                reward=rewards[place],
                reward_parts={name: values[place] for name, values in parts.items() if not math.isnan(values[place])},
                reward_error=UNSCORED if math.isnan(rewards[place]) else "",
                version_first=version,
                version_last=version,
                sampler=self.sampler,
                seed=seed,
            )
            for place, draft in enumerate(drafts)
        ]
        directory = batch_directory(self.root, version=version, generation_batch=number)
        directory.mkdir(parents=True)
        write_shard(directory, 0, rollouts, seconds=seconds)
        commit_batch(directory, shards=1, task=TASK)

    def _drafts(
        self, inputs: Sequence[Mapping[str, Any]], output: Mapping[str, Any], stops: Set[int]
    ) -> list[dict[str, Any]]:
        """What this rank knows of its rollouts; plain Python, to be gathered."""
        drafts: list[dict[str, Any]] = []
        for row, given in enumerate(inputs):
            prompt_ids = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
            is_token = output["completion_mask"][row].bool()
            response_ids = output["completion_ids"][row][is_token].tolist()
            stopped = bool(response_ids) and response_ids[-1] in stops
            drafts.append(
                {
                    "prompt_id": str(given["prompt_id"]) if "prompt_id" in given else _prompt_id(prompt_ids),
                    "prompt_ids": tuple(prompt_ids),
                    "response_ids": tuple(response_ids),
                    "behaviour_logp": tuple(output["behaviour_logp"][row][is_token].tolist()),
                    "finish_reason": FinishReason.STOP if stopped else FinishReason.LENGTH,
                    "text": self.tokenizer.decode(response_ids, skip_special_tokens=True),
                }
            )
        return drafts

    def _next(self, group_size: int) -> tuple[int, int]:
        """Number of the next generation batch, and its first rollout id, which begins a group."""
        present = batch_directories(self.root)
        number = parse_batch_name(present[-1]).generation_batch + 1 if present else 0
        lasts = [read_batch_manifest(path).shards[-1].rollout_last for path in present if is_committed(path)]
        return number, -(-(max(lasts) + 1) // group_size) * group_size if lasts else 0


def _prompt_id(prompt_ids: Sequence[int]) -> str:
    return f"{TASK}/{hashlib.sha256(np.asarray(prompt_ids, dtype=np.int64).tobytes()).hexdigest()[:16]}"


class StoredRollouts:
    """Rollouts of our store in place of generated ones: TRL's trainer takes `dataset`, `rollouts` and `reward`.

    `directory` is a run directory, or one that a trainer wrote with `store`. Every group has `group_size` rollouts,
    which `GRPOConfig.num_generations` has to be; an epoch of `dataset` reads each rollout once.
    """

    def __init__(self, directory: str | Path) -> None:
        present = [path for path in batch_directories(Path(directory) / "rollouts") if is_committed(path)]
        if not present:
            raise StoreError(f"{directory} has no committed generation batch: give a directory with rollouts")
        self.rows: RolloutColumns = concatenate([rows for path in present for rows in open_batch(path).iter_rows()])
        batch = np.repeat(np.arange(len(present)), [read_batch_manifest(path).rows for path in present])
        keys = [f"{number}/{group}" for number, group in zip(batch, self.rows.group, strict=True)]
        self.places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            self.places.setdefault(key, []).append(place)
        sizes = {len(places) for places in self.places.values()}
        if len(sizes) > 1:
            raise StoreError(f"{directory} has groups of {min(sizes)} to {max(sizes)} rollouts: TRL needs equal groups")
        self.group_size = sizes.pop()

    @property
    def dataset(self) -> Dataset:
        """One row per group; its `prompt` is the group's name here, not what the model is given."""
        return Dataset.from_dict({"prompt": list(self.places)})

    def rollouts(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: the stored rollouts of these groups, which come once for each of their rollouts."""
        if trainer.num_generations != self.group_size:
            raise ConfigError(
                f"num_generations is {trainer.num_generations}, but the stored groups have {self.group_size} rollouts: "
                "set it to that"
            )
        first = trainer.accelerator.process_index * len(prompts)
        chosen = [self.places[key][(first + row) % self.group_size] for row, key in enumerate(prompts)]
        return {
            "prompt_ids": [self.rows.prompt(row).tolist() for row in chosen],
            "completion_ids": [self.rows.response(row).tolist() for row in chosen],
            "logprobs": [self.rows.logp(row).tolist() for row in chosen],
            "stored_reward": self.rows.reward[chosen].tolist(),
        }

    @staticmethod
    def reward(completions: Any, stored_reward: Sequence[float], **_: Any) -> list[float | None]:
        """TRL's reward function: what the store says; None where the verifier failed."""
        return [None if math.isnan(value) else value for value in stored_reward]
