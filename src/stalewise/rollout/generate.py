"""Generates one batch of rollouts, shard by shard: sample, score, write and commit."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from stalewise import store
from stalewise.errors import TaskError
from stalewise.models.loading import encode_prompts
from stalewise.rollout.episodes import CallJournal, encode_first, episode_rewards, play_episodes
from stalewise.rollout.mixed_policy import check_tokenizers
from stalewise.rollout.sampler import Request, Response, Sampler, SchedulingSampler, StreamingSampler
from stalewise.rollout.token_sampling import rollout_seed
from stalewise.tasks import ErrorCounts, Task, Verifier, count_errors
from stalewise.tasks.environments.play import EnvironmentPool
from stalewise.types import Prompt, Reward, SamplerSettings

ENOUGH_RESPONSES = 64  # number of responses from which on the fraction without a score is checked
RECALLED_ROWS = 1 << 16  # rollouts whose lengths a resumed run reads
SCORED_AT_ONCE = 256  # responses that are scored together, while others are sampled
PROMPTS_TO_COMPARE = 256  # prompts that the tokenizers of two policies must encode alike


class ShardSource:
    """Decides which shards of a batch this process makes: here all of them; `ShardQueue` is for several processes."""

    provenance: Mapping[str, Any] = {}  # written into the manifests of this process's shards

    def __init__(self, directory: Path) -> None:
        self._present = {shard.index for shard in store.committed_shards(directory)}
        self._taken: set[int] = set()

    def present(self) -> set[int]:
        """Shards that any process has committed."""
        return set(self._present)

    def take(self, missing: list[int], most: int) -> list[int]:
        """Up to `most` of the missing shards, for this process to make now; none if other processes make them."""
        taken = [shard for shard in missing if shard not in self._taken][:most]
        self._taken.update(taken)
        return taken

    def mark_committed(self, shard: int) -> None:
        """Record that this process has committed a shard."""
        self._present.add(shard)

    def mark_lost_race(self, shard: int) -> None:
        """Record that another process committed a shard before this one did."""
        self._present.add(shard)

    def wait(self) -> None:
        """Wait a moment for other processes."""

    def output_directory(self, directory: Path) -> Path:
        """The directory to write shards to, by default the batch's `directory`.

        Waits until shards may be written there: not before their policy is committed. Called once after each `take`.
        """
        return directory


class HeldShards(ShardSource):
    """The shards of a batch whose policy is still being written, in a temporary directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    def output_directory(self, directory: Path) -> Path:
        """The temporary directory."""
        return self.directory


Source = TypeVar("Source", bound=ShardSource)


