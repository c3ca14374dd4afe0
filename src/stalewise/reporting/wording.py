"""The texts of the report: each metric as in docs/metrics.md, and each chart."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

ACCURACY = "accuracy"  # from eval.jsonl, all others are from metrics.jsonl


@dataclass(frozen=True, slots=True)
class Metric:
    """The caption of a metric, its definition, and when its value needs a closer look."""

    short: str
    definition: str
    check_when: str = ""

    @property
    def in_full(self) -> str:
        """Definition and warning in one text."""
        return f"{self.definition}. Check when {self.check_when}." if self.check_when else f"{self.definition}."


def _read_metrics() -> dict[str, Metric]:
    """The rows of metrics.md: key, caption, definition, warning. A test compares them with docs/metrics.md."""
    lines = files("stalewise.reporting").joinpath("metrics.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {key: Metric(*texts) for key, *texts in rows}


METRICS = _read_metrics()


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot of metrics against updates or time; `quantity` and `unit` label the vertical axis."""

    name: str
    title: str
    quantity: str
    unit: str
    keys: tuple[str, ...]
    is_share: bool = False  # between 0 and 1: all such charts have the same scale
    is_log: bool = False
    has_zero: bool = True  # the vertical axis includes 0
    is_against_time: bool = False
    limit: float | None = None  # drawn as a line

    @property
    def y_title(self) -> str:
        """The label of the vertical axis."""
        return f"{self.quantity} ({self.unit})"


REWARD = ("reward", ACCURACY)
CHARTS = (
    Chart("reward", "Reward and held-out accuracy", "reward, accuracy", "score", REWARD),
    Chart("reward-time", "Reward and accuracy against time", "reward, accuracy", "score", REWARD, is_against_time=True),
    Chart("ess", "Effective sample size", "ESS", "share, 0 to 1", ("ess", "ess_sequence"), is_share=True),
    Chart("clip", "Clipped and vetoed", "share of tokens", "0 to 1", ("clip_fraction", "veto_fraction"), is_share=True),
    Chart(
        *("ratios", "Mean ratio by sign of the advantage", "mean ratio", "policy / behaviour"),
        ("ratio_mean_positive", "ratio_mean_negative"),
        has_zero=False,
        limit=1.0,
    ),
    Chart(
        *("largest", "Largest ratio by sign of the advantage", "policy / behaviour", "ratio, log scale"),
        ("ratio_max_positive", "ratio_max_negative"),
        is_log=True,
    ),
    Chart("kl", "KL of policy and behaviour", "KL", "nats per token", ("kl_behaviour_policy", "kl_policy_behaviour")),
    Chart("reference", "KL of policy and reference", "KL", "nats per token", ("kl_reference",)),
    Chart("entropy", "Entropy", "entropy", "nats per token", ("entropy",)),
    Chart("length", "Response length", "mean length", "tokens", ("response_length",)),
    Chart(
        *("shares", "Truncated, degenerate, unscored", "share", "0 to 1"),
        ("truncated_fraction", "degenerate_fraction", "verifier_error_fraction"),
        is_share=True,
    ),
    Chart("age", "Age of the rollouts", "age", "updates", ("age_mean", "age_max")),
    Chart("drift", "Drift", "Σ‖Δθ‖", "Euclidean norm", ("drift", "batch_drift")),
    Chart("budget", "Drift limits used", "share", "1 is the limit", ("batch_budget", "horizon_budget"), limit=1.0),
    Chart("rate", "Learning rate", "learning rate", "per update", ("learning_rate",)),
    Chart("gradient", "Gradient norm", "‖gradient‖", "loss per unit of weight", ("grad_norm",)),
    Chart("seconds", "Time per update", "time", "seconds", ("seconds",)),
)
