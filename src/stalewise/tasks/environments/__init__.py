"""Environments answer a policy between its turns. The protocol, and construction by name.

An environment object plays one episode at a time. It gets the prompt of its row, then each complete turn of the policy,
as text. Its answers are messages: `{"role": …, "content": …}`. The policy reads them and is never trained on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import Verifier, is_importable, no_module
from stalewise.types import Prompt

ENVIRONMENTS = {
    "calculator": "stalewise.tasks.environments.builtin:Calculator",
    "python": "stalewise.tasks.environments.builtin:PythonTool",
    "sums": "stalewise.tasks.environments.builtin:RunningSums",
    "retry": "stalewise.tasks.environments.builtin:Retry",
    "verifiers": "stalewise.tasks.environments.prime:PrimeEnvironment",
}


class ChatMessage(TypedDict):
    """One message of a chat template. Without a chat template the contents are concatenated."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode: the policy's turns, the answers between them, and why it ended."""

    prompt: Prompt
    turns: tuple[str, ...]
    answers: tuple[tuple[ChatMessage, ...], ...]  # after each turn but the last
    finish_reason: str  # stop: the environment was done; length: no tokens or no turns were left


class Environment(Protocol):
    """Plays one episode at a time. Equal rows and turns must give equal answers, since an episode may be replayed."""

    def reset(self, row: Prompt) -> Sequence[ChatMessage]:
        """Begin an episode; the messages that the policy sees first. They must depend on the row alone."""
        ...

    def step(self, response: str) -> Sequence[ChatMessage] | None:
        """Answer a turn of the policy; None: the episode is over."""
        ...

    def score(self, episode: Episode) -> Any:
        """The reward: a number, a mapping of numbers with the key "reward" (the others are parts), or a `Reward`."""
        ...


def first_messages(row: Prompt, system: str = "") -> list[ChatMessage]:
    """The messages of a prompt, its own system text before `system`."""
    both = "\n\n".join(text for text in (row.metadata.get("system", ""), system) if text)
    history: list[ChatMessage] = json.loads(row.metadata.get("history", "[]"))
    first: list[ChatMessage] = [{"role": "system", "content": both}] if both else []
    return [*first, *history, {"role": "user", "content": row.text}]


def environment_factory(name: str) -> str:
    """The reference "module:name" of an environment: one of ENVIRONMENTS, or a class of the user's."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute.isidentifier()):
        advice = nearest(name, ENVIRONMENTS)
        raise TaskError(f"unknown environment {name!r}; {advice}, or name a class of yours as 'module:Class'")
    if not is_importable(module):
        raise TaskError(f"environment {name}: {no_module(module)}")
    return name


def make_environments(name: str, options: Mapping[str, Any] | None = None, *, verifier: Verifier | None = None) -> Any:
    """The pool that plays episodes of a task in the environment `name`.

    The options `workers`, `limit_s` and `max_turns` are for the pool, all others for the environment.
    """
    from stalewise.tasks.environments.play import EnvironmentPool

    environment_options = dict(options or {})
    pool_names = ("workers", "limit_s", "max_turns")
    pool_options = {key: environment_options.pop(key) for key in pool_names if key in environment_options}
    return EnvironmentPool(environment_factory(name), environment_options, verifier=verifier, **pool_options)
