"""What torchrun and `accelerate launch` say of this process in its environment. Imports nothing heavy."""

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
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stalewise.errors import ConfigError, RankError, StalewiseError
from stalewise.objectives.batch_statistics import Mergeable

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place among those that were launched together."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1  # of them on this machine

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks, and writes files."""
        return self.rank == 0


def launched() -> Launch:
    """Alone, unless the environment says that there are several."""
    said = {name: os.environ.get(name) for name in VARIABLES}
    try:
        if int(said["WORLD_SIZE"] or 1) == 1:
            return Launch()
        missing = [name for name in VARIABLES if said[name] is None and not name.startswith("LOCAL")]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {said['WORLD_SIZE']} but {missing[0]} is not set: start several processes with "
                "torchrun or `accelerate launch`, or unset WORLD_SIZE"
            )
        rank, world = int(said["RANK"] or 0), int(said["WORLD_SIZE"] or 1)
        return Launch(rank, world, int(said["LOCAL_RANK"] or rank), int(said["LOCAL_WORLD_SIZE"] or world))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        numbers = ", ".join(f"{name}={value}" for name, value in said.items() if value is not None)
        raise ConfigError(f"the environment names no ranks ({numbers}): unset these, or start with torchrun") from None


def environment_of_a_child() -> dict[str, str]:
    """The environment for a process that this one starts, which is no rank."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


# The processes of one launch, and merging sums over them. The pure rooms know no collectives: this is where they meet.
# The first rank leads: it conducts the run as it would alone, and tells the others what to do. Those wait for its orders.
# So a decision is taken in one place, and a file is written by one process. Orders, and what comes with them, travel from
# process to process over a group of their own, which has all the time in the world: between two orders the first rank may
# evaluate for hours. A process that ends closes its connections, and whoever waits for it notices at once; whoever has
# something else to do meanwhile can have a thread listen.

MergeableT = TypeVar("MergeableT", bound=Mergeable)

