"""Whose turn a shard of a generation batch is: everything is ours, unless others work at the same batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from stalewise.models.loading import encode_prompts
from stalewise.rollout.mixed_policy import check_foreign
from stalewise.rollout.sampler import Request, Response, Sampler
from stalewise.rollout.token_sampling import rollout_seed
from stalewise.store import (
    AlreadyCommitted,
    BatchManifest,
    batch_directory,
    commit_batch,
    committed_shards,
    is_committed,
    read_batch_manifest,
    write_shard,
)
from stalewise.tasks import ErrorCounts, Task, count_errors
from stalewise.types import Prompt, Reward, Rollout, SamplerSettings


class ShardSource(Protocol):
    """What one process is told about the batch that it works at."""

    provenance: Mapping[str, Any]  # what the manifests of its shards say about where they come from

    def present(self) -> set[int]:
        """Shards that are committed, by whomever."""
        ...

    def take(self, missing: list[int], most: int) -> list[int]:
        """Shards of the missing ones that are this process's to make now; none where others have them."""
        ...

    def made(self, shard: int) -> None:
        """This process has committed a shard."""
        ...

    def too_late(self, shard: int) -> None:
        """This process has made a shard that somebody else committed first; it counts for nothing."""
        ...

    def wait(self) -> None:
        """Nothing is to be had: wait a moment for the others."""
        ...


class Alone:
    """The only process at a batch: it makes all that is missing, in order."""

    provenance: Mapping[str, Any] = {}

    def __init__(self, directory: Path) -> None:
        self._present = {shard.index for shard in committed_shards(directory)}
        self._taken: set[int] = set()

    def present(self) -> set[int]:
        """Shards that were there, and those that were made since."""
        return set(self._present)

    def take(self, missing: list[int], most: int) -> list[int]:
        """The next ones."""
        taken = [shard for shard in missing if shard not in self._taken][:most]
        self._taken.update(taken)
        return taken

    def made(self, shard: int) -> None:
        """Note it."""
        self._present.add(shard)

    def too_late(self, shard: int) -> None:
        """Note it."""
        self._present.add(shard)

    def wait(self) -> None:
        """Wait for nobody: the thread that writes shards has been waited for."""


# Filling the store: one generation batch, shard by shard, each sampled, verified and committed.
# Many processes may fill one batch: whose turn a shard is, `Shares` says, and everybody returns when the batch is whole.

