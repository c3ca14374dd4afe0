"""A read-only server for this machine only: the report of a run and the rollout browser.

The address contains a random token, and the Host header has to name this machine, against DNS rebinding.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from stalewise.config.run_directory import RESOLVED, read_resolved
from stalewise.errors import ConfigError, StalewiseError
from stalewise.reporting.browser.group import GoldAnswers, TokenDecoder, describe_group, describe_tokens
from stalewise.reporting.browser.index import IndexCache, RolloutIndex
from stalewise.reporting.browser.query import QueryResult, RolloutFilters, parse_filters
from stalewise.reporting.read import read_runs
from stalewise.reporting.render import render
from stalewise.reporting.status import StatusLine
from stalewise.store import batch_directories

HOST = "127.0.0.1"
OWN_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
# Pages may read from this server only.
STRICT = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The report is one file and loads nothing.
REPORT = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'self'"
)
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGES = {"": "report.html", "rollouts": "rollouts.html"}
REQUEST_S = 10.0  # for a whole request to arrive
SEND_S = 30.0  # for a client to read or send data
WATCHED = (RESOLVED, "metrics.jsonl", "eval.jsonl", "journal.jsonl", "rollbacks", "rollouts")
KEPT_QUERIES = 16


class RunServer(ThreadingHTTPServer):
    """Serves one run directory at `url`, which contains the secret token."""

    daemon_threads = True
    request_queue_size = 64  # a browser opens many connections at once

    def __init__(self, run: Path, port: int) -> None:
        self.run = run
        self.token = secrets.token_urlsafe(24)
        self.indexes = IndexCache(run)
        self._decoder = TokenDecoder(run)
        self.gold = GoldAnswers()
        self.status = StatusLine(run)
        self._queries: OrderedDict[tuple[str, RolloutFilters], Future[QueryResult]] = OrderedDict()
        self._query_lock = threading.Lock()
        self._report_lock = threading.Lock()
        self._report: tuple[str, str] = ("", "")
        self.unread: dict[socket.socket, float] = {}  # connections whose request is not yet read, and since when
        super().__init__((HOST, port), RequestHandler)

    def service_actions(self) -> None:
        """End connections that do not send their request; called twice a second."""
        for connection, since in list(self.unread.items()):
            if time.monotonic() - since > REQUEST_S:
                self.unread.pop(connection, None)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a bug; a client that disconnected is not a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The address of the report; the browser's is `rollouts` below it."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    @property
    def decoder(self) -> TokenDecoder:
        """Decodes with the run's tokenizer, which is looked for again until a checkpoint has one."""
        if not self._decoder.has_tokenizer:
            self._decoder = TokenDecoder(self.run)
        return self._decoder

    def state(self) -> str:
        """A text that changes with the records of the run and with every shard of rollouts."""
        stamps: list[str] = []
        for path in [*(self.run / name for name in WATCHED), *batch_directories(self.run / "rollouts")]:
            with contextlib.suppress(OSError):
                stamps.append(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}")
        return "|".join(stamps)

    def report(self) -> str:
        """The report page, rendered again when the run has changed."""
        with self._report_lock:
            state = self.state()
            if self._report[0] != state:
                self._report = (state, render(read_runs([self.run])))
            return self._report[1]

    def query(self, index: RolloutIndex, filters: RolloutFilters) -> QueryResult:
        """The groups that pass the filters. The last answers are cached, since a list is read page by page.

        A query that is already being answered is waited for; other queries do not wait.
        """
        key = (index.fingerprint, filters)
        with self._query_lock:
            is_first = key not in self._queries
            answer = self._queries.setdefault(key, Future())
            self._queries.move_to_end(key)
            while len(self._queries) > KEPT_QUERIES:
                self._queries.popitem(last=False)
        if is_first:
            try:
                answer.set_result(QueryResult(index, filters))
            except BaseException as error:
                answer.set_exception(error)
                with self._query_lock:
                    self._queries.pop(key, None)
        return answer.result()