HEADER = "message"  # the array that holds what is said in words
PATIENCE = timedelta(days=365)
LAST_WORDS_S = 5.0  # to tell the others that it is over; who is stuck elsewhere notices anyway


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank says to another: a word, what JSON can say, and arrays."""

    what: str
    record: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class Ranks:
    """The processes that were launched together, as one of them sees it; one process is a case of it."""

    def __init__(self, launch: Launch, control: Any = None) -> None:
        self.rank, self.world, self.local_world = launch.rank, launch.world, launch.local_world
        self.control = control  # the group that messages travel over
        self.is_whole = True  # no, once another has been found to be gone
        self._listening: dict[int, Future[Message]] = {}
        self._farewells: list[threading.Thread] = []

    @property
    def is_first(self) -> bool:
        """Whether this one leads."""
        return self.rank == 0

    @property
    def others(self) -> range:
        """The ranks that are led."""
        return range(1, self.world)

    def tell(
        self, rank: int, what: str, record: Mapping[str, Any] | None = None, arrays: Mapping[str, Any] | None = None
    ) -> None:
        """Say something to one rank; returns when it has been heard."""
        for tensor in _letter(what, record, arrays):
            dist.send(tensor, dst=rank, group=self.control)

    def tell_all(self, what: str, **record: Any) -> None:
        """Say the same to all that are led."""
        for rank in self.others:
            self.tell(rank, what, record)

    def hear(self, rank: int = 0) -> Message:
        """Wait for what a rank says to this one; that it is over is answered."""
        listening = self._listening.pop(rank, None)
        message = self._receive(rank) if listening is None else listening.result()
        if message.what == "stop":
            with contextlib.suppress(RuntimeError):  # the first one has not waited
                self.tell(0, "bye")
        return message

    def listen(self, rank: int = 0) -> None:
        """Have a thread wait for what a rank says next, so that this one can work meanwhile; `hear` gives it."""
        heard = self._listening[rank] = Future[Message]()

        def receive() -> None:
            try:
                heard.set_result(self._receive(rank))
            except BaseException as error:  # `hear` raises it
                heard.set_exception(error)

        threading.Thread(target=receive, daemon=True).start()

    def has_heard(self, rank: int = 0) -> bool:
        """Whether, after `listen`, something was said, or the other one is gone: `hear` then takes no time."""
        return rank in self._listening and self._listening[rank].done()

    def stop_listening(self) -> bool:
        """Before this process ends: give threads that listen the time to hear that all end; whether they have."""
        if any(thread.is_alive() for thread in self._farewells):
            return False  # they have had their time
        return not wait(self._listening.values(), timeout=LAST_WORDS_S).not_done

    def _receive(self, rank: int) -> Message:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=rank, group=self.control)
        body = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(body, src=rank, group=self.control)
        arrays = load(body.numpy().tobytes())
        header = json.loads(arrays.pop(HEADER).tobytes())
        return Message(header["what"], header["record"], arrays)

    def dismiss(self, **record: Any) -> None:
        """Tell all that are led that it is over, as far as they can hear it, and wait until they have.

        Side by side: who waits for something else must not keep the word from the others, and will notice.
        """
        until = time.monotonic() + LAST_WORDS_S
        self._farewells = [
            threading.Thread(target=self._see_off, args=(rank, record), daemon=True) for rank in self.others
        ]
        for thread in self._farewells:
            thread.start()
        for thread in self._farewells:
            thread.join(max(until - time.monotonic(), 0.01))

    def _see_off(self, rank: int, record: Mapping[str, Any]) -> None:
        """Leaving before a rank has read that it is over might take the word back."""
        with contextlib.suppress(RuntimeError):  # it is gone
            self.tell(rank, "stop", record)
            while self.hear(rank).what != "bye":  # a report that crossed our word
                pass


ALONE = Ranks(Launch())
_joined: list[Ranks] = []


def join(device: torch.device) -> Ranks:
    """Meet the other processes of this launch. Asked again, the same ones."""
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
        _meet(launch, backend)
        atexit.register(_leave)
    _joined.append(Ranks(launch, dist.new_group(backend="gloo", timeout=PATIENCE)))
    return _joined[0]


def _meet(launch: Launch, backend: str) -> None:
    """Find the others by the address that all were given."""
    try:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world))
        if launch.local_world == launch.world:
            # torchrun keeps its store over a restart, with the addresses of those who are no more. On several machines
            # each counts restarts for itself, so the number is no name that all would find each other by.
            store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"rank {launch.rank} of {launch.world} did not find the others at {where}: {' '.join(str(error).split())}; "
            "see that all were started, and that they can reach each other"
        ) from error


def _leave() -> None:
    heard = all(ranks.stop_listening() for ranks in _joined)  # one that wakes up later would abort the interpreter
    if heard and all(ranks.is_whole for ranks in _joined):  # else it might wait for one that is gone
        dist.destroy_process_group()


@contextlib.contextmanager
def noticing(ranks: Ranks) -> Iterator[None]:
    """Turn what a collective raises when another process is gone into a RankError."""
    try:
        yield
    except StalewiseError:
        raise
    except RuntimeError as error:
        of_a_collective = isinstance(error, dist.DistError) or any(name in str(error) for name in ("gloo", "NCCL"))
        if ranks.world == 1 or not of_a_collective:
            raise
        ranks.is_whole = False
        raise RankError(
            f"rank {ranks.rank} has lost touch with another rank, which ended or cannot be reached; what was committed "
            "is kept: run the same command again to go on"
        ) from error


def _letter(what: str, record: Mapping[str, Any] | None, arrays: Mapping[str, Any] | None) -> tuple[Tensor, Tensor]:
    """How long it is, and a safetensors file: nothing that comes over the wire is ever executed."""
    header = json.dumps({"what": what, "record": record or {}}).encode()
    whole = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    body = save({**whole, HEADER: np.frombuffer(header, dtype=np.uint8)})
    return torch.tensor([len(body)]), torch.frombuffer(bytearray(body), dtype=torch.uint8)


def merge_over_ranks(sums: MergeableT) -> MergeableT:
    """The sums of all ranks together, the same on each; `sums` itself where there is one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sums
    parts = [type(sums).unpack(packed) for packed in _gather(sums.pack())]
    return reduce(lambda merged, part: merged.merge(part), parts)


def _gather(mine: Tensor) -> list[Tensor]:
    """The flat tensors of all ranks, which may differ in length, in the order of ranks."""
    length = torch.tensor([len(mine)], device=mine.device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    longest = max(int(n) for n in lengths)
    padded = mine.new_zeros(longest)
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return [part[: int(n)] for part, n in zip(gathered, lengths, strict=True)]
