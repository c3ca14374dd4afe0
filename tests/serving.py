"""A server that speaks as vLLM does, over real HTTP, with a real (small) policy behind it and faults on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies import POLICY, loaded, sampling_logp
from stalewise.rollout.token_sampling import draw, uniforms
from stalewise.types import SamplerSettings


@dataclass
class Behaviour:
    """What the server does; tests change it while it runs."""

    checkpoint: Path = POLICY
    fail: list[int] = field(default_factory=list)  # status codes of the next completions
    headers: dict[str, str] = field(default_factory=dict)  # of those failures
    hang_up: int = 0  # completions that are cut off in the middle of the answer
    delay_s: float = 0.0
    logprobs: bool = True
    token_ids: bool = True
    ids_as_tokens: bool = False
    echo: bool = True
    processed: bool = True  # log-probabilities are of the distribution that is sampled from
    reloads: bool = True  # knows /collective_rpc
    deaf: bool = False  # says that it reloaded, and did not
    cache_is_reset: bool = True
    models: tuple[str, ...] | None = ("policy",)
    change_prompt: bool = False
    end_tokens: bool = True
    not_json: bool = False
    swap_after: int = -1  # completions after which it has other weights, as if it had been restarted
    swap_to: Path = POLICY


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int = 0, **behaviour: Any) -> None:
        self.behaviour = Behaviour(**behaviour)
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []  # of completions that were sampled, not of probes
        self.paths: list[str] = []
        self.authorization: list[str | None] = []
        self.under_way = self.most_under_way = 0
        self.load(self.behaviour.checkpoint)
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def load(self, checkpoint: Path) -> None:
        self.model = loaded(checkpoint)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no trouble of ours."""

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt: list[int] = body["prompt"]
        settings = SamplerSettings(temperature=body["temperature"], top_p=body["top_p"], top_k=max(body["top_k"], 0))
        plain = SamplerSettings()
        uniform = torch.from_numpy(uniforms([body["seed"]], body["max_tokens"])[0])
        ids, values, top = list(prompt), [], []
        finish = "length"
        for step in range(body["max_tokens"]):
            logits = self.model(input_ids=torch.tensor([ids])).logits[:, -1]
            logp = sampling_logp(logits, settings)
            token = int(draw(logp, uniform[step : step + 1])[0])
            told = logp if self.behaviour.processed else sampling_logp(logits, plain)
            ids.append(token)
            values.append(float(told[0, token]))
            best = told[0].topk(body["logprobs"])
            named = {f"token_id:{place}": value for place, value in zip(*map(Tensor.tolist, best[::-1]), strict=True)}
            top.append({f"token_id:{token}": float(told[0, token]), **named})
            if token in body["stop_token_ids"]:
                finish = "stop"
                break
        new = ids[len(prompt) :]
        if finish == "stop" and not self.behaviour.end_tokens:
            new, values = new[:-1], values[:-1]
        logprobs: dict[str, Any] = {"token_logprobs": values, "top_logprobs": top}
        if body.get("echo"):
            own = self.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
            scores = [None, *own[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0].tolist()]
            logprobs["token_logprobs"] = [*(scores if self.behaviour.echo else [None] * len(prompt)), *values]
        choice: dict[str, Any] = {"text": "", "finish_reason": finish, "logprobs": logprobs}
        if self.behaviour.ids_as_tokens:
            logprobs["tokens"] = [f"token_id:{token}" for token in new]
        elif self.behaviour.token_ids:
            choice |= {"token_ids": new, "prompt_token_ids": [0, *prompt] if self.behaviour.change_prompt else prompt}
        if not self.behaviour.logprobs:
            choice["logprobs"] = None
        return {"choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # a FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        names = self.server.behaviour.models
        self.answer(200, {"data": [{"id": name} for name in names]} if names is not None else {"hello": "world"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behaviour = self.server.behaviour
        self.server.paths.append(self.path)
        self.server.authorization.append(self.headers["Authorization"])
        if self.path == "/v1/completions":
            self.completion(body)
        elif self.path == "/collective_rpc" and behaviour.reloads:
            path = Path(body["kwargs"]["weights_path"])
            if not path.is_dir():
                return self.answer(400, {"detail": f"{path} is not here"})
            if not behaviour.deaf:
                self.server.load(path)
            self.answer(200, {"results": [None]})
        elif self.path == "/reset_prefix_cache" and behaviour.reloads:
            self.answer(200, {"success": behaviour.cache_is_reset})
        elif self.path == "/update_weights_from_disk":
            self.server.load(Path(body["model_path"]))
            self.answer(200, {"success": not behaviour.deaf, "message": "cannot"})
        else:
            self.answer(404, {"detail": "Not Found"})

    def completion(self, body: dict[str, Any]) -> None:
        server: FakeServer = self.server
        behaviour = server.behaviour
        sampled = body["max_tokens"] > 1
        if sampled:
            with server.lock:
                server.under_way += 1
                server.most_under_way = max(server.most_under_way, server.under_way)
                server.bodies.append(body)
                status = behaviour.fail.pop(0) if behaviour.fail else 0
                hang_up = behaviour.hang_up > 0 and not status
                behaviour.hang_up -= hang_up
                if behaviour.swap_after == 0:
                    server.load(behaviour.swap_to)
                behaviour.swap_after -= 1
            if not status:
                time.sleep(behaviour.delay_s)
            with server.lock:
                server.under_way -= 1
            if status:
                return self.answer(status, {"error": {"message": "scripted"}}, behaviour.headers)
            if hang_up:
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices"')
                self.close_connection = True
                return None
        with server.lock:
            answer = server.complete(body)
        return self.answer(200, answer)

    def answer(self, status: int, record: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        content = b"<html>" if self.server.behaviour.not_json else json.dumps(record).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(**behaviour: Any) -> Iterator[FakeServer]:
    server = FakeServer(**behaviour)
    try:
        yield server
    finally:
        server.stop()
