"""The engine server: any OpenAI-compatible server that returns token ids and log-probabilities (vLLM, SGLang).

A server gets the checkpoint's weights before it samples. Its answers count only if probes before and after a call show
the right weights. Unavailable servers are left out, with a message, and asked again later; if none is left, we wait.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stalewise.config.sections import ServerSection
from stalewise.errors import ConfigError, EngineError
from stalewise.rollout.engines.http import Endpoint, RequestRefused, ServerSlow, ServerUnavailable, distribute
from stalewise.rollout.engines.http import retry_while_unavailable as retry
from stalewise.rollout.engines.weight_check import AnswerHistory, PolicyCheck, ProbeLogps
from stalewise.rollout.policy_files import ROUNDING, Answer, ExternalSampler, PolicyFiles, read_policy_files
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings

LOSSES = 4  # of its policy within one call, after which a server is considered broken
SLOW_FACTOR = 20.0  # a slow server is left out for this many times as long as it took to notice
AWAY_S = 30.0  # before an unavailable server is asked again while others work: asking costs its retries
# Explicit, since a server takes other defaults from the model's generation config.
NEUTRAL = {"n": 1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# At this temperature, the highest that vLLM takes, differences of log-probabilities are half of those at 1.
HOT = SamplerSettings(temperature=2.0)
TOP = 5  # most probable tokens that every server returns
_REMEDY = {
    "vllm": "its reload_weights did not do it: restart it with that checkpoint, or use a command",
    "sglang": "its update_weights_from_disk did not do it: restart it with that checkpoint, or use a command",
    "command": "the command of sampler.server.command did not do it",
    "none": "give it that checkpoint, then run the same command again; or set sampler.server.reload",
}


def path_on_server(checkpoint: Path, paths: dict[str, str]) -> str:
    """The checkpoint's path on the server; the longest matching prefix is replaced."""
    path = checkpoint.absolute()
    for here in sorted(paths, key=len, reverse=True):
        if path.is_relative_to(Path(here).absolute()):
            return str(Path(paths[here]) / path.relative_to(Path(here).absolute()))
    return str(path) if checkpoint.exists() else str(checkpoint)  # a name on a hub is not a path


def reload_weights(endpoint: Endpoint, checkpoint: Path, options: ServerSection) -> None:
    """Load weights into a running server in the way that the config names; whether it has them is checked later."""
    path = path_on_server(checkpoint, options.paths)
    if options.reload == "vllm":
        _reload_vllm(endpoint, path)
    elif options.reload == "sglang":
        done = endpoint.post("/update_weights_from_disk", {"model_path": path, "flush_cache": True}) or {}
        if not done.get("success"):
            raise EngineError(f"{endpoint.url} did not load {path}: {done.get('message', 'no reason given')}")
    elif options.reload == "command":
        _reload_by_command(options, path, endpoint.url)


def _reload_vllm(endpoint: Endpoint, path: str) -> None:
    try:
        endpoint.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        done = endpoint.post("/reset_prefix_cache", {})
    except RequestRefused as error:
        if error.status != 404:
            raise EngineError(f"{error}; does {path} exist where the server runs? sampler.server.paths") from error
        raise EngineError(
            f"{endpoint.url} does not accept weights: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment (in a "
            'network you trust), or set sampler.server.reload = "command"'
        ) from error
    if done is not None and not done.get("success", True):
        raise EngineError(f"{endpoint.url} did not reset its prefix cache: is someone else sampling there?")


def _reload_by_command(options: ServerSection, path: str, url: str) -> None:
    command = [word.replace("{checkpoint}", path).replace("{url}", url) for word in options.command]
    # Into a file: a process that the command leaves running (perhaps a server) would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        try:
            limit_s = options.timeout_s
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=limit_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"sampler.server.command {command[0]}: {error}") from error
        file.seek(0)
        last = (file.read().strip() or "no output").splitlines()[-1]
    if done.returncode:
        raise EngineError(f"sampler.server.command {command[0]} ended with {done.returncode}: {last}")


