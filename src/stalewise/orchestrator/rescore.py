"""Scores existing rollouts again: with another verifier, repaired answers, or other weights of reward parts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from stalewise import store
from stalewise.config import make_config
from stalewise.config.run_directory import read_config
from stalewise.errors import ConfigError, StoreError, TaskError, nearest
from stalewise.store.reward_versions import RewardVersion, check_new_name, find_version, new_version, versions_directory
from stalewise.tasks import ErrorCounts, Task, Verifier, count_errors, make_verifier
from stalewise.tasks.jsonl import read_jsonl
from stalewise.types import NullCallback, ProgressCallback, Prompt, Reward

ROWS_TASKS = ("jsonl", "hf")  # tasks that have the option `verifier`, and give it the fields of rows
COLUMNS = ("rollout_id", "prompt_id", "group", "text", "reward", "reward_parts", "reward_error")


@dataclass
class ScoreChange:
    """The changes of rescoring, summed over batches. A reward that is unknown on one side only counts as changed."""

    rollouts: int = 0
    changed: int = 0
    raised: int = 0
    lowered: int = 0
    sum_before: float = 0.0
    scored_before: int = 0
    sum_after: float = 0.0
    scored_after: int = 0
    parts: set[str] = field(default_factory=set)

    def add(self, before: Reward, after: Reward) -> None:
        """Count one rollout."""
        known = [not math.isnan(reward.value) for reward in (before, after)]
        self.rollouts += 1
        self.changed += known[0] != known[1] or (all(known) and before.value != after.value)
        self.raised += all(known) and after.value > before.value
        self.lowered += all(known) and after.value < before.value
        self.scored_before += known[0]
        self.scored_after += known[1]
        self.sum_before += before.value if known[0] else 0.0
        self.sum_after += after.value if known[1] else 0.0

    def record(self) -> dict[str, Any]:
        """For the manifest: counts, and means over the rollouts that have a reward."""
        return {
            "rollouts": self.rollouts,
            "changed": self.changed,
            "raised": self.raised,
            "lowered": self.lowered,
            "unscored_before": self.rollouts - self.scored_before,
            "unscored_after": self.rollouts - self.scored_after,
            "mean_before": self.sum_before / self.scored_before if self.scored_before else None,
            "mean_after": self.sum_after / self.scored_after if self.scored_after else None,
        }


def rescore(
    run: str | Path,
    verifier: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    answers: str | Path | Mapping[str, str] | None = None,
    weights: Mapping[str, float] | None = None,
    name: str | None = None,
    callback: ProgressCallback | None = None,
) -> RewardVersion:
    """Score all committed rollouts of a run again, and keep the result as `rewards/NAME` beside the first rewards.

    Args:
        run: a run directory with rollouts of its own.
        verifier: the name of another verifier; without one, the run's own as it is now.
        options: options of the verifier.
        answers: repaired gold answers by prompt id: a mapping, or a JSONL file with `id` and `answer`.
        weights: the reward becomes the sum of these parts, times their weights. Without a verifier, answers and
            options nothing is scored: the recorded parts are used.
        name: of the version; default: r1, r2, …
        callback: receives the progress.
    """
    run, callback = Path(run), callback or NullCallback()
    config, batches = read_config(run), _committed(run)
    name = name or _next_name(run)
    check_new_name(run, name)
    repaired = _answers(answers)
    scores = weights is None or verifier is not None or bool(options) or bool(repaired)
    if scores:
        _refuse_episodes(run, config.task.options)
    scorer = _task(run, verifier, dict(options or {})) if scores else None
    change, counts = ScoreChange(), ErrorCounts()
    with contextlib.ExitStack() as closing:
        if scorer is not None:
            closing.callback(scorer[1].close)
        writer = closing.enter_context(new_version(run, name))
        callback.begin("rescore", sum(store.read_batch_manifest(path).rows for path in batches))
        used: set[str] = set()
        for path in batches:
            batch = store.open_batch(path)
            ids, rewards = list[int](), list[Reward]()
            for rows, before in _recorded(batch):
                after = before if scorer is None else _scored(*scorer, rows, repaired, used, f"{run}, {path.name}")
                counts += count_errors(after)
                after = after if weights is None else [_weighted(reward, weights, change.parts) for reward in after]
                for pair in zip(before, after, strict=True):
                    change.add(*pair)
                ids += rows["rollout_id"]
                rewards += after
                callback.advance(len(after))
            writer.add(path.name, batch.manifest, ids, rewards)
        _check(counts, config.task.max_unscored, change, weights, repaired, used)
        how = {"verifier": verifier, "options": dict(options or {}), "weights": dict(weights or {})}
        how |= {"answers": len(repaired), "answers_sha256": _digest(repaired), "errors": counts.record()}
        writer.record |= {"time": time.time(), **how, **change.record()}
    return find_version(run, name)


def _refuse_episodes(run: Path, options: Mapping[str, Any]) -> None:
    if played := options.get("environment"):
        raise ConfigError(
            f"{run} has episodes, which the environment {played} scored turn by turn: a verifier alone cannot score "
            "them again. Weights of their recorded parts can change rewards (--weight PART=…)"
        )


def _committed(run: Path) -> list[Path]:
    """The generation batches of a run that can be scored again; a StoreError if there are none."""
    batches = list(filter(store.is_committed, store.batch_directories(run / "rollouts")))
    if not batches:
        where = "learned from other runs: rescore those" if (run / "sources.json").is_file() else "has none yet"
        raise StoreError(f"{run} has no committed rollouts to score; it {where}")
    return batches


def _next_name(run: Path) -> str:
    root, number = versions_directory(run), 1
    while (root / f"r{number}").exists():
        number += 1
    return f"r{number}"


def _task(run: Path, verifier: str | None, options: dict[str, Any]) -> tuple[Task, Verifier]:
    """The run's task, and its own verifier or another one."""
    record = read_config(run).model_dump(mode="json")
    if verifier is None and not options:
        task = make_config(record, source=str(run)).make_task()
        return task, task.verifier
    if record["task"]["name"] in ROWS_TASKS:
        own = record["task"]["options"]
        if verifier is not None and verifier != own.get("verifier", "number"):
            own |= {"verifier": verifier, "verifier_options": options}
        else:
            own["verifier_options"] = {**(own.get("verifier_options") or {}), **options}
        task = make_config(record, source=str(run)).make_task()
        return task, task.verifier
    if verifier is None:
        raise ConfigError(f"options of a verifier need its name: {record['task']['name']} has a verifier of its own")
    task = make_config(record, source=str(run)).make_task()
    task.verifier.close()
    return task, make_verifier(verifier, **options)


