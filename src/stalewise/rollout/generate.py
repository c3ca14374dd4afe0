"""Generates one batch of rollouts shard by shard: sample, verify, write and commit."""

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

ENOUGH_RESPONSES = 64  # before the fraction without a score is judged
RECALLED_ROWS = 1 << 16  # rollouts whose lengths a resumed run reads
SCORED_AT_ONCE = 256  # responses, while others are sampled
PROMPTS_TO_COMPARE = 256  # that the tokenizers of two policies must encode alike


class ShardSource:
    """Decides which shards of a batch a process makes. This one has a single process; `ShardQueue` one of several."""

    provenance: Mapping[str, Any] = {}  # goes into the manifests of this process's shards

    def __init__(self, directory: Path) -> None:
        self._present = {shard.index for shard in store.committed_shards(directory)}
        self._taken: set[int] = set()

    def present(self) -> set[int]:
        """Shards that are committed, by any process."""
        return set(self._present)

    def take(self, missing: list[int], most: int) -> list[int]:
        """Up to `most` of the missing shards for this process to make now; none if others have them."""
        taken = [shard for shard in missing if shard not in self._taken][:most]
        self._taken.update(taken)
        return taken

    def made(self, shard: int) -> None:
        """This process has committed a shard."""
        self._present.add(shard)

    def too_late(self, shard: int) -> None:
        """Another process committed a shard that this one has made, too."""
        self._present.add(shard)

    def wait(self) -> None:
        """Wait a moment for other processes."""

    def settle(self, directory: Path) -> Path:
        """Return the directory of the shards, when they may be written there: not before their policy is committed."""
        return directory


class HeldShards(ShardSource):
    """The shards of a batch whose policy is still being written: they wait in another directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    def settle(self, directory: Path) -> Path:
        """The directory where they wait."""
        return self.directory


Source = TypeVar("Source", bound=ShardSource)


class DeferredShards(ShardSource, Generic[Source]):
    """The shards of a policy that is still being written: they are sampled at once, and committed after it.

    `order` waits for the policy and returns the source of its shards, of which this process is making the given ones;
    or it returns `HeldShards`, and is asked again when the next ones are sampled.
    """

    def __init__(self, order: Callable[[list[int]], Source | HeldShards]) -> None:
        self._order = order
        self._latest: list[int] = []
        self.source: Source | HeldShards | None = None

    @property
    def provenance(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the source."""
        return {} if self.source is None else self.source.provenance

    def present(self) -> set[int]:
        """None before the policy is committed."""
        return set() if self.source is None else self.source.present()

    def take(self, missing: list[int], most: int) -> list[int]:
        """Any, before other processes know of them."""
        self._latest = missing[:most] if self.source is None else self.source.take(missing, most)
        return self._latest

    def settle(self, directory: Path) -> Path:
        """Wait for the policy, or let the shards wait for it."""
        if self.source is None or isinstance(self.source, HeldShards):
            self.source = self._order(self._latest)
        return self.source.settle(directory)

    def made(self, shard: int) -> None:
        """This process has committed a shard."""
        assert self.source is not None
        self.source.made(shard)

    def too_late(self, shard: int) -> None:
        """Another process committed a shard that this one has made, too."""
        assert self.source is not None
        self.source.too_late(shard)

    def wait(self) -> None:
        """Wait a moment for other processes."""
        assert self.source is not None
        self.source.wait()


class ScoreCheck:
    """Counts the responses of a batch that could not be scored, shows the first traceback, and stops above a limit."""

    def __init__(self, limit: float = 1.0, log: Callable[[str], object] = lambda text: None) -> None:
        self.counts = ErrorCounts()
        self._limit, self._log = limit, log

    def add(self, counts: ErrorCounts, most: int = ENOUGH_RESPONSES) -> None:
        """Count the responses of a shard, of a batch of `most`; TaskError above the limit, before it is committed."""
        is_first = not self.counts.failed
        self.counts += counts
        if is_first and counts.failed:
            self._log("\n".join(filter(None, (str(counts), counts.traceback))))
        if self.counts.total >= min(most, ENOUGH_RESPONSES) and (problem := self.counts.over(self._limit)):
            raise TaskError(f"{problem}; these responses are not kept, and the same command samples them again")

    @property
    def note(self) -> str:
        """For the progress line."""
        return f"{self.counts.failed / self.counts.total:.1%} unscored" if self.counts.failed else ""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which rollouts make up a generation batch; a function of the config, so it can be made again."""

    generation_batch: int
    version: int
    first_prompt: int  # index in the task's endless order
    prompts: int
    group_size: int
    prompts_per_shard: int
    seed: int
    foreign: str = ""  # path of the second policy
    foreign_rollouts: int = 0  # rollouts at the end of every group that it samples
    most_prompts: int = 0  # up to which the batch may grow, to replace groups without variance; 0: it may not
    rounds: tuple[int, ...] = ()  # prompts of each round of a batch that has grown; their sum is `prompts`

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

    def with_more(self, prompts: int) -> BatchPlan:
        """The plan with another round of prompts, after the others and in shards of their own."""
        return replace(self, prompts=self.prompts + prompts, rounds=(*(self.rounds or (self.prompts,)), prompts))

    def policy_of(self, rollout: int) -> str:
        """The policy that samples a rollout, counted from the start of any group; empty: the run's own."""
        return self.foreign if rollout % self.group_size >= self.group_size - self.foreign_rollouts else ""


