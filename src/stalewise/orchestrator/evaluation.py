"""Held-out accuracy of a checkpoint: avg@k and pass@k with bootstrap intervals. Axes: P prompts, K samples each.

Imports no torch: an evaluation that cannot be done is refused before torch is imported.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stalewise.config import RunConfig, TaskSection, make_config
from stalewise.config.run import limit_setting, longest_of
from stalewise.config.run_directory import read_config
from stalewise.config.sections import SamplerSection, SuiteSection
from stalewise.errors import ConfigError, StoreError, TaskError, nearest
from stalewise.models import embedded_policies, embedded_policy, resolve_model
from stalewise.orchestrator.contamination import seen_in_training
from stalewise.rollout.sampler import Sampler, token_limit
from stalewise.statistics import Interval, bootstrap
from stalewise.store import checkpoints
from stalewise.store.records import LARGEST
from stalewise.tasks import ErrorCounts, Seen, Task, Verifier, close_task, count_errors, make_evaluation_file
from stalewise.tasks.mixture import MixtureVerifier
from stalewise.tasks.rows import read_ids, task_of
from stalewise.tasks.verifiers.error_counts import LISTED, check_weights
from stalewise.tasks.verifiers.math import MathVerifier
from stalewise.tasks.verifiers.python import FunctionVerifier
from stalewise.types import FinishReason, ProgressCallback, Prompt, Reward, SamplerSettings

if TYPE_CHECKING:
    from stalewise.rollout.generate import ScoreCheck


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluating one checkpoint."""

    version: int
    task: str
    prompts: int
    samples: int
    accuracy: Interval  # avg@k: mean reward of all samples
    pass_at: dict[int, Interval]  # fraction of prompts with a right answer among k samples, unbiased
    response_length: float  # mean tokens of the policy
    truncated_fraction: float
    verifier_errors: int
    verifier_error_kinds: dict[str, int]
    seconds: float
    excluded: int = 0  # held-out prompts that training has seen or that a list names
    verifier_error_prompts: dict[str, list[str]] = field(default_factory=dict, repr=False)  # ids, by kind of error
    unparsed: int = 0  # responses in which the verifier found no answer; they score 0
    unparsed_examples: list[dict[str, str]] = field(default_factory=list, repr=False)
    by_prompt: dict[str, list[Any]] = field(default_factory=dict, repr=False)  # see `scores_by_prompt`
    unmatched: int = 0  # gold answers that their verifier rejects, see `MathVerifier.unmatched`
    unmatched_prompts: list[str] = field(default_factory=list, repr=False)  # some of their ids
    unknown: list[str] | None = None  # why some prompts that training has seen may be unknown; None: not checked
    majority: Interval | None = None  # majority@k over all samples; None: the verifier names no answers
    suite: str = ""  # empty: the run's own evaluation
    settings: dict[str, Any] = field(default_factory=dict)  # temperature, top_p and max_new_tokens of a suite
    by_task: dict[str, dict[str, Any]] = field(default_factory=dict)  # prompts and measures of each task of a mixture
    timed_out: int = 0  # programs that hit the time limit; they score 0

    def record(self) -> dict[str, Any]:
        """The line in `eval.jsonl`."""
        return {key: value for key, value in asdict(self).items() if key != "timed_out" or value}


def describe_evaluation(result: Evaluation) -> str:
    """One line for the log."""
    accuracy = result.accuracy
    named = f"{result.suite} at " if result.suite else ""
    line = f"{named}version {result.version}: accuracy {accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]"
    by_task = {label: measures["accuracy"]["value"] for label, measures in result.by_task.items()}
    notes = {f"{label} {'unknown' if math.isnan(value) else f'{value:.3f}'}": True for label, value in by_task.items()}
    notes |= {
        f"{result.truncated_fraction:.0%} truncated": result.truncated_fraction > 0.5,
        f"{result.excluded} prompts left out": result.excluded,
        f"no answer found in {result.unparsed} responses": result.unparsed > 0.5 * result.prompts * result.samples,
        f"{result.verifier_errors} verifier errors {result.verifier_error_kinds}": result.verifier_errors,
    }
    return ", ".join([line, *(note for note, is_shown in notes.items() if is_shown)])


