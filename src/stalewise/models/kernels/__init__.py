"""GPU kernels. Modules that import Triton are imported only where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import threading
from functools import cache

from torch.utils._triton import has_triton


@cache
def can_compile() -> bool:
    """Whether kernels can be compiled: needs Triton, which comes with torch for GPUs, and a C compiler."""
    return has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


def get_ready() -> threading.Thread:
    """Let Triton checksum its own files in a thread, which it does before its first kernel."""
    thread = threading.Thread(target=_read_triton, daemon=True)
    thread.start()
    return thread


def _read_triton() -> None:
    if not can_compile():
        return
    with contextlib.suppress(ImportError):  # its place may change; nothing depends on it
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingImports]

        triton_key()