class OpenAIServer:
    """One OpenAI-compatible server, and what is known about it."""

    def __init__(self, url: str, options: ServerSection) -> None:
        key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        if options.api_key_env and not key:
            raise ConfigError(f"sampler.server.api_key_env names {options.api_key_env}, which is not set")
        self.options = options
        self.endpoint = Endpoint(url, timeout_s=options.timeout_s, retries=options.retries, api_key=key)
        self.url = self.endpoint.url
        self.patience_s = (options.retries + 1) * options.timeout_s  # the time it takes to notice that it is slow
        self.history = AnswerHistory()
        self.loaded = ""  # the weights that it was found to have
        self.has_answered = False
        self.away_until = 0.0  # on the monotonic clock: left out until then; 0: available
        self._model = ""
        self.checked: set[SamplerSettings] = set()  # with log-probabilities of the sampling distribution

    def load(self, policy: PolicyFiles, check: PolicyCheck) -> None:
        """Load this policy and check it; EngineError if it is not there, ServerUnavailable without a server."""
        if self.loaded == policy.weights and not self.has_lost(policy, check):
            return
        self.loaded, self.checked = "", set()
        if self.options.reload != "command":
            self.contact()
        reload_weights(self.endpoint, policy.checkpoint, self.options)
        if self.options.reload == "command":
            self.has_answered = True  # the command may have started it
            retry(self.contact, self.options.wait_s)
        token_ids = check.token_ids(policy)
        if problem := check.mismatch(policy, self.probe_logps(token_ids, policy), self.history):
            raise EngineError(
                f"{self.url} does not have the policy of {policy.checkpoint}: its log-probabilities of a "
                f"probe {problem}; {_REMEDY[self.options.reload]}"
            )
        self.history.repeat(policy, self.probe_logps(token_ids, policy), check.precision)
        self.loaded = policy.weights

    def has_lost(self, policy: PolicyFiles, check: PolicyCheck) -> bool:
        """Whether it no longer has the policy that it was found to have: restarted, or given other weights."""
        return self.history.has_changed(policy, self.probe_logps(check.token_ids(policy), policy))

    def contact(self) -> None:
        """Find out the name of the server's model."""
        listed = self.endpoint.get("/v1/models")
        self.has_answered = True
        try:
            names = [str(model["id"]) for model in listed["data"]]
        except (KeyError, TypeError):
            text = f"{self.url}/v1/models lists no models: is this an OpenAI-compatible server?"
            raise EngineError(text) from None
        self._model = self.options.model or (names[0] if len(names) == 1 else "")
        if self._model not in names:
            raise EngineError(f"{self.url} has the models {', '.join(names)}: name one in sampler.server.model")

    def complete(
        self, request: Request, policy: PolicyFiles, settings: SamplerSettings, max_new_tokens: int, **extra: Any
    ) -> Mapping[str, Any]:
        """The choice that it answers one request with."""
        body = {
            "model": self._model,
            "prompt": request.context,
            "seed": request.turn_seed,
            "max_tokens": max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            **NEUTRAL,
            "stop_token_ids": list(policy.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": policy.weights,  # keys and values of other weights must not come from the prefix cache
            **extra,
        }
        record = self.endpoint.post("/v1/completions", body)
        try:
            return record["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"{self.url} answered a completion without choices: {str(record)[:80]}") from None

    def answer(self, request: Request, policy: PolicyFiles, settings: SamplerSettings, max_new_tokens: int) -> Answer:
        """One sampled response with its log-probabilities."""
        choice = self.complete(request, policy, settings, max_new_tokens - len(request.begun))
        if choice.get("prompt_token_ids", request.context) != request.context:
            raise EngineError(f"{self.url} changed the tokens of a prompt: switch that off there")
        return Answer(self._token_ids(choice), self._logprobs(choice), str(choice.get("finish_reason")))

    def probe_logps(self, token_ids: list[int], policy: PolicyFiles) -> ProbeLogps:
        """Its log-probabilities of the probe's tokens, and of the most probable token after them."""
        request = Request(token_ids, seed=0)
        echoed = self._logprobs(self.complete(request, policy, SamplerSettings(), 1, echo=True))[1 : len(token_ids)]
        if len(echoed) != len(token_ids) - 1 or not all(isinstance(value, int | float) for value in echoed):
            raise EngineError(
                f"{self.url} gives no log-probabilities of a prompt (echo with logprobs), so its weights "
                "cannot be checked: serve with vLLM or SGLang"
            )
        # A second request without echo: only it uses the prefix cache.
        return np.array([*echoed, max(self._top(request, policy, SamplerSettings()))], dtype=np.float64)

    def _logprobs(self, choice: Mapping[str, Any]) -> list[float]:
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        if not values:
            raise EngineError(f"{self.url} answers without log-probabilities, which training needs: use vLLM or SGLang")
        return values

    def _token_ids(self, choice: Mapping[str, Any]) -> list[int]:
        if choice.get("token_ids"):
            return choice["token_ids"]
        tokens = (choice.get("logprobs") or {}).get("tokens") or []
        if tokens and all(str(token).startswith("token_id:") for token in tokens):
            return [int(token.removeprefix("token_id:")) for token in tokens]
        raise EngineError(
            f"{self.url} answers without token ids, and text cannot be turned back into the sampled tokens: "
            "it must support return_token_ids, as vLLM and SGLang do"
        )

    def check_distribution(self, policy: PolicyFiles, settings: SamplerSettings, token_ids: list[int]) -> None:
        """Check that log-probabilities are of the sampling distribution, by facts that hold for every policy."""
        if settings in self.checked:
            return
        wrong = ""
        if settings.temperature != 1:  # a temperature of 2 halves differences
            plain, hot = (self._spread(policy, trial, token_ids) for trial in (SamplerSettings(), HOT))
            wrong = "" if abs(hot - plain / 2) <= 0.05 * plain else "temperature"
        for name, trial in (("top_k", SamplerSettings(top_k=1)), ("top_p", SamplerSettings(top_p=1e-6))):
            if getattr(settings, name) != getattr(SamplerSettings(), name):
                # A single remaining token has probability 1.
                single = self.answer(Request(token_ids, seed=0), policy, trial, 1).logp[0]
                wrong = wrong if abs(single) < ROUNDING else name
        if wrong:
            raise EngineError(
                f"{self.url} leaves sampler.{wrong} out of its log-probabilities: start vLLM with "
                f"--logprobs-mode processed_logprobs, or do not set {wrong}"
            )
        self.checked.add(settings)

    def _spread(self, policy: PolicyFiles, settings: SamplerSettings, token_ids: list[int]) -> float:
        """Range of the log-probabilities of the most probable tokens."""
        best = sorted(self._top(Request(token_ids, seed=0), policy, settings), reverse=True)[:TOP]
        return best[0] - best[-1]

    def _top(self, request: Request, policy: PolicyFiles, settings: SamplerSettings) -> list[float]:
        """Log-probabilities of the most probable next tokens."""
        choice = self.complete(request, policy, settings, 1, logprobs=TOP)
        top = (choice.get("logprobs") or {}).get("top_logprobs")
        if not top or not top[0]:
            raise EngineError(f"{self.url} gives no top_logprobs: serve with vLLM or SGLang")
        return list(top[0].values())


class ServerSampler(ExternalSampler):
    """Samples on one or more servers."""

    def __init__(
        self,
        settings: SamplerSettings,
        *,
        max_new_tokens: int,
        options: ServerSection,
        on_tokens: Callable[[int], object] = lambda count: None,
        log: Callable[[str], object] = lambda text: None,
    ) -> None:
        super().__init__(settings, max_new_tokens, on_tokens)
        self.log, self._options = log, options
        # Several times what is under way: at the end of each call servers run partly empty.
        self.preferred_batch_size = 4 * options.concurrency * len(options.urls)
        self._servers = [OpenAIServer(url, options) for url in options.urls]
        self._check = PolicyCheck(options.precision)

    def load(self, checkpoint: Path) -> None:
        """Load this checkpoint on every server, and check that it is there."""
        policy = read_policy_files(checkpoint)
        retry(lambda: self._available(policy, None), self._options.wait_s)
        self.policy = policy

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        self.check_lengths([request.prompt_ids for request in requests])
        answers: dict[int, Answer] = {}
        losses = 0
        while len(answers) < len(requests):
            missing = [number for number in range(len(requests)) if number not in answers]
            valid, lost = retry(
                lambda missing=missing: self._round(requests, settings or self.settings, missing), self._options.wait_s
            )
            answers |= valid
            losses += lost and not valid
            if losses > LOSSES:
                raise EngineError(
                    f"servers lost their policy {losses} times while {len(requests)} responses were sampled: check "
                    "their logs, and that nothing else loads weights there; committed shards are kept"
                )
        return self.make_responses([answers[number] for number in range(len(requests))], requests, "a server")

    def _round(
        self, requests: Sequence[Request], settings: SamplerSettings, numbers: list[int]
    ) -> tuple[dict[int, Answer], bool]:
        """The numbered responses of servers that had the policy before and after, and whether one had lost it."""
        policy, limit = self.policy, self.max_new_tokens
        available = self._available(policy, settings)
        results = distribute(
            numbers,
            [lambda number, ask=server.answer: ask(requests[number], policy, settings, limit) for server in available],
            concurrency=self._options.concurrency,
            on_answer=lambda answer: self.on_tokens(len(answer.token_ids)),
            abort=self.close,
        )
        valid: dict[int, Answer] = {}
        lost, errors = False, list[ServerUnavailable]()
        for server, result in zip(available, results, strict=True):
            try:
                if not server.has_lost(policy, self._check):
                    valid |= result.answers
                else:
                    lost, server.loaded = True, ""
            except ServerUnavailable as error:
                result.error, server.loaded = result.error or error, ""  # it gets the policy again when it is back
            if result.error is not None:
                self._leave_out(server, result.error)
                errors.append(result.error)
        if len(errors) == len(available) and not valid and not lost:
            raise errors[0]
        return valid, lost

    def _available(self, policy: PolicyFiles, settings: SamplerSettings | None) -> list[OpenAIServer]:
        """Servers with this policy; ServerUnavailable if there are none. The others are asked again later."""
        now = time.monotonic()
        resting = [server for server in self._servers if server.away_until > now]
        errors: list[Exception] = []
        for asked in ([server for server in self._servers if server not in resting], resting):
            available: list[OpenAIServer] = []
            for server in asked:
                try:
                    if server.loaded != policy.weights or settings not in server.checked:
                        server.load(policy, self._check)
                    if settings is not None:
                        server.check_distribution(policy, settings, self._check.token_ids(policy))
                except ServerUnavailable as error:
                    errors.append(error)
                    self._leave_out(server, error)
                    continue
                if server.away_until:
                    self.log(f"{server.url} is available again")
                server.away_until = 0.0
                available.append(server)
            if available:
                return available
        if not any(server.has_answered for server in self._servers):  # wrong addresses, rather than restarts
            raise EngineError(f"{errors[0]}: start the server, or correct sampler.server.urls") from errors[0]
        raise errors[0]

    def _leave_out(self, server: OpenAIServer, error: ServerUnavailable) -> None:
        # Noticing again that it is slow would delay the others for as long.
        away_s = max(AWAY_S, SLOW_FACTOR * server.patience_s) if isinstance(error, ServerSlow) else AWAY_S
        if len(self._servers) > 1 and not server.away_until:
            self.log(f"{error}: left out while others are available, and asked again after {away_s:g} s")
        server.away_until = time.monotonic() + away_s

    def close(self) -> None:
        """Abort all requests; there are no connections to keep."""
        for server in self._servers:
            server.endpoint.abort()
