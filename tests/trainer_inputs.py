"""Made-up rollouts and configs for tests of the trainer."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from stalewise.config import RunConfig, make_config
from stalewise.models import EMBEDDED
from stalewise.models.loading import load_model
from stalewise.store import RolloutColumns
from stalewise.trainer.trainer import Trainer

POLICY = EMBEDDED / "arithmetic-steps"


CPU = torch.device("cpu")


def config(**sections: Any) -> RunConfig:
    return make_config({"sampler": {"max_new_tokens": 64}, "optimizer": {"learning_rate": 1e-3}} | sections)


def rollouts(
    groups: int = 3, size: int = 4, *, seed: int = 0, drift: float = 0.3, shared: bool = True
) -> RolloutColumns:
    """Made-up rollouts of different lengths, with behaviour log-probabilities near those of the policy.

    A group shares its prompt, as it does in life, unless told otherwise.
    """
    rng = np.random.default_rng(seed)
    count = groups * size
    prompt_lengths, response_lengths = rng.integers(2, 9, count), rng.integers(1, 20, count)
    prompts = [rng.integers(3, 18, length) for length in prompt_lengths]
    if shared:
        prompts = [prompts[row - row % size] for row in range(count)]
        prompt_lengths = np.array([len(prompt) for prompt in prompts])
    rows = RolloutColumns(
        rollout_id=np.arange(count),
        group=np.repeat(np.arange(groups), size),
        reward=rng.integers(0, 2, count).astype(np.float64),
        truncated=rng.random(count) < 0.3,
        version_first=np.zeros(count, dtype=np.int32),
        version_last=np.zeros(count, dtype=np.int32),
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=np.r_[0, prompt_lengths.cumsum()],
        response_ids=rng.integers(3, 18, response_lengths.sum()).astype(np.int32),
        behaviour_logp=np.zeros(response_lengths.sum(), dtype=np.float32),
        response_offsets=np.r_[0, response_lengths.cumsum()],
    )
    rows.reward[::size], rows.reward[1::size] = 1.0, 0.0  # no group without variance
    rows.behaviour_logp[:] = padded_logp(rows) + drift * rng.normal(size=len(rows.response_ids)).astype(np.float32)
    return rows


def padded_logp(rows: RolloutColumns) -> np.ndarray:
    """All rows in one forward pass: what is padded on the right, no token before it sees."""
    sequences = [torch.tensor([*rows.prompt(row), *rows.response(row)]) for row in range(len(rows))]
    ids_BL = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    with torch.no_grad():
        logp_BLV = _plain_model()(input_ids=ids_BL[:, :-1]).logits.log_softmax(-1)
    logp_BL = logp_BLV.gather(2, ids_BL[:, 1:, None])[:, :, 0].numpy()
    ends = [(len(rows.prompt(row)) - 1, len(ids) - 1) for row, ids in enumerate(sequences)]
    return np.concatenate([logp_L[first:last] for logp_L, (first, last) in zip(logp_BL, ends, strict=True)])


def plain_logp(rows: RolloutColumns) -> np.ndarray:
    """Row by row through the whole model: the slow way, taken once for a row."""
    return np.concatenate(
        [_row_logp(tuple(rows.prompt(row).tolist()), tuple(rows.response(row).tolist())) for row in range(len(rows))]
    )


@cache
def _plain_model() -> Any:
    return load_model(str(POLICY), device=CPU)


@cache
def _row_logp(prompt: tuple[int, ...], response: tuple[int, ...]) -> np.ndarray:
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logp = _plain_model()(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logp.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def tokens_of(part: Any) -> list[int]:
    """Of each passage, padding included."""
    return [passage["input_ids"].numel() for passage in part.inputs]


def gradient_after_update(name: str, token_budget: int, **objective: Any) -> tuple[torch.Tensor, dict[str, float]]:
    settings = config(
        objective={"name": name, **objective},
        learner={"tokens_per_micro_batch": token_budget},
        optimizer={"learning_rate": 1e-5},
    )
    trainer = Trainer(settings, POLICY)
    trainer.update(rollouts(seed=1))
    metrics = trainer.update(rollouts(seed=2))
    return torch.cat([parameter.grad.flatten() for parameter in trainer.names if parameter.grad is not None]), metrics


def of_lengths(lengths: np.ndarray, *, prompt: int, size: int) -> RolloutColumns:
    """Made-up rollouts with responses of these lengths, in groups of one size with a prompt each."""
    count = len(lengths)
    return RolloutColumns(
        rollout_id=np.arange(count),
        group=np.arange(count) // size,
        reward=(np.arange(count) % 2).astype(np.float64),
        truncated=np.zeros(count, dtype=np.bool_),
        version_first=np.zeros(count, dtype=np.int32),
        version_last=np.zeros(count, dtype=np.int32),
        prompt_ids=np.repeat(np.arange(count) // size + 3, prompt).astype(np.int32),
        prompt_offsets=np.arange(count + 1) * prompt,
        response_ids=(np.arange(lengths.sum()) % 15 + 3).astype(np.int32),
        behaviour_logp=np.full(lengths.sum(), -3.0, dtype=np.float32),
        response_offsets=np.r_[0, lengths.cumsum()],
    )


def one_long_among_short(short: int, long: int) -> RolloutColumns:
    return of_lengths(np.array([long, *[5] * short]), prompt=4, size=1 + short)