def make_server(run: str | Path, port: int = 0) -> RunServer:
    """A server for a run directory, bound and not yet serving; port 0 takes any free port."""
    run = Path(run)
    read_resolved(run)  # refuses what is not a run directory
    try:
        return RunServer(run, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "needs more permissions"
        raise ConfigError(f"port {port} {why}: name another with --port, or --port 0 for any free port") from None
    except OverflowError:
        raise ConfigError(f"port {port} does not exist: --port takes 0 to 65535") from None


class RequestHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD requests."""

    server: RunServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "stalewise", ""

    def setup(self) -> None:
        """Begin a connection."""
        super().setup()
        self.connection.settimeout(SEND_S)  # of each read and write
        self.server.unread[self.connection] = time.monotonic()

    def finish(self) -> None:
        """End a connection."""
        self.server.unread.pop(self.connection, None)
        super().finish()

    def do_GET(self) -> None:
        """Check host and token, and answer."""
        self.server.unread.pop(self.connection, None)
        address = urlsplit(self.path)
        token, slash, rest = address.path.removeprefix("/").partition("/")
        if _host_name(self.headers.get("Host", "")) not in OWN_NAMES:
            self._send(
                HTTPStatus.FORBIDDEN, "text/plain", "this server answers only requests to 127.0.0.1 or localhost\n"
            )
        elif not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "use the whole address that `stalewise serve` printed\n")
        elif not slash:
            self._send(HTTPStatus.FOUND, "text/plain", "", {"Location": quote(f"/{token}/")})
        else:
            self._answer(rest, dict(parse_qsl(address.query, keep_blank_values=True)))

    do_HEAD = do_GET

    def _answer(self, path: str, parameters: dict[str, str]) -> None:
        try:
            if path in ROUTES:
                answer = json.dumps(ROUTES[path](self.server, parameters), allow_nan=False)
                self._send(HTTPStatus.OK, "application/json", answer)
            elif path == "report":
                self._send(HTTPStatus.OK, "text/html", self.server.report(), {"Content-Security-Policy": REPORT})
            elif (name := PAGES.get(path, path.removeprefix("static/"))) in STATIC:
                self._send(HTTPStatus.OK, TYPES[Path(name).suffix], STATIC[name].read_text(encoding="utf-8"))
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is nothing here\n")
        except StalewiseError as error:
            status = HTTPStatus.BAD_REQUEST if isinstance(error, ConfigError) else HTTPStatus.UNPROCESSABLE_ENTITY
            self._send(status, "application/json", json.dumps({"error": " ".join(str(error).split())}))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            pass  # the client has disconnected
        except Exception:
            traceback.print_exc(file=sys.stderr)
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "application/json", '{"error": "see the server\'s terminal"}')

    def _send(self, status: HTTPStatus, kind: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        standard = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": STRICT,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in {**standard, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address contains the token."""


def _host_name(header: str) -> str | None:
    with contextlib.suppress(ValueError):  # not an address
        return urlsplit(f"//{header}").hostname
    return None


def _overview(server: RunServer, parameters: dict[str, str]) -> dict[str, Any]:
    index = server.indexes.index()
    update = index.column("update")
    batches = [
        {"key": batch.key, "rollback": batch.rollback, "rollouts": int((index.column("place") == number).sum())}
        for number, batch in enumerate(index.batches)
    ]
    return {
        "run": server.run.resolve().name,
        "rollouts": index.table.num_rows,
        "groups": len(index.starts),
        "consumed": int((update >= 0).sum()),
        "last_update": int(update.max(initial=-1)),
        "batches": batches,
        "parts": index.parts,
        "problems": index.problems,
        "generating": index.generating,
        "has_tokenizer": server.decoder.has_tokenizer,
        "fingerprint": index.fingerprint,
    }


def _groups(server: RunServer, parameters: dict[str, str]) -> dict[str, Any]:
    offset, limit = (_integer(parameters, name, default) for name, default in (("offset", 0), ("limit", 100)))
    filters = parse_filters({key: value for key, value in parameters.items() if key not in ("offset", "limit")})
    index = server.indexes.index()
    result = server.query(index, filters)
    return {
        "groups": len(result.groups),
        "rollouts": result.rollouts,
        "fingerprint": index.fingerprint,
        "problems": result.problems,
        "offset": offset,
        "rows": result.page(offset, limit),
    }


def _group(server: RunServer, parameters: dict[str, str]) -> dict[str, Any]:
    group = _integer(parameters, "group")
    return describe_group(server.indexes.index(), parameters.get("batch", ""), group, server.decoder)


def _gold(server: RunServer, parameters: dict[str, str]) -> dict[str, Any]:
    return server.gold.of(server.indexes.index(), parameters.get("batch", ""), _integer(parameters, "group"))


def _tokens(server: RunServer, parameters: dict[str, str]) -> dict[str, Any]:
    rollout, start = _integer(parameters, "rollout"), _integer(parameters, "start", 0)
    return describe_tokens(server.indexes.index(), parameters.get("batch", ""), rollout, start, server.decoder)


def _integer(parameters: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = parameters.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ConfigError(f"{name} must be a non-negative integer")
    return int(text)


ROUTES: dict[str, Callable[[RunServer, dict[str, str]], dict[str, Any]]] = {
    "api/state": lambda server, _: {"state": server.state(), "status": server.status.text()},
    "api/overview": _overview,
    "api/groups": _groups,
    "api/group": _group,
    "api/gold": _gold,
    "api/tokens": _tokens,
}


STATIC = {path.name: path for path in files("stalewise.reporting.browser").joinpath("static").iterdir()}
