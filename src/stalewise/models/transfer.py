"""Copies between host and device.

Arrays for a GPU go together in one pinned buffer, since a copy of ten numbers costs the host as much as one of ten
thousand. Tensors for a file come back in pieces through a little pinned memory, by several threads: the driver's own
copy to ordinary memory uses one thread, which spends most of its time waiting for the system to map or lock the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, so that kernels can use wide loads
CAPTURE_LOCK = threading.Lock()  # held while a CUDA graph is captured: no other thread may call the driver
PIECE = 2**24  # bytes
PAGE = 4096  # bytes: the system maps memory in pages of this size or larger ones
THREADS = 8
AT_ONCE = 2**30  # bytes of tensors that are held on the device until they are copied
SMALL = 1 << 12  # bytes: smaller tensors do not leave the device, such as the count of an optimizer's steps


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a tensor, asynchronously on a GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, asynchronously from a GPU: the caller must wait for it."""
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return here.copy_(tensor, non_blocking=True)


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Copy arrays to the device asynchronously; returns a buffer of bytes, and a view of it for each array."""
    starts, end = dict[str, int](), 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    with CAPTURE_LOCK:
        here = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        whole = here.numpy()
        for name, array in arrays.items():
            whole[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = here.to(device, non_blocking=True)
        del here, whole  # freeing pinned memory calls the driver, too
    return buffer, {name: _view(buffer, starts[name], array) for name, array in arrays.items()}


def in_buffer(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The same view of another buffer."""
    start = tensor.storage_offset() * tensor.element_size()
    return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _view(buffer: Tensor, start: int, array: np.ndarray) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)


def host_copies(*files: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Host copies of the tensors of some files; tensors on the host are not copied, shared ones are copied once."""
    there: dict[tuple[object, ...], Tensor] = {}
    here: dict[tuple[object, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if key not in here and tensor.is_cuda:
            here[key], there[key] = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.detach().contiguous()
        elif key not in here:
            here[key] = tensor.cpu()
        return here[key]

    copies = [{name: copy(tensor) for name, tensor in file.items()} for file in files]
    for device in {tensor.device for tensor in there.values()}:
        fetch([(tensor, here[key]) for key, tensor in there.items() if tensor.device == device], device)
    return copies


class HostBuffers:
    """Host memory for the tensors of some files, reused from one copy to the next.

    The system must map and clear every new page, which takes longer than the copy from a device.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, shapes: Mapping[tuple[str, str], tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate memory for tensors, by file and name, and write to every page, so that the system maps it now.

        Several threads do this: on a virtual machine, one thread maps less than 1 GB a second.
        """
        missing = {key: shape for key, shape in shapes.items() if key not in self._buffers}
        new = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in missing.items()}
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(_map_pages, (piece for tensor in new.values() for piece in _pieces(tensor))))
        self._buffers |= new

    def copy(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors of a file; the copies are valid until the same file is copied again.

        `tensors` is iterated once, so that it may make them one by one.
        """
        copies: dict[str, Tensor] = {}
        waiting: list[tuple[Tensor, Tensor]] = []
        for name, tensor in tensors.items():
            buffer = self._buffers.get((file, name))
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                self._buffers[file, name] = buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies[name] = buffer
            if tensor.is_cuda:
                waiting.append((tensor.detach().contiguous(), buffer))
                if sum(pair[1].nbytes for pair in waiting) > AT_ONCE:
                    fetch(waiting, tensor.device)
                    waiting = []
            else:
                buffer.copy_(tensor.detach())
        if waiting:
            fetch(waiting, waiting[0][0].device)
        return copies


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """The bytes of a contiguous tensor, piece by piece."""
    return tensor.view(-1).view(torch.uint8).split(PIECE)


def _map_pages(piece: Tensor) -> None:
    piece.numpy()[::PAGE] = 0  # without Python's lock


class StorageOffload:
    """Moves tensor storages to host memory and back; the tensors stay valid, with empty storages meanwhile.

    Tensors that shared a storage share it afterwards, too: views, parts of a joined tensor, tensors that only a closure
    holds. Addresses change.
    """

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        # Storage, its size, and its bytes on the host (None: they were dropped).
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def is_away(self) -> bool:
        """Whether storages are in host memory."""
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copy the storages of these tensors to the host and free them on the device; small storages stay.

        A storage that the tensors in `dropped` fill completely is freed without a copy. `reload` must get these tensors
        as `replaced`.
        """
        if self._away:
            return
        large = [tensor for tensor in tensors if tensor.untyped_storage().nbytes() > SMALL]
        _make_resizable(large)
        storages = list({(storage := tensor.untyped_storage()).data_ptr(): storage for tensor in large}.values())
        is_dropped = _filled_by(dropped)
        kept = {
            str(index): _all_bytes(storage)
            for index, storage in enumerate(storages)
            if not is_dropped(storage, storage.nbytes())
        }
        copies = self._buffers.copy("", kept)
        self._away = [(storage, storage.nbytes(), copies.get(str(index))) for index, storage in enumerate(storages)]
        for storage in storages:
            storage.resize_(0)

    def reload(self, replaced: Iterable[Tensor] = ()) -> None:
        """Undo `offload`. The tensors in `replaced` get arbitrary values: the caller overwrites them."""
        for storage, nbytes, _ in self._away:
            storage.resize_(nbytes)
        is_replaced = _filled_by(replaced)
        missing = [(storage, copy) for storage, nbytes, copy in self._away if not is_replaced(storage, nbytes)]
        pairs = [(copy, _all_bytes(storage)) for storage, copy in missing if copy is not None]
        if len(pairs) < len(missing):
            for storage, _, _ in self._away:
                storage.resize_(0)
            raise RuntimeError("weights were dropped and nothing replaces them: load a checkpoint first")
        if pairs:
            restore(pairs, pairs[0][1].device)
        self._away = []  # last: what fails before can be done again


def _all_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _filled_by(tensors: Iterable[Tensor]) -> Callable[[torch.UntypedStorage, int], bool]:
    """Returns a function of a storage and its size: whether these tensors cover all of its bytes."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        start = tensor.data_ptr()
        spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, start + tensor.nbytes))

    def is_filled(storage: torch.UntypedStorage, nbytes: int) -> bool:
        start = end = storage.data_ptr()
        for first, last in sorted(spans.get(start, [])):
            if first > end:
                break
            end = max(end, last)
        return end >= start + nbytes

    return is_filled


