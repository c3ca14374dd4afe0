"""The budget of a run while it goes on: how much of the drift that it bears has been used, and a word before it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from stalewise.staleness.spent import fresh_ess, is_spent, remaining_ess

WARN_AT = 0.8  # of a limit
WARN_ESS = 0.5  # of what the effective sample size was when the rollouts were new


class DriftBudget:
    """Measures each update against limits, where they are known, and warns once in a run about each.

    It warns where most of a limit is used, or where one more step like the last would cross it. The limits are the
    lower ends of the law's radii, 0 where one is not known: R_batch within one generation batch, R_crit over the whole
    run. `used` has the largest shares on record: what an earlier sitting warned about is known.
    """

    def __init__(
        self,
        limits: tuple[float, float] | None,
        log: Callable[[str], object],
        used: Mapping[str, float] | None = None,
    ) -> None:
        self.limits = limits
        self.log = log
        self.warned = {name for name, share in (used or {}).items() if share >= WARN_AT}
        self.last: dict[str, float] = {}

    def measure(self, drift: float, drift_of_version: float) -> dict[str, float]:
        """Metrics of an update after which the run has drifted so far, and its rollouts' policy had so far."""
        batch_drift = drift - drift_of_version
        if self.limits is None:
            return {"batch_drift": batch_drift, "batch_budget": math.nan, "horizon_budget": math.nan}
        drifts = {"batch_budget": batch_drift, "horizon_budget": drift}
        both = zip(drifts.items(), self.limits, strict=True)
        used = {name: far / limit if limit > 0 else math.nan for (name, far), limit in both}
        advice = {
            "batch_budget": "within its rollouts: smaller stages or a lower optimizer.learning_rate keep it valid",
            "horizon_budget": "in all: stop here, or go on with a lower optimizer.learning_rate in a new run",
        }
        for name, share in used.items():
            step = share - self.last.get(name, share)  # negative where a new batch begins
            if name not in self.warned and (share >= WARN_AT or share + max(step, 0.0) >= 1.0):
                self.warned.add(name)
                self.log(f"{share:.0%} of the drift that this policy bears is used {advice[name]}")
        self.last = used
        return {"batch_drift": batch_drift, **used}

    def look_at(self, ess: Sequence[float]) -> None:
        """Warn where the rollouts of a stage, by the effective sample sizes of its updates, are worth half as much."""
        fell = is_spent(ess, WARN_ESS) and not is_spent(ess[:-1], WARN_ESS)  # just now: not what a sitting before saw
        left = remaining_ess(ess) / fresh_ess(ess) if fell else math.nan
        if left < WARN_ESS and "ess" not in self.warned:
            self.warned.add("ess")
            self.log(
                f"the rollouts of this stage are worth {left:.0%} of what they were when they were new: smaller "
                'stages, schedule.end = "spent" or a lower optimizer.learning_rate keep them useful'
            )

    @staticmethod
    def note(metrics: dict[str, float]) -> str:
        """The budget for a progress line; empty where it is not known."""
        shares = {"batch": metrics.get("batch_budget", math.nan), "run": metrics.get("horizon_budget", math.nan)}
        known = ", ".join(f"{share:.0%} of {name}" for name, share in shares.items() if not math.isnan(share))
        return f"  budget {known}" if known else ""
