"""Copies between host and device. What only a GPU can show, benchmarks/check_gpu.py checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from stalewise.models import transfer as module
from stalewise.models.transfer import (
    ALIGNMENT,
    HostBuffers,
    StorageOffload,
    fetch,
    host_copies,
    in_buffer,
    restore,
    send,
)

CPU = torch.device("cpu")
ARRAYS = {
    "long": np.arange(7, dtype=np.int64)[None],
    "int": np.array([3, -1, 2], dtype=np.int32),
    "none": np.zeros((0, 0), dtype=np.int64),
    "float": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "bool": np.array([[True, False, True]]),
    "view": np.arange(12, dtype=np.int64).reshape(3, 4).T,  # not contiguous
}


def test_arrays_arrive_as_they_were() -> None:
    buffer, there = send(ARRAYS, CPU)
    assert list(there) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert there[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(there[name].numpy(), array)
        assert (there[name].data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 or there[name].numel() == 0
    there["int"][0] = 9  # a view, not a copy
    assert buffer[there["int"].storage_offset() * 4] == 9
    assert send({}, CPU)[0].numel() == 0


def test_the_same_place_in_another_buffer() -> None:
    buffer, there = send(ARRAYS, CPU)
    other = buffer.clone()
    moved = {name: in_buffer(tensor, other) for name, tensor in there.items()}
    buffer.zero_()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(moved[name].numpy(), array)


def test_what_is_on_the_host_is_not_copied() -> None:
    weight, moment = torch.ones(3), torch.zeros(3)
    policy, moments = host_copies({"w": weight}, {"m": moment})
    assert policy["w"] is weight and moments["m"] is moment


def test_a_weight_that_has_two_names_stays_one_tensor() -> None:
    weight = torch.arange(6.0)
    (found,) = host_copies({"embedding": weight.detach(), "output": weight.detach()})
    assert found["embedding"] is found["output"]  # or it would be written twice


def test_other_views_of_the_same_memory_are_not_taken_for_it() -> None:
    square = torch.arange(4.0).view(2, 2)
    others = {"flat": square.view(4), "turned": square.T, "whole": square.view(torch.int32)}
    (found,) = host_copies({"square": square, **others})
    for name, expected in others.items():
        assert found[name].dtype is expected.dtype and torch.equal(found[name], expected), name


class Stream:
    """Without a device everything has happened at once."""

    def wait_event(self, event: Stream) -> None: ...
    def synchronize(self) -> None: ...
    def record(self) -> None: ...


def fake_cuda(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    empty = torch.empty
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(module, "PIECE", piece)


@pytest.mark.parametrize("piece", [3, 64, 1 << 20])
def test_every_byte_of_every_tensor_arrives(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, piece)
    torch.manual_seed(0)
    shapes = [(100,), (7, 9), (), (0, 4), (1,), (30, 5)]
    there = [torch.randn(shape).to(dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16, torch.int64)]
    here = [torch.zeros_like(tensor) for tensor in there]
    fetch(list(zip(there, here, strict=True)), torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))
    back = [torch.zeros_like(tensor) for tensor in there]
    restore(list(zip(here, back, strict=True)), torch.device("cuda"))
    assert all(torch.equal(a, b) for a, b in zip(back, there, strict=True))


def test_memory_that_is_reserved_is_mapped() -> None:
    before, buffers = psutil.Process().memory_info().rss, HostBuffers()
    shapes = {("file", str(place)): (torch.Size([place + 1, 5 << 20]), torch.float32) for place in range(4)}
    buffers.reserve(shapes)
    assert buffers.nbytes == 10 * 20 << 20
    assert psutil.Process().memory_info().rss - before > 0.9 * buffers.nbytes
    places = [buffer.data_ptr() for buffer in buffers.copy("file", {"3": torch.ones(4, 5 << 20)}).values()]
    buffers.reserve(shapes)
    copied = buffers.copy("file", {"3": torch.ones(4, 5 << 20)})["3"]
    assert [copied.data_ptr()] == places


def test_of_memory_that_cannot_be_mapped_none_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(piece: torch.Tensor) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "_map_pages", fail)
    buffers = HostBuffers()
    with pytest.raises(MemoryError):
        buffers.reserve({("file", "one"): (torch.Size([8]), torch.float32)})
    assert buffers.nbytes == 0


# ---------------------------------------------------------------- storages that wait


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def joined_weights() -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    """One tensor of 60 rows, and parameters that are parts of it."""
    torch.manual_seed(0)
    parts = [torch.nn.Parameter(torch.empty(rows, 50)) for rows in (30, 20, 10)]
    joined = torch.randn(60, 50)
    for part, data in zip(parts, joined.split([30, 20, 10]), strict=True):
        part.data = data
    return joined, parts


@pytest.mark.parametrize("bring", [module.replace_weights, module._copy_from_host])
def test_weights_are_replaced_whatever_their_type(bring: Callable[[Any], None]) -> None:
    joined = torch.zeros(6, 4)
    old = [joined[:2], joined[2:].T, torch.zeros(5, dtype=torch.bfloat16), torch.zeros(3)]
    new = [torch.rand(2, 4), torch.rand(4, 4), torch.rand(5), torch.rand(3, dtype=torch.float64).bfloat16()]
    bring(list(zip(new, old, strict=True)))
    for one, other in zip(new, old, strict=True):
        assert torch.equal(one.to(other.dtype), other)
    assert torch.equal(joined, torch.cat([new[0], new[1].T]))
    bring([])


def test_weights_for_a_device_are_replaced_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, bring = list[int](), module._copy_from_host
    monkeypatch.setattr(module, "AT_ONCE", 4 * 10)
    monkeypatch.setattr(module, "_copy_from_host", lambda pairs: (batches.append(len(pairs)), bring(pairs))[1])
    monkeypatch.setattr(module, "_is_upload", lambda new, old: len(new) != 3)
    old = [torch.zeros(size) for size in (4, 4, 4, 3, 20, 1)]
    new = [torch.rand(len(one)) for one in old]
    module.replace_weights(zip(new, old, strict=True))
    assert batches == [3, 1, 1] and all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


def test_parts_of_a_joined_tensor_stay_its_parts() -> None:
    joined, parts = joined_weights()
    whole, turned, small = torch.randn(40, 50), torch.randn(50, 60).T, torch.randn(3)
    hidden = joined[5:7]  # of which the offload knows nothing
    before = [tensor.detach().clone() for tensor in (joined, *parts, whole, turned, small, hidden)]
    offload = StorageOffload()
    for _ in range(2):
        offload.offload([*parts, whole, turned, small, whole])
        offload.offload([*parts, whole, turned, small])  # they are away already
        assert offload.is_away and sizes(joined, *parts, whole, turned, hidden) == [0] * 7 and sizes(small) == [12]
        offload.reload()
        after = [joined, *parts, whole, turned, small, hidden]
        assert not offload.is_away and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert turned.stride() == (1, 60)
    joined[30] = 7
    assert parts[1][0].tolist() == [7] * 50 and sizes(*parts) == [60 * 50 * 4] * 3


def test_memory_that_torch_did_not_allocate_waits_too() -> None:
    array = np.arange(4000, dtype=np.float32)
    whole = torch.from_numpy(array)
    first, second = whole[:1000].view(20, 50), whole[500:]
    assert not whole.untyped_storage().resizable()
    offload = StorageOffload()
    offload.offload([first, second])
    assert sizes(first, second) == [0, 0]
    offload.reload()
    assert torch.equal(first.flatten(), torch.arange(1000.0)) and torch.equal(second, torch.arange(500.0, 4000.0))
    first[10] = -1  # numbers 500 to 549
    assert second[:50].tolist() == [-1] * 50 and second[50] == 550 and array[500] == 500


def test_what_is_replaced_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    plain = module.restore
    monkeypatch.setattr(
        module,
        "restore",
        lambda pairs, device: (copied.append(sum(here.nbytes for here, _ in pairs)), plain(pairs, device)),
    )
    joined, parts = joined_weights()
    other = torch.randn(40, 50)
    before = other.clone(), parts[0].detach().clone()
    offload = StorageOffload()
    offload.offload([*parts, other])
    offload.reload(parts[::-1])
    assert copied == [40 * 50 * 4] and torch.equal(other, before[0])  # all rows of the joined tensor are replaced
    with torch.no_grad():
        parts[0].copy_(before[1])
    offload.offload([*parts, other])
    offload.reload(parts[1:])  # not all of it: the first part must come back
    assert copied[1:] == [40 * 50 * 4 + 60 * 50 * 4] and torch.equal(parts[0], before[1])
    offload.offload([*parts, other])
    offload.reload([*parts, other])
    assert len(copied) == 2
    assert sizes(joined, other) == [12000, 8000]


def test_what_is_dropped_must_be_replaced() -> None:
    joined, parts = joined_weights()
    other, offload = torch.randn(40, 50), StorageOffload()
    kept = other.clone()
    offload.offload([*parts, other], dropped=parts[:2])  # not all of the joined tensor
    assert offload._buffers.nbytes == 12_000 + 8_000 and sizes(joined, other) == [0, 0]
    offload.reload()
    before, offload = joined.clone(), StorageOffload()
    offload.offload([*parts, other], dropped=parts)
    assert offload._buffers.nbytes == other.nbytes and sizes(joined, other) == [0, 0]
    for replaced in ([], parts[1:]):
        with pytest.raises(RuntimeError, match="load a checkpoint first"):
            offload.reload(replaced)
        assert offload.is_away and sizes(joined, other) == [0, 0]
    offload.reload(parts)
    joined.copy_(before)
    assert not offload.is_away and torch.equal(other, kept) and sizes(joined) == [60 * 50 * 4]


def test_a_return_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, parts = joined_weights()
    before, offload = joined.clone(), StorageOffload()
    offload.offload(parts)

    def fail(pairs: object, device: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as there:
        there.setattr(module, "restore", fail)
        with pytest.raises(torch.OutOfMemoryError):
            offload.reload()
    assert offload.is_away
    offload.reload()
    assert torch.equal(joined, before)


def test_host_memory_is_used_again() -> None:
    joined, parts = joined_weights()
    before, offload = joined.clone(), StorageOffload()
    offload.offload(parts)
    copy = offload._away[0][2]
    assert copy is not None
    offload.reload()
    joined += 1
    offload.offload(parts)
    assert offload._away[0][2] is copy and torch.equal(copy.view(torch.float32).view(60, 50), before + 1)