@dataclass(slots=True)
class Refill:
    """Adds prompts to a batch until `groups` of its groups have variance, or it has all the prompts it may have.

    How many each round adds follows from the shards of the rounds before, so a batch that was interrupted grows alike.
    """

    groups: int
    weights: Mapping[str, float]  # of the parts of rewards
    selection: store.Selection
    order: Callable[[BatchPlan], ShardSource]  # the source of the shards of a longer plan
    found: int = 0  # groups with variance so far
    first_found: int = 0  # of them in the first round
    prompts: int = 0  # so far
    last: Any = None  # what `order` returned last

    def longer(self, plan: BatchPlan, directory: Path) -> BatchPlan | None:
        """The plan with another round; None where there are enough groups, or no more prompts may be added."""
        made = store.open_shards(directory, plan.shards)
        made.weights, made.selection = self.weights, self.selection
        self.found, self.prompts = len(np.unique(made.column("group")[made.informative()])), plan.prompts
        self.first_found = self.found if not plan.rounds else self.first_found
        missing, left = self.groups - self.found, plan.most_prompts - plan.prompts
        if missing <= 0 or left <= 0:
            return None
        # A tenth more than expected, since each round costs a pass of the sampler that is not full.
        wanted = math.ceil(1.1 * missing * plan.prompts / self.found) if self.found else plan.prompts
        return plan.with_more(min(left, wanted))

    def describe(self, first: int, manifest: store.BatchManifest) -> str:
        """What it cost; `first` are the prompts of the first round."""
        more = self.prompts - first
        tokens = round(manifest.tokens * more / self.prompts)
        cost = f"{more:,} more prompts ({more / first:.0%}, about {tokens:,} tokens) were sampled"
        lack = "" if self.found >= self.groups else f": only {self.found:,}, and updates are smaller for it"
        have = f"{self.first_found:,} of {first:,} groups had variance"
        return f"{have}; {cost if more else 'no more were needed'} for {min(self.found, self.groups):,}{lack}"


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
    """Make the missing shards of a generation batch and commit it, where `source` puts it; returns when all are there.

    `load` is called instead of the sampler's own method where the policy may be in memory. `refill` adds prompts until
    enough groups have variance.
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
    """Commit a generation batch whose shards are all there, unless another process has."""
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
    """Make the shards that fall to this process, then wait for those of the others; the first `before` are there.

    Returns where they are.
    """
    present = set(range(before))
    loaded = False
    # One thread verifies and writes the last shards while the next are sampled. Another verifies those that have ended.
    with ThreadPoolExecutor(max_workers=1) as writer, ThreadPoolExecutor(max_workers=1) as scorer:
        writing: Future[float] | None = None
        while True:
            for shard in source.present() - present:
                if shard >= plan.shards:
                    continue  # of a later round, before the batch was interrupted
                on_shard(len(plan.prompt_range(shard)) * plan.group_size)
                present.add(shard)
            missing = [shard for shard in range(plan.shards) if shard not in present]
            most = sampler.preferred_batch_size // (plan.prompts_per_shard * plan.group_size)
            start, shards = time.perf_counter(), source.take(missing, max(1, most))
            if shards and not loaded:
                if plan.foreign_rollouts:
                    prompts = task.prompts(plan.first_prompt, min(plan.prompts, PROMPTS_TO_COMPARE))
                    check_tokenizers(plan.foreign, checkpoint, prompts)
                (load or sampler.load)(checkpoint)
                loaded = True
            asked = [_shard_requests(plan, shard, task, sampler) for shard in shards]
            responses = _responses(plan, directory, asked, task, sampler, scorer)
            pending, writing = writing, None
            if pending is not None:
                start = max(start, pending.result())  # the seconds of shards do not overlap
            sampled = time.perf_counter()
            settled = source.settle(directory)
            start += time.perf_counter() - sampled  # the shards took no longer for it
            if asked:
                details = sampler.settings, asked, responses, start, source, check or ScoreCheck()
                writing = writer.submit(_write_shards, plan, settled, task, *details)
            elif not missing:
                return settled
            elif pending is None:
                source.wait()


class _ShardRequests(NamedTuple):
    """What is asked for one shard; prompts are repeated, one for each request."""

    shard: int
    prompts: list[Prompt]
    requests: list[Request]


def _shard_requests(plan: BatchPlan, shard: int, task: Task, sampler: Sampler) -> _ShardRequests:
    indices = plan.prompt_range(shard)
    prompts, encoded = shown_prompts(task, task.prompts(indices.start, len(indices)), sampler.tokenizer)
    requests = [
        Request(ids, rollout_seed(plan.seed, index * plan.group_size + place))
        for index, ids in zip(indices, encoded, strict=True)
        for place in range(plan.group_size)
    ]
    return _ShardRequests(shard, [prompt for prompt in prompts for _ in range(plan.group_size)], requests)


class EarlyScores:
    """Samples, and scores responses as they end, in a thread of `scorer`."""

    def __init__(
        self, sampler: StreamingSampler, verifier: Verifier, prompts: Sequence[Prompt], scorer: ThreadPoolExecutor
    ) -> None:
        self._sampler, self._verifier, self._prompts, self._scorer = sampler, verifier, prompts, scorer
        self._waiting: deque[tuple[int, str]] = deque()
        self._rewards: dict[int, Reward] = {}
        self._rounds: list[Future[None]] = []

    def sample(self, requests: Sequence[Request], settings: SamplerSettings, numbers: Sequence[int]) -> list[Response]:
        """Responses to requests, which have these numbers among the prompts."""
        try:
            return self._sampler.stream(requests, settings, partial(self._ended, numbers))
        except BaseException:
            self._waiting.clear()  # nobody will ask for these
            raise

    def _ended(self, numbers: Sequence[int], responses: Mapping[int, Response]) -> None:
        self._waiting.extend((numbers[request], response.text) for request, response in responses.items())
        self._rounds.append(self._scorer.submit(self._score))

    def _score(self) -> None:
        """Score all that wait, so that most of the later rounds have nothing to do."""
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(SCORED_AT_ONCE, len(self._waiting)))]
            numbers, texts = zip(*some, strict=True)
            rewards = self._verifier.score([self._prompts[number] for number in numbers], texts)
            self._rewards.update(zip(numbers, rewards, strict=True))

    def rewards(self) -> Iterator[Reward]:
        """The rewards in the order of the prompts; waits for them when the first is asked for."""
        for scored in self._rounds:
            scored.result()
        yield from (self._rewards[number] for number in range(len(self._prompts)))


def early_scores(
    task: Task, prompts: Sequence[Prompt], sampler: Sampler, scorer: ThreadPoolExecutor
) -> EarlyScores | None:
    """Scores while others are sampled, where engine and verifier can do that."""
    is_independent = environment_of(task) is None and getattr(task.verifier, "scores_independently", False)
    if not (is_independent and isinstance(sampler, StreamingSampler) and sampler.streams):
        return None
    return EarlyScores(sampler, task.verifier, prompts, scorer)


def _responses(
    plan: BatchPlan,
    directory: Path,
    asked: list[_ShardRequests],
    task: Task,
    sampler: Sampler,
    scorer: ThreadPoolExecutor,
) -> Iterator[tuple[Response, Reward | None]]:
    """Responses to the requests of whole groups, in order, with rewards where they are scored meanwhile.

    Each policy samples its own.
    """
    requests = [request for one in asked for request in one.requests]
    prompts = [prompt for one in asked for prompt in one.prompts]
    if (environment := environment_of(task)) is not None and requests:
        if plan.foreign_rollouts:
            raise TaskError("episodes of a second policy are not supported: set sampler.foreign.share = 0")
        first = [plan.prompt_range(one.shard).start * plan.group_size for one in asked]
        numbers = [start + place for start, one in zip(first, asked, strict=True) for place in range(len(one.requests))]
        journal = CallJournal(directory / f"calls-{asked[0].shard:05d}.jsonl")
        options = {"sampler": sampler, "settings": sampler.settings, "journal": journal}
        return zip(play_episodes(environment, prompts, requests, numbers, **options), repeat(None), strict=False)
    scores = early_scores(task, prompts, sampler, scorer)
    policies = [plan.policy_of(number) for number in range(len(requests))]
    sampled: dict[str, Iterator[Response]] = {}
    for policy in dict.fromkeys(policies):
        numbers = [number for number, its in enumerate(policies) if its == policy]
        its_requests = [requests[number] for number in numbers]
        settings = replace(sampler.settings, policy=policy)
        if scores is None:
            sampled[policy] = iter(sampler.sample(its_requests, settings))
        else:
            sampled[policy] = iter(scores.sample(its_requests, settings, numbers))
    ordered = (next(sampled[policy]) for policy in policies)
    return zip(ordered, repeat(None) if scores is None else scores.rewards(), strict=False)


def recall_lengths(sampler: Sampler, rollouts: Path) -> None:
    """Tell an engine that schedules by length how long the responses of committed batches are; the newest are enough.

    So a run that is resumed knows what it had learned of lengths. The order changes no response.
    """
    if not isinstance(sampler, SchedulingSampler) or not sampler.schedules:
        return
    newest, rows = list[store.Batch](), 0
    for directory in reversed([one for one in store.batch_directories(rollouts) if store.is_committed(one)]):
        if rows >= RECALLED_ROWS:
            break
        newest.append(store.open_batch(directory, verify=False))
        rows += len(newest[-1])
    for batch in reversed(newest):
        for shard in batch.manifest.shards:
            found, lengths = batch.rows_of(shard), dict[tuple[int, ...], list[int]]()
            for row, length in enumerate(found.response_lengths.tolist()):
                lengths.setdefault(tuple(found.prompt(row).tolist()), []).append(length)
            sampler.recall(list(lengths), [sum(each) / len(each) for each in lengths.values()])


def environment_of(task: Task) -> EnvironmentPool | None:
    """What answers the policy between its turns; None for a task of one turn."""
    return getattr(task, "environment", None)


def shown_prompts(task: Task, prompts: list[Prompt], tokenizer: Any) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts as the policy sees them, and their tokens."""
    environment = environment_of(task)
    if environment is None:
        return prompts, encode_prompts(prompts, tokenizer)
    return encode_first(environment, prompts, tokenizer)


