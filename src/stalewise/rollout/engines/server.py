"""The engine server: any OpenAI-compatible server that returns token ids and log-probabilities (vLLM, SGLang).

A server is another program with its own life. So: it gets the checkpoint's weights before it samples (or the run
stops), it is asked before and after every call whether it still has them, and what it answered in between counts only
if it has. Of several servers those that are there do the work; one that is away is left out, which is said, and asked
again later. Where none is left, they are waited for; a run that stops loses nothing that was committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stalewise.config.sections import ServerSection
from stalewise.errors import EngineError
from stalewise.rollout.engines.http import ServerSlow, ServerUnavailable, retry_while_unavailable, share_out
from stalewise.rollout.engines.openai_client import Server
from stalewise.rollout.engines.weight_check import PolicyCheck
from stalewise.rollout.policy_files import (
    Answer,
    HasPolicy,
    PolicyFiles,
    check_lengths,
    make_responses,
    read_policy_files,
)
from stalewise.rollout.sampler import Request, Response
from stalewise.types import SamplerSettings

# A server that loses its policy again and again within one call has a trouble that waiting does not cure.
LOSSES = 4
SLOW_FACTOR = 20.0  # times what it took to find out: that much longer is a server left out that takes too long
AWAY_S = 30.0  # before a server that was away is asked again, while others do the work: asking costs its retries


class ServerSampler(HasPolicy):
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
        """`on_tokens` is told the number of tokens of every response; `say`, which servers are left out."""
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        # Some rounds of all places: at the end of each call places stay empty.
        self.preferred_batch_size = 4 * options.concurrency * len(options.urls)
        self.on_tokens = on_tokens
        self.log = log
        self._options = options
        self._servers = [Server(url, options) for url in options.urls]
        self._check = PolicyCheck(options.precision)

    def load(self, checkpoint: Path) -> None:
        """Give every server this checkpoint, and see that it has it."""
        policy = read_policy_files(checkpoint)
        retry_while_unavailable(lambda: self._present(policy, None), self._options.wait_s)
        self._policy = policy

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        check_lengths(prompt_ids, limit=self.policy.context, max_new_tokens=self.max_new_tokens)

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        self.check_lengths([request.prompt_ids for request in requests])
        answers: dict[int, Answer] = {}
        losses = 0

        def one_round() -> tuple[dict[int, Answer], bool]:
            return self._round(requests, settings or self.settings, missing(answers, len(requests)))

        while len(answers) < len(requests):
            valid, lost = retry_while_unavailable(one_round, self._options.wait_s)
            answers |= valid
            losses += lost and not valid
            if losses > LOSSES:
                raise EngineError(
                    f"servers lost their policy {losses} times while {len(requests)} responses were sampled: look into "
                    "their logs, and see that nobody else gives them weights; what is committed stays"
                )
        ordered = [answers[number] for number in range(len(requests))]
        return make_responses(ordered, self.policy, max_new_tokens=self.max_new_tokens, who="a server")

    def _round(
        self, requests: Sequence[Request], settings: SamplerSettings, numbers: list[int]
    ) -> tuple[dict[int, Answer], bool]:
        """Ask for the numbered responses: those of servers that had the policy before and after; whether one had not.

        Gone where all that came of it is that no server does its work.
        """
        policy = self.policy

        def asker(server: Server) -> Callable[[int], Answer]:
            return lambda number: server.answer(requests[number], policy, settings, self.max_new_tokens)

        present = self._present(policy, settings)
        shares = share_out(
            numbers,
            [asker(server) for server in present],
            concurrency=self._options.concurrency,
            on_answer=lambda answer: self.on_tokens(len(answer.token_ids)),
            abort=self._abort,
        )
        valid: dict[int, Answer] = {}
        lost, all_gone = False, list[ServerUnavailable]()
        for server, share in zip(present, shares, strict=True):
            try:
                if not server.lost(policy, self._check):
                    valid |= share.answers
                else:
                    lost, server.has = True, ""
            except ServerUnavailable as gone:
                share.gone, server.has = share.gone or gone, ""  # it gets the policy again, once it is there
            if share.gone is not None:
                self._leave_out(server, share.gone)
                all_gone.append(share.gone)
        if len(all_gone) == len(present) and not valid and not lost:
            raise all_gone[0]
        return valid, lost

    def _present(self, policy: PolicyFiles, settings: SamplerSettings | None) -> list[Server]:
        """Servers that are there, with this policy; Gone where none is. The others are asked again later."""
        now = time.monotonic()
        resting = [server for server in self._servers if server.away_until > now]
        absent: list[ServerUnavailable] = []
        for asked in ([server for server in self._servers if server not in resting], resting):
            present = [server for server in asked if self._is_there(server, policy, settings, absent)]
            if present:
                return present
        if not any(server.met for server in self._servers):  # more likely wrong addresses than all of them restarting
            raise EngineError(f"{absent[0]}: start the server, or correct sampler.server.urls") from absent[0]
        raise absent[0]

    def _is_there(
        self, server: Server, policy: PolicyFiles, settings: SamplerSettings | None, absent: list[ServerUnavailable]
    ) -> bool:
        try:
            if settings is None or not server.is_ready(policy, settings):
                server.serve(policy, self._check)
            if settings is not None:
                server.check_distribution(policy, settings, self._check.token_ids(policy))
        except ServerUnavailable as gone:
            absent.append(gone)
            self._leave_out(server, gone)
            return False
        if server.away_until:
            self.log(f"{server.endpoint.url} is there again")
        server.away_until = 0.0
        return True

    def _leave_out(self, server: Server, gone: ServerUnavailable) -> None:
        # To find out again that it takes too long would hold the others up for as long.
        away_s = max(AWAY_S, SLOW_FACTOR * server.patience_s) if isinstance(gone, ServerSlow) else AWAY_S
        if len(self._servers) > 1 and not server.away_until:
            self.log(f"{gone}: left out while others are there, and asked again after {away_s:g} s")
        server.away_until = time.monotonic() + away_s

    def _abort(self) -> None:
        for server in self._servers:
            server.endpoint.abort()

    def close(self) -> None:
        """Break off what is under way; there is no connection to keep."""
        self._abort()


def missing(answers: Mapping[int, object], count: int) -> list[int]:
    """Numbers below `count` that have no answer yet."""
    return [number for number in range(count) if number not in answers]
