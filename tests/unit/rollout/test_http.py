"""Requests to servers that are slow, refuse, break off or go away."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from typing import Any

import pytest

from serving import serving
from stalewise.rollout.engines import http as endpoint
from stalewise.rollout.engines.http import Endpoint, ServerSlow, ServerUnavailable, distribute


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "POLL_S", 0.02)


def test_pauses_grow_and_heed_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    with serving(fail=[500, 503, 429], headers={"Retry-After": "0.07"}) as fake:
        client = Endpoint(fake.url, timeout_s=5, retries=3)
        monkeypatch.setattr(client._aborted, "wait", lambda pause: pauses.append(pause))
        monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.05)
        body = {"prompt": [3], "max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 0}
        client.post("/v1/completions", {**body, "stop_token_ids": [1], "logprobs": 1})
    assert pauses == [0.07, 0.1, 0.2]


def test_an_answer_that_stops_in_the_middle_leaves_no_socket_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        begun = threading.Event()

        def begin_to_answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n{")
                begun.wait(10)

        threading.Thread(target=begin_to_answer, daemon=True).start()
        with pytest.raises(ServerSlow) as caught:
            Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.5, retries=0).get("/v1/models")
        begun.set()
    error: Any = caught.value.__context__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    (response,) = [frame.f_locals["response"] for frame in frames if "response" in frame.f_locals]
    assert response.isclosed()


def test_waiting_begins_when_nobody_is_there() -> None:
    tries: list[float] = []

    def slow_then_gone() -> int:
        tries.append(time.monotonic())
        if len(tries) == 1:
            time.sleep(0.4)
        if len(tries) < 4:
            raise ServerUnavailable("away")
        return 7

    assert endpoint.retry_while_unavailable(slow_then_gone, wait_s=0.3) == 7


def test_an_error_within_a_request_is_not_taken_for_the_end_of_them() -> None:
    def ask(number: int) -> int:
        return [1][number]

    with pytest.raises(IndexError):
        distribute([0, 1], [ask], concurrency=1, on_answer=lambda answer: None, abort=lambda: None)


def test_an_interrupt_reaches_the_one_who_waits() -> None:
    def ask(number: int) -> int:
        raise KeyboardInterrupt if number == 2 else ServerUnavailable("never")

    aborted: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        distribute([2], [ask], concurrency=1, on_answer=print, abort=lambda: aborted.append(True))
    assert aborted == [True]
