"""Reading the clock and the memory of a device: nothing that was enqueued may be left out."""

from __future__ import annotations

import time
from typing import Any

import torch


def set_up(device: str, threads: int) -> torch.device:
    """Threads, and a CUDA context before any clock starts."""
    if threads:
        torch.set_num_threads(threads)
    place = torch.device(device)
    if place.type == "cuda":
        torch.ones(1024, 1024, device=place).matmul(torch.ones(1024, 1024, device=place))
        torch.cuda.synchronize()
    return place


def synchronised() -> float:
    """The time when everything enqueued so far is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Seconds since it was made, without those in which it was paused."""

    def __init__(self) -> None:
        self.start = synchronised()
        self.paused = 0.0
        self._since = 0.0

    def read(self) -> float:
        return synchronised() - self.start - self.paused

    def pause(self) -> None:
        self._since = synchronised()

    def resume(self) -> None:
        self.paused += synchronised() - self._since


def reset_peak() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak() -> dict[str, int | None]:
    """Peak bytes since `reset_peak`; a CPU has no such counter."""
    if not torch.cuda.is_initialized():
        return {"peak_bytes": None, "peak_reserved_bytes": None}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def device_allocations() -> int:
    """How often the driver was asked for memory so far."""
    return torch.cuda.memory_stats().get("num_device_alloc", 0) if torch.cuda.is_initialized() else 0


def highest(warm: dict[str, int | None], steady: dict[str, int | None]) -> dict[str, int | None]:
    """The peaks of a whole process, and of what came after its warm-up.

    Memory that a CUDA graph holds shows in the allocator's peak when the graph is recorded, and never again.
    """
    whole = {key: max(value or 0, steady[key] or 0) or None for key, value in warm.items()}
    return {**whole, "peak_bytes_after_warmup": steady["peak_bytes"]}


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int, repeats: int = 5) -> float:
    """Operations per second of a square product: the best of a few, each of as many products as take a while."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products = 10 if device.type == "cuda" else 2
    best = 0.0
    for _ in range(repeats):
        start = synchronised()
        for _ in range(products):
            torch.mm(left, right)
        best = max(best, products * 2.0 * size**3 / (synchronised() - start))
    return best


def model_shape(model: Any) -> dict[str, int]:
    """The fields of `ModelShape`."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    embeddings = {
        id(layer.weight): layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    return {
        "body_parameters": total - sum(weight.numel() for weight in embeddings.values()),
        "layers": config.num_hidden_layers,
        "attention_width": heads * head,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
    }