def evaluate_checkpoint(
    checkpoint: Path,
    *,
    version: int,
    task: Task,
    sampler: Sampler,
    prompts: int,
    samples: int,
    seed: int = 0,
    rows_at_once: int = 2048,
    exclude: Seen | None = None,
    on_load: Callable[[float], object] = lambda seconds: None,
    scores: ScoreCheck | None = None,
    settings: SamplerSettings | None = None,
    load: Callable[[Path], object] | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> Evaluation:
    """Sample and score `samples` responses to each of the first `prompts` held-out prompts that are not in `exclude`.

    The seeds do not depend on the checkpoint. `load` replaces the sampler's own `load`. `reward_weights` are only
    checked: they must name parts of the rewards.
    """
    from stalewise.rollout.generate import sample_and_score

    start = time.perf_counter()
    (load or sampler.load)(checkpoint)
    on_load(time.perf_counter() - start)
    held_out, excluded = _held_out(task, prompts, exclude)
    repeated, responses, rewards = sample_and_score(
        task, held_out, samples=samples, seed=seed, sampler=sampler, rows_at_once=rows_at_once, settings=settings
    )
    texts = [response.text for response in responses]
    errors = count_errors(rewards, repeated, texts)
    if scores is not None:
        scores.add(errors)
    _check_rewards(task, rewards, errors, reward_weights or {})
    unmatched = task.verifier.unmatched(held_out) if isinstance(task.verifier, MathVerifier) else []
    score_PK = np.array([reward.value for reward in rewards]).reshape(len(held_out), samples)
    return Evaluation(
        version=version,
        task=task.name,
        prompts=len(held_out),
        samples=samples,
        accuracy=average(score_PK),
        pass_at={k: pass_at_k(score_PK, k) for k in sorted({*(2**i for i in range(samples.bit_length())), samples})},
        response_length=float(np.mean([response.policy_tokens for response in responses])),
        truncated_fraction=float(np.mean([r.finish_reason is FinishReason.LENGTH for r in responses])),
        verifier_errors=errors.failed,
        seconds=time.perf_counter() - start,
        excluded=excluded,
        **{key: value for key, value in errors.record().items() if key != "verifier_error_examples"},
        unmatched=len(unmatched),
        unmatched_prompts=[prompt.prompt_id for prompt in unmatched[:LISTED]],
        by_prompt=scores_by_prompt([prompt.prompt_id for prompt in held_out], score_PK),
        majority=majority_of(score_PK, answers_of(task.verifier, repeated, texts, rewards)),
        by_task=measures_by_task(task.verifier, repeated, texts, rewards, score_PK),
    )


def _check_rewards(task: Task, rewards: list[Reward], errors: ErrorCounts, weights: Mapping[str, float]) -> None:
    if errors.failed == len(rewards):
        scorer = "reward function" if isinstance(task.verifier, FunctionVerifier) else "verifier"
        raise TaskError(
            f"the {scorer} of {task.name} failed on all {len(rewards)} responses, so repair it: {errors.causes}"
        )
    check_weights(weights, rewards)


def _held_out(task: Task, count: int, exclude: Seen | None) -> tuple[list[Prompt], int]:
    """The first held-out prompts of a task without those that are excluded, and how many these are."""
    candidates = task.evaluation_prompts(count)
    held_out = [prompt for prompt in candidates if exclude is None or prompt not in exclude]
    excluded = len(candidates) - len(held_out)
    if not held_out:
        why = f": training has seen all {excluded}, or they are excluded by their ids" if excluded else ""
        raise TaskError(f"task {task.name} has no held-out prompts left to evaluate on{why}")
    return held_out, excluded


# Measures.


def scores_by_prompt(prompt_ids: Sequence[str], score_PK: npt.NDArray[np.float64]) -> dict[str, list[Any]]:
    """Scores per prompt, as parallel lists, to compare runs prompt by prompt.

    `score` is the sum over the samples that have a score, and `scored` is the number of those samples.
    """
    totals = [round(float(total), 6) for total in np.nansum(score_PK, axis=1)]
    return {
        "prompt_ids": list(prompt_ids),
        "score": [int(total) if total.is_integer() and abs(total) <= LARGEST else total for total in totals],
        "scored": (~np.isnan(score_PK)).sum(axis=1).tolist(),
    }


def average(score_PK: npt.NDArray[np.float64]) -> Interval:
    """Mean score with its interval; samples without a score (NaN) are skipped."""
    count_P = (~np.isnan(score_PK)).sum(axis=1)
    return bootstrap(np.nansum(score_PK, axis=1)[count_P > 0] / count_P[count_P > 0])


def pass_at_k(score_PK: npt.NDArray[np.float64], k: int) -> Interval:
    """Probability that one of k samples is right, 1 − C(n − c, k) / C(n, k) per prompt: unbiased (Chen et al. 2021).

    Right is a score of 1; a sample without a score is not right.
    """
    samples = score_PK.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; expected 1 to {samples}, the number of samples")
    correct_P = (score_PK >= 1).sum(axis=1)
    missed_P = np.array([math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct_P])
    return bootstrap(1 - missed_P)


def majority_of(score_PK: npt.NDArray[np.float64], answers: Sequence[str | None] | None) -> Interval | None:
    """majority@k: the score of the answer that most of the k samples give, averaged over tied answers.

    Samples without an answer do not vote. A prompt without any vote scores 0. None if answers are unknown.
    """
    if answers is None:
        return None
    prompts, samples = score_PK.shape
    return bootstrap(
        np.array([_winning_score(score_PK[p], answers[p * samples : (p + 1) * samples]) for p in range(prompts)])
    )


def _winning_score(score_K: npt.NDArray[np.float64], answers: Sequence[str | None]) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    scores = [[score for score, answer in zip(score_K, answers, strict=True) if answer == winner] for winner in winners]
    return float(np.mean([np.mean(np.nan_to_num(np.array(of_winner))) for of_winner in scores]))


def answers_of(
    verifier: Verifier, prompts: Sequence[Prompt], texts: Sequence[str], rewards: Sequence[Reward]
) -> list[str | None] | None:
    """The answer of each response, as its verifier reads it or as the reward function returned it.

    The answer of a response without one is None. The whole result is None if a verifier does neither.
    """
    verifiers = [verifier.of(prompt) if isinstance(verifier, MixtureVerifier) else verifier for prompt in prompts]
    without_method = {id(own) for own in verifiers if not hasattr(own, "answer")}
    with_returned = {id(own) for own, reward in zip(verifiers, rewards, strict=True) if reward.answer is not None}
    if without_method - with_returned:
        return None
    return [
        reward.answer if id(own) in without_method else getattr(own, "answer")(text)  # noqa: B009  an optional method
        for own, text, reward in zip(verifiers, texts, rewards, strict=True)
    ]


def measures_by_task(
    verifier: Verifier,
    repeated: Sequence[Prompt],
    texts: Sequence[str],
    rewards: Sequence[Reward],
    score_PK: npt.NDArray[np.float64],
) -> dict[str, dict[str, Any]]:
    """Number of prompts, accuracy, pass@k and majority@k of each task of a mixture; empty for another task."""
    samples = score_PK.shape[1]
    task_P = np.array([task_of(prompt.prompt_id) for prompt in repeated[::samples]])
    measures: dict[str, dict[str, Any]] = {}
    for label in dict.fromkeys(task_P.tolist()):
        if label:
            rows = np.flatnonzero(np.repeat(task_P == label, samples)).tolist()
            answers = answers_of(
                verifier, [repeated[row] for row in rows], [texts[row] for row in rows], [rewards[row] for row in rows]
            )
            own_PK = score_PK[task_P == label]
            majority = majority_of(own_PK, answers)
            measures[label] = {
                "prompts": len(own_PK),
                "accuracy": asdict(average(own_PK)),
                "pass_at": {samples: asdict(pass_at_k(own_PK, samples))},
                "majority": None if majority is None else asdict(majority),
            }
    return measures


# Suites of a run.


class Suites:
    """The suites of a run: when each is due, and its task."""

    def __init__(self, config: RunConfig, log: Callable[[str], object]) -> None:
        self.config, self._log = config, log
        self._tasks: dict[str, Task] = {}
        self._seen: dict[bool, Seen] = {}

    def due(self, version: int, last: int, recorded: Iterable[Mapping[str, Any]]) -> SuiteSection | None:
        """The first suite that is due at this version and has no record there with its present settings."""
        done = {record["suite"] for record in recorded if record["version"] == version and self._is_same(record)}
        for suite in self.config.evaluation.suite:
            is_due = version in (0, last) or (suite.every > 0 and version % suite.every == 0)
            if is_due and suite.label not in done:
                return suite
        return None

    def _is_same(self, record: Mapping[str, Any]) -> bool:
        suite = next((suite for suite in self.config.evaluation.suite if suite.label == record["suite"]), None)
        return suite is not None and record.get("definition") == definition_of(suite)

    def periods(self) -> list[int]:
        """The intervals in updates at which suites are evaluated."""
        return [suite.every for suite in self.config.evaluation.suite if suite.every]

    def check(self, policy: Path, recorded: Iterable[Mapping[str, Any]] | None = None) -> None:
        """Refuse suites on which the policy cannot be evaluated, before it is loaded.

        `recorded` are the results of a run that is complete: nothing is checked if no suite is due any more.
        """
        last, suites = self.config.schedule.updates, self.config.evaluation.suite
        if recorded is not None and self.due(last, last, recorded) is None:
            return
        for suite in suites:
            check_suite(self.config.sampler, suite, policy, self._task(suite), self._count(suite))

    def responses(self, suite: SuiteSection) -> int:
        """The number of responses that an evaluation samples if no prompt is excluded."""
        return len(self._task(suite).evaluation_prompts(self._count(suite))) * suite.responses

    def _count(self, suite: SuiteSection) -> int:
        return suite.prompts or (sys.maxsize if suite.file else self.config.evaluation.prompts)

    def evaluate(
        self, suite: SuiteSection, checkpoint: Path, version: int, sampler: Sampler, scores: ScoreCheck
    ) -> Evaluation:
        """Evaluate a version of the run. Prompts that this run or earlier ones train on are excluded."""
        # A task holds its own prompts out, but earlier runs may have seen them.
        is_own = not suite.file and not suite.task and not suite.options
        if is_own not in self._seen:
            apart = self.config.task if is_own else None
            self._seen[is_own] = seen_in_training(self.config.directory, self._log, apart=apart)
        return evaluate_suite(
            suite,
            checkpoint,
            version=version,
            task=self._task(suite),
            sampler=sampler,
            prompts=self._count(suite),
            exclude=self._seen[is_own],
            rows_at_once=self.config.sampler.rollouts_per_shard,
            scores=scores,
        )

    def _task(self, suite: SuiteSection) -> Task:
        if suite.label not in self._tasks:
            self._tasks[suite.label] = self.config.make_suite(suite)
        return self._tasks[suite.label]

    def close(self) -> None:
        """End the processes of the suites' verifiers."""
        with contextlib.ExitStack() as stack:
            for task in self._tasks.values():
                stack.callback(close_task, task)
        self._tasks = {}


def definition_of(suite: SuiteSection) -> dict[str, Any]:
    """The settings of a suite that determine its result: all except how often it is evaluated."""
    return suite.model_dump(mode="json", exclude={"every"})


def check_suite(
    section: SamplerSection, suite: SuiteSection, policy: Path, task: Task, prompts: int, *, is_single: bool = False
) -> None:
    """Refuse a suite without prompts, or with responses beyond the policy's context, before the policy is loaded.

    `is_single`: the user did not name a suite, so messages do not speak of one.
    """
    from stalewise.rollout.factory import check_context

    held_out = task.evaluation_prompts(prompts)
    if not held_out:
        of = "" if is_single else f", of the suite {suite.label!r},"
        raise TaskError(f"task {task.name}{of} has no held-out prompts to evaluate on")
    setting = "max_new_tokens" if is_single and suite.max_new_tokens else limit_setting(suite)
    of_suite = section.model_copy(update={"max_new_tokens": suite.max_new_tokens or section.max_new_tokens})
    check_context(of_suite, policy, task, longest_of(held_out), setting)


def evaluate_suite(
    suite: SuiteSection,
    checkpoint: Path,
    *,
    version: int,
    task: Task,
    sampler: Sampler,
    prompts: int,
    exclude: Seen,
    rows_at_once: int = 2048,
    scores: ScoreCheck | None = None,
) -> Evaluation:
    """Evaluate a checkpoint on the first `prompts` prompts of a suite."""
    limit = suite.max_new_tokens or sampler.max_new_tokens
    with token_limit(sampler, limit):
        result = evaluate_checkpoint(
            checkpoint,
            version=version,
            task=task,
            sampler=sampler,
            prompts=prompts,
            samples=suite.responses,
            rows_at_once=rows_at_once,
            exclude=exclude,
            scores=scores,
            settings=sampling_of(suite),
        )
    settings = {"temperature": suite.temperature, "top_p": suite.top_p, "max_new_tokens": limit}
    return replace(result, suite=suite.label, settings=settings)


def sampling_of(suite: SuiteSection) -> SamplerSettings:
    """The sampling of a suite. Greedy decoding is top-k with k = 1, which every engine supports."""
    if suite.temperature == 0:
        return SamplerSettings(top_k=1)
    return SamplerSettings(temperature=suite.temperature, top_p=suite.top_p)


# Evaluations outside of a run, as `stalewise eval` makes them.


class Policy(NamedTuple):
    """A policy to evaluate, and the config with the suites to evaluate it on."""

    checkpoint: Path
    version: int
    config: RunConfig
    run: Path | None  # its run directory, where it has one


class PlannedSuite(NamedTuple):
    """The task of a suite, its number of held-out prompts, and the task of training if that has held them out."""

    task: Task
    prompts: int
    apart: TaskSection | None


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """What `stalewise eval` will do; `is_single`: the user did not name a suite."""

    policy: Policy
    suites: list[PlannedSuite]
    exclude: Seen
    is_single: bool = False

    def __str__(self) -> str:
        pairs = zip(self.policy.config.evaluation.suite, self.suites, strict=True)
        names = [
            f"{planned.task.name}, {planned.prompts:,} prompts with {suite.responses} responses"
            for suite, planned in pairs
        ]
        policy = self.policy
        where = policy.checkpoint if policy.run is None else f"version {policy.version} of {policy.run}"
        return f"{where}: {'; '.join(names)}"

    def close(self) -> None:
        """End the processes of the suites' verifiers."""
        with contextlib.ExitStack() as stack:
            for suite in self.suites:
                stack.callback(close_task, suite.task)


def plan_evaluation(
    name: str,
    *,
    task: Any = None,
    file: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    prompts: int | None = None,
    sampling: Mapping[str, Any],
    exclude_ids: str | Path | None = None,
) -> EvaluationPlan:
    """The plan of one evaluation; the arguments are those of `stalewise.evaluate`."""
    chosen = None if task is None or isinstance(task, str) else task  # a class or an object
    policy = find_policy(name, "jsonl" if file is not None or chosen is not None else task)
    own = policy.config.task
    exclude = _excluded(exclude_ids)
    named = None if chosen is not None else task
    suite = {**sampling, "samples": sampling["samples"] or _samples(policy, sampling["temperature"])}
    policy = _with_suites(policy, named, {} if file is not None else options, [suite])
    config = policy.config
    if file is not None:
        chosen = make_evaluation_file(str(file), **{**own.form, **(options or {})})
    # A task holds its own prompts out, but earlier runs from which the policy comes may have seen them.
    apart = own if policy.run is not None and chosen is None and config.task == own else None
    chosen = chosen(seed=config.seed) if isinstance(chosen, type) else chosen or config.make_task()
    count = prompts or (sys.maxsize if file is not None else config.evaluation.prompts)
    planned = PlannedSuite(chosen, len(chosen.evaluation_prompts(count)), apart)
    return EvaluationPlan(policy, [planned], exclude, is_single=True)


def plan_suites(
    model: str | Path, suites: Sequence[Mapping[str, Any] | str] | None, exclude_ids: str | Path | None = None
) -> EvaluationPlan:
    """The plan of an evaluation on suites, as in `stalewise.evaluate_suites`."""
    new = [suite for suite in suites or () if not isinstance(suite, str)]
    task = next((str(suite["task"]) for suite in new if suite.get("task")), "jsonl" if new else None)
    policy = find_policy(str(model), task)
    own = {suite.label: suite.model_dump(mode="json") for suite in policy.config.evaluation.suite}
    for name in [suite for suite in suites or () if isinstance(suite, str) and suite not in own]:
        known = nearest(name, own) if own else "it has none"
        raise ConfigError(f"{model} has no suite {name!r}; {known}")
    if suites is None:
        tables = list(own.values())
    else:
        tables = [own[suite] if isinstance(suite, str) else suite for suite in suites]
    if not tables:
        raise ConfigError(f"{model} has no suites: pass some, or add [[evaluation.suite]] to its config")
    policy = _with_suites(policy, None, {}, tables)
    config = policy.config
    exclude = _excluded(exclude_ids)
    planned: list[PlannedSuite] = []
    for suite in config.evaluation.suite:
        is_own = policy.run is not None and not suite.file and not suite.task and not suite.options
        count = suite.prompts or (sys.maxsize if suite.file else config.evaluation.prompts)
        suite_task = config.make_suite(suite)
        held_out = len(suite_task.evaluation_prompts(count))
        planned.append(PlannedSuite(suite_task, held_out, config.task if is_own else None))
    return EvaluationPlan(policy, planned, exclude)


def find_policy(name: str, task: str | None) -> Policy:
    """The policy of a run, a checkpoint or a model. A model outside of a run needs a task, unless it is embedded."""
    path = Path(name).expanduser()
    if (path / "config.resolved.json").is_file():
        newest = checkpoints.versions(path)[-1:]
        if not newest:
            raise StoreError(f"{path} has no checkpoint yet")
        checkpoint = checkpoints.checkpoint_directory(path, newest[0])
        checkpoints.read_state(checkpoint)  # compares checksums
        return Policy(checkpoint, newest[0], read_config(path), path)
    run = path.resolve().parent.parent
    if (path / "state.json").is_file() and (run / "config.resolved.json").is_file():
        return Policy(path, checkpoints.read_state(path)["version"], read_config(run), run)
    name = embedded_policy(name) or name
    if task is None and name not in embedded_policies():
        raise TaskError(f"{name} is not a run directory: name the task to evaluate it on, as in --task arithmetic")
    config = make_config({"model": {"path": name}, "task": {"name": task or name}})
    return Policy(Path(resolve_model(name)), 0, config, None)


def _with_suites(
    policy: Policy, task: str | None, options: Mapping[str, Any] | None, suites: Sequence[Mapping[str, Any]]
) -> Policy:
    """The policy with these suites in its config, and with another task or other options of its task."""
    record = policy.config.model_dump(mode="json")
    if task is not None and task != policy.config.task.name:
        record["task"] = {"name": task, "options": {}}
    record["task"]["options"] |= dict(options or {})
    record["evaluation"]["suite"] = [dict(suite) for suite in suites]
    return policy._replace(config=make_config(record, source="evaluate"))


def _samples(policy: Policy, temperature: float) -> int:
    return policy.config.evaluation.samples if temperature else 1


def _excluded(path: str | Path | None) -> Seen:
    return Seen() if path is None else read_ids(path)


def evaluate_planned(plan: EvaluationPlan, callback: ProgressCallback) -> list[Evaluation]:
    """Evaluate as planned; returns one result for each suite."""
    from stalewise.orchestrator.model_check import check_model
    from stalewise.planning.memory import check_sampling_memory
    from stalewise.rollout.factory import make_sampler

    policy = plan.policy
    config = policy.config
    longest = max(suite.max_new_tokens or config.sampler.max_new_tokens for suite in config.evaluation.suite)
    check_sampling_memory(config.model, config.sampler.engine, str(policy.checkpoint), longest)
    results: list[Evaluation] = []
    for suite, (task, prompts, _) in zip(config.evaluation.suite, plan.suites, strict=True):
        check_suite(config.sampler, suite, policy.checkpoint, task, prompts, is_single=plan.is_single)
    with contextlib.closing(make_sampler(config)) as sampler:
        for suite, (task, prompts, apart) in zip(config.evaluation.suite, plan.suites, strict=True):
            unknown: list[str] = []
            seen = plan.exclude | seen_in_training(policy.run or policy.checkpoint, unknown.append, apart=apart)
            for message in unknown if not results else ():
                callback.log(message)
            if not results:
                check_model(config, policy.checkpoint, task, sampler, callback.log, learns=False)
            callback.begin("evaluate", prompts * suite.responses)
            result = evaluate_suite(
                suite,
                policy.checkpoint,
                version=policy.version,
                task=task,
                sampler=sampler,
                prompts=prompts,
                exclude=seen,
                rows_at_once=config.sampler.rollouts_per_shard,
            )
            callback.advance((result.prompts + result.excluded) * result.samples)
            results.append(replace(result, unknown=unknown))
    if plan.is_single:
        is_plain = all(result.settings[key] == 1 for result in results for key in ("temperature", "top_p"))
        return [replace(result, suite="", settings={} if is_plain else result.settings) for result in results]
    return results