def score_responses(task: Task, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Reward]:
    """The rewards of responses, by the task's verifier or its environment."""
    if environment_of(task) is not None:
        return episode_rewards(prompts, responses, task.verifier)
    return task.verifier.score(prompts, [response.text for response in responses])


def _write_shards(
    plan: BatchPlan,
    directory: Path,
    task: Task,
    settings: SamplerSettings,
    asked: list[_ShardRequests],
    responses: Iterator[tuple[Response, Reward | None]],
    start: float,
    source: ShardSource,
    check: ScoreCheck,
) -> float:
    """Verify and write shards; `start` is when their sampling began. Returns when they were written."""
    settings_of = {policy: replace(settings, policy=policy) for policy in ("", plan.foreign)}
    for one in asked:
        pairs = list(islice(responses, len(one.requests)))
        answered = [response for response, _ in pairs]
        texts = [response.text for response in answered]
        rewards = [reward for _, reward in pairs if reward is not None] or score_responses(task, one.prompts, answered)
        counts = count_errors(rewards, one.prompts, texts)
        check.add(counts, plan.prompts * plan.group_size)
        first = plan.prompt_range(one.shard).start * plan.group_size
        rollout_ids = range(first, first + len(answered))
        columns = {
            "rollout_id": rollout_ids,
            "prompt_id": [prompt.prompt_id for prompt in one.prompts],
            "group": [rollout_id // plan.group_size for rollout_id in rollout_ids],
            "prompt_ids": [request.prompt_ids for request in one.requests],
            "response_ids": [response.token_ids for response in answered],
            "behaviour_logp": [response.logp for response in answered],
            "reward": [reward.value for reward in rewards],
            "reward_parts": [reward.parts for reward in rewards],
            "reward_error": [reward.error for reward in rewards],
            "finish_reason": [response.finish_reason for response in answered],
            "version_first": [plan.version] * len(answered),
            "version_last": [plan.version] * len(answered),
            "sampler": [settings_of[plan.policy_of(rollout_id)] for rollout_id in rollout_ids],
            "seed": [request.seed for request in one.requests],
            "text": texts,
            "segments": [() if (episode := one.episode) is None else episode.segments for one in answered],
        }
        extra = {**source.provenance, **counts.record()}
        table = store.table_from_columns(columns)
        seconds = (time.perf_counter() - start) / len(asked)
        try:
            store.write_shard(directory, one.shard, table, seconds=seconds, extra=extra)
        except store.AlreadyCommitted:  # by a process that considered this one lost
            source.too_late(one.shard)
        else:
            source.made(one.shard)
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
    """`samples` responses to each prompt, prompt by prompt, by default at temperature 1; nothing is stored."""
    shown, encoded = shown_prompts(task, list(prompts), sampler.tokenizer)
    requests = [
        Request(ids, rollout_seed(seed, row * samples + place, purpose=1))
        for row, ids in enumerate(encoded)
        for place in range(samples)
    ]
    repeated = [prompt for prompt in shown for _ in range(samples)]
    responses: list[Response] = []
    rows_at_once, environment = max(rows_at_once, sampler.preferred_batch_size), environment_of(task)
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
