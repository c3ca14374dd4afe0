"""The learner: a policy with float32 weights, its optimizer, and one update as a method.

An update reads the whole optimizer batch, in two phases where the objective needs it, so that the gradient does not
depend on the token budget. Everything it holds is in the checkpoint: loading one and going on is exact.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stalewise.config import RunConfig
from stalewise.diagnostics import TokenSums, age_statistics, drift_statistics
from stalewise.errors import StalewiseError
from stalewise.learn.batching import MicroBatch, micro_batches
from stalewise.learn.logp import check_output_layer, response_logp
from stalewise.learn.optimizer import learning_rate, moments_by_name, restore_moments
from stalewise.models import load_model, load_tokenizer, pick_device, pick_precision, turn_dropout_off
from stalewise.objectives import (
    Tokens,
    constant_denominator,
    get_objective,
    group_advantages,
    make_tokens,
    micro_batch_loss,
)
from stalewise.staleness.step_control import vcpo_factor
from stalewise.store import Rows


class NonFiniteUpdate(StalewiseError, ArithmeticError):
    """An update whose gradient or ratios are not finite: nothing was changed."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The rollouts of one update, with advantages; rollouts that cannot teach anything are already gone."""

    rows: Rows
    advantage: Tensor  # [B]
    keep: Tensor  # [B] bool; False: the tokens are out of the loss


