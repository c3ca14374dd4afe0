"""The server: which requests it answers, and the command that starts it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from rollout_runs import (
    GROUP_SIZE,
    add_batch,
    expected,
    make_rollout,
)
from stalewise.errors import StoreError
from stalewise.reporting.browser.http_server import RunServer, make_server
from stalewise.reporting.browser.query import parse_filters
from stalewise.types import FinishReason
from tiny import refused


def get(server: RunServer, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def ask(server: RunServer, path: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
    status, _, body = get(server, f"/{server.token}/api/{path}?{urlencode(parameters)}")
    return status, json.loads(body)


def test_the_server_answers_who_knows_the_word(server: RunServer) -> None:
    word = server.token
    assert get(server, f"/{word}/rollouts")[0] == 200
    for path in ("/", "/rollouts", "/x/rollouts", f"/{word[:-1]}/rollouts", f"/{word}x/", f"/?token={word}", "/%00/"):
        assert get(server, path)[0] == 403, path
    assert urlsplit(server.url).path == f"/{word}/" and len(word) >= 32


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost:9000", 200), ("127.0.0.1", 200), ("[::1]:1", 200), ("[::1]", 200)),
        *(("evil.example:80", 403), ("127.0.0.1.evil", 403), ("", 403), ("[::1", 403), ("localhost@evil.example", 403)),
    ],
)
def test_the_server_answers_to_its_own_name_alone(server: RunServer, host: str, status: int) -> None:
    assert get(server, f"/{server.token}/rollouts", Host=host)[0] == status


def test_pages_may_ask_for_nothing_elsewhere(server: RunServer) -> None:
    for path in ("", "rollouts", "static/tokens.js", "api/overview"):
        status, headers, body = get(server, f"/{server.token}/{path}")
        assert status == 200 and headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert b"://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    assert "unsafe-inline" not in get(server, f"/{server.token}/rollouts")[1]["Content-Security-Policy"]


def test_the_server_is_read_only_and_keeps_to_its_files(server: RunServer) -> None:
    for path in ("static/../server.py", "static/%2e%2e/server.py", "../config.resolved.json", "static/", "nothing"):
        assert get(server, f"/{server.token}/{path}")[0] == 404, path
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", f"/{server.token}/api/overview", body=b"{}")
    assert connection.getresponse().status == 501


def test_questions_are_answered_or_refused_in_words(server: RunServer) -> None:
    assert ask(server, "overview")[1]["rollouts"] == 480
    status, answer = ask(server, "groups", truncated="true", limit=3)
    wanted = expected(lambda r: r.finish_reason is FinishReason.LENGTH)
    assert status == 200 and answer["rollouts"] == len(wanted) and len(answer["rows"]) == 3
    assert ask(server, "group", batch="g000000-v000000", group=2)[1]["prompt_id"] == "prompt/2"
    assert ask(server, "tokens", batch="g000000-v000000", rollout=2)[1]["ids"] == list(make_rollout(2).response_ids)
    for path, words, expected_status in (
        ("groups", {"ratio": "much"}, 400),
        ("groups", {"offset": "-1"}, 400),
        ("groups", {"part": "colour", "part_min": 1}, 400),
        ("group", {"batch": "g000000-v000000", "group": "9" * 30}, 400),
        ("group", {"batch": "../..", "group": 0}, 422),
        ("tokens", {"batch": "g000000-v000000", "rollout": 10**6}, 422),
    ):
        status, answer = ask(server, path, **words)
        assert status == expected_status and answer["error"], (path, answer)


def test_the_report_is_made_anew_when_the_run_goes_on(own: Path) -> None:
    with make_server(own) as server:
        first, state = server.report(), server.state()
        assert server.report() is first
        with open(own / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"update": 6, "generation_batch": 1, "reward": 1.0}) + "\n")
        assert server.state() != state and server.report() != first
        state = server.state()
        add_batch(own, 2, [make_rollout(i) for i in range(480, 484)])
        assert server.state() != state


def test_how_the_run_stands_is_said(server: RunServer) -> None:
    status = ask(server, "state")[1]["status"]
    assert status.startswith("stopped · next: ") and "update 6 of 8" in status


def test_a_slow_search_keeps_nobody_waiting(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search whose shard comes late: others are answered meanwhile, and who asks the same gets its answer."""
    from stalewise.reporting.browser import query

    asked, may_go_on = threading.Event(), threading.Event()
    plain = query.read_shard

    def slow(*arguments: Any) -> Any:
        asked.set()
        assert may_go_on.wait(30)
        return plain(*arguments)

    monkeypatch.setattr(query, "read_shard", slow)
    with make_server(own) as server, ThreadPoolExecutor(2) as pool:
        index = server.indexes.index()
        searches = [pool.submit(server.query, index, parse_filters({"text": "w7"})) for _ in range(2)]
        assert asked.wait(30)
        assert server.query(index, parse_filters({"group": "3"})).rollouts == GROUP_SIZE
        may_go_on.set()
        assert searches[0].result() is searches[1].result()


