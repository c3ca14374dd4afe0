"""What runs on the device beside torch's own operators. Modules that import Triton are imported where it is."""

from __future__ import annotations

import shutil
from functools import cache

from torch.utils._triton import has_triton


@cache
def can_compile() -> bool:
    """Whether kernels can be made here: Triton, which comes with torch for GPUs, also wants a C compiler."""
    return has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))
