"""Environments of the package `verifiers` (0.1.9 to 0.3): their data as a task, their turns as an environment.

The environment's own `rollout` runs, with its set-up, stop conditions and rubric. Where it would ask a server for the
next message, it waits for the policy's turn instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.base import CHAT, FinitePrompts, LocalVerifier, check_range, content_id, is_importable, need
from stalewise.tasks.environments import ChatMessage, Episode
from stalewise.types import Prompt, Reward

_playing: contextvars.ContextVar[PrimeEnvironment | None] = contextvars.ContextVar("playing", default=None)


@lru_cache(maxsize=8)
def load_prime(name: str, arguments: str) -> Any:
    """The environment with this name and arguments (JSON), patched to wait for turns; cached in this process."""
    need("verifiers", "verifiers", "an environment of verifiers")
    import verifiers as vf  # pyright: ignore[reportMissingImports]

    if not hasattr(vf, "MultiTurnEnv"):
        raise TaskError(
            f"verifiers {getattr(vf, '__version__', '')} has no MultiTurnEnv: pip install 'stalewise[verifiers]'"
        )
    is_importable(name.rpartition("/")[2].replace("-", "_"))
    made = vf.load_environment(name, **json.loads(arguments))
    if not isinstance(made, vf.MultiTurnEnv):
        raise TaskError(f"{name} is a {type(made).__name__}: only environments with turns (MultiTurnEnv) can be played")

    async def get_model_response(state: Any, prompt: Any, *_: Any, **__: Any) -> Any:
        playing = _playing.get()
        assert playing is not None
        return await playing.wait_for_turn(prompt)

    made.get_model_response = get_model_response
    return made


def _plain(message: Any) -> ChatMessage:
    record = message if isinstance(message, Mapping) else message.model_dump()
    content = record.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return {"role": str(record["role"]), "content": content}


class PrimeEnvironment:
    """One episode of the environment `env` of verifiers, made with `arguments`."""

    def __init__(self, env: str = "", arguments: Mapping[str, Any] | None = None) -> None:
        if not env:
            raise TaskError('the environment verifiers needs the option env: the name of one, as in env = "wordle"')
        self._environment = load_prime(env, json.dumps(dict(arguments or {}), sort_keys=True))
        self._loop = asyncio.new_event_loop()
        self._asked: asyncio.Future[list[ChatMessage]] = self._loop.create_future()
        self._turn: asyncio.Future[Any] = self._loop.create_future()
        self._rollout: asyncio.Task[Any] | None = None
        self._seen = 0  # messages

    def __del__(self) -> None:
        """Drop an unfinished episode without asyncio's warning about it."""
        if (rollout := getattr(self, "_rollout", None)) is not None:
            setattr(rollout, "_log_destroy_pending", False)  # noqa: B010
            self._loop.close()

    async def wait_for_turn(self, prompt: Any) -> Any:
        """Called by the environment instead of a server: pass on its messages, and wait for the policy's turn."""
        self._turn = self._loop.create_future()
        self._asked.set_result([_plain(message) for message in prompt])
        return await self._turn

    def reset(self, row: Prompt) -> list[ChatMessage]:
        """Begin an episode; the environment's first messages."""
        from verifiers.clients import Client  # pyright: ignore[reportMissingImports]

        fields = json.loads(row.metadata["row"])
        context = contextvars.copy_context()
        context.run(_playing.set, self)
        rollout = self._environment.rollout(fields, object.__new__(_client(Client)), "policy", {})
        self._rollout = self._loop.create_task(rollout, context=context)
        messages = self._until_asked()
        if messages is None:
            raise RuntimeError("the environment ended before the first turn")
        self._seen = len(messages)
        return messages

    def _until_asked(self) -> list[ChatMessage] | None:
        """Let the environment run until it waits for a turn; None if it has ended."""
        assert self._rollout is not None
        both = [self._rollout, self._asked]
        self._loop.run_until_complete(asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED))
        if not self._asked.done():
            self._rollout.result()  # raises the environment's exception, if any
            return None
        messages, self._asked = self._asked.result(), self._loop.create_future()
        return messages

    def step(self, response: str) -> list[ChatMessage] | None:
        """Give the policy's turn to the environment."""
        from verifiers.types import Response, ResponseMessage  # pyright: ignore[reportMissingImports]

        message = ResponseMessage(role="assistant", content=response, finish_reason="stop", is_truncated=False)
        self._turn.set_result(Response(id="turn", created=int(time.time()), model="policy", message=message))
        messages = self._until_asked()
        if messages is None:
            return None
        new, self._seen = messages[self._seen + 1 :], len(messages)
        return new

    def score(self, episode: Episode) -> dict[str, float]:
        """The rubric's reward, with its metrics as parts."""
        assert self._rollout is not None
        if not self._rollout.done():  # the token or turn limit cut the episode
            self._rollout.cancel()
            raise RuntimeError("the episode was cut before the environment ended it, so its rubric cannot score it")
        state = self._rollout.result()
        if state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        self._loop.run_until_complete(self._environment.rubric.score_rollout(state))
        metrics = {
            f"part_{name}" if name == "reward" else name: value for name, value in (state["metrics"] or {}).items()
        }
        return {"reward": state["reward"], **metrics}


@lru_cache(maxsize=1)
def _client(base: type) -> type:
    """A client class without abstract methods; its instances are never called."""
    return type("NoClient", (base,), dict.fromkeys(getattr(base, "__abstractmethods__", ())))


class _Unscored(LocalVerifier):
    """Episodes are scored by their environment."""

    def judge(self, prompt: Prompt, response: str) -> Reward:
        raise NotImplementedError("the environment scores episodes")


class PrimeTask:
    """`verifiers`: the data of the environment `env`, to be played in it."""

    def __init__(self, env: str, *, seed: int = 0, arguments: Mapping[str, Any] | None = None, rows: int = -1) -> None:
        made = load_prime(env, json.dumps(dict(arguments or {}), sort_keys=True))
        self.name, self.verifier = env, _Unscored()
        self._training = FinitePrompts(self._prompts(made.get_dataset(n=rows)), seed=seed, name=env)
        self._evaluation = self._prompts(made.get_eval_dataset(n=rows))

    def _prompts(self, dataset: Any) -> list[Prompt]:
        prompts: dict[str, Prompt] = {}
        for row in dataset:
            messages = [_plain(message) for message in row["prompt"]]
            fields = {key: value for key, value in row.items() if value is not None}
            answer = str(row.get("answer", ""))
            row_id = content_id(json.dumps(messages), answer)
            metadata = {**CHAT, "row": json.dumps(fields, default=str)}
            prompts[row_id] = Prompt(f"{self.name}/{row_id}", messages[-1]["content"], answer, metadata)
        return list(prompts.values())

    @property
    def size(self) -> int:
        """The number of distinct training prompts."""
        return len(self._training)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`."""
        return self._training.take(start, count)

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` prompts of its evaluation data."""
        check_range(0, count)
        return self._evaluation[:count]