def test_a_search_ends_at_its_time_limit_and_says_so(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stalewise.reporting.browser import query

    monkeypatch.setattr(query, "SEARCH_S", -1.0)
    with make_server(own) as server:
        found = server.query(server.indexes.index(), parse_filters({"text": "w7"}))
    assert found.rollouts == 0 and "shards were not searched: choose a batch" in found.problems[0]


def test_300_half_open_requests_keep_nobody_out_and_are_ended(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stalewise.reporting.browser import http_server

    monkeypatch.setattr(http_server, "REQUEST_S", 1.0)
    with make_server(own) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        connections: list[socket.socket] = []
        for _ in range(300):
            connections.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=20))
            connections[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
            if len(connections) % server.request_queue_size == 0:
                time.sleep(0.05)  # where its queue is full, the kernel tries again after a second, and then after two
        with urllib.request.urlopen(f"{server.url}api/overview", timeout=60) as answer:
            assert answer.status == 200
        for connection in connections:
            assert connection.recv(1) == b""  # ended by the server
            connection.close()
        server.shutdown()
        thread.join()
    assert server.unread == {}


def test_a_client_that_does_not_read_its_answer_is_left(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stalewise.reporting.browser import http_server

    monkeypatch.setattr(http_server, "SEND_S", 0.5)
    monkeypatch.setattr(http_server.RunServer, "report", lambda self: "a" * 2**26)
    read = 0
    with make_server(own) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        others = set(threading.enumerate())
        path = urlsplit(f"{server.url}report").path
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            while not (answering := {one for one in threading.enumerate() if one.is_alive()} - others):
                time.sleep(0.01)  # one that is about to start is not alive yet
            answering.pop().join(20)
            with contextlib.suppress(OSError):
                while part := connection.recv(2**20):
                    read += len(part)
        server.shutdown()
        thread.join()
    assert 0 < read < 2**26


def test_the_browser_serves_without_torch(run: Path) -> None:
    code = (
        "import sys; from stalewise.reporting.browser import make_server\n"
        f"with make_server({str(run)!r}) as server: server.indexes.index(); server.report()\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_a_port_in_use_is_said_with_what_to_do(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refused("serve", run, "--port", port) == (
            f"port {port} is in use: name another with --port, or --port 0 for any free port"
        )
    assert "does not exist" in refused("serve", run, "--port", "70000")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "is not a run directory" in refused("serve", tmp_path)
    with pytest.raises(StoreError, match="is not a run directory"):
        make_server(tmp_path)


def test_serve_prints_an_address_that_works_and_ends_on_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "stalewise", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(address.netloc, timeout=30)
        connection.request("GET", quote(f"{address.path}rollouts"))
        assert connection.getresponse().status == 200
        os.kill(process.pid, 2)
        assert process.wait(timeout=30) == 0
