"""The ranks of one launch: the launcher's environment, messages between ranks, and sums merged over all ranks.

The first rank leads: it runs the orchestrator as a single process would and sends orders to the others. So one process
decides and writes files. Messages use a process group of their own without a timeout, since the first rank may evaluate
for hours between two orders. A process that ends closes its connections, so a waiting rank notices at once; a busy rank
can let a thread wait. Imports torch only when it is used.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors.numpy import load, save

from stalewise.errors import ConfigError, RankError, StalewiseError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from stalewise.objectives.batch_statistics import Mergeable

MergeableT = TypeVar("MergeableT", bound="Mergeable")

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HEADER = "message"  # name of the array that holds a message's JSON
PATIENCE = timedelta(days=365)
STOP_LIMIT_S = 5.0  # to tell the other ranks to stop; a rank that is stuck elsewhere notices later


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process, and how many processes were launched."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1  # ranks on this machine

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes files."""
        return self.rank == 0


def launched() -> Launch:
    """The rank that torchrun or `accelerate launch` set in the environment; without them, a single process."""
    variables = {name: os.environ.get(name) for name in VARIABLES}
    try:
        if int(variables["WORLD_SIZE"] or 1) == 1:
            return Launch()
        missing = [name for name in VARIABLES if variables[name] is None and not name.startswith("LOCAL")]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {variables['WORLD_SIZE']} but {missing[0]} is not set: start several processes with "
                "torchrun or `accelerate launch`, or unset WORLD_SIZE"
            )
        rank, world = int(variables["RANK"] or 0), int(variables["WORLD_SIZE"] or 1)
        return Launch(rank, world, int(variables["LOCAL_RANK"] or rank), int(variables["LOCAL_WORLD_SIZE"] or world))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        numbers = ", ".join(f"{name}={value}" for name, value in variables.items() if value is not None)
        raise ConfigError(f"the environment names no ranks ({numbers}): unset these, or start with torchrun") from None


