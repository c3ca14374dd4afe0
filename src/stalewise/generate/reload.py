"""How a checkpoint's weights get into a running server."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from stalewise.errors import EngineError
from stalewise.generate.endpoint import Endpoint, Refused
from stalewise.sections import ServerSection


def path_on_server(checkpoint: Path, paths: dict[str, str]) -> str:
    """What the checkpoint's path is there; the longest beginning that fits is replaced.

    >>> path_on_server(Path("/home/me/runs/a/checkpoints/v000004"), {"/home/me": "/mnt/me"})
    '/mnt/me/runs/a/checkpoints/v000004'
    """
    path = checkpoint.absolute()
    for here in sorted(paths, key=len, reverse=True):
        if path.is_relative_to(Path(here).absolute()):
            return str(Path(paths[here]) / path.relative_to(Path(here).absolute()))
    return str(path) if checkpoint.exists() else str(checkpoint)  # a name on a hub is no path


def reload_weights(endpoint: Endpoint, checkpoint: Path, options: ServerSection) -> None:
    """Give the server these weights in the way that the config names. Whether it has them is asked afterwards."""
    path = path_on_server(checkpoint, options.paths)
    if options.reload == "vllm":
        _vllm(endpoint, path)
    elif options.reload == "sglang":
        done = endpoint.post("/update_weights_from_disk", {"model_path": path, "flush_cache": True}) or {}
        if not done.get("success"):
            raise EngineError(f"{endpoint.url} did not load {path}: {done.get('message', 'no reason given')}")
    elif options.reload == "command":
        _command(options, path, endpoint.url)


def _vllm(endpoint: Endpoint, path: str) -> None:
    try:
        endpoint.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        done = endpoint.post("/reset_prefix_cache", {})
    except Refused as error:
        if error.status != 404:
            raise EngineError(f"{error}; does {path} exist where the server runs? sampler.server.paths") from error
        raise EngineError(
            f"{endpoint.url} cannot be given weights: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment (in a "
            'network you trust), or say sampler.server.reload = "command"'
        ) from error
    if done is not None and not done.get("success", True):
        raise EngineError(f"{endpoint.url} did not reset its prefix cache: is someone else sampling there?")


def _command(options: ServerSection, path: str, url: str) -> None:
    words = [word.replace("{checkpoint}", path).replace("{url}", url) for word in options.command]
    # Into a file: what the command leaves running (a server, perhaps) would hold a pipe open for ever.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=options.timeout_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"sampler.server.command {words[0]}: {error}") from error
        said.seek(0)
        last = (said.read().strip() or "it said nothing").splitlines()[-1]
    if done.returncode:
        raise EngineError(f"sampler.server.command {words[0]} ended with {done.returncode}: {last}")
