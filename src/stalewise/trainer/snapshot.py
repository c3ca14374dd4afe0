"""The trainer's state in host memory: the content of a checkpoint, or all of it while a stage is generated (`Offload`).

A snapshot is taken between two updates, and a thread writes it while the run goes on. Writing must not hold Python's
lock for long, since a sampler runs beside it. safetensors did until release 0.8, so tensors are written here. The bytes
are those of `safetensors.torch.save_file`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stalewise.models.transfer import SMALL, HostBuffers, restore
from stalewise.store import atomic
from stalewise.store.atomic import joined_sha256, sha256_of_pieces
from stalewise.store.checkpoints import SpareFiles

POLICY = "model.safetensors"
PLENTY = 0.5  # share of the free host memory: larger buffers are freed while the tensors are on the device
AT_ONCE = 1 << 22  # bytes that are hashed and then written while they are in the processor's cache
THREADS = min(12, max(2, (os.cpu_count() or 1) - 2))  # some are left to the sampler
# Names in a file's header, in the order in which safetensors writes tensors: wide numbers first, aligned without gaps.
DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Tensors of a checkpoint by file, in host memory, and a function that writes its small files."""

    files: Mapping[str, Mapping[str, Tensor]]
    write_small_files: Callable[[Path], object]

    @property
    def policy(self) -> Mapping[str, Tensor]:
        """The weights of the policy."""
        return self.files[POLICY]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; one with two names counts once."""
        return sum({t.data_ptr(): t.nbytes for file in self.files.values() for t in file.values()}.values())

    def write(self, directory: Path, spare: SpareFiles | None = None) -> dict[str, str]:
        """Write all files, those of tensors over the spare ones. Returns the SHA-256 of each file of tensors."""
        self.write_small_files(directory)
        for name in self.files:
            (directory / name).parent.mkdir(exist_ok=True)
        if spare is not None:
            spare.move_to(directory, self.files)
        digests = write_files({directory / name: tensors for name, tensors in self.files.items()})
        return dict(zip(self.files, digests.values(), strict=True))


def write_files(files: Mapping[Path, Mapping[str, Tensor]]) -> dict[Path, str]:
    """Write tensors in host memory as safetensors files; returns the SHA-256 of each, as `sha256_of_pieces` has it.

    With one thread for each file, 2 GB took 2 s. So several threads write pieces of all files in turn, since the system
    lets one thread at a time write to a file. An existing file is overwritten.
    """
    with contextlib.ExitStack() as stack:
        opened = {
            path: stack.enter_context(open(path, "r+b" if path.exists() else "xb", buffering=0)) for path in files
        }
        # Threads end before the files are closed: the number of a closed file may be another file's.
        threads = stack.enter_context(ThreadPoolExecutor(THREADS))
        flushing = stack.enter_context(ThreadPoolExecutor(max(1, len(files))))
        stack.callback(threads.shutdown, cancel_futures=True)  # first: after an error the other pieces are not begun
        pieces = [_pieces_of(path, tensors) for path, tensors in files.items()]
        in_turn = [(path, piece) for turn in zip_longest(*pieces) for path, piece in filter(None, turn)]
        ends = {path: start + sum(map(len, views)) for path, (start, views) in in_turn}
        for path, end in ends.items():
            os.truncate(path, min(end, path.stat().st_size))  # the existing file may be longer
        writing = [(path, threads.submit(_write_piece, opened[path].fileno(), *piece)) for path, piece in in_turn]
        flushed: dict[Path, Future[Any]] = {path: flushing.submit(bool) for path in files}
        digests = {path: list[bytes]() for path in files}
        for path, piece in writing:
            digests[path].append(piece.result())
            if flushed[path].done():  # flushed while writing: to flush only in the end would take longer
                flushed[path].result()
                flushed[path] = flushing.submit(os.fdatasync, opened[path].fileno())
        for flush in flushed.values():
            flush.result()
        return {path: joined_sha256(made) if made else sha256_of_pieces(path) for path, made in digests.items()}


def _pieces_of(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Path, tuple[int, list[memoryview]]]]:
    """The pieces of a file; none if only safetensors can write it, which is then done here."""
    metadata = {"format": "pt"} if path.name == POLICY or path.parent.name == "adapter" else None
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        save_file(dict(tensors), path, metadata)
        return
    for piece in _pieces(_content(tensors, metadata)):
        yield path, piece


def _write_piece(file: int, start: int, views: Sequence[memoryview]) -> bytes:
    """Write a piece of a file, from its byte `start` on; returns its SHA-256."""
    digest = hashlib.sha256()
    for view in views:
        for first in range(0, len(view), AT_ONCE):
            rest = view[first : first + AT_ONCE]
            digest.update(rest)
            while rest:  # a write may take less than all of it
                written = os.pwrite(file, rest, start)
                rest, start = rest[written:], start + written
    return digest.digest()


def _pieces(content: Iterable[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """The content of a file, cut every `PIECE` bytes: the start of each piece, and its bytes."""
    start, piece, room = 0, list[memoryview](), atomic.PIECE
    for view in content:
        rest = view
        while rest:
            part, rest = rest[:room], rest[room:]
            piece.append(part)
            room -= len(part)
            if not room:
                yield start, piece
                start, piece, room = start + atomic.PIECE, [], atomic.PIECE
    if piece:
        yield start, piece


def _content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    """The bytes of a safetensors file: the header's length, the header, the tensors."""
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data


