"""What runs on the device beside torch's own operators. Modules that import Triton are imported where it is."""

from __future__ import annotations

import contextlib
import shutil
import threading
from functools import cache

from torch.utils._triton import has_triton


@cache
def can_compile() -> bool:
    """Whether kernels can be made here: Triton, which comes with torch for GPUs, also wants a C compiler."""
    return has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


def get_ready() -> threading.Thread:
    """Have Triton do in a thread what it does before its first kernel: checksums over all of its own files."""
    thread = threading.Thread(target=_read_triton, daemon=True)
    thread.start()
    return thread


def _read_triton() -> None:
    if not can_compile():
        return
    with contextlib.suppress(ImportError):  # where it lies is not promised, and nothing depends on it
        from triton.runtime.cache import triton_key  # pyright: ignore[reportMissingImports]

        triton_key()
