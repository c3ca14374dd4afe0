"""An update that is enqueued on the device and not waited for, and how its numbers come home."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stalewise.models import transfer
from stalewise.store import TokenRecord

Read = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update that is enqueued; `metrics` waits for it and says what happened.

    A GPU stays busy where the next update is enqueued before the metrics of this one are read. Read updates in order.
    """

    described: dict[str, float]  # what is known of the rollouts alone
    finish: Callable[[], dict[str, float]] | None  # None: there was nothing to learn from
    seen: Callable[[], TokenRecord] | None = None  # None: nothing is recorded of single tokens

    def metrics(self) -> dict[str, float]:
        """What happened; raises NonFiniteUpdate where the update went wrong."""
        if self.finish is None:
            return self.described | {"taken": 0.0}
        found = self.finish()
        # At age 0 policy and behaviour have the same weights: what their log-probabilities differ by is the engines'.
        fresh = self.described["age_max"] == 0
        mismatch = {
            "mismatch_mean": found["log_ratio_mean_abs"] if fresh else math.nan,
            "mismatch_max": found["log_ratio_max_abs"] if fresh else math.nan,
        }
        return self.described | {"taken": 1.0} | found | mismatch

    def tokens(self) -> TokenRecord | None:
        """What the update saw of each token; waits for it. None where nothing is recorded."""
        return None if self.seen is None else self.seen()


def updates_ahead(device: torch.device, *, heeded: bool = False) -> int:
    """How many updates are enqueued while the oldest of them is waited for, read and written down.

    A GPU would be idle with none, and with one whenever the host is late. `heeded`: what an update says may end the
    stage, so that the fewer the better.
    """
    return 0 if device.type != "cuda" else 1 if heeded else 2


def to_host(vector: Tensor) -> Read:
    """Enqueue a copy to the host; calling the result waits for it, and for nothing enqueued after it."""
    if vector.device.type != "cuda":
        return lambda: vector
    copy = transfer.to_host(vector)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return copy

    return read