PROMPTS_TO_COMPARE = 256  # that a foreign policy's tokenizer must read as the run's own does


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
    foreign: str = ""  # a policy that is not the run's own
    foreign_places: int = 0  # the last places of every group, which it samples

    @property
    def shards(self) -> int:
        """Shards of the batch; the last may be smaller."""
        return -(-self.prompts // self.prompts_per_shard)

    def prompt_range(self, shard: int) -> range:
        """Prompt indices of one shard."""
        first = self.first_prompt + shard * self.prompts_per_shard
        return range(first, min(first + self.prompts_per_shard, self.first_prompt + self.prompts))

    def policy_of(self, rollout: int) -> str:
        """Which policy samples a rollout, counted from the beginning of any group; empty: the run's own."""
        return self.foreign if rollout % self.group_size >= self.group_size - self.foreign_places else ""


def generate_batch(
    plan: BatchPlan,
    *,
    checkpoint: Path,
    rollouts: Path,
    task: Task,
    sampler: Sampler,
    on_shard: Callable[[int], object] = lambda rollouts: None,
    shares: ShardSource | None = None,
) -> BatchManifest:
    """Make what is missing of a generation batch and commit it. What was committed before is not made again.

    With `shares` others may make some of it, and this returns when all of it is there.
    """
    directory = batch_directory(rollouts, version=plan.version, generation_batch=plan.generation_batch)
    if is_committed(directory):
        return read_batch_manifest(directory)
    make_shards(
        plan,
        checkpoint=checkpoint,
        directory=directory,
        task=task,
        sampler=sampler,
        on_shard=on_shard,
        shares=shares or Alone(directory),
    )
    return commit_made(plan, directory, task.name)


def commit_made(plan: BatchPlan, directory: Path, task: str) -> BatchManifest:
    """Commit a generation batch whose shards are all there, unless somebody did."""
    counts = (ErrorCounts.of_record(shard.extra, shard.rows) for shard in committed_shards(directory))
    try:
        return commit_batch(directory, shards=plan.shards, task=task, extra=sum(counts, ErrorCounts()).record())
    except AlreadyCommitted:  # by somebody else; or a damaged shard was made again, and came out the same
        return read_batch_manifest(directory)


def make_shards(
    plan: BatchPlan,
    *,
    checkpoint: Path,
    directory: Path,
    task: Task,
    sampler: Sampler,
    on_shard: Callable[[int], object],
    shares: ShardSource,
) -> None:
    """Make the shards that fall to this process, and wait until the others are there."""
    told: set[int] = set()  # shards that are there, as far as we know
    loaded = False
    # One thread verifies and writes what was sampled last while the next is being sampled.
    with ThreadPoolExecutor(max_workers=1) as worker:
        waiting: Future[None] | None = None
        while True:
            for shard in shares.present() - told:
                on_shard(len(plan.prompt_range(shard)) * plan.group_size)
                told.add(shard)
            missing = [shard for shard in range(plan.shards) if shard not in told]
            preferred_batch_size = sampler.preferred_batch_size // (plan.prompts_per_shard * plan.group_size)
            start, shards = time.perf_counter(), shares.take(missing, max(1, preferred_batch_size))
            if shards and not loaded:
                _load(plan, checkpoint, task, sampler)
                loaded = True
            sampled = _sample(plan, shards, task, sampler) if shards else []
            pending, waiting = waiting, None
            if pending is not None:
                pending.result()
            if sampled:
                waiting = worker.submit(_finish, plan, directory, task, sampler.settings, sampled, start, shares)
            elif not missing:
                return
            elif pending is None:
                shares.wait()


def _load(plan: BatchPlan, checkpoint: Path, task: Task, sampler: Sampler) -> None:
    if plan.foreign_places:
        check_foreign(plan.foreign, checkpoint, task.prompts(plan.first_prompt, min(plan.prompts, PROMPTS_TO_COMPARE)))
    sampler.load(checkpoint)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One shard before its responses are verified; prompts are repeated, one for each response."""

    shard: int
    prompts: list[Prompt]
    requests: list[Request]
    responses: list[Response]


def _sample(plan: BatchPlan, shards: list[int], task: Task, sampler: Sampler) -> list[_Sampled]:
    """Sample some shards together."""
    planned: list[tuple[int, list[Prompt], list[Request]]] = []
    for shard in shards:
        indices = plan.prompt_range(shard)
        prompts = task.prompts(indices.start, len(indices))
        prompt_ids = encode_prompts(prompts, sampler.tokenizer)
        requests = [
            Request(ids, rollout_seed(plan.seed, index * plan.group_size + place))
            for index, ids in zip(indices, prompt_ids, strict=True)
            for place in range(plan.group_size)
        ]
        planned.append((shard, [prompt for prompt in prompts for _ in range(plan.group_size)], requests))
    responses = _responses(plan, [request for _, _, requests in planned for request in requests], sampler)
    return [
        _Sampled(shard, prompts, requests, list(islice(responses, len(requests))))
        for shard, prompts, requests in planned
    ]


def _responses(plan: BatchPlan, requests: list[Request], sampler: Sampler) -> Iterator[Response]:
    """Responses to the requests of whole groups, in their order; every policy samples its own."""
    policies = [plan.policy_of(number) for number in range(len(requests))]
    sampled: dict[str, Iterator[Response]] = {}
    for policy in dict.fromkeys(policies):
        its_own = [request for request, its in zip(requests, policies, strict=True) if its == policy]
        sampled[policy] = iter(sampler.sample(its_own, replace(sampler.settings, policy=policy)))
    return (next(sampled[policy]) for policy in policies)


def _finish(
    plan: BatchPlan,
    directory: Path,
    task: Task,
    settings: SamplerSettings,
    sampled: list[_Sampled],
    start: float,
    shares: ShardSource,
) -> None:
    """Verify and write shards; `start` is when their sampling began."""
    for one in sampled:
        texts = [response.text for response in one.responses]
        rewards = task.verifier.score(one.prompts, texts)
        first = plan.prompt_range(one.shard).start * plan.group_size
        made = [
            _rollout(first + i, plan, settings, one.prompts[i], one.requests[i], one.responses[i], rewards[i])
            for i in range(len(one.requests))
        ]
        extra = {**shares.provenance, **count_errors(rewards, one.prompts, texts).record()}
        seconds = (time.perf_counter() - start) / len(sampled)
        try:
            write_shard(directory, one.shard, made, seconds=seconds, extra=extra)
        except AlreadyCommitted:  # by someone who thought that we were lost
            shares.too_late(one.shard)
        else:
            shares.made(one.shard)


def _rollout(
    rollout_id: int,
    plan: BatchPlan,
    settings: SamplerSettings,
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
        sampler=replace(settings, policy=plan.policy_of(rollout_id)),
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
    rows_at_once = max(rows_at_once, sampler.preferred_batch_size)
    for start in range(0, len(requests), rows_at_once):
        responses += sampler.sample(requests[start : start + rows_at_once], settings)
    return [prompt for prompt in prompts for _ in range(samples)], responses
