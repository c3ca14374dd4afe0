"""Checks that an engine samples from the checkpoint's policy, with a fixed sequence of tokens (the probe).

An engine loads weights with its own code and may be restarted by others; rollouts of wrong weights would silently
spoil training. So its log-probabilities are compared with those of transformers on the CPU, as one vector: the probe's
tokens (which the engine computes without its prefix cache), then the most probable next token (computed with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from stalewise.errors import EngineError
from stalewise.models.loading import load_model
from stalewise.rollout.policy_files import PolicyFiles
from stalewise.statistics import uniform

ProbeLogps = npt.NDArray[np.float64]

LENGTH = 64
# Root mean square of differences from a float32 forward pass; measured values are in docs/engines.md.
TOLERANCE = {"float32": 3e-4, "bfloat16": 0.4, "float16": 0.1}
# The same between two answers of one idle engine with unchanged weights.
DRIFT = {"float32": 1e-4, "bfloat16": 1e-3, "float16": 1e-3}


def probe_ids(policy: PolicyFiles, limit: int | None) -> list[int]:
    """The probe: ordinary tokens, drawn evenly; shorter if the engine's context is."""
    special = set(policy.tokenizer.all_special_ids)
    ordinary = [token for token in range(min(policy.vocabulary, len(policy.tokenizer))) if token not in special]
    length = min([LENGTH, *(room - 1 for room in (policy.context, limit) if room is not None)])
    drawn = uniform(np.zeros(1, dtype=np.uint64), np.arange(length, dtype=np.uint64))
    return [ordinary[int(number * len(ordinary))] for number in drawn]


@torch.no_grad()
def expected_logps(policy: PolicyFiles, token_ids: list[int]) -> ProbeLogps:
    """The checkpoint's log-probabilities: a float32 forward pass on the CPU."""
    model = load_model(str(policy.checkpoint), device=torch.device("cpu"))
    ids = torch.tensor([token_ids])
    logp_TV = model(input_ids=ids).logits[0].float().log_softmax(dim=1)
    own = logp_TV[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([own, logp_TV[-1].max()[None]]).double().numpy()


def distance(left: ProbeLogps, right: ProbeLogps) -> float:
    """Root mean square of the differences; infinite if a number is not finite."""
    difference = float(np.sqrt(np.mean((left - right) ** 2)))
    return difference if np.isfinite(difference) else float("inf")


def mismatch(answered: ProbeLogps, expected: ProbeLogps, others: Mapping[str, ProbeLogps], precision: str) -> str:
    """Why these log-probabilities are not the expected policy's, or an empty string.

    They are too far off, or much nearer to another policy, towards which rounding errors do not point.
    """
    off = distance(answered, expected)
    if off > TOLERANCE[precision]:
        return f"are off by {off:.2g}, where {TOLERANCE[precision]:g} is allowed in {precision}"
    for name, logps in others.items():
        if (near := distance(answered, logps)) < off / 2:
            return f"are those of {name} (off by {near:.2g}, and by {off:.2g} from what they should be)"
    return ""


@dataclass(slots=True)
class AnswerHistory:
    """One engine's answers for the checkpoints that it was found to have, by their weights.

    An engine repeats itself more closely than two implementations agree, which tells versions of one run apart.
    """

    answered: dict[str, ProbeLogps] = field(default_factory=dict)
    slack: float = 0.0  # how closely the engine repeats itself

    def repeat(self, policy: PolicyFiles, answered: ProbeLogps, precision: str) -> None:
        """Set the slack from a second answer."""
        self.slack = max(DRIFT[precision], 4 * distance(answered, self.answered[policy.weights]))

    def has_changed(self, policy: PolicyFiles, answered: ProbeLogps) -> bool:
        """Whether the engine no longer has this checkpoint: restarted, or reloaded."""
        return distance(answered, self.answered[policy.weights]) > self.slack


@dataclass(slots=True)
class PolicyCheck:
    """The expected log-probabilities of the checkpoints that one sampler has loaded."""

    precision: str
    limit: int | None = None  # the engine's context, if shorter than the model's
    _expected: dict[str, tuple[str, list[int], ProbeLogps]] = field(default_factory=dict)

    def token_ids(self, policy: PolicyFiles) -> list[int]:
        """The probe for this checkpoint, whose expected answer is computed at the first call."""
        if policy.weights not in self._expected:
            token_ids = probe_ids(policy, self.limit)
            self._expected[policy.weights] = (policy.checkpoint.name, token_ids, expected_logps(policy, token_ids))
        return self._expected[policy.weights][1]

    def mismatch(self, policy: PolicyFiles, answered: ProbeLogps, history: AnswerHistory) -> str:
        """Why an engine with this answer does not have this checkpoint; empty if it has, which is remembered."""
        token_ids = self.token_ids(policy)
        expected = self._expected[policy.weights][2]
        if answered.shape != expected.shape:
            raise EngineError(f"an engine gave {len(answered)} log-probabilities of a probe with {len(expected)}")
        others: dict[str, ProbeLogps] = {}
        for weights, (name, ids, logps) in self._expected.items():
            # A checkpoint that was only saved again has the same numbers and is no other policy.
            if weights != policy.weights and ids == token_ids and distance(logps, expected) > 0:
                others[name] = logps
                if weights in history.answered:
                    others[f"{name}, to the last digit"] = history.answered[weights]
        if not (problem := mismatch(answered, expected, others, self.precision)):
            history.answered[policy.weights] = answered
        return problem
