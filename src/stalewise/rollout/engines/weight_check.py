"""Is the policy that an engine samples from the one in the checkpoint? Asked with a fixed sequence of tokens.

An engine keeps its weights in another process, loads them by code that is not ours, and may be restarted by someone
else. Rollouts of other weights than their version says would be learned from as if nothing were wrong, so the engine's
log-probabilities of the probe are compared with those of the checkpoint, which transformers computes on the CPU once
per checkpoint. Numbers of N probed places are one vector: the probe's own tokens (computed by the engine without its
prefix cache), and last the most probable next token (computed with it).
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

Numbers = npt.NDArray[np.float64]

LENGTH = 64
# Root mean square of differences from a float32 forward pass; for what was measured see docs/engines.md.
TOLERANCE = {"float32": 3e-4, "bfloat16": 0.4, "float16": 0.1}
# The same of two answers of one engine that has kept its weights and has nothing else to do.
DRIFT = {"float32": 1e-4, "bfloat16": 1e-3, "float16": 1e-3}


def probe_ids(policy: PolicyFiles, limit: int | None) -> list[int]:
    """The fixed sequence: ordinary tokens, drawn evenly; shorter where the engine's context is."""
    special = set(policy.tokenizer.all_special_ids)
    ordinary = [token for token in range(min(policy.vocabulary, len(policy.tokenizer))) if token not in special]
    length = min([LENGTH, *(room - 1 for room in (policy.context, limit) if room is not None)])
    drawn = uniform(np.zeros(1, dtype=np.uint64), np.arange(length, dtype=np.uint64))
    return [ordinary[int(number * len(ordinary))] for number in drawn]


@torch.no_grad()
def expected_numbers(policy: PolicyFiles, token_ids: list[int]) -> Numbers:
    """What the checkpoint's own policy gives: a float32 forward pass on the CPU. The model is dropped afterwards."""
    model = load_model(str(policy.checkpoint), device=torch.device("cpu"))
    ids = torch.tensor([token_ids])
    logp_TV = model(input_ids=ids).logits[0].float().log_softmax(dim=1)
    own = logp_TV[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([own, logp_TV[-1].max()[None]]).double().numpy()


def distance(left: Numbers, right: Numbers) -> float:
    """Root mean square of the differences; infinite where a number is not finite."""
    difference = float(np.sqrt(np.mean((left - right) ** 2)))
    return difference if np.isfinite(difference) else float("inf")


def problem_with(answered: Numbers, expected: Numbers, others: Mapping[str, Numbers], precision: str) -> str:
    """Why these cannot be the numbers of the expected policy, or an empty string.

    Too far away; or, which half precision makes possible within the tolerance, much nearer to another policy: a right
    engine is off by rounding alone, and rounding has no direction towards other weights.
    """
    off = distance(answered, expected)
    if off > TOLERANCE[precision]:
        return f"are off by {off:.2g}, where {TOLERANCE[precision]:g} is allowed in {precision}"
    for name, numbers in others.items():
        near = distance(answered, numbers)
        if near < off / 2:
            return f"are those of {name} (off by {near:.2g}, and by {off:.2g} from what they should be)"
    return ""


@dataclass(slots=True)
class Memory:
    """What one engine answered for each checkpoint that it was found to have, by the checkpoint's weights.

    One engine repeats itself far more closely than two implementations agree: this is what tells versions of one run
    apart where the tolerance of half precision cannot.
    """

    answered: dict[str, Numbers] = field(default_factory=dict)
    slack: float = 0.0  # how closely it repeats itself

    def repeat(self, policy: PolicyFiles, answered: Numbers, precision: str) -> None:
        """Learn from a second answer how closely the engine repeats itself."""
        self.slack = max(DRIFT[precision], 4 * distance(answered, self.answered[policy.weights]))

    def changed(self, policy: PolicyFiles, answered: Numbers) -> bool:
        """Whether an engine that was found to have this checkpoint answers otherwise now: restarted, or reloaded."""
        return distance(answered, self.answered[policy.weights]) > self.slack


@dataclass(slots=True)
class PolicyCheck:
    """Expected numbers of the checkpoints that one sampler has met."""

    precision: str
    limit: int | None = None  # the engine's context, where it is shorter than the model's
    _expected: dict[str, tuple[str, list[int], Numbers]] = field(default_factory=dict)

    def token_ids(self, policy: PolicyFiles) -> list[int]:
        """The tokens to ask for; what is expected of this checkpoint is computed, unless that is known."""
        if policy.weights not in self._expected:
            token_ids = probe_ids(policy, self.limit)
            self._expected[policy.weights] = (policy.checkpoint.name, token_ids, expected_numbers(policy, token_ids))
        return self._expected[policy.weights][1]

    def problem(self, policy: PolicyFiles, answered: Numbers, memory: Memory) -> str:
        """Why an engine that answers so cannot have this checkpoint, or an empty string, which is remembered."""
        token_ids = self.token_ids(policy)
        expected = self._expected[policy.weights][2]
        if answered.shape != expected.shape:
            raise EngineError(f"an engine gave {len(answered)} log-probabilities of a probe with {len(expected)}")
        others: dict[str, Numbers] = {}
        for weights, (name, ids, numbers) in self._expected.items():
            # A checkpoint that was only saved again has the same numbers and is no other policy.
            if weights != policy.weights and ids == token_ids and distance(numbers, expected) > 0:
                others[name] = numbers
                if weights in memory.answered:
                    others[f"{name}, to the last digit"] = memory.answered[weights]
        problem = problem_with(answered, expected, others, self.precision)
        if not problem:
            memory.answered[policy.weights] = answered
        return problem
