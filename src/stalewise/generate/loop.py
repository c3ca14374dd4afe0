"""Filling the store: one generation batch, shard by shard, each decoded, verified and committed at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stalewise.generate.sampler import Request, Response, Sampler
from stalewise.generate.sampling import rollout_seed
from stalewise.models import encode_prompts
from stalewise.store import BatchManifest, batch_directory, commit_batch, is_committed, read_batch_manifest, write_shard
from stalewise.store.manifest import committed_shards
from stalewise.tasks import ErrorCounts, Task, count_errors
from stalewise.types import Prompt, Reward, Rollout, SamplerSettings


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rollouts make one generation batch. Everything here is a function of the config, so it can be redone."""

    generation_batch: int
    version: int
    first_prompt: int  # index in the task's endless order
    prompts: int
    group_size: int
    prompts_per_shard: int
    seed: int

    @property
    def shards(self) -> int:
        """Shards of the batch; the last may be smaller."""
        return -(-self.prompts // self.prompts_per_shard)

    def prompt_range(self, shard: int) -> range:
        """Prompt indices of one shard."""
        first = self.first_prompt + shard * self.prompts_per_shard
        return range(first, min(first + self.prompts_per_shard, self.first_prompt + self.prompts))


def generate_batch(
    plan: BatchPlan,
    *,
    checkpoint: Path,
    rollouts: Path,
    task: Task,
    sampler: Sampler,
    on_shard: Callable[[int], object] = lambda rollouts: None,
) -> BatchManifest:
    """Make what is missing of a generation batch and commit it. What was committed before is not made again."""
    directory = batch_directory(rollouts, version=plan.version, generation_batch=plan.generation_batch)
    if is_committed(directory):
        return read_batch_manifest(directory)
    sampler.load(checkpoint)
    present = {shard.index for shard in committed_shards(directory)}
    errors = ErrorCounts()
    for shard in range(plan.shards):
        if shard not in present:
            start = time.perf_counter()
            made, found = _make_shard(plan, shard, task, sampler)
            errors += found
            write_shard(directory, shard, made, seconds=time.perf_counter() - start)
        on_shard(len(plan.prompt_range(shard)) * plan.group_size)
    if is_committed(directory):  # a damaged shard was made again, and came out the same
        return read_batch_manifest(directory)
    # Only of the shards made now: counts of all of them are in the manifest, the words are for whoever watches.
    extra = {"verifier_error_kinds": dict(errors.kinds), "verifier_error_examples": dict(errors.examples)}
    return commit_batch(directory, shards=plan.shards, task=task.name, extra=extra)


def _make_shard(plan: BatchPlan, shard: int, task: Task, sampler: Sampler) -> tuple[list[Rollout], ErrorCounts]:
    indices = plan.prompt_range(shard)
    prompts = task.prompts(indices.start, len(indices))
    prompt_ids = encode_prompts(prompts, sampler.tokenizer)
    requests = [
        Request(ids, rollout_seed(plan.seed, index * plan.group_size + place))
        for index, ids in zip(indices, prompt_ids, strict=True)
        for place in range(plan.group_size)
    ]
    responses = sampler.sample(requests)
    repeated = [prompt for prompt in prompts for _ in range(plan.group_size)]
    rewards = task.verifier.score(repeated, [response.text for response in responses])
    first = indices.start * plan.group_size
    made = [
        _rollout(first + i, plan, sampler, repeated[i], requests[i], responses[i], rewards[i])
        for i in range(len(requests))
    ]
    return made, count_errors(rewards)


def _rollout(
    rollout_id: int,
    plan: BatchPlan,
    sampler: Sampler,
    prompt: Prompt,
    request: Request,
    response: Response,
    reward: Reward,
) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        prompt_id=prompt.prompt_id,
        group=rollout_id // plan.group_size,
        prompt_ids=tuple(request.prompt_ids),
        response_ids=response.token_ids,
        behaviour_logp=response.logp,
        reward=reward.value,
        reward_parts=reward.parts,
        reward_error=reward.error,
        finish_reason=response.finish_reason,
        version_first=plan.version,
        version_last=plan.version,
        sampler=sampler.settings,
        seed=request.seed,
        text=response.text,
    )


def sample_for_evaluation(
    prompts: Sequence[Prompt],
    *,
    samples: int,
    seed: int,
    sampler: Sampler,
    rows_at_once: int,
    settings: SamplerSettings | None = None,
) -> tuple[list[Prompt], list[Response]]:
    """`samples` responses to each prompt, prompt by prompt, for whoever measures accuracy; nothing is stored.

    They come from the whole distribution at temperature 1 unless `settings` say otherwise.
    """
    settings = settings or SamplerSettings()
    prompt_ids = encode_prompts(list(prompts), sampler.tokenizer)
    requests = [
        Request(ids, rollout_seed(seed, row * samples + place, purpose=1))
        for row, ids in enumerate(prompt_ids)
        for place in range(samples)
    ]
    responses: list[Response] = []
    for start in range(0, len(requests), rows_at_once):
        responses += sampler.sample(requests[start : start + rows_at_once], settings)
    return [prompt for prompt in prompts for _ in range(samples)], responses
