"""One HTTP server and the patience to have with it: time limits, retries that slow down, one message at the end.

From the standard library: a connection per request costs less than a token, and none is ever stale.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import queue
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from stalewise.errors import EngineError

# Answers that may be others a moment later: overloaded, restarting behind a proxy, an engine that hiccups.
PASSING = frozenset({408, 429, 500, 502, 503, 504})
AWAY = frozenset({429, 502, 503, 504})  # of these, what says nothing of the request: another server may take it
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
CONNECT_S = 10.0
POLL_S = 1.0

Result = TypeVar("Result")


class ServerUnavailable(Exception):
    """A server does not do its work, as often as it was tried: nobody answers, it has no time, or takes too long."""


class ServerSlow(ServerUnavailable):
    """It takes too long, which waiting would not change."""


class RequestRefused(EngineError):
    """The server answered that it will not do this; asking again would change nothing."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """Requests to one server. Threads may share it."""

    def __init__(self, url: str, *, timeout_s: float, retries: int, api_key: str = "") -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.retries = retries
        self._secure = parts.scheme == "https"
        self._host = parts.netloc
        self._root = urlsplit(self.url).path
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._broken_off = threading.Event()  # of the requests that begin now

    def get(self, path: str) -> Any:
        """The JSON that a GET answers with."""
        return self._patiently("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a POST answers with; None where the answer is empty."""
        return self._patiently("POST", path, json.dumps(body).encode())

    def abort(self) -> None:
        """Break off what is under way, in all threads; later requests are not concerned."""
        with self._lock:
            self._broken_off.set()
            self._broken_off = threading.Event()
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _patiently(self, method: str, path: str, body: bytes | None) -> Any:
        broken_off = self._broken_off
        pause = FIRST_PAUSE_S
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            asked_to_wait = 0.0
            try:
                status, headers, content = self._once(method, path, body)
            except TimeoutError:
                if last:
                    raise ServerSlow(
                        f"{self.url}{path} took longer than {self.timeout_s:g} s, {attempt + 1} times: raise "
                        "sampler.server.timeout_s, or lower concurrency or max_new_tokens"
                    ) from None
            except (OSError, http.client.HTTPException) as error:
                if last or broken_off.is_set():
                    raise ServerUnavailable(f"{self.url} does not answer ({_words(error)})") from error
            else:
                if status in AWAY and last:
                    raise ServerUnavailable(f"{self.url}{path} answers {status} ({_error_words(content)})")
                if status not in PASSING or last:
                    return self._content(path, status, content)
                with contextlib.suppress(ValueError):
                    asked_to_wait = float(headers.get("Retry-After") or 0)
            if broken_off.wait(min(max(pause, asked_to_wait), LONGEST_PAUSE_S)):
                raise ServerUnavailable(f"{self.url} was not asked again")
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, http.client.HTTPMessage, bytes]:
        """One attempt, within the time limit: TimeoutError after it, another OSError where nobody is there."""
        deadline = time.monotonic() + self.timeout_s
        connection = self._connection()
        try:
            with self._lock:
                self._open.add(connection)
            connection.request(method, self._root + path, body, self._headers)
            pieces: list[bytes] = []
            # Closed in any case: a response that is broken off holds on to the socket, and an error on to the response.
            with connection.getresponse() as response:
                while piece := response.read1(1 << 16):  # a slow trickle must not outlast the limit
                    pieces.append(piece)
                    if time.monotonic() > deadline:
                        raise TimeoutError
                if response.length:
                    raise http.client.IncompleteRead(b"".join(pieces), response.length)
                return response.status, response.headers, b"".join(pieces)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        limit = min(CONNECT_S, self.timeout_s)
        if self._secure:
            connection = http.client.HTTPSConnection(self._host, timeout=limit, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(self._host, timeout=limit)
        try:
            connection.connect()
        except TimeoutError as error:  # of connecting: nobody is there, which is not the same as a slow answer
            connection.close()
            raise ConnectionError(f"no connection within {limit:g} s") from error
        connection.sock.settimeout(self.timeout_s)
        return connection

    def _content(self, path: str, status: int, content: bytes) -> Any:
        if status >= 400:
            raise RequestRefused(
                f"{self.url}{path} answered {status}: {_error_words(content)}{_ADVICE.get(status, '')}", status
            )
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise EngineError(f"{self.url}{path} answered with something that is no JSON: {content[:80]!r}") from None


def retry_while_unavailable(action: Callable[[], Result], wait_s: float) -> Result:
    """Try an action until somebody is there for it, but no longer than the config says from when nobody was."""
    deadline = math.inf
    while True:
        try:
            return action()
        except ServerSlow as slow:
            raise EngineError(str(slow)) from slow
        except ServerUnavailable as gone:
            deadline = min(deadline, time.monotonic() + wait_s)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{gone}, though it was waited for {wait_s:g} s: see to it and run the same command; what is "
                    "committed stays"
                ) from gone
        time.sleep(min(POLL_S, wait_s))


_ADVICE = {401: "; name the variable with its key in sampler.server.api_key_env", 404: "; is the url right?"}


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _error_words(content: bytes) -> str:
    """What an error body says, in the shapes of OpenAI, FastAPI and plain text; one line."""
    try:
        record = json.loads(content)
    except ValueError:
        record = content.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(record, dict) and key in record:
            record = record[key]
    return " ".join(str(record).split())[:300] or "nothing more"


# Many requests, a few servers, so many at a time on each: whoever is free takes the next one.

Answer = TypeVar("Answer")


@dataclass(slots=True)
class ServerQuota(Generic[Answer]):
    """What one server did of the requests."""

    answers: dict[int, Answer] = field(default_factory=dict)  # by the request's number
    gone: ServerUnavailable | None = None  # it went away in the middle


def share_out(
    requests: Sequence[int],
    ask: Sequence[Callable[[int], Answer]],
    *,
    concurrency: int,
    on_answer: Callable[[Answer], object],
    abort: Callable[[], object],
) -> list[ServerQuota[Answer]]:
    """Let each server (`ask` has one function for each) answer requests until none is left, or until all are gone.

    At most `concurrency` requests are under way on a server; the rest wait here, not in the server. An error other than
    Gone ends everything: `abort` breaks off what is under way, and the error is raised here. So does Ctrl-C.
    """
    waiting = deque(requests)
    shares: list[ServerQuota[Answer]] = [ServerQuota() for _ in ask]
    done: queue.SimpleQueue[tuple[int, int, Answer] | BaseException | None] = queue.SimpleQueue()

    def work(server: int) -> None:
        try:
            while shares[server].gone is None:
                try:
                    request = waiting.popleft()
                except IndexError:
                    return  # nothing is left
                done.put((server, request, ask[server](request)))
        except ServerUnavailable as gone:
            shares[server].gone = gone
        except BaseException as error:  # told to the thread that waits
            done.put(error)
        finally:
            done.put(None)

    workers = min(concurrency, len(requests))
    for server in range(len(ask)):
        for _ in range(workers):
            # Daemons: a program that is told to end must not wait for a server.
            threading.Thread(target=work, args=(server,), daemon=True).start()
    try:
        running = workers * len(ask)
        while running:
            item = done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                server, request, answer = item
                shares[server].answers[request] = answer
                on_answer(answer)
    except BaseException:
        waiting.clear()
        abort()
        raise
    return shares