def stored_names(checkpoint: Path, weights: Collection[str]) -> frozenset[str]:
    """The names of the weights in a checkpoint's one file, if all are names in memory; otherwise none.

    transformers stores tied weights once, those of some architectures under other names, and large models in parts.
    """
    try:
        with safe_open(checkpoint / POLICY, framework="pt") as file:
            names = frozenset(file.keys())
    except (OSError, SafetensorError):
        return frozenset()
    return names if names.issubset(weights) else frozenset()


def save_model_config(model: Any, directory: Path) -> None:
    """Write the configs that `save_pretrained` writes beside the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


class Offload:
    """Moves the data of tensors between a device and the host.

    Unlike those of `models.transfer.StorageOffload`, the tensors can be read on the host meanwhile: a checkpoint may be
    written. Frozen tensors are copied once: their host memory is kept. Other host memory is kept while there is
    plenty, since the system takes longer to map and clear new memory than the copy takes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.away: list[Tensor] = []
        self._buffers, self._frozen = HostBuffers(), dict[Tensor, Tensor]()

    def copy_frozen(self, frozen: Iterable[Tensor]) -> list[Tensor]:
        """Copy tensors that never change, at the first call for each; returns those large enough to be offloaded."""
        standing = _large_enough(frozen)
        new = {str(place): one.detach() for place, one in enumerate(standing) if one not in self._frozen}
        copies = HostBuffers().copy("", new)
        self._frozen |= {standing[int(place)]: copy for place, copy in copies.items()}
        return standing

    def offload(self, tensors: Iterable[Tensor], frozen: Iterable[Tensor] = ()) -> None:
        """Move the data of these tensors to the host; the `frozen` ones never change."""
        moving, standing = _large_enough(tensors), self.copy_frozen(frozen)
        here = self._buffers.copy("", {str(place): one.detach() for place, one in enumerate(moving)})
        self.away += [*moving, *standing]
        for one, data in zip(self.away, [*here.values(), *map(self._frozen.__getitem__, standing)], strict=True):
            one.data = data

    def reload(self) -> None:
        """Move the data back to the device."""
        away, self.away = self.away, []
        there = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in away]
        restore(list(zip((one.detach() for one in away), there, strict=True)), self.device)
        for one, data in zip(away, there, strict=True):
            one.data = data
        if self._buffers.nbytes > PLENTY * psutil.virtual_memory().available:
            self._buffers = HostBuffers()


def _large_enough(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list(dict.fromkeys(one for one in tensors if one.nbytes > SMALL and one.is_contiguous()))
