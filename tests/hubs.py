"""A hub of our own: as much of the Hugging Face hub as an upload needs, so that the real client can talk to it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


class Hub(ThreadingHTTPServer):
    """Keeps the files of repositories in memory; `refuses` is a status that it answers everything with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.refuses = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses:
            self._answer({"error": "who are you?"}, self.server.refuses)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            record = json.loads(body)
            name = f"{record.get('organization', 'me')}/{record['name']}"
            kind = f"{record.get('type', 'model')}s"
            self.server.created.append(record)
            self.server.repositories.setdefault(f"{kind}/{name}", {})
            self._answer({"url": f"{self.server.url}/{'' if kind == 'models' else kind + '/'}{name}"})
        elif self.path.startswith("/api/") and "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            self._answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]})
        elif self.path.startswith("/api/") and "/commit/" in self.path:
            repository = self.server.repositories["/".join(self.path.split("/")[2:5])]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repository[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                if line["key"] == "deletedFile":
                    del repository[line["value"]["path"]]
            self._answer({"commitUrl": f"{self.server.url}/x/y/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self._answer({"error": f"no {self.path}"}, 404)

    def do_GET(self) -> None:
        files = self.server.repositories.get("/".join(self.path.split("/")[2:5]), {})
        if "/tree/" in self.path:
            listed = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
            self._answer(listed)
        elif "/revision/" in self.path:
            siblings = [{"rfilename": name} for name in files]
            self._answer({"id": "x/y", "sha": "0" * 40, "siblings": siblings, "private": False, "tags": []})
        else:
            self._answer({"error": f"no {self.path}"}, 404)

    def _answer(self, record: Any, status: int = 200) -> None:
        data = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def hub_of_our_own() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


POLICY_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
EXPORT_FILES = ["README.md", "stalewise.json", "training_config.toml"]


def file_names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def card_of(directory: Path) -> tuple[Any, str]:
    card = ModelCard.load(directory / "README.md")
    return card.data, card.text
