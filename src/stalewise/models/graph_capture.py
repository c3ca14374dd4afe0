"""Recording work of a GPU as a CUDA graph, while it goes on with what it has, and with what was kept for later left
where it is.

`torch.cuda.graph` waits for the GPU and gives all memory back first that is kept for the next time, the machine's
page-locked memory as well. To ask for it again took longer than the recording itself.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from stalewise.errors import ModelError

SHORT_SHARE = 0.25  # of a GPU's memory: where less is free, a recording wants all that can be had


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """What is launched within becomes the graph; nothing of it runs. `pool` is memory that graphs share."""
    free, total = torch.cuda.mem_get_info()
    # What lies about may be as much as the graph will want, and is not given up for it while it is recorded.
    lies_about = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < max(SHORT_SHARE * total, lies_about):
        gc.collect()
        torch.cuda.synchronize()  # with expandable segments, memory is gone as soon as the stream that had it is done
        torch.cuda.empty_cache()
    with torch.cuda.stream(stream), _no_collection():
        # Other threads may ask the driver for what they like, such as those that watch over several devices.
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
        try:
            yield
        except BaseException as error:
            _end_failed(graph, error)
            raise
        graph.capture_end()


def _end_failed(graph: torch.cuda.CUDAGraph, error: BaseException) -> None:
    """End a recording that failed. Where that fails, too, it says nothing of why, and torch's allocator goes on as if
    recording: whoever would try again with less must not.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        if isinstance(error, torch.OutOfMemoryError):
            raise ModelError(
                "out of memory while a CUDA graph was recorded, after which this process cannot go on: "
                "lower learner.tokens_per_micro_batch or sampler.rollouts_per_shard, then resume"
            ) from error


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects no garbage within: what is found there may belong to the driver, which is not to be called."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
