"""The engine server: any OpenAI-compatible server that returns token ids and log-probabilities (vLLM, SGLang).

A server is another program with its own life. So: it gets the checkpoint's weights before it samples (or the run
stops), it is asked before and after every call whether it still has them, and what it answered in between counts only
if it has. A server that goes away is waited for; a run that stops loses nothing that was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stalewise.errors import EngineError
from stalewise.generate.completions import Server
from stalewise.generate.crowd import share_out
from stalewise.generate.endpoint import Gone, patiently
from stalewise.generate.policy_files import (
    Answer,
    HasPolicy,
    PolicyFiles,
    check_lengths,
    make_responses,
    read_policy_files,
)
from stalewise.generate.probe import PolicyCheck
from stalewise.generate.sampler import Request, Response
from stalewise.sections import ServerSection
from stalewise.types import SamplerSettings

# A server that loses its policy again and again within one call has a trouble that waiting does not cure.
LOSSES = 4


class ServerSampler(HasPolicy):
    """Samples on one or more servers."""

    def __init__(
        self,
        settings: SamplerSettings,
        *,
        max_new_tokens: int,
        options: ServerSection,
        on_tokens: Callable[[int], object] = lambda count: None,
    ) -> None:
        """`on_tokens` is told the number of tokens of every response."""
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        # Some rounds of all places: at the end of each call places stay empty.
        self.appetite = 4 * options.concurrency * len(options.urls)
        self.on_tokens = on_tokens
        self._options = options
        self._servers = [Server(url, options) for url in options.urls]
        self._check = PolicyCheck(options.precision)

    def load(self, checkpoint: Path) -> None:
        """Give every server this checkpoint, and see that it has it."""
        policy = read_policy_files(checkpoint)
        patiently(lambda: self._present(policy, None), self._options.wait_s)
        self._policy = policy

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        check_lengths(prompt_ids, limit=self.policy.context, max_new_tokens=self.max_new_tokens)

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        self.check_lengths([request.prompt_ids for request in requests])
        answers: dict[int, Answer] = {}
        for _ in range(LOSSES + 1):
            answers |= self._round(requests, settings or self.settings, missing(answers, len(requests)))
            if len(answers) == len(requests):
                ordered = [answers[number] for number in range(len(requests))]
                return make_responses(ordered, self.policy, max_new_tokens=self.max_new_tokens, who="a server")
        raise EngineError(
            f"servers lost their policy {LOSSES + 1} times while {len(requests)} responses were sampled: look into "
            "their logs, and see that nobody else gives them weights; what is committed stays"
        )

    def _round(self, requests: Sequence[Request], settings: SamplerSettings, numbers: list[int]) -> dict[int, Answer]:
        """Ask for the numbered responses; those of servers that had the policy before and after."""
        policy = self.policy

        def asker(server: Server) -> Callable[[int], Answer]:
            return lambda number: server.answer(requests[number], policy, settings, self.max_new_tokens)

        present = patiently(lambda: self._present(policy, settings), self._options.wait_s)
        shares = share_out(
            numbers,
            [asker(server) for server in present],
            concurrency=self._options.concurrency,
            on_answer=lambda answer: self.on_tokens(len(answer.token_ids)),
            abort=self._abort,
        )
        valid: dict[int, Answer] = {}
        for server, share in zip(present, shares, strict=True):
            try:
                if not server.lost(policy, self._check):
                    valid |= share.answers
                    continue
            except Gone:
                pass
            server.has = ""  # the next round gives it the policy again, once it is there
        return valid

    def _present(self, policy: PolicyFiles, settings: SamplerSettings | None) -> list[Server]:
        """Servers that are there, with this policy; Gone where none is. The others are asked again the next time."""
        present: list[Server] = []
        absent: list[Gone] = []
        for server in self._servers:
            try:
                if settings is None or not server.is_ready(policy, settings):
                    server.serve(policy, self._check)
                if settings is not None:
                    server.check_distribution(policy, settings, self._check.token_ids(policy))
                present.append(server)
            except Gone as gone:
                if not server.met:  # more likely a wrong address than a server that is about to come back
                    raise EngineError(f"{gone}: start the server, or correct sampler.server.urls") from gone
                absent.append(gone)
        if not present:
            raise absent[0]
        return present

    def _abort(self) -> None:
        for server in self._servers:
            server.endpoint.abort()

    def close(self) -> None:
        """Break off what is under way; there is no connection to keep."""
        self._abort()


def missing(answers: Mapping[int, object], count: int) -> list[int]:
    """Numbers below `count` that have no answer yet."""
    return [number for number in range(count) if number not in answers]
