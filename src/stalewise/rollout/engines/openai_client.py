"""How a checkpoint's weights get into a running server."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stalewise.config.sections import ServerSection
from stalewise.errors import ConfigError, EngineError
from stalewise.rollout.engines.http import Endpoint, RequestRefused, retry_while_unavailable
from stalewise.rollout.engines.weight_check import Memory, Numbers, PolicyCheck
from stalewise.rollout.policy_files import ROUNDING, Answer, PolicyFiles
from stalewise.rollout.sampler import Request
from stalewise.types import SamplerSettings


def path_on_server(checkpoint: Path, paths: dict[str, str]) -> str:
    """What the checkpoint's path is there; the longest beginning that fits is replaced.

    >>> path_on_server(Path("/home/me/runs/a/checkpoints/v000004"), {"/home/me": "/mnt/me"})
    '/mnt/me/runs/a/checkpoints/v000004'
    """
    path = checkpoint.absolute()
    for here in sorted(paths, key=len, reverse=True):
        if path.is_relative_to(Path(here).absolute()):
            return str(Path(paths[here]) / path.relative_to(Path(here).absolute()))
    return str(path) if checkpoint.exists() else str(checkpoint)  # a name on a hub is no path


def reload_weights(endpoint: Endpoint, checkpoint: Path, options: ServerSection) -> None:
    """Give the server these weights in the way that the config names. Whether it has them is asked afterwards."""
    path = path_on_server(checkpoint, options.paths)
    if options.reload == "vllm":
        _vllm(endpoint, path)
    elif options.reload == "sglang":
        done = endpoint.post("/update_weights_from_disk", {"model_path": path, "flush_cache": True}) or {}
        if not done.get("success"):
            raise EngineError(f"{endpoint.url} did not load {path}: {done.get('message', 'no reason given')}")
    elif options.reload == "command":
        _command(options, path, endpoint.url)


def _vllm(endpoint: Endpoint, path: str) -> None:
    try:
        endpoint.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        done = endpoint.post("/reset_prefix_cache", {})
    except RequestRefused as error:
        if error.status != 404:
            raise EngineError(f"{error}; does {path} exist where the server runs? sampler.server.paths") from error
        raise EngineError(
            f"{endpoint.url} cannot be given weights: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment (in a "
            'network you trust), or say sampler.server.reload = "command"'
        ) from error
    if done is not None and not done.get("success", True):
        raise EngineError(f"{endpoint.url} did not reset its prefix cache: is someone else sampling there?")


def _command(options: ServerSection, path: str, url: str) -> None:
    words = [word.replace("{checkpoint}", path).replace("{url}", url) for word in options.command]
    # Into a file: what the command leaves running (a server, perhaps) would hold a pipe open for ever.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=options.timeout_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"sampler.server.command {words[0]}: {error}") from error
        said.seek(0)
        last = (said.read().strip() or "it said nothing").splitlines()[-1]
    if done.returncode:
        raise EngineError(f"sampler.server.command {words[0]} ended with {done.returncode}: {last}")


# One OpenAI-compatible server: what it is asked, what it must answer, and which policy it was found to have.

# Said although they are the usual defaults: a server takes its own from the model's generation config.
NEUTRAL = {"n": 1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# At this temperature, the highest that vLLM takes, differences of log-probabilities are half of what they are at 1.
HOT = SamplerSettings(temperature=2.0)
TOP = 5  # most probable tokens that every server tells


class Server:
    """One server: what it is asked, and what is known of it."""

    def __init__(self, url: str, options: ServerSection) -> None:
        key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        if options.api_key_env and not key:
            raise ConfigError(f"sampler.server.api_key_env names {options.api_key_env}, which is not set")
        self.options = options
        self.endpoint = Endpoint(url, timeout_s=options.timeout_s, retries=options.retries, api_key=key)
        self.patience_s = (options.retries + 1) * options.timeout_s  # before it is known to take too long
        self.memory = Memory()
        self.has = ""  # weights that it was found to have
        self.met = False  # it has been there in this sitting
        self.away_until = 0.0  # by the monotonic clock: until then it is left out; 0: it is there
        self._model = ""
        self.checked: set[SamplerSettings] = set()  # whose log-probabilities are known to be of what is sampled

    def serve(self, policy: PolicyFiles, check: PolicyCheck) -> None:
        """Make it sample from this policy and see that it does; EngineError where it does not, Gone where it is not."""
        if self.has == policy.weights and not self.lost(policy, check):
            return
        self.has, self.checked = "", set()
        if self.options.reload == "command":
            reload_weights(self.endpoint, policy.checkpoint, self.options)
            self.met = True  # the command may well be what starts it
            retry_while_unavailable(self.contact, self.options.wait_s)
        else:
            self.contact()
            reload_weights(self.endpoint, policy.checkpoint, self.options)
        token_ids = check.token_ids(policy)
        if problem := check.problem(policy, self.numbers(token_ids, policy), self.memory):
            raise EngineError(
                f"{self.endpoint.url} does not have the policy of {policy.checkpoint}: its log-probabilities of a "
                f"probe {problem}; {_REMEDY[self.options.reload]}"
            )
        self.memory.repeat(policy, self.numbers(token_ids, policy), check.precision)
        self.has = policy.weights

    def is_ready(self, policy: PolicyFiles, settings: SamplerSettings) -> bool:
        """Whether nothing is left to be found out before it samples."""
        return self.has == policy.weights and settings in self.checked

    def lost(self, policy: PolicyFiles, check: PolicyCheck) -> bool:
        """Whether it no longer has the policy that it was found to have: restarted, or given other weights."""
        return self.memory.changed(policy, self.numbers(check.token_ids(policy), policy))

    def contact(self) -> None:
        """See that it is there, and find out what it calls its model."""
        listed = self.endpoint.get("/v1/models")
        self.met = True
        try:
            names = [str(model["id"]) for model in listed["data"]]
        except (KeyError, TypeError):
            raise EngineError(
                f"{self.endpoint.url}/v1/models lists no models: is this an OpenAI-compatible server?"
            ) from None
        self._model = self.options.model or (names[0] if len(names) == 1 else "")
        if self._model not in names:
            raise EngineError(
                f"{self.endpoint.url} has the models {', '.join(names)}: name one in sampler.server.model"
            )

    # ------------------------------------------------------------ what it is asked

    def complete(
        self, request: Request, policy: PolicyFiles, settings: SamplerSettings, max_new_tokens: int, **extra: Any
    ) -> Mapping[str, Any]:
        """The choice that it answers one request with."""
        body = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "seed": request.seed,
            "max_tokens": max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            **NEUTRAL,
            "stop_token_ids": list(policy.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            # Keys and values of other weights must not be read from the prefix cache.
            "cache_salt": policy.weights,
            **extra,
        }
        record = self.endpoint.post("/v1/completions", body)
        try:
            return record["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise EngineError(
                f"{self.endpoint.url} answered a completion without choices: {str(record)[:80]}"
            ) from None

    def answer(self, request: Request, policy: PolicyFiles, settings: SamplerSettings, max_new_tokens: int) -> Answer:
        """One sampled response with its log-probabilities."""
        choice = self.complete(request, policy, settings, max_new_tokens)
        if choice.get("prompt_token_ids", list(request.prompt_ids)) != list(request.prompt_ids):
            raise EngineError(f"{self.endpoint.url} changed the tokens of a prompt: switch that off there")
        return Answer(self._token_ids(choice), self._logprobs(choice), str(choice.get("finish_reason")))

    def numbers(self, token_ids: list[int], policy: PolicyFiles) -> Numbers:
        """Its log-probabilities of the probe's tokens, and of the most probable token after them."""
        request = Request(token_ids, seed=0)
        echoed = self._logprobs(self.complete(request, policy, SamplerSettings(), 1, echo=True))[1 : len(token_ids)]
        if len(echoed) != len(token_ids) - 1 or not all(isinstance(value, int | float) for value in echoed):
            raise EngineError(
                f"{self.endpoint.url} gives no log-probabilities of a prompt (echo with logprobs), so nothing shows "
                "which weights it has: serve with vLLM or SGLang"
            )
        # A second time without the echo: only so is the prefix cache read.
        return np.array([*echoed, max(self._top(request, policy, SamplerSettings()))], dtype=np.float64)

    def _logprobs(self, choice: Mapping[str, Any]) -> list[float]:
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        if not values:
            raise EngineError(
                f"{self.endpoint.url} answers without log-probabilities, and learning needs them: use vLLM or SGLang"
            )
        return values

    def _token_ids(self, choice: Mapping[str, Any]) -> list[int]:
        if choice.get("token_ids"):
            return choice["token_ids"]
        tokens = (choice.get("logprobs") or {}).get("tokens") or []
        if tokens and all(str(token).startswith("token_id:") for token in tokens):
            return [int(token.removeprefix("token_id:")) for token in tokens]
        raise EngineError(
            f"{self.endpoint.url} answers without token ids, and text cannot be turned back into the sampled tokens: "
            "it must know return_token_ids, as vLLM and SGLang do"
        )

    def check_distribution(self, policy: PolicyFiles, settings: SamplerSettings, token_ids: list[int]) -> None:
        """See that log-probabilities are under the distribution that is sampled from, in what these settings use.

        Known for every policy: a temperature of 2 halves differences, and a token that is alone has probability 1.
        """
        if settings in self.checked:
            return
        wrong = ""
        if settings.temperature != 1:
            plain, hot = (self._spread(policy, trial, token_ids) for trial in (SamplerSettings(), HOT))
            wrong = "" if abs(hot - plain / 2) <= 0.05 * plain else "temperature"
        for name, trial in (("top_k", SamplerSettings(top_k=1)), ("top_p", SamplerSettings(top_p=1e-6))):
            if getattr(settings, name) != getattr(SamplerSettings(), name):
                alone = self.answer(Request(token_ids, seed=0), policy, trial, 1).logp[0]
                wrong = wrong if abs(alone) < ROUNDING else name
        if wrong:
            raise EngineError(
                f"{self.endpoint.url} leaves sampler.{wrong} out of its log-probabilities: start vLLM with "
                f"--logprobs-mode processed_logprobs, or do not set {wrong}"
            )
        self.checked.add(settings)

    def _spread(self, policy: PolicyFiles, settings: SamplerSettings, token_ids: list[int]) -> float:
        """How far apart the log-probabilities of the most probable tokens are."""
        best = sorted(self._top(Request(token_ids, seed=0), policy, settings), reverse=True)[:TOP]
        return best[0] - best[-1]

    def _top(self, request: Request, policy: PolicyFiles, settings: SamplerSettings) -> list[float]:
        """Log-probabilities of the most probable next tokens."""
        choice = self.complete(request, policy, settings, 1, logprobs=TOP)
        top = (choice.get("logprobs") or {}).get("top_logprobs")
        if not top or not top[0]:
            raise EngineError(f"{self.endpoint.url} gives no top_logprobs: serve with vLLM or SGLang")
        return list(top[0].values())


_REMEDY = {
    "vllm": "its reload_weights did not do it: restart it with that checkpoint, or use a command",
    "sglang": "its update_weights_from_disk did not do it: restart it with that checkpoint, or use a command",
    "command": "the command of sampler.server.command did not do it",
    "none": "give it that checkpoint, then run the same command again; or set sampler.server.reload",
}
