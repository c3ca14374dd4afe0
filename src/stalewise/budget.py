"""The budget of a run while it goes on: how much of the drift that it bears has been used, and a word before it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

WARN_AT = 0.8  # of a limit


class BudgetWatch:
    """Measures each update against limits, where they are known, and warns once in a run about each.

    The limits are the lower ends of the law's radii: R_batch within one generation batch, R_crit over the whole run.
    `used` has the largest shares on record: what an earlier sitting warned about is known.
    """

    def __init__(
        self,
        limits: tuple[float, float] | None,
        say: Callable[[str], object],
        used: Mapping[str, float] | None = None,
    ) -> None:
        self.limits = limits
        self.say = say
        self.warned = {name for name, share in (used or {}).items() if share >= WARN_AT}

    def measure(self, drift: float, drift_of_version: float) -> dict[str, float]:
        """Metrics of an update after which the run has drifted so far, and its rollouts' policy had so far."""
        batch_drift = drift - drift_of_version
        if self.limits is None:
            return {"batch_drift": batch_drift, "batch_budget": math.nan, "horizon_budget": math.nan}
        batch_limit, horizon_limit = self.limits
        used = {"batch_budget": batch_drift / batch_limit, "horizon_budget": drift / horizon_limit}
        advice = {
            "batch_budget": "within its rollouts: smaller stages or a lower optimizer.learning_rate keep it valid",
            "horizon_budget": "in all: stop here, or go on with a lower optimizer.learning_rate in a new run",
        }
        for name, share in used.items():
            if share >= WARN_AT and name not in self.warned:
                self.warned.add(name)
                self.say(f"{share:.0%} of the drift that this policy bears is used {advice[name]}")
        return {"batch_drift": batch_drift, **used}

    @staticmethod
    def note(metrics: dict[str, float]) -> str:
        """The budget for a progress line; empty where it is not known."""
        shares = [metrics.get(name, math.nan) for name in ("batch_budget", "horizon_budget")]
        return "" if any(map(math.isnan, shares)) else f"  budget {shares[0]:.0%} of batch, {shares[1]:.0%} of run"
