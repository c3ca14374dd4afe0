"""What a task and a verifier are, and the two ways of numbering prompts: over a finite list and without end.

Prompt number i is a function of the task's seed and of i alone. So generation that was killed can be done
again from the index at which it stopped, and machines that generate different ranges need not speak to each
other.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar, runtime_checkable

from stalewise.errors import TaskError, nearest
from stalewise.types import Prompt, Reward

CHAT: Mapping[str, str] = {"format": "chat"}
"""Metadata of a prompt whose text is a user message: the generator puts it through the chat template.

A key "system" beside it, where there is one, holds the system message, and "prefill" the beginning of the reply, which
the policy goes on from. A prompt without "format" goes to the tokenizer as it is. "problem" holds what was put into a
template.
"""

Item = TypeVar("Item")


@runtime_checkable
class Verifier(Protocol):
    """Scores responses. One that could not be scored has value NaN and an error, and is never given 0."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`; results in the same order."""
        ...

    def close(self) -> None:
        """End the processes that the verifier owns, if any. May be called twice."""
        ...


@runtime_checkable
class Task(Protocol):
    """A stream of training prompts, a held-out set, and a verifier."""

    @property
    def name(self) -> str:
        """The name under which reports and prompt ids know the task."""
        ...

    @property
    def size(self) -> int | None:
        """How many distinct training prompts there are; None for a generator without end."""
        ...

    @property
    def verifier(self) -> Verifier:
        """What scores the responses."""
        ...

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`, the same at every call.

        A finite task goes through all of its prompts once per epoch, each epoch in another order.
        """
        ...

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, all distinct; fewer where there are fewer.

        They do not depend on the seed: runs with different seeds are judged on the same questions.
        """
        ...


class LocalVerifier(ABC):
    """A verifier that is quick and cannot hang, so it runs in this process. Subclasses judge one response."""

    @abstractmethod
    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`."""
        return [self.judge(prompt, response) for prompt, response in paired(prompts, responses)]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""
        return


def paired(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[tuple[Prompt, str]]:
    """Pair prompts with responses; lengths that differ are an error, never a silent cut."""
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses; pass one prompt per response")
    return list(zip(prompts, responses, strict=True))


def fraction_of(text: str) -> float:
    """Map a text to [0, 1), evenly and for ever: the same on every machine and in every Python."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48


def stream(*names: object) -> random.Random:
    """Give the random stream of that name. Draw from it with `below` and `pick`."""
    return random.Random("/".join(map(str, names)))


def below(rng: random.Random, bound: int) -> int:
    """Draw from 0..bound-1. `random()` is the one method whose sequence Python promises to keep."""
    return int(rng.random() * bound)


def pick(rng: random.Random, items: Sequence[Item]) -> Item:
    """Draw one of the items."""
    return items[below(rng, len(items))]


def check_range(start: int, count: int) -> None:
    """Refuse negative indices, which Python would take to mean the end of a list."""
    if start < 0 or count < 0:
        raise ValueError(f"prompts are numbered from 0: start={start}, count={count} must not be negative")


class FinitePrompts:
    """Numbers a finite list of prompts without end: epoch after epoch, each in its own seeded order.

    >>> questions = [Prompt(prompt_id=letter, text=letter, answer="") for letter in "abc"]
    >>> order = FinitePrompts(questions, seed=0, name="letters")
    >>> [sorted(p.text for p in order.take(epoch * 3, 3)) for epoch in range(2)]
    [['a', 'b', 'c'], ['a', 'b', 'c']]
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, name: str):
        if not prompts:
            raise TaskError(f"task {name} has no training prompts")
        self._prompts = list(prompts)
        # Two epochs, since a range that crosses a boundary needs both.
        self._order: Callable[[int], list[int]] = lru_cache(maxsize=2)(
            lambda epoch: _shuffled(len(self._prompts), stream(name, seed, "epoch", epoch))
        )

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts number `start` to `start + count - 1`."""
        check_range(start, count)
        places = (divmod(index, len(self._prompts)) for index in range(start, start + count))
        return [self._prompts[self._order(epoch)[place]] for epoch, place in places]


def _shuffled(length: int, rng: random.Random) -> list[int]:
    order = list(range(length))
    for last in range(length - 1, 0, -1):
        other = below(rng, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def first_distinct(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    """Take prompts until `count` have distinct ids, or until there are no more."""
    found: dict[str, Prompt] = {}
    while len(found) < count and (prompt := next(prompts, None)) is not None:
        found.setdefault(prompt.prompt_id, prompt)
    return list(found.values())


# Turns a name and options, as they stand in a configuration, into an object, or into an error that helps.


def build(kind: str, name: str, known: Mapping[str, str], options: Mapping[str, Any]) -> Any:
    """Call what `known[name]` refers to ("module:class") with the options; `kind` is for the messages."""
    if name not in known:
        raise TaskError(f"unknown {kind} {name!r}; {nearest(name, known)}")
    module, _, function = known[name].partition(":")
    factory = getattr(importlib.import_module(module), function)
    named = inspect.signature(factory).parameters
    for option in options:
        if option not in named:
            advice = nearest(option, named) if named else "it takes none"
            raise TaskError(f"{kind} {name} has no option {option!r}; {advice}")
    for parameter in named.values():
        if parameter.default is parameter.empty and parameter.name not in options:
            raise TaskError(f"{kind} {name} needs the option {parameter.name!r}")
    return factory(**options)


def need(module: str, extra: str, what: str) -> None:
    """Refuse, with the remedy, where an optional package is missing; looks without importing it."""
    try:
        missing = importlib.util.find_spec(module) is None
    except ValueError:  # blocked by a None in sys.modules
        missing = True
    if missing:
        raise TaskError(f"{what} needs the package {module}: pip install 'stalewise[{extra}]'")