class Learner:
    """Holds policy and optimizer between updates. `version` counts the updates that made the policy."""

    def __init__(self, config: RunConfig, checkpoint: Path) -> None:
        self.config = config
        self.objective = get_objective(config.objective.name)
        self.settings = self.objective.settings(config.objective.params)
        self.device = pick_device(config.model.device)
        self.precision = pick_precision(config.model.precision, self.device)
        self.model = load_model(str(checkpoint), device=self.device)
        self.tokenizer = load_tokenizer(str(checkpoint))
        check_output_layer(self.model)
        if config.learner.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.train()  # transformers recomputes activations in training mode only
            turn_dropout_off(self.model)
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.names,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.version = 0
        self.steps = 0  # updates that were taken: one with nothing to learn from is counted in `version` alone
        self.drift = 0.0
        self.proximal: dict[str, Tensor] = {}
        self._snapshot_proximal()

    # ------------------------------------------------------------ checkpoints

    def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go on from a checkpoint whose weights the constructor has loaded."""
        self.version, self.steps, self.drift = state["version"], state["steps"], state["drift"]
        if self.steps:
            moments = load_file(checkpoint / "optimizer.safetensors", device=str(self.device))
            restore_moments(self.optimizer, self.names, moments, self.steps)
        if (checkpoint / "proximal.safetensors").is_file():
            self.proximal = load_file(checkpoint / "proximal.safetensors", device=str(self.device))

    def save(self, directory: Path) -> None:
        """Write policy, tokenizer and optimizer state; the caller commits the directory."""
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        if self.steps:
            save_file(moments_by_name(self.optimizer, self.names), directory / "optimizer.safetensors")
        if self.proximal:
            save_file(self.proximal, directory / "proximal.safetensors")

    def state(self) -> dict[str, Any]:
        """The numbers that belong to a checkpoint."""
        return {"steps": self.steps, "drift": self.drift}

    # ------------------------------------------------------------ one update

    def prepare(self, rows: Rows) -> tuple[UpdateBatch | None, dict[str, float]]:
        """Advantages of the rollouts of one update, None where nothing is left to learn from; and what was left out."""
        scored = torch.from_numpy(rows.reward).isfinite()
        left_out = {"verifier_error_fraction": 1 - float(scored.double().mean()), "degenerate_fraction": float("nan")}
        rows = rows.take(scored.nonzero().squeeze(1).numpy())
        if len(rows) == 0:
            return None, left_out
        kind = self.config.objective.advantage
        found = group_advantages(
            torch.from_numpy(rows.reward).float(),
            torch.from_numpy(rows.group),
            kind=self.objective.advantage if kind == "auto" else kind,
            truncated=torch.from_numpy(rows.truncated),
            truncated_rule=self.config.objective.truncated,
        )
        left_out["degenerate_fraction"] = found.degenerate_groups / found.groups
        chosen = torch.ones(len(rows), dtype=torch.bool)
        if self.objective.drops_degenerate_groups:
            chosen = ~found.degenerate_N
        if not bool((found.advantage_N[chosen] * found.keep_N[chosen]).any()):
            return None, left_out
        batch = UpdateBatch(
            rows=rows.take(chosen.nonzero().squeeze(1).numpy()),
            advantage=found.advantage_N[chosen],
            keep=found.keep_N[chosen],
        )
        return batch, left_out

    def update(self, rows: Rows) -> dict[str, float]:
        """Take one update on these rollouts and say what happened. The version rises by one in any case."""
        batch, left_out = self.prepare(rows)
        described = _describe(rows, self.version) | left_out
        if self.version % self.config.objective.proximal_every == 0:
            self._snapshot_proximal()
        metrics = {"taken": 0.0} if batch is None else {"taken": 1.0, **self._step(batch)}
        self.version += 1
        return described | metrics

    def _step(self, batch: UpdateBatch) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        loss, sums = self._backward(batch)
        stats = sums.summary()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.names, self.config.optimizer.max_grad_norm))
        if stats["nonfinite"] or not torch.isfinite(torch.tensor([grad_norm, loss])).all():
            raise NonFiniteUpdate(
                f"update {self.version}: {int(stats['nonfinite'])} tokens with a non-finite ratio"
                f"{self._name_nonfinite(batch)}, gradient norm {grad_norm:g}, loss {loss:g}; nothing was changed: "
                "start a new run with a lower optimizer.learning_rate or more stages"
            )
        rate = learning_rate(
            self.version,
            peak=self.config.optimizer.learning_rate,
            updates=self.config.schedule.updates,
            warmup_updates=self.config.optimizer.warmup_updates,
            schedule=self.config.optimizer.schedule,
        )
        factor = float(vcpo_factor(sums.sequence_weights)) if self.config.optimizer.step_control == "vcpo" else 1.0
        norm = self._take_step(rate * factor)
        if not math.isfinite(norm):
            raise NonFiniteUpdate(
                f"update {self.version} at learning rate {rate * factor:g} made weights that are not finite; "
                "the last checkpoint is whole: start a new run with a lower optimizer.learning_rate"
            )
        drift = drift_statistics(norm, rate * factor, self.drift)
        self.drift = drift["drift"]
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "step_factor": factor,
            **stats,
            **drift,
        }

    def _take_step(self, rate: float) -> float:
        """One optimizer step at this rate; the norm of the change of all weights."""
        before = [parameter.detach().clone() for parameter in self.names]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.steps += 1
        norms = [torch.linalg.vector_norm(p.detach() - b) for p, b in zip(self.names, before, strict=True)]
        return float(torch.linalg.vector_norm(torch.stack(norms).double()))

    def _backward(self, batch: UpdateBatch) -> tuple[float, TokenSums]:
        """Both phases over all micro-batches; gradients are left on the parameters."""
        parts = list(self._micro_batches(batch))
        proximal = [self._proximal_logp(part) for part in parts]
        denominator = self._denominator(batch)
        statistics = None
        if self.objective.measure is not None and len(parts) > 1:
            with torch.no_grad():
                measured = [
                    self.objective.measure(self._tokens(part, batch, near, self._forward(part)[0]), self.settings)
                    for part, near in zip(parts, proximal, strict=True)
                ]
            statistics = reduce(lambda merged, more: merged.merge(more), measured)
        total, all_sums = 0.0, []
        for part, near in zip(parts, proximal, strict=True):
            logp_BT, entropy_BT = self._forward(part)
            tokens = self._tokens(part, batch, near, logp_BT)
            if len(parts) == 1:  # the batch in one piece needs no pass of its own for its statistics
                statistics = self.objective.first_pass(tokens, self.settings)
            loss, sums = micro_batch_loss(
                self.objective, tokens, statistics, self.settings, denominator, entropy_BT=entropy_BT
            )
            loss.backward()
            total, all_sums = total + loss.detach(), [*all_sums, sums]
        return float(total), reduce(lambda merged, more: merged.merge(more), all_sums)

    def _name_nonfinite(self, batch: UpdateBatch) -> str:
        """Where the first tokens with a non-finite ratio are, by rollout and place in the response."""
        places: list[str] = []
        for part in self._micro_batches(batch):
            with torch.no_grad():
                tokens = self._tokens(part, batch, None, self._forward(part)[0])
            bad = ~tokens.log_ratio_BT.exp().isfinite() & tokens.mask_BT
            ids = batch.rows.rollout_id[part.rows]
            places += [f"rollout {ids[row]} token {column}" for row, column in bad.nonzero().tolist()]
        return f" ({', '.join(places[:3])})" if places else ""

    def _micro_batches(self, batch: UpdateBatch) -> Iterator[MicroBatch]:
        return micro_batches(
            batch.rows,
            token_budget=self.config.learner.tokens_per_micro_batch,
            pad_id=self.tokenizer.pad_token_id,
            device=self.device,
        )

    def _denominator(self, batch: UpdateBatch) -> float:
        if self.objective.constant_denominator:
            return constant_denominator(int(batch.keep.sum()), self.config.sampler.max_new_tokens)
        if self.objective.reduction == "sequence":
            return float(batch.keep.sum())
        lengths = torch.from_numpy(batch.rows.response_lengths)
        return float(lengths[batch.keep].sum())

    def _forward(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        enabled = self.precision is not torch.float32
        with torch.autocast(self.device.type, dtype=self.precision, enabled=enabled):
            return response_logp(self.model, part)

    def _tokens(self, part: MicroBatch, batch: UpdateBatch, proximal_logp: Tensor | None, logp_BT: Tensor) -> Tokens:
        return make_tokens(
            logp=logp_BT,
            behaviour_logp=part.behaviour_logp_BT,
            advantage=batch.advantage[part.rows].to(self.device),
            mask=part.mask_BT & batch.keep[part.rows].to(self.device).unsqueeze(1),
            proximal_logp=proximal_logp,
            check_values=False,
        )

    # ------------------------------------------------------------ the proximal policy

    def _snapshot_proximal(self) -> None:
        if self.objective.needs_proximal:
            self.proximal = {name: parameter.detach().clone() for parameter, name in self.names.items()}

    def _proximal_logp(self, part: MicroBatch) -> Tensor | None:
        if not self.proximal:
            return None
        with torch.no_grad(), self._weights(self.proximal):
            return self._forward(part)[0]

    @contextlib.contextmanager
    def _weights(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """The model with other weights for a while; nothing is copied."""
        current = {name: parameter.data for parameter, name in self.names.items()}
        try:
            for parameter, name in self.names.items():
                parameter.data = weights[name]
            yield
        finally:
            for parameter, name in self.names.items():
                parameter.data = current[name]


def _describe(rows: Rows, version: int) -> dict[str, float]:
    reward = torch.from_numpy(rows.reward)
    reward = reward[reward.isfinite()]
    return {
        "rollouts": float(len(rows)),
        "reward": float(reward.mean()) if len(reward) else float("nan"),
        "truncated_fraction": float(rows.truncated.mean()),
        **age_statistics(version, torch.from_numpy(rows.version_first)),
    }