class DeferredShards(ShardSource, Generic[Source]):
    """The shards of a policy that is still being written: they are sampled at once, and committed after the policy.

    `order(taken)` waits for the policy and returns the shard source, with `taken` already claimed; or `HeldShards`, and
    it is called again later.
    """

    def __init__(self, order: Callable[[list[int]], Source | HeldShards]) -> None:
        self._order = order
        self._newly_taken: list[int] = []  # since the last call of `output_directory`
        self.source: Source | HeldShards | None = None

    @property
    def provenance(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The provenance of the source."""
        return {} if self.source is None else self.source.provenance

    def present(self) -> set[int]:
        """Shards that any process has committed: none before the first order."""
        return set() if self.source is None else self.source.present()

    def take(self, missing: list[int], most: int) -> list[int]:
        """Up to `most` of the missing shards: before the first order, no other process knows of the batch."""
        self._newly_taken = missing[:most] if self.source is None else self.source.take(missing, most)
        return self._newly_taken

    def output_directory(self, directory: Path) -> Path:
        """Order the shards that were taken, and return the directory of the source."""
        taken, self._newly_taken = self._newly_taken, []
        if self.source is None or isinstance(self.source, HeldShards):
            self.source = self._order(taken)
        return self.source.output_directory(directory)

    def mark_committed(self, shard: int) -> None:
        """Record that this process has committed a shard."""
        assert self.source is not None
        self.source.mark_committed(shard)

    def mark_lost_race(self, shard: int) -> None:
        """Record that another process committed a shard before this one did."""
        assert self.source is not None
        self.source.mark_lost_race(shard)

    def wait(self) -> None:
        """Wait a moment for other processes."""
        assert self.source is not None
        self.source.wait()


class ScoreCheck:
    """Counts the responses of a batch that could not be scored, logs the first traceback, and stops above a limit."""

    def __init__(
        self,
        limit: float = 1.0,
        log: Callable[[str], object] = lambda text: None,
        advice: Callable[[], str] = lambda: "the same command samples them again",
    ) -> None:
        self.counts = ErrorCounts()
        self._limit, self._log, self._advice = limit, log, advice

    def add(self, counts: ErrorCounts, most: int = ENOUGH_RESPONSES) -> None:
        """Count the responses of a shard before it is committed; TaskError above the limit.

        `most` is the number of responses of the batch.
        """
        is_first = not self.counts.failed
        self.counts += counts
        if is_first and counts.failed:
            self._log("\n".join(filter(None, (str(counts), counts.traceback))))
        if self.counts.total >= min(most, ENOUGH_RESPONSES) and (problem := self.counts.over(self._limit)):
            raise TaskError(f"{problem}; these responses are not kept, and {self._advice()}")

    @property
    def note(self) -> str:
        """A note for the progress line; empty if all responses were scored."""
        return f"{self.counts.failed / self.counts.total:.1%} unscored" if self.counts.failed else ""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rollouts make up a generation batch. It follows from the config, so that it can be made again."""

    generation_batch: int
    version: int
    first_prompt: int  # index in the task's endless order
    prompts: int
    group_size: int
    prompts_per_shard: int
    seed: int
    foreign: str = ""  # path of the second policy
    foreign_rollouts: int = 0  # rollouts of each group, at its end, that the second policy samples
    most_prompts: int = 0  # limit to which the batch may grow to replace groups without variance; 0: it may not grow
    rounds: tuple[int, ...] = ()  # for a batch that has grown: the prompts of each round; their sum is `prompts`

    @property
    def shards(self) -> int:
        """Number of shards; the last of each round may be smaller."""
        return sum(-(-prompts // self.prompts_per_shard) for prompts in self.rounds or (self.prompts,))

    def prompt_range(self, shard: int) -> range:
        """Prompt indices of one shard."""
        start = self.first_prompt
        for prompts in self.rounds or (self.prompts,):
            first, shard = start + shard * self.prompts_per_shard, shard - -(-prompts // self.prompts_per_shard)
            if shard < 0:
                return range(first, min(first + self.prompts_per_shard, start + prompts))
            start += prompts
        raise IndexError("the batch has fewer shards")

    def rollout_range(self, shard: int) -> range:
        """Rollout ids of one shard."""
        prompts = self.prompt_range(shard)
        return range(prompts.start * self.group_size, prompts.stop * self.group_size)

    @property
    def rollouts_per_shard(self) -> int:
        """Rollouts of a full shard."""
        return self.prompts_per_shard * self.group_size

    def with_more(self, prompts: int) -> BatchPlan:
        """The plan with another round of prompts after the others, in new shards."""
        return replace(self, prompts=self.prompts + prompts, rounds=(*(self.rounds or (self.prompts,)), prompts))

    def policy_of(self, rollout: int) -> str:
        """The policy that samples a rollout, whose number is counted from the start of any group; empty: the run's."""
        return self.foreign if rollout % self.group_size >= self.group_size - self.foreign_rollouts else ""


@dataclass(slots=True)
class Refill:
    """Adds prompts to a batch until `groups` of its groups have variance, or it has the most prompts it may have.

    The size of a round follows from the shards of the rounds before, so an interrupted batch grows in the same way.
    """

    groups: int
    weights: Mapping[str, float]  # of the parts of rewards
    selection: store.Selection
    order: Callable[[BatchPlan], ShardSource]  # returns the shard source of a longer plan
    informative: int = 0  # groups with variance so far
    first_informative: int = 0  # groups with variance in the first round
    prompts: int = 0  # so far
    last: Any = None  # the last result of `order`

    def longer(self, plan: BatchPlan, directory: Path) -> BatchPlan | None:
        """The plan with another round; None if there are enough groups, or no more prompts may be added."""
        batch = store.open_shards(directory, plan.shards)
        batch = batch.with_columns(reward_weights=self.weights, selection=self.selection)
        self.informative = len(np.unique(batch.column("group")[batch.informative()]))
        self.prompts = plan.prompts
        if not plan.rounds:
            self.first_informative = self.informative
        missing = self.groups - self.informative
        left = plan.most_prompts - plan.prompts
        if missing <= 0 or left <= 0:
            return None
        # A tenth more than expected: each further round would be another small call of the sampler.
        wanted = math.ceil(1.1 * missing * plan.prompts / self.informative) if self.informative else plan.prompts
        return plan.with_more(min(left, wanted))

    def describe(self, first: int, manifest: store.BatchManifest) -> str:
        """How many prompts were added, for the log; `first` is the number of prompts of the first round."""
        more = self.prompts - first
        tokens = round(manifest.tokens * more / self.prompts)
        cost = f"{more:,} more prompts ({more / first:.0%}, about {tokens:,} tokens) were sampled"
        lack = "" if self.informative >= self.groups else f": only {self.informative:,}, and updates are smaller for it"
        have = f"{self.first_informative:,} of {first:,} groups had variance"
        return f"{have}; {cost if more else 'no more were needed'} for {min(self.informative, self.groups):,}{lack}"


def generate_batch(
    plan: BatchPlan,
    *,
    checkpoint: Path,
    rollouts: Path,
    task: Task,
    sampler: Sampler,
    on_shard: Callable[[int], object] = lambda rollouts: None,
    source: ShardSource | None = None,
    check: ScoreCheck | None = None,
    load: Callable[[Path], object] | None = None,
    refill: Refill | None = None,
) -> store.BatchManifest:
    """Make the missing shards of a generation batch, wait for those of other processes, and commit the batch.

    `source` decides which shards are made here, and the directory of the batch. `load` replaces the sampler's own
    method where the policy may be in memory. `refill` adds prompts until enough groups have variance.
    """
    directory = store.batch_directory(rollouts, version=plan.version, generation_batch=plan.generation_batch)
    if store.is_committed(directory):
        return store.read_batch_manifest(directory)
    make = partial(make_shards, on_shard=on_shard, check=check, load=load)
    directory = make(plan, checkpoint, directory, task, sampler, source or ShardSource(directory))
    while refill is not None and (longer := refill.longer(plan, directory)) is not None:
        before, plan = plan.shards, longer
        make(plan, checkpoint, directory, task, sampler, refill.order(plan), before=before)
    return commit_shards(plan, directory, task.name)


def commit_shards(plan: BatchPlan, directory: Path, task: str) -> store.BatchManifest:
    """Commit a generation batch with all of its shards, unless another process has."""
    counts = (ErrorCounts.of_record(shard.extra, shard.rows) for shard in store.committed_shards(directory))
    try:
        return store.commit_batch(directory, shards=plan.shards, task=task, extra=sum(counts, ErrorCounts()).record())
    except store.AlreadyCommitted:  # by another process, or a damaged shard was made again
        return store.read_batch_manifest(directory)


def make_shards(
    plan: BatchPlan,
    checkpoint: Path,
    directory: Path,
    task: Task,
    sampler: Sampler,
    source: ShardSource,
    on_shard: Callable[[int], object],
    check: ScoreCheck | None = None,
    load: Callable[[Path], object] | None = None,
    before: int = 0,
) -> Path:
    """Make this process's shards, then wait for those of other processes; returns the directory of all shards.

    The first `before` shards are known to be there.
    """
    present = set(range(before))
    loaded = False
    # While shards are sampled, `writer` scores and writes the shards before them; `scorer` scores ended responses.
    with ThreadPoolExecutor(max_workers=1) as writer, ThreadPoolExecutor(max_workers=1) as scorer:
        writing: Future[float] | None = None
        while missing := _missing_shards(plan, source, present, on_shard):
            start = time.perf_counter()
            shards = source.take(missing, max(1, sampler.preferred_batch_size // plan.rollouts_per_shard))
            if shards and not loaded:
                _check_second_policy(plan, checkpoint, task)
                (load or sampler.load)(checkpoint)
                loaded = True
            is_idle = not shards and writing is None
            inputs = [_shard_input(plan, shard, task, sampler) for shard in shards]
            responses = _responses(plan, directory, inputs, task, sampler, scorer)
            if writing is not None:
                start = max(start, writing.result())  # so that the seconds of shards do not overlap
                writing = None
            sampled = time.perf_counter()
            output = source.output_directory(directory)
            start += time.perf_counter() - sampled  # waiting for the policy is not part of the shards' seconds
            if shards:
                options = sampler.settings, inputs, responses, start, source, check or ScoreCheck()
                writing = writer.submit(_write_shards, plan, output, task, *options)
            elif is_idle:
                source.wait()
        if writing is not None:
            writing.result()
        return source.output_directory(directory)


def _missing_shards(
    plan: BatchPlan, source: ShardSource, present: set[int], on_shard: Callable[[int], object]
) -> list[int]:
    """Shards that nobody has committed. Those committed since the last call are added to `present` and reported."""
    for shard in source.present() - present:
        if shard < plan.shards:  # others are from a later round, made before the batch was interrupted
            on_shard(len(plan.prompt_range(shard)) * plan.group_size)
            present.add(shard)
    return [shard for shard in range(plan.shards) if shard not in present]


def _check_second_policy(plan: BatchPlan, checkpoint: Path, task: Task) -> None:
    """Refuse a second policy that encodes the batch's prompts differently."""
    if plan.foreign_rollouts:
        prompts = task.prompts(plan.first_prompt, min(plan.prompts, PROMPTS_TO_COMPARE))
        check_tokenizers(plan.foreign, checkpoint, prompts)


class _ShardInput(NamedTuple):
    """The requests of one shard, and the prompt of each: prompts are repeated."""

    shard: int
    prompts: list[Prompt]
    requests: list[Request]


def _shard_input(plan: BatchPlan, shard: int, task: Task, sampler: Sampler) -> _ShardInput:
    indices = plan.prompt_range(shard)
    prompts, encoded = shown_prompts(task, task.prompts(indices.start, len(indices)), sampler.tokenizer)
    requests = [
        Request(ids, rollout_seed(plan.seed, index * plan.group_size + member))
        for index, ids in zip(indices, encoded, strict=True)
        for member in range(plan.group_size)
    ]
    return _ShardInput(shard, [prompt for prompt in prompts for _ in range(plan.group_size)], requests)


class EarlyScores:
    """Samples responses, and scores them in a thread of `scorer` as they end."""

    def __init__(
        self, sampler: StreamingSampler, verifier: Verifier, prompts: Sequence[Prompt], scorer: ThreadPoolExecutor
    ) -> None:
        self._sampler, self._verifier, self._prompts, self._scorer = sampler, verifier, prompts, scorer
        self._waiting: deque[tuple[int, str]] = deque()
        self._rewards: dict[int, Reward] = {}
        self._rounds: list[Future[None]] = []

    def sample(self, requests: Sequence[Request], settings: SamplerSettings, numbers: Sequence[int]) -> list[Response]:
        """Sample responses to some of the prompts' requests; `numbers` are the positions of these among all."""
        try:
            return self._sampler.stream(requests, settings, partial(self._ended, numbers))
        except BaseException:
            self._waiting.clear()  # their scores are not needed
            raise

    def _ended(self, numbers: Sequence[int], responses: Mapping[int, Response]) -> None:
        self._waiting.extend((numbers[request], response.text) for request, response in responses.items())
        self._rounds.append(self._scorer.submit(self._score))

    def _score(self) -> None:
        """Score all waiting responses; most of the later rounds then find none."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(SCORED_AT_ONCE, len(self._waiting)))]
            numbers, texts = zip(*batch, strict=True)
            rewards = self._verifier.score([self._prompts[number] for number in numbers], texts)
            self._rewards.update(zip(numbers, rewards, strict=True))

    def rewards(self) -> Iterator[Reward]:
        """The rewards in the order of the prompts; the first `next` waits for all of them."""
        for scoring in self._rounds:
            scoring.result()
        yield from (self._rewards[number] for number in range(len(self._prompts)))


def early_scores(
    task: Task, prompts: Sequence[Prompt], sampler: Sampler, scorer: ThreadPoolExecutor
) -> EarlyScores | None:
    """An `EarlyScores` if engine and verifier support it, else None."""
    is_independent = environment_of(task) is None and getattr(task.verifier, "scores_independently", False)
    if not (is_independent and isinstance(sampler, StreamingSampler) and sampler.streams):
        return None
    return EarlyScores(sampler, task.verifier, prompts, scorer)


def _responses(
    plan: BatchPlan,
    directory: Path,
    inputs: list[_ShardInput],
    task: Task,
    sampler: Sampler,
    scorer: ThreadPoolExecutor,
) -> Iterator[tuple[Response, Reward | None]]:
    """Sample responses to the requests of some shards, in order; with rewards if they are scored meanwhile.

    The second policy, if any, samples its part of each group.
    """
    requests = [request for shard_input in inputs for request in shard_input.requests]
    prompts = [prompt for shard_input in inputs for prompt in shard_input.prompts]
    if (environment := environment_of(task)) is not None and requests:
        if plan.foreign_rollouts:
            raise TaskError("episodes of a second policy are not supported: set sampler.foreign.share = 0")
        rollout_ids = [rollout_id for shard_input in inputs for rollout_id in plan.rollout_range(shard_input.shard)]
        journal = CallJournal(directory / f"calls-{inputs[0].shard:05d}.jsonl")
        options = {"sampler": sampler, "settings": sampler.settings, "journal": journal}
        return zip(play_episodes(environment, prompts, requests, rollout_ids, **options), repeat(None), strict=False)
    scores = early_scores(task, prompts, sampler, scorer)
    policies = [plan.policy_of(number) for number in range(len(requests))]
    sampled: dict[str, Iterator[Response]] = {}
    for policy in dict.fromkeys(policies):
        numbers = [number for number, of_number in enumerate(policies) if of_number == policy]
        part = [requests[number] for number in numbers]
        settings = replace(sampler.settings, policy=policy)
        if scores is None:
            sampled[policy] = iter(sampler.sample(part, settings))
        else:
            sampled[policy] = iter(scores.sample(part, settings, numbers))
    ordered = (next(sampled[policy]) for policy in policies)
    return zip(ordered, repeat(None) if scores is None else scores.rewards(), strict=False)


def recall_lengths(sampler: Sampler, rollouts: Path) -> None:
    """Give an engine that schedules by length the response lengths of the newest committed batches.

    A resumed run then schedules as if it had not been interrupted. The order of requests changes no response.
    """
    if not isinstance(sampler, SchedulingSampler) or not sampler.schedules:
        return
    newest: list[store.Batch] = []
    rows = 0
    committed = [directory for directory in store.batch_directories(rollouts) if store.is_committed(directory)]
    for directory in reversed(committed):
        if rows >= RECALLED_ROWS:
            break
        newest.append(store.open_batch(directory, verify=False))
        rows += len(newest[-1])
    for batch in reversed(newest):
        for shard in batch.manifest.shards:
            columns = batch.rows_of(shard)
            lengths: dict[tuple[int, ...], list[int]] = {}
            for row, length in enumerate(columns.response_lengths.tolist()):
                lengths.setdefault(tuple(columns.prompt(row).tolist()), []).append(length)
            sampler.recall(list(lengths), [sum(of_prompt) / len(of_prompt) for of_prompt in lengths.values()])


def environment_of(task: Task) -> EnvironmentPool | None:
    """The environment of a task with several turns; None for a task of one turn."""
    return getattr(task, "environment", None)


def shown_prompts(task: Task, prompts: list[Prompt], tokenizer: Any) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts as the policy sees them, with an environment's first messages, and their tokens."""
    environment = environment_of(task)
    if environment is None:
        return prompts, encode_prompts(prompts, tokenizer)
    return encode_first(environment, prompts, tokenizer)


def score_responses(task: Task, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Reward]:
    """Score responses by the task's verifier or its environment."""
    if environment_of(task) is not None:
        return episode_rewards(prompts, responses, task.verifier)
    return task.verifier.score(prompts, [response.text for response in responses])


def _write_shards(
    plan: BatchPlan,
    directory: Path,
    task: Task,
    settings: SamplerSettings,
    inputs: list[_ShardInput],
    sampled: Iterator[tuple[Response, Reward | None]],
    start: float,
    source: ShardSource,
    check: ScoreCheck,
) -> float:
    """Score and write shards whose sampling began at `start`; returns the time when they were written."""
    settings_of = {policy: replace(settings, policy=policy) for policy in ("", plan.foreign)}
    for shard, prompts, requests in inputs:
        pairs = list(islice(sampled, len(requests)))
        responses = [response for response, _ in pairs]
        texts = [response.text for response in responses]
        rewards = [reward for _, reward in pairs if reward is not None] or score_responses(task, prompts, responses)
        counts = count_errors(rewards, prompts, texts)
        check.add(counts, plan.prompts * plan.group_size)
        rollout_ids = plan.rollout_range(shard)
        columns = {
            "rollout_id": rollout_ids,
            "prompt_id": [prompt.prompt_id for prompt in prompts],
            "group": [rollout_id // plan.group_size for rollout_id in rollout_ids],
            "prompt_ids": [request.prompt_ids for request in requests],
            "response_ids": [response.token_ids for response in responses],
            "behaviour_logp": [response.logp for response in responses],
            "reward": [reward.value for reward in rewards],
            "reward_parts": [reward.parts for reward in rewards],
            "reward_error": [reward.error for reward in rewards],
            "finish_reason": [response.finish_reason for response in responses],
            "version_first": [plan.version] * len(responses),
            "version_last": [plan.version] * len(responses),
            "sampler": [settings_of[plan.policy_of(rollout_id)] for rollout_id in rollout_ids],
            "seed": [request.seed for request in requests],
            "text": texts,
            "segments": [response.episode.segments if response.episode is not None else () for response in responses],
        }
        extra = {**source.provenance, **counts.record()}
        table = store.table_from_columns(columns)
        seconds = (time.perf_counter() - start) / len(inputs)
        try:
            store.write_shard(directory, shard, table, seconds=seconds, extra=extra)
        except store.AlreadyCommitted:  # by a process that considered this one lost
            source.mark_lost_race(shard)
        else:
            source.mark_committed(shard)
    return time.perf_counter()


def sample_and_score(
    task: Task,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    seed: int,
    sampler: Sampler,
    rows_at_once: int,
    settings: SamplerSettings | None = None,
) -> tuple[list[Prompt], list[Response], list[Reward]]:
    """Sample and score `samples` responses to each prompt, by default at temperature 1; nothing is stored.

    Returns prompts, each repeated for its responses, responses and rewards, prompt by prompt.
    """
    shown, encoded = shown_prompts(task, list(prompts), sampler.tokenizer)
    requests = [
        Request(ids, rollout_seed(seed, row * samples + sample, purpose=1))
        for row, ids in enumerate(encoded)
        for sample in range(samples)
    ]
    repeated = [prompt for prompt in shown for _ in range(samples)]
    responses: list[Response] = []
    rows_at_once = max(rows_at_once, sampler.preferred_batch_size)
    environment = environment_of(task)
    settings = settings or SamplerSettings()
    with ThreadPoolExecutor(max_workers=1) as scorer:
        scores = early_scores(task, repeated, sampler, scorer)
        for start in range(0, len(requests), rows_at_once):
            part = slice(start, start + rows_at_once)
            numbers = range(len(requests))[part]
            if environment is not None:
                options = {"sampler": sampler, "settings": settings}
                responses += play_episodes(environment, repeated[part], requests[part], numbers, **options)
            elif scores is not None:
                responses += scores.sample(requests[part], settings, numbers)
            else:
                responses += sampler.sample(requests[part], settings)
        rewards = score_responses(task, repeated, responses) if scores is None else list(scores.rewards())
    return repeated, responses, rewards