def _answers(answers_or_file: str | Path | Mapping[str, str] | None) -> dict[str, str]:
    if answers_or_file is None or isinstance(answers_or_file, Mapping):
        return {str(key): str(value) for key, value in (answers_or_file or {}).items()}
    answers: dict[str, str] = {}
    for row in read_jsonl(answers_or_file):
        if not {"id", "answer"} <= row.fields.keys():
            raise TaskError(f"{row.where}: expected an object with id (of a prompt) and answer")
        if answers.setdefault(str(row.fields["id"]), str(row.fields["answer"])) != str(row.fields["answer"]):
            raise TaskError(f"{row.where}: {row.fields['id']!r} has two different answers")
    return answers


def _recorded(batch: store.Batch) -> Iterator[tuple[dict[str, list[Any]], list[Reward]]]:
    """Rollouts with their first rewards, some hundred at a time."""
    for table in batch.iter_tables(COLUMNS):
        rows: dict[str, list[Any]] = table.to_pydict()
        yield rows, [Reward(*values) for values in zip(*_reward_columns(table), strict=True)]


def _reward_columns(table: pa.Table) -> tuple[list[float], list[dict[str, float]], list[str]]:
    values = [math.nan if value is None else value for value in table["reward"].to_pylist()]
    parts = [{part["name"]: part["value"] for part in row} for row in table["reward_parts"].to_pylist()]
    return values, parts, table["reward_error"].to_pylist()


def _scored(
    task: Task,
    verifier: Verifier,
    rows: Mapping[str, list[Any]],
    answers: Mapping[str, str],
    used: set[str],
    where: str,
) -> list[Reward]:
    """Score rollouts; a group is the number of its prompt in the task's order."""
    first, last = min(rows["group"]), max(rows["group"])
    prompts = dict(zip(range(first, last + 1), task.prompts(first, last - first + 1), strict=True))
    scored_prompts: list[Prompt] = []
    for group, prompt_id in zip(rows["group"], rows["prompt_id"], strict=True):
        prompt = prompts[group]
        if prompt.prompt_id != prompt_id:
            raise TaskError(
                f"{where}: prompt {group} was {prompt_id!r} and is {prompt.prompt_id!r} now: the data were changed; "
                "restore them, and give repaired answers by prompt id (--answers)"
            )
        if prompt_id in answers:
            used.add(prompt_id)
            prompt = replace(prompt, answer=answers[prompt_id])
        scored_prompts.append(prompt)
    return verifier.score(scored_prompts, rows["text"])


def _weighted(reward: Reward, weights: Mapping[str, float], parts: set[str]) -> Reward:
    parts.update(reward.parts)
    if reward.error:
        return reward
    if missing := [name for name in weights if name not in reward.parts]:
        return Reward(math.nan, reward.parts, f"no part: {missing[0]}")
    return replace(reward, value=math.fsum(weight * reward.parts[name] for name, weight in weights.items()))


def _check(
    counts: ErrorCounts,
    limit: float,
    change: ScoreChange,
    weights: Mapping[str, float] | None,
    answers: Mapping[str, str],
    used: set[str],
) -> None:
    """Refuse obvious mistakes before anything is committed."""
    if wrong := [name for name in weights or () if name not in change.parts]:
        known = nearest(wrong[0], change.parts) if change.parts else "these rewards have no parts"
        raise ConfigError(f"weight of {wrong[0]!r}: there is no such reward part; {known}")
    if weights is not None and not any(weights.values()):
        raise ConfigError("all weights are 0: no reward would be left")
    if unknown := sorted(answers.keys() - used):
        raise TaskError(
            f"{len(unknown)} of {len(answers)} answers are of no prompt of these rollouts, e.g. {unknown[0]!r}"
        )
    if problem := counts.over(limit):
        raise TaskError(f"{problem}; no rewards were kept")


def _digest(answers: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(answers.items())).encode()).hexdigest() if answers else ""
