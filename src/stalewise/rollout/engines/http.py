"""Requests to HTTP servers with time limits and retries, and the distribution of many requests over several servers.

From the standard library: a new connection per request costs less than a token, and none is ever stale.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from stalewise.errors import EngineError

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})  # a retry may succeed: overloaded, restarting behind a proxy
UNAVAILABLE = frozenset({429, 502, 503, 504})  # of these: not the request's fault, another server may take it
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
CONNECT_S = 10.0
POLL_S = 1.0
_ADVICE = {401: "; name the variable with its key in sampler.server.api_key_env", 404: "; is the url right?"}

Result = TypeVar("Result")


class ServerUnavailable(Exception):
    """A server does not respond, is overloaded or too slow, after all retries."""


class ServerSlow(ServerUnavailable):
    """A server takes too long, which waiting would not change."""


class RequestRefused(EngineError):
    """The server refused a request; a retry would not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Endpoint:
    """Requests to one server. Threads may share it."""

    def __init__(self, url: str, *, timeout_s: float, retries: int, api_key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s, self.retries = timeout_s, retries
        self._is_secure, self._host = urlsplit(url).scheme == "https", urlsplit(url).netloc
        self._root = urlsplit(self.url).path
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._aborted = threading.Event()  # of the requests that begin now

    def get(self, path: str) -> Any:
        """The JSON response to a GET."""
        return self._request("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON response to a POST; None if it is empty."""
        return self._request("POST", path, json.dumps(body).encode())

    def abort(self) -> None:
        """Abort the requests of all threads; later requests are not affected."""
        with self._lock:
            self._aborted.set()
            self._aborted = threading.Event()
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _request(self, method: str, path: str, body: bytes | None) -> Any:
        """Retry with growing pauses."""
        aborted, pause = self._aborted, FIRST_PAUSE_S
        for attempt in range(self.retries + 1):
            last, retry_after = attempt == self.retries, 0.0
            try:
                status, headers, content = self._request_once(method, path, body)
            except TimeoutError:
                if last:
                    raise ServerSlow(
                        f"{self.url}{path} took longer than {self.timeout_s:g} s, {attempt + 1} times: raise "
                        "sampler.server.timeout_s, or lower concurrency or max_new_tokens"
                    ) from None
            except (OSError, http.client.HTTPException) as error:
                if last or aborted.is_set():
                    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    raise ServerUnavailable(f"{self.url} does not answer ({reason})") from error
            else:
                if status in UNAVAILABLE and last:
                    raise ServerUnavailable(f"{self.url}{path} answers {status} ({_error_text(content)})")
                if status not in TRANSIENT or last:
                    return self._parse(path, status, content)
                with contextlib.suppress(ValueError):
                    retry_after = float(headers.get("Retry-After") or 0)
            if aborted.wait(min(max(pause, retry_after), LONGEST_PAUSE_S)):
                raise ServerUnavailable(f"{self.url} was not asked again")
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _request_once(self, method: str, path: str, body: bytes | None) -> tuple[int, http.client.HTTPMessage, bytes]:
        """One attempt: TimeoutError after the time limit, another OSError without a connection."""
        deadline = time.monotonic() + self.timeout_s
        connection = self._connect()
        try:
            with self._lock:
                self._open.add(connection)
            connection.request(method, self._root + path, body, self._headers)
            pieces: list[bytes] = []
            # Closed in any case: an aborted response keeps the socket, and an error keeps the response.
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

    def _connect(self) -> http.client.HTTPConnection:
        limit = min(CONNECT_S, self.timeout_s)
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=limit)
        try:
            connection.connect()
        except TimeoutError as error:  # while connecting it means that no server is there, not that it is slow
            connection.close()
            raise ConnectionError(f"no connection within {limit:g} s") from error
        connection.sock.settimeout(self.timeout_s)
        return connection

    def _parse(self, path: str, status: int, content: bytes) -> Any:
        if status >= 400:
            text = f"{self.url}{path} answered {status}: {_error_text(content)}{_ADVICE.get(status, '')}"
            raise RequestRefused(text, status)
        try:
            return json.loads(content) if content else None
        except ValueError:
            raise EngineError(f"{self.url}{path} answered with something that is no JSON: {content[:80]!r}") from None


def _error_text(content: bytes) -> str:
    """The message of an error body of OpenAI, FastAPI or plain text, in one line."""
    try:
        record = json.loads(content)
    except ValueError:
        record = content.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(record, dict) and key in record:
            record = record[key]
    return " ".join(str(record).split())[:300] or "nothing more"


def retry_while_unavailable(action: Callable[[], Result], wait_s: float) -> Result:
    """Retry an action for at most `wait_s` after the servers disappear."""
    deadline = math.inf
    while True:
        try:
            return action()
        except ServerSlow as slow:
            raise EngineError(str(slow)) from slow
        except ServerUnavailable as unavailable:
            deadline = min(deadline, time.monotonic() + wait_s)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{unavailable}; it did not come back within {wait_s:g} s: check the server and run the same "
                    "command again; committed shards are kept"
                ) from unavailable
        time.sleep(min(POLL_S, wait_s))


@dataclass(slots=True)
class ServerAnswers(Generic[Result]):
    """What one server answered."""

    answers: dict[int, Result] = field(default_factory=dict)  # by number of the request
    error: ServerUnavailable | None = None  # it became unavailable


def distribute(
    requests: Sequence[int],
    ask: Sequence[Callable[[int], Result]],
    *,
    concurrency: int,
    on_answer: Callable[[Result], object],
    abort: Callable[[], object],
) -> list[ServerAnswers[Result]]:
    """Let servers (`ask` has one function for each) answer requests until none is left or no server is available.

    Each server has at most `concurrency` requests at a time; the rest wait here. Any error but ServerUnavailable, and
    Ctrl-C, calls `abort` for the requests under way and is raised here.
    """
    waiting = deque(requests)
    results: list[ServerAnswers[Result]] = [ServerAnswers() for _ in ask]
    done: queue.SimpleQueue[tuple[int, int, Result] | BaseException | None] = queue.SimpleQueue()

    def work(server: int) -> None:
        try:
            while results[server].error is None:
                try:
                    request = waiting.popleft()
                except IndexError:
                    return  # none is left
                done.put((server, request, ask[server](request)))
        except ServerUnavailable as error:
            results[server].error = error
        except BaseException as error:  # raised in the thread that waits
            done.put(error)
        finally:
            done.put(None)

    workers = min(concurrency, len(requests))
    for server in range(len(ask)):
        for _ in range(workers):
            # Daemons: a program that ends must not wait for a server.
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
                results[server].answers[request] = answer
                on_answer(answer)
    except BaseException:
        waiting.clear()
        abort()
        raise
    return results
