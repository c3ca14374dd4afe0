"""The trainer's state in host memory: a checkpoint's content, and all of it while a stage is generated (`Offload`).

A checkpoint's content is taken between two updates and written while the run goes on.

Nothing that writes it holds Python's lock for long, so that a thread can do it beside a sampler: safetensors did until
release 0.8, so tensors are written here. The bytes are those of `safetensors.torch.save_file`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stalewise.models.transfer import SMALL, fetch, restore

POLICY = "model.safetensors"
FILE_PIECE = 2**24  # bytes
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
    """Tensors of a checkpoint by file, in host memory, and what writes the small files beside them."""

    files: Mapping[str, Mapping[str, Tensor]]
    write_small_files: Callable[[Path], object]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; one with two names counts once."""
        return sum({t.data_ptr(): t.nbytes for file in self.files.values() for t in file.values()}.values())

    def write(self, directory: Path) -> dict[str, str]:
        """Write all files; returns the SHA-256 of each file that holds tensors."""
        self.write_small_files(directory)
        with ThreadPoolExecutor(max(1, len(self.files))) as threads:  # a disk takes several files faster in parallel
            paths = [directory / name for name in self.files]
            for path in paths:
                path.parent.mkdir(exist_ok=True)
            return dict(zip(self.files, threads.map(write_tensors, paths, self.files.values()), strict=True))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors in host memory as a safetensors file; returns its SHA-256."""
    metadata = {"format": "pt"} if path.name == POLICY or path.parent.name == "adapter" else None
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        save_file(dict(tensors), path, metadata)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    # Three at once: writing, hashing what was written, and flushing it to the disk.
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(2) as threads:
        hashed, flushed = threads.submit(bool), threads.submit(bool)
        for piece in _pieces(tensors, metadata):
            rest = piece
            while rest:  # a write may take less than all of it
                rest = rest[file.write(rest) :]
            hashed.result()
            hashed = threads.submit(digest.update, piece)
            if flushed.done():
                flushed.result()
                flushed = threads.submit(os.fdatasync, file.fileno())
        hashed.result()
        flushed.result()
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
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
        data = tensors[name].contiguous().view(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), FILE_PIECE):
            yield data[start : start + FILE_PIECE].data


def stored_names(checkpoint: Path, weights: Collection[str]) -> frozenset[str]:
    """The weights that a checkpoint has in one file under the names they have in memory; empty where it has not.

    transformers stores tied weights once, those of some architectures under other names, and large models in parts.
    """
    try:
        with safe_open(checkpoint / POLICY, framework="pt") as file:
            names = frozenset(file.keys())
    except (OSError, SafetensorError):
        return frozenset()
    return names if names.issubset(weights) else frozenset()


def save_model_config(model: Any, directory: Path) -> None:
    """Write what `save_pretrained` writes beside the weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


class Offload:
    """Moves the data of tensors between a device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.away: list[Tensor] = []

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Move the data of these tensors to the host."""
        chosen = {id(one): one for one in tensors if one.nbytes > SMALL and one.is_contiguous()}
        self.away += chosen.values()
        here = [torch.empty(one.shape, dtype=one.dtype) for one in self.away]
        to_host(list(zip((one.detach() for one in self.away), here, strict=True)), self.device)
        for one, data in zip(self.away, here, strict=True):
            one.data = data

    def come_back(self) -> None:
        """Move it back to the device."""
        away, self.away = self.away, []
        there = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in away]
        restore(list(zip((one.detach() for one in away), there, strict=True)), self.device)
        for one, data in zip(away, there, strict=True):
            one.data = data


def to_host(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy the first tensor of each pair, on the device, to the second, on the host."""
    if device.type == "cuda":
        fetch(pairs, device)
        return
    for source, target in pairs:
        target.copy_(source)
