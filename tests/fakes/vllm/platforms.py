from __future__ import annotations

import os


class Platform:
    def is_cuda_alike(self) -> bool:
        return "gpu" in os.environ.get("FAKE_VLLM_FAULTS", "").split()


current_platform = Platform()