def child_environment() -> dict[str, str]:
    """The environment for a child process that is not a rank."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


@dataclass(frozen=True, slots=True)
class Message:
    """A message between ranks: its kind, JSON values, and arrays."""

    what: str
    record: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class Ranks:
    """All ranks of this launch, and how this rank talks to the others; there may be only one rank."""

    def __init__(self, launch: Launch, control: Any = None) -> None:
        self.rank, self.world, self.local_world = launch.rank, launch.world, launch.local_world
        self.control = control  # the process group of messages
        self.is_whole = True  # False once another rank is found to be gone
        self._listening: dict[int, Future[Message]] = {}
        self._stopping: list[threading.Thread] = []

    @property
    def is_first(self) -> bool:
        """Whether this is the leading rank."""
        return self.rank == 0

    @property
    def others(self) -> range:
        """All ranks except the first."""
        return range(1, self.world)

    def send(
        self, rank: int, what: str, record: Mapping[str, Any] | None = None, arrays: Mapping[str, Any] | None = None
    ) -> None:
        """Send a message to one rank; returns when it was received."""
        import torch.distributed as dist

        for tensor in _encode(what, record, arrays):
            dist.send(tensor, dst=rank, group=self.control)

    def send_to_all(self, what: str, **record: Any) -> None:
        """Send the same message to all other ranks."""
        for rank in self.others:
            self.send(rank, what, record)

    def receive(self, rank: int = 0) -> Message:
        """Wait for the next message of a rank; answers `stop` with `bye`."""
        listening = self._listening.pop(rank, None)
        message = self._receive_now(rank) if listening is None else listening.result()
        if message.what == "stop":
            with contextlib.suppress(RuntimeError):  # the first rank did not wait
                self.send(0, "bye")
        return message

    def listen(self, rank: int = 0) -> None:
        """Let a thread wait for the next message of a rank; `receive` returns it."""
        received = self._listening[rank] = Future[Message]()

        def receive() -> None:
            try:
                received.set_result(self._receive_now(rank))
            except BaseException as error:  # `receive` raises it
                received.set_exception(error)

        threading.Thread(target=receive, daemon=True).start()

    def has_heard(self, rank: int = 0) -> bool:
        """Whether a message arrived since `listen`, or the rank is gone: then `receive` returns at once."""
        return rank in self._listening and self._listening[rank].done()

    def stop_listening(self) -> bool:
        """Let listening threads receive the end of the run, for at most 5 s; return whether all did."""
        if any(thread.is_alive() for thread in self._stopping):
            return False  # `stop_others` has waited for them already
        return not wait(self._listening.values(), timeout=STOP_LIMIT_S).not_done

    def _receive_now(self, rank: int) -> Message:
        import torch
        import torch.distributed as dist

        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=rank, group=self.control)
        body = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(body, src=rank, group=self.control)
        arrays = load(body.numpy().tobytes())
        header = json.loads(arrays.pop(HEADER).tobytes())
        return Message(header["what"], header["record"], arrays)

    def stop_others(self, **record: Any) -> None:
        """Send `stop` to all other ranks, in parallel, and wait for their answers for at most 5 s."""
        until = time.monotonic() + STOP_LIMIT_S
        self._stopping = [threading.Thread(target=self._stop, args=(rank, record), daemon=True) for rank in self.others]
        for thread in self._stopping:
            thread.start()
        for thread in self._stopping:
            thread.join(max(until - time.monotonic(), 0.01))

    def _stop(self, rank: int, record: Mapping[str, Any]) -> None:
        """Send `stop` and wait for `bye`: a message may be lost if its sender ends before it was read."""
        with contextlib.suppress(RuntimeError):  # the rank is gone
            self.send(rank, "stop", record)
            while self.receive(rank).what != "bye":  # skip reports that were sent before
                pass


ALONE = Ranks(Launch())
_joined: list[Ranks] = []


def join(device: torch.device) -> Ranks:
    """Connect to the other ranks of this launch. Later calls return the same object."""
    import torch
    import torch.distributed as dist

    if _joined:
        return _joined[0]
    launch = launched()
    backend = "gloo"
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if device.index is not None:
            raise ConfigError(f'model.device is "{device}", but each of {launch.world} ranks has its own: say "auto"')
        if launch.local_rank >= count:
            raise ConfigError(f"rank {launch.rank} has no GPU of its own: launch at most {count} processes here")
        torch.cuda.set_device(launch.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        _connect(launch, backend)
        atexit.register(_disconnect)
    _joined.append(Ranks(launch, dist.new_group(backend="gloo", timeout=PATIENCE)))
    return _joined[0]


def _connect(launch: Launch, backend: str) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world))
        if launch.local_world == launch.world:
            # torchrun keeps its store over a restart, with the addresses of ended processes. On several machines each
            # counts its own restarts, so the count is no common prefix.
            store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"rank {launch.rank} of {launch.world} did not find the others at {where}: {' '.join(str(error).split())}; "
            "check that all were started and can reach each other"
        ) from error


def _disconnect() -> None:
    import torch.distributed as dist

    ended = all(ranks.stop_listening() for ranks in _joined)  # a thread that wakes up later would abort the interpreter
    if ended and all(ranks.is_whole for ranks in _joined):  # otherwise this might wait for a rank that is gone
        dist.destroy_process_group()


@contextlib.contextmanager
def explain_lost_ranks(ranks: Ranks) -> Iterator[None]:
    """Turn the error of a collective whose other process is gone into a RankError."""
    try:
        yield
    except StalewiseError:
        raise
    except RuntimeError as error:
        from torch.distributed import DistError

        of_a_collective = isinstance(error, DistError) or any(name in str(error) for name in ("gloo", "NCCL"))
        if ranks.world == 1 or not of_a_collective:
            raise
        ranks.is_whole = False
        raise RankError(
            f"rank {ranks.rank} lost its connection to another rank; committed work is kept: run the same command again"
        ) from error


def _encode(what: str, record: Mapping[str, Any] | None, arrays: Mapping[str, Any] | None) -> tuple[Tensor, Tensor]:
    """The length and the bytes of a safetensors file: no received data is ever executed."""
    import torch

    header = json.dumps({"what": what, "record": record or {}}).encode()
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    body = save({**contiguous, HEADER: np.frombuffer(header, dtype=np.uint8)})
    return torch.tensor([len(body)]), torch.frombuffer(bytearray(body), dtype=torch.uint8)


def merge_over_ranks(sums: MergeableT) -> MergeableT:
    """The merged sums of all ranks, the same on each; `sums` itself in a single process."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sums
    parts = [type(sums).unpack(packed) for packed in _gather(sums.pack())]
    return reduce(lambda merged, part: merged.merge(part), parts)


def _gather(mine: Tensor) -> list[Tensor]:
    """The flat tensors of all ranks, in the order of ranks; their lengths may differ."""
    import torch
    import torch.distributed as dist

    length = torch.tensor([len(mine)], device=mine.device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    padded = mine.new_zeros(max(int(n) for n in lengths))
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return [part[: int(n)] for part, n in zip(gathered, lengths, strict=True)]
