"""A small OpenAI-compatible server in a thread, whose answers a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int | bytes
"""A text is what the judge says, a number an HTTP status, bytes the whole body."""


class JudgeServer:
    """What was asked, and how many questions were open at once."""

    def __init__(self, answer: Callable[[str, int], Answer], delay_s: float = 0.0) -> None:
        self.answer, self.delay_s = answer, delay_s
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.open = self.most_open = 0
        self.lock = threading.Lock()
        self.url = ""

    def reply(self, body: dict[str, Any], key: str | None) -> Answer:
        with self.lock:
            self.asked.append(body)
            self.keys.append(key)
            number = len(self.asked)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        time.sleep(self.delay_s)
        with self.lock:
            self.open -= 1
        return self.answer(body["messages"][-1]["content"], number)


@contextmanager
def judge_server(answer: Callable[[str, int], Answer], delay_s: float = 0.0) -> Iterator[JudgeServer]:
    state = JudgeServer(answer, delay_s)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = state.reply(body, self.headers.get("Authorization"))
            known = self.path == "/v1/chat/completions"
            status = said if isinstance(said, int) else 200 if known else 404
            content = said if isinstance(said, bytes) else b"busy" if isinstance(said, int) else _completion(said)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 429:
                self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
