"""What is drawn, in words: one entry per metric, in agreement with docs/metrics.md, and one per chart."""

from __future__ import annotations

from dataclasses import dataclass

ACCURACY = "accuracy"  # comes from eval.jsonl and not from metrics.jsonl, so it is drawn by its own function

# A short explanation of every key that is drawn; docs/metrics.md has the definitions.
METRICS: dict[str, str] = {
    "reward": "mean reward of the rollouts that the update consumed; made by an older policy, so it lags behind",
    ACCURACY: "mean score on held-out prompts, with its 95% bootstrap interval over prompts",
    "ess": "effective share of the tokens: 1 on fresh data; below 0.1, few tokens carry the estimate",
    "ess_sequence": "the same for whole responses; at 1 / responses, one response outweighs all others",
    "clip_fraction": "share of tokens whose ratio the objective bounded; its meaning depends on the objective",
    "veto_fraction": "share of tokens that the negative-advantage veto took out of the loss (mu_grpo only)",
    "kl_behaviour_policy": "KL(behaviour‖policy) per token; look twice above 0.1 nats, or when it outgrows the age",
    "kl_policy_behaviour": "KL(policy‖behaviour) per token; noisy where ess is low",
    "entropy": "entropy of the policy's next token; towards 0, no exploration is left",
    "response_length": "mean tokens per response; look twice when it sits at the token limit, or collapses",
    "age_mean": "mean over rollouts of update − version that made them",
    "age_max": "the largest of these ages",
    "drift": "cumulative length of the path of the weights, Σ‖Δθ‖",
    "learning_rate": "learning rate of the schedule, before step_factor",
    "grad_norm": "norm of the gradient before it is scaled down to optimizer.max_grad_norm",
    "truncated_fraction": "share of rollouts that were cut at sampler.max_new_tokens",
    "degenerate_fraction": "share of groups whose rewards are all equal: they teach nothing",
    "verifier_error_fraction": "share of rollouts that the verifier could not score; left out of the update",
    "seconds": "wall-clock time of the update",
}


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot of some metrics against updates; `unit` belongs to its vertical axis."""

    name: str
    title: str
    quantity: str
    unit: str
    keys: tuple[str, ...]
    is_share: bool = False  # between 0 and 1: all such charts have the same scale, so that they can be compared

    @property
    def y_title(self) -> str:
        """Quantity and unit."""
        return f"{self.quantity} ({self.unit})"


CHARTS = (
    Chart("reward", "Reward and held-out accuracy", "reward, accuracy", "score", ("reward", ACCURACY)),
    Chart("ess", "Effective sample size", "ESS", "share, 0 to 1", ("ess", "ess_sequence"), is_share=True),
    Chart("clip", "Clipped and vetoed", "share of tokens", "0 to 1", ("clip_fraction", "veto_fraction"), is_share=True),
    Chart(
        "kl",
        "Divergence of policy and behaviour policy",
        "KL",
        "nats per token",
        ("kl_behaviour_policy", "kl_policy_behaviour"),
    ),
    Chart("entropy", "Entropy", "entropy", "nats per token", ("entropy",)),
    Chart("length", "Response length", "mean length", "tokens", ("response_length",)),
    Chart("age", "Age of the rollouts", "age", "updates", ("age_mean", "age_max")),
    Chart(
        "shares",
        "Truncated, degenerate, without score",
        "share",
        "0 to 1",
        ("truncated_fraction", "degenerate_fraction", "verifier_error_fraction"),
        is_share=True,
    ),
    Chart("drift", "Drift", "Σ‖Δθ‖", "Euclidean norm", ("drift",)),
    Chart("rate", "Learning rate", "learning rate", "per update", ("learning_rate",)),
    Chart("gradient", "Gradient norm", "‖gradient‖", "loss per unit of weight", ("grad_norm",)),
    Chart("seconds", "Time per update", "time", "seconds", ("seconds",)),
)