def _make_resizable(tensors: Iterable[Tensor]) -> None:
    """Copy tensors whose memory torch did not allocate, such as a mapped file's, to memory that it did."""
    own: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():
            continue
        if storage.data_ptr() not in own:
            own[storage.data_ptr()] = storage.clone()
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = view.set_(own[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())


def restore(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy the first tensor of each pair, on the host, to the second, on the device; returns when all are copied."""
    if device.type != "cuda":
        for here, there in pairs:
            there.copy_(here)
        return

    def copy(here: Tensor, there: Tensor, pinned: Tensor, stream: torch.cuda.Stream) -> None:
        np.copyto(pinned.numpy(), here.numpy())  # without Python's lock
        there.copy_(pinned, non_blocking=True)
        stream.synchronize()

    _in_threads(pairs, device, copy)


def replace_weights(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the first tensor of each pair to the second, whatever their types and devices are."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for new, old in pairs:
        if not _is_upload(new, old):
            old.copy_(new)
            continue
        waiting.append((new, old))
        if sum(pair[0].nbytes for pair in waiting) > AT_ONCE:
            _copy_from_host(waiting)
            waiting = []
    _copy_from_host(waiting)


def _is_upload(new: Tensor, old: Tensor) -> bool:
    return old.is_cuda and not new.is_cuda


def _copy_from_host(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy tensors from the host; those of another type are converted on the device."""

    def target(new: Tensor, old: Tensor) -> Tensor:
        fits = old.dtype == new.dtype and old.is_contiguous()
        return old if fits else torch.empty(new.shape, dtype=new.dtype, device=old.device)

    targets = [target(new, old) for new, old in pairs]
    if pairs:
        restore([(new.contiguous(), there) for (new, _), there in zip(pairs, targets, strict=True)], targets[0].device)
    for (_, old), there in zip(pairs, targets, strict=True):
        if there is not old:
            old.copy_(there)


def fetch(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy the first tensor of each pair, on the device, to the second, on the host; both are contiguous."""

    def copy(there: Tensor, here: Tensor, pinned: Tensor, stream: torch.cuda.Stream) -> None:
        pinned.copy_(there, non_blocking=True)
        stream.synchronize()
        np.copyto(here.numpy(), pinned.numpy())  # without Python's lock

    _in_threads(pairs, device, copy)


def _in_threads(
    pairs: Sequence[tuple[Tensor, Tensor]],
    device: torch.device,
    copy: Callable[[Tensor, Tensor, Tensor, torch.cuda.Stream], None],
) -> None:
    """Call `copy` with bytes of both tensors of a pair, as much pinned memory, and a stream; piece by piece."""
    pieces = [both for first, second in pairs for both in zip(_pieces(first), _pieces(second), strict=True)]
    ready = torch.cuda.Event()
    with torch.cuda.device(device):
        ready.record()

    def work(thread: int) -> None:
        with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream()):
            stream.wait_event(ready)  # the memory may be another kernel's until then
            pinned = _pinned_piece()
            for first, second in pieces[thread::THREADS]:
                copy(first, second, pinned[: len(first)], stream)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(min(THREADS, len(pieces)))))


def _pinned_piece() -> Tensor:
    try:
        return torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the system pins no more memory: ordinary memory is slower, but works
        return torch.empty(PIECE, dtype=torch.uint8)
