"""What is drawn, in words: one entry per metric, in agreement with docs/metrics.md, and one per chart."""

from __future__ import annotations

from dataclasses import dataclass

ACCURACY = "accuracy"  # comes from eval.jsonl and not from metrics.jsonl, so it is drawn by its own function


@dataclass(frozen=True, slots=True)
class Metric:
    """A key in words: shortly, and as the page of metrics defines it and says when to look twice."""

    short: str
    definition: str
    look_twice: str = ""

    @property
    def in_full(self) -> str:
        """Definition and warning in one text."""
        return f"{self.definition}. Look twice when {self.look_twice}." if self.look_twice else f"{self.definition}."


# Definitions and warnings are those of docs/metrics.md, word by word; a test compares.
METRICS: dict[str, Metric] = {
    "reward": Metric(
        "mean reward of the rollouts that the update consumed, with its 95% band; lags, as an older policy made them",
        "mean of R over the rollouts that have a score",
        "it falls from one stage to the next, or rises while held-out accuracy does not",
    ),
    ACCURACY: Metric(
        "mean score on held-out prompts, with its 95% bootstrap interval over prompts",
        "avg@k of a policy on prompts that training never sees, from eval.jsonl",
        "it falls, or stands still while the reward rises",
    ),
    "ess": Metric(
        "effective share of the tokens: 1 on fresh data; below 0.1, few tokens carry the estimate",
        "(Σ r)² / (n Σ r²) over tokens",
        "it falls steadily within a stage, or is below 0.1: few tokens carry the estimate",
    ),
    "ess_sequence": Metric(
        "the same for whole responses; at 1 / responses, one response outweighs all others",
        "(Σ w)² / (B Σ w²) over responses, w = exp(Σ_t(ℓ − b))",
        "it reads 1/B: one response outweighs all others. Long responses reach this early, so compare at equal length",
    ),
    "ratio_mean_positive": Metric(
        "mean ratio where the advantage is positive: above 1, towards what was rewarded",
        "mean of r where A > 0",
        "it runs away while the reward stands still",
    ),
    "ratio_mean_negative": Metric(
        "mean ratio where it is negative: below 1, away from what was not rewarded",
        "mean of r where A < 0",
        "it is near 0 (given up), or above 1 (moving the wrong way)",
    ),
    "ratio_max_positive": Metric(
        "largest ratio where the advantage is positive; grows with the batch",
        "largest r where A > 0",
        "it is many times the clip or cap",
    ),
    "ratio_max_negative": Metric(
        "largest ratio where it is negative: the loss of such a token is in proportion to it",
        "largest r where A < 0",
        "it exceeds 10",
    ),
    "clip_fraction": Metric(
        "share of tokens whose ratio the objective bounded; its meaning depends on the objective",
        "tokens clipped / tokens",
        "it is above 0.2 in the ratio form: most of the data no longer teaches. In p3o values near 1 are normal",
    ),
    "veto_fraction": Metric(
        "share of tokens that the negative-advantage veto took out of the loss (mu_grpo only)",
        "tokens vetoed / tokens",
        "it rises within a stage: the policy leaves the support of its data",
    ),
    "kl_behaviour_policy": Metric(
        "KL(behaviour‖policy) per token; look twice above 0.1 nats, or when it outgrows the age",
        "mean of r − 1 − log r",
        "it exceeds 0.1 nats, or grows faster than the age",
    ),
    "kl_policy_behaviour": Metric(
        "KL(policy‖behaviour) per token; noisy where ess is low",
        "mean of r log r − r + 1",
        "it is many times kl_behaviour_policy",
    ),
    "entropy": Metric(
        "entropy of the policy's next token; towards 0, no exploration is left",
        "mean of the exact entropy where the learner computes it, else mean of −r·ℓ",
        "it falls towards 0 (no exploration left) or climbs without the reward",
    ),
    "response_length": Metric(
        "mean tokens per response; look twice when it sits at the token limit, or collapses",
        "tokens / responses",
        "it sits at the token limit, or collapses",
    ),
    "age_mean": Metric(
        "mean over rollouts of update − version that made them",
        "mean over rollouts of update − version of their first token",
        "it differs from what the schedule says",
    ),
    "age_max": Metric("the largest of these ages", "largest of these", "it exceeds worst_age of the schedule"),
    "drift": Metric(
        "cumulative length of the path of the weights, Σ‖Δθ‖",
        "Σ ‖Δθ‖ over all updates up to this one",
        "it nears R_crit",
    ),
    "batch_drift": Metric(
        "drift since the policy that made the rollouts at hand",
        "Σ ‖Δθ‖ over the updates since the policy that made this update's rollouts",
        "it nears R_batch",
    ),
    "batch_budget": Metric(
        "share of R_batch that is used: at 1, the rollouts at hand are no longer valid",
        "batch_drift / the lower end of R_batch",
        "it is above 0.8",
    ),
    "horizon_budget": Metric(
        "share of R_crit that is used: at 1, runs of this model and task collapse",
        "drift / the lower end of R_crit",
        "it is above 0.8",
    ),
    "learning_rate": Metric(
        "learning rate of the schedule, before step_factor", "η of the schedule, before step_factor"
    ),
    "grad_norm": Metric(
        "norm of the gradient before it is scaled down to optimizer.max_grad_norm",
        "Euclidean norm of the gradient before it is scaled down to optimizer.max_grad_norm",
        "it is above the limit in most updates, or jumps",
    ),
    "truncated_fraction": Metric(
        "share of rollouts that were cut at sampler.max_new_tokens",
        "rollouts cut at sampler.max_new_tokens / rollouts",
        "it is above 0.5: most rewards judge a part of a response",
    ),
    "degenerate_fraction": Metric(
        "share of groups whose rewards are all equal: they teach nothing",
        "groups whose rewards are all equal / groups",
        "it is above 0.5, or nears 1: the task is too easy or too hard by now",
    ),
    "verifier_error_fraction": Metric(
        "share of rollouts that the verifier could not score; left out of the update",
        "rollouts without a score / rollouts",
        "it is not 0",
    ),
    "seconds": Metric(
        "wall-clock time of the update",
        "wall-clock time from the end of the update before it (or the beginning of learning) to its own, in seconds",
        "it jumps while tokens does not",
    ),
}


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot of some metrics against updates, or against time; `unit` belongs to its vertical axis."""

    name: str
    title: str
    quantity: str
    unit: str
    keys: tuple[str, ...]
    is_share: bool = False  # between 0 and 1: all such charts have the same scale, so that they can be compared
    is_log: bool = False
    has_zero: bool = True  # whether the vertical axis goes down to 0
    is_against_time: bool = False
    limit: float | None = None  # a value with a meaning, drawn as a line

    @property
    def y_title(self) -> str:
        """Quantity and unit."""
        return f"{self.quantity} ({self.unit})"


CHARTS = (
    Chart("reward", "Reward and held-out accuracy", "reward, accuracy", "score", ("reward", ACCURACY)),
    Chart(
        *("reward-time", "Reward and held-out accuracy against time", "reward, accuracy", "score"),
        ("reward", ACCURACY),
        is_against_time=True,
    ),
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
    Chart(
        *("kl", "Divergence of policy and behaviour policy", "KL", "nats per token"),
        ("kl_behaviour_policy", "kl_policy_behaviour"),
    ),
    Chart("entropy", "Entropy", "entropy", "nats per token", ("entropy",)),
    Chart("length", "Response length", "mean length", "tokens", ("response_length",)),
    Chart(
        *("shares", "Truncated, degenerate, without score", "share", "0 to 1"),
        ("truncated_fraction", "degenerate_fraction", "verifier_error_fraction"),
        is_share=True,
    ),
    Chart("age", "Age of the rollouts", "age", "updates", ("age_mean", "age_max")),
    Chart("drift", "Drift", "Σ‖Δθ‖", "Euclidean norm", ("drift", "batch_drift")),
    Chart(
        *("budget", "Drift against the limits of the law", "share of the limit", "1 is all of it"),
        ("batch_budget", "horizon_budget"),
        limit=1.0,
    ),
    Chart("rate", "Learning rate", "learning rate", "per update", ("learning_rate",)),
    Chart("gradient", "Gradient norm", "‖gradient‖", "loss per unit of weight", ("grad_norm",)),
    Chart("seconds", "Time per update", "time", "seconds", ("seconds",)),
)
