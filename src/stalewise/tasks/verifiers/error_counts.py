"""Counts of scoring errors, so that reports show them instead of hiding them in a mean."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from stalewise.errors import ConfigError, nearest
from stalewise.types import Prompt, Reward

LISTED = 20  # examples per kind of error that are listed; all errors are counted
_EXCERPT = 200
_PLACE = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True)
class ErrorCounts:
    """How many responses were scored and how many failed, by kind of error, with the first example of each kind.

    The kind is the text before the colon: "ValueError", "worker died", "timeout after 5.0 s". A response in which the
    verifier found no answer is scored, and counted as `unparsed`. The counts of two batches can be added.
    """

    total: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # prompt ids by kind
    unparsed: int = 0
    unparsed_examples: tuple[tuple[str, str], ...] = ()  # prompt id and response, or the end of it
    traceback: str = ""  # of the first error that has one; not recorded
    timed_out: int = 0  # programs that hit the time limit; they score 0

    @property
    def failed(self) -> int:
        """How many responses could not be scored."""
        return sum(self.kinds.values())

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        prompts = {
            kind: tuple(dict.fromkeys((*self.prompts.get(kind, ()), *other.prompts.get(kind, ()))))[:LISTED]
            for kind in {**self.prompts, **other.prompts}
        }
        return ErrorCounts(
            self.total + other.total,
            dict(Counter(self.kinds) + Counter(other.kinds)),
            {**other.examples, **self.examples},
            prompts,
            self.unparsed + other.unparsed,
            (*self.unparsed_examples, *other.unparsed_examples)[:LISTED],
            self.traceback or other.traceback,
            self.timed_out + other.timed_out,
        )

    def __str__(self) -> str:
        if not self.failed:
            late = f", {self.timed_out} of them 0 for taking too long" if self.timed_out else ""
            return f"all {self.total} responses were scored{late}"
        return f"{self.failed} of {self.total} responses could not be scored: {self.causes}"

    @property
    def causes(self) -> str:
        """The kinds of errors, the most frequent first, each with its count and its first example."""
        most_first = sorted(self.kinds.items(), key=lambda pair: (-pair[1], pair[0]))
        return ", ".join(f"{count} × {kind}{self._detail(kind)}" for kind, count in most_first)

    def over(self, limit: float) -> str:
        """Why a run should stop, if more than this fraction of the responses failed; else an empty string."""
        if not self.failed or self.failed <= limit * self.total:
            return ""
        places = _PLACE.findall(self.traceback)
        where = f"; the first error was raised in {places[-1][0]}, line {places[-1][1]}" if places else ""
        return (
            f"{self}; that is {self.failed / self.total:.0%}, and task.max_unscored is {limit:g}{where}: repair the "
            "verifier, or raise task.max_unscored to go on without these responses"
        )

    def record(self) -> dict[str, Any]:
        """The record in manifests and evaluations, as JSON."""
        timed_out = {"timed_out": self.timed_out} if self.timed_out else {}
        return {
            **timed_out,
            "verifier_error_kinds": dict(self.kinds),
            "verifier_error_examples": dict(self.examples),
            "verifier_error_prompts": {kind: list(ids) for kind, ids in self.prompts.items()},
            "unparsed": self.unparsed,
            "unparsed_examples": [{"prompt_id": name, "response": text} for name, text in self.unparsed_examples],
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any], total: int) -> ErrorCounts:
        """The counts of a `record` of `total` responses; missing keys count nothing."""
        return cls(
            total,
            dict(record.get("verifier_error_kinds", {})),
            dict(record.get("verifier_error_examples", {})),
            {kind: tuple(ids) for kind, ids in record.get("verifier_error_prompts", {}).items()},
            record.get("unparsed", 0),
            tuple((example["prompt_id"], example["response"]) for example in record.get("unparsed_examples", ())),
            timed_out=record.get("timed_out", 0),
        )

    def _detail(self, kind: str) -> str:
        detail = self.examples[kind].removeprefix(kind).removeprefix(": ")
        return f" ({detail})" if detail else ""


def check_weights(weights: Mapping[str, float], rewards: Iterable[Reward]) -> None:
    """Raise a ConfigError if objective.reward_weights name a part that none of the scored rewards has."""
    scored = [reward for reward in rewards if not reward.error]
    found = {name for reward in scored for name in reward.parts}
    if missing := [name for name in weights if scored and name not in found]:
        known = nearest(missing[0], found) if found else "these rewards have no parts"
        raise ConfigError(f"objective.reward_weights names {missing[0]!r}, which no reward has as a part; {known}")


def count_errors(
    rewards: Iterable[Reward], prompts: Sequence[Prompt] = (), responses: Sequence[str] = ()
) -> ErrorCounts:
    """Count the errors of a batch by kind; `prompts` and `responses`, if given, are listed as examples."""
    total = unparsed = timed_out = 0
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    listed: dict[str, dict[str, None]] = {}
    unparsed_examples: list[tuple[str, str]] = []
    traceback = ""
    for reward, prompt, response in zip_longest(rewards, prompts, responses):
        total += 1
        if reward.error:
            kind = reward.error.partition(":")[0]
            kinds[kind] += 1
            traceback = traceback or reward.traceback
            examples.setdefault(kind, reward.error)
            if prompt is not None and len(listed.setdefault(kind, {})) < LISTED:
                listed[kind][prompt.prompt_id] = None
            continue
        timed_out += reward.parts.get("timed_out") == 1
        if reward.parts.get("parsed") == 0:
            unparsed += 1
            if prompt is not None and response is not None and len(unparsed_examples) < LISTED:
                # Keep the end, where an answer would be.
                text = response if len(response) <= _EXCERPT else "…" + response[-_EXCERPT:]
                unparsed_examples.append((prompt.prompt_id, text))
    by_kind = {kind: tuple(ids) for kind, ids in listed.items()}
    return ErrorCounts(total, dict(kinds), examples, by_kind, unparsed, tuple(unparsed_examples), traceback, timed_out)
