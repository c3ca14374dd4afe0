"""Ranks as processes of this machine, over gloo: started as torchrun starts them, but without a second interpreter's
imports for each.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

CONTEXT = get_context("forkserver")
# What a run on the embedded policy imports on its way, too: each rank would do it again. pyarrow asks pandas for types.
PRELOADED = ["torch.distributed.fsdp", "stalewise.api", "stalewise.cli.tables", "stalewise.tasks.arithmetic"]
PRELOADED += ["transformers.models.llama.modeling_llama", "pyarrow.compute", "pandas", "rich._emoji_codes"]
CONTEXT.set_forkserver_preload(PRELOADED)


def start(world: int, function: Callable[..., Any], *arguments: Any) -> list[ForkServerProcess]:
    """Call `function(rank, *arguments)` in so many processes that know of each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [CONTEXT.Process(target=_rank, args=(rank, world, port, function, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def finish(processes: Sequence[ForkServerProcess], timeout: float = 120.0) -> list[int | None]:
    """Exit codes; a process that does not end is killed, and has none."""
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def launch(
    world: int,
    directory: Path,
    *words: object,
    each: Sequence[Sequence[str]] = (),
    places: Sequence[Path] = (),
    limits: Mapping[str, float] = MappingProxyType({}),
) -> list[ForkServerProcess]:
    """`stalewise …` on so many ranks; what they print goes to `rank0.txt`, … in the directory.

    `each` has further words for single ranks, `places` the directory that each is in, `limits` other values of limits
    in seconds, by module and name.
    """
    more = [*each, *[()] * (world - len(each))]
    return start(world, _command, directory, [[*map(str, words), *own] for own in more], places, dict(limits))


def printed(directory: Path, world: int) -> list[str]:
    """What each rank printed."""
    return [(directory / f"rank{rank}.txt").read_text() for rank in range(world)]


def _rank(rank: int, world: int, port: int, function: Callable[..., Any], *arguments: Any) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "RANK": str(rank)}
    os.environ.update(place | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)})
    import torch

    torch.set_num_threads(1)
    function(rank, *arguments)


def _command(
    rank: int, directory: Path, words: list[list[str]], places: Sequence[Path], limits: dict[str, float]
) -> None:
    for name, seconds in limits.items():
        module, _, limit = name.rpartition(".")
        assert hasattr(import_module(module), limit)
        setattr(import_module(module), limit, seconds)
    if places:
        os.chdir(places[rank])
    out = os.open(directory / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["stalewise", *words[rank]]
    from stalewise.cli import main

    main()
