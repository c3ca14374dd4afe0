"""Records CUDA graphs without waiting for the GPU and without freeing cached memory.

`torch.cuda.graph` first synchronises and frees all cached memory, also page-locked memory. Allocating it again took
longer than the recording.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from stalewise.errors import ModelError

SHORT_SHARE = 0.25  # of a GPU's memory: if less is free, cached memory is freed first


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record what is launched within as the graph, without running it. Graphs may share the memory of a `pool`."""
    free, total = torch.cuda.mem_get_info()
    # Cached memory, which the graph might need as well, is not freed during a recording.
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < max(SHORT_SHARE * total, cached):
        gc.collect()
        torch.cuda.synchronize()  # expandable segments are unmapped only when their stream is done
        torch.cuda.empty_cache()
    with torch.cuda.stream(stream), contextlib.ExitStack() as stack:
        if gc.isenabled():  # collecting CUDA objects would call the driver
            gc.disable()
            stack.callback(gc.enable)
        # Other threads, such as those that watch several devices, may call the driver.
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
        try:
            yield
        except BaseException as error:
            try:
                graph.capture_end()
            except RuntimeError:  # torch's allocator stays in recording mode: a retry is impossible
                if isinstance(error, torch.OutOfMemoryError):
                    raise ModelError(
                        "out of memory while a CUDA graph was recorded, after which this process cannot go on: "
                        "lower learner.tokens_per_micro_batch or sampler.rollouts_per_shard, then resume"
                    ) from error
            raise
        graph.capture_end()
