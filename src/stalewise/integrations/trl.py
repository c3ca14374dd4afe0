"""TRL's GRPO trainer with the objectives, diagnostics and rollout store of stalewise.

Loss, advantages and behaviour log-probabilities are replaced. Statistics and denominators are those of the whole
optimizer batch, over gradient accumulation and ranks, so the gradient does not depend on how a batch is split.

Axes: B rollouts of a micro-batch, T their response tokens, N rollouts of a generation batch on all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import is_async_callable

from stalewise import objectives
from stalewise.distributed import merge_over_ranks
from stalewise.errors import ConfigError, TaskError
from stalewise.integrations.trl_store import RolloutWriter
from stalewise.objectives.batch_statistics import Mergeable
from stalewise.objectives.diagnostics import TokenSums, age_statistics
from stalewise.trainer.trainer import NonFiniteUpdate
from stalewise.types import SamplerSettings

PREFIX = "stalewise/"  # before the names of docs/metrics.md: TRL has an `entropy` of its own

# Settings of TRL's own losses and advantages that are not used here; changing one is an error.
UNREAD = ("beta", "delta", "entropy_coef", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type")
UNREAD += ("multi_objective_aggregation", "off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile")
UNREAD += ("use_adaptive_entropy",)
# What to do instead, for some of them.
INSTEAD: Mapping[str, str] = {
    "beta": "a KL to a reference is not available here, but in stalewise.train(kl=…)",
    "scale_rewards": "the objective says how advantages are scaled, as 'dr_grpo' does without the standard deviation",
    "loss_type": "name the loss in objective=…",
    "importance_sampling_level": "objective='gspo' has one ratio for each response",
    **dict.fromkeys(("epsilon", "epsilon_high", "delta"), "set bounds in objective_params"),
    **dict.fromkeys(
        ("entropy_coef", "use_adaptive_entropy"),
        "an entropy bonus is not available here, but in stalewise.train(entropy_bonus=…)",
    ),
}
# Settings of `generate` for which a forward pass gives the sampling distribution.
UNTRUNCATED: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty"), (None, 1.0)),
    **{name: (None, least) for name, least in (("top_k", 0), ("min_p", 0.0), ("num_beams", 1))},
}
# Further inputs of the model's forward, by their names in TRL's micro-batches.
EXTRA_INPUTS = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles")
EXTRA_INPUTS += ("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids")


log = logging.getLogger(__name__)


def check_directory(store: Any) -> None:
    """Refuse a `store` that cannot be a directory, before a model is loaded."""
    if not isinstance(store, str | Path):
        raise ConfigError(f"store={store!r:.60} is not a path: name a directory")
    path = Path(store) / "rollouts"
    existing = next((parent for parent in (path, *path.parents) if os.path.lexists(parent)), Path())
    if not existing.is_dir():
        raise ConfigError(f"store={store}: {existing} is a file: name a directory")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"store={store}: {existing} cannot be written: name another directory")


def _is_infinite_or_nan(value: Any) -> bool:
    try:
        return value is not None and not math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # no number: TRL's error says so
        return False


@dataclass(slots=True)
class _Window:
    """One optimizer batch: its micro-batches on this rank, and its statistics over all ranks."""

    parts: list[dict[str, Any]]
    denominator: Tensor
    statistics: Mergeable | None
    sums: list[TokenSums] = field(default_factory=list)


class StaleGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with an objective of `stalewise.objectives`.

    Further arguments: `objective` with `objective_params` (docs/objectives.md), and `store`, a directory to which every
    generation batch is written for `stalewise learn`. TRL logs the diagnostics of docs/metrics.md under `stalewise/`.
    """

    # transformers and TRL type these too widely.
    model: Any
    args: Any
    accelerator: Any
    num_generations: Any
    num_generations_eval: Any

    def __init__(
        self,
        *arguments: Any,
        objective: str = "mu_grpo",
        objective_params: Mapping[str, Any] | None = None,
        store: str | Path | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(objective, str):
            raise ConfigError(f"objective is {objective!r:.60}: name one, as 'mu_grpo'; docs/objectives.md lists them")
        if store is not None:
            check_directory(store)
        try:
            self.objective = objectives.get_objective(objective)
            self.objective_settings = self.objective.settings(objective_params)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        super().__init__(*arguments, **more)
        self._check_settings(store)
        self._writer, self._has_written = None, False
        if store is not None:
            sampler, stops = self._sampler_settings(), set(self.eos_token_ids)
            size, seed = self.num_generations, self.args.seed
            self._writer = RolloutWriter(Path(store), self.processing_class, sampler, size, stops, seed)
        self.reward_funcs = [*map(self._noting, self.reward_funcs, self.reward_func_names)]
        self._not_finite: set[int] = set()  # completions on this rank of which a function returned NaN or infinity
        self._rewards = torch.empty(0)  # [N, functions] of the last scored generation batch
        self._version = 0  # updates before the current generation batch
        self._window: _Window | None = None

    def _check_settings(self, store: str | Path | None) -> None:
        for name in UNREAD:
            value, default = getattr(self.args, name), GRPOConfig.__dataclass_fields__[name].default
            if value != default:
                unused = f"GRPOConfig.{name} is {value!r}, but objective {self.objective.name} does not use it"
                instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
                raise ConfigError(f"{unused}: leave it at {default!r}{instead}")
        if self.aux_loss_enabled:
            raise ConfigError("the router's auxiliary loss is not part of the objective: set router_aux_loss_coef=0.0")
        passes, steps = self.args.gradient_accumulation_steps, self.args.steps_per_generation
        if steps % passes:
            what = f"steps_per_generation is {steps}, not a multiple of gradient_accumulation_steps {passes}"
            raise ConfigError(f"{what}: an update would need rollouts that are not generated yet; make it a multiple")
        # Without vLLM, log-probabilities come from a forward pass, which only takes the temperature into account.
        is_recomputed = not self.use_vllm and self.rollout_func is None
        for name, values in {**UNTRUNCATED, "temperature": (self.temperature,)}.items() if is_recomputed else ():
            if (value := getattr(self.generation_config, name, None)) not in values:
                what = f"generation with {name}={value!r} samples from a distribution without log-probabilities in TRL"
                raise ConfigError(f"{what}: set it to {values[-1]!r}, or generate with use_vllm=True")
        if store is not None and self.mask_truncated_completions:
            what = "mask_truncated_completions removes responses that `store` has to keep"
            raise ConfigError(f"{what}: leave it out; objective.truncated masks them in `stalewise learn`")

    def _sampler_settings(self) -> SamplerSettings:
        own = str(self.model.dtype).removeprefix("torch.")
        precision = "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else own
        shape = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k or 0}
        return SamplerSettings(name="trl-vllm" if self.use_vllm else "trl", precision=precision, **shape)

    def _noting(self, function: Any, name: str) -> Any:
        """Wrap a reward function: warn if it returns neither a finite number nor None.

        TRL turns None ("does not apply") into NaN, so the two cannot be told apart afterwards.
        """

        def note(result: Any) -> list[Any]:
            rewards = list(result)
            wrong = {row: float(reward) for row, reward in enumerate(rewards) if _is_infinite_or_nan(reward)}
            self._warn(name, list(wrong.values()), len(rewards))
            self._not_finite.update(wrong)
            return rewards

        async def call_later(**arguments: Any) -> list[Any]:
            return note(await function(**arguments))

        if isinstance(function, torch.nn.Module):
            return function
        return call_later if is_async_callable(function) else lambda **arguments: note(function(**arguments))

    @staticmethod
    def _warn(name: str, wrong: list[float], count: int) -> None:
        if wrong:
            log.warning(
                f"the reward function {name} returned {wrong[0]} for {len(wrong)} of {count} completions, which are "
                "left out: return a finite number, or None where it does not apply"
            )

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *arguments: Any) -> Tensor:
        """Rewards of all ranks, [N, functions]. A completion with a non-finite reward loses all its rewards."""
        self._not_finite.clear()
        reward_NF = super()._calculate_rewards(inputs, *arguments)
        wrong_B = torch.tensor([row in self._not_finite for row in range(len(inputs))], device=reward_NF.device)
        wrong_N = self.accelerator.gather(wrong_B)
        for column, function in enumerate(self.reward_funcs):
            if isinstance(function, torch.nn.Module):  # a reward model never returns None
                unknown_N = ~reward_NF[:, column].isfinite()
                wrong_N |= unknown_N
                self._warn(self.reward_func_names[column], reward_NF[unknown_N, column].tolist(), len(reward_NF))
        self._rewards = reward_NF.masked_fill(wrong_N.unsqueeze(1), torch.nan)
        if self.model.training and bool(self._rewards.isnan().all()):
            names = ", ".join(self.reward_func_names)
            raise TaskError(
                f"update {self.state.global_step}: none of the {len(reward_NF)} completions has a reward ({names}): "
                "there is nothing to learn from; each needs a number from at least one function"
            )
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._writer is not None and self.model.training and not self._has_written:
            self._writer.check_new(self.state.global_step)
            self._has_written = True
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._version = self.state.global_step
        policy_logp = output.get("old_per_token_logps")
        if policy_logp is None:  # TRL omits them if a generation batch serves one update
            size = self.args.per_device_train_batch_size
            with self._without_gradient():
                policy_logp, _ = self._policy_logp(self.model, output, batch_size=size)
        sampled_logp = output.get("sampling_per_token_logps", policy_logp)
        output["behaviour_logp"] = torch.where(sampled_logp.isnan(), policy_logp, sampled_logp)
        output["proximal_logp"] = policy_logp
        # Weighted sum of the reward functions; NaN where none gave a reward.
        reward_N = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(dim=1)
        reward_N = reward_N.masked_fill(self._rewards.isnan().all(dim=1), torch.nan)
        rank = self.accelerator.process_index
        own_rows = slice(rank * len(inputs), (rank + 1) * len(inputs))
        output["advantages"], output["kept"] = (part_N[own_rows] for part_N in self._advantages(reward_N))
        if self._writer is not None and self.model.training:
            parts = dict(zip(self.reward_func_names, self._rewards.T.tolist(), strict=True))
            scores = {"rewards": reward_N.tolist(), "parts": parts}
            seconds = time.perf_counter() - start
            self._writer.write(inputs, output, **scores, version=self._version, seconds=seconds)
        return output

    def _advantages(self, reward_N: Tensor) -> tuple[Tensor, Tensor]:
        """The objective's advantages, and which rollouts stay in the update, [N]."""
        size = self.num_generations if self.model.training else self.num_generations_eval
        group_N = torch.arange(len(reward_N), device=reward_N.device) // size
        kept_N = reward_N.isfinite()
        advantage_N = torch.zeros_like(reward_N)
        if bool(kept_N.any()):
            found = objectives.group_advantages(reward_N[kept_N], group_N[kept_N], kind=self.objective.advantage)
            advantage_N[kept_N] = found.advantage_N
            if self.objective.drops_degenerate_groups:
                kept_N[kept_N.clone()] = ~found.degenerate_N
        return advantage_N, kept_N

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        logp_BT, entropy_BT = self._policy_logp(model, inputs, compute_entropy=True)
        tokens = self._tokens(inputs, logp_BT)
        window = self._window if training else None
        if window is None:
            window = self._open_window(model, self._parts() if training else [inputs], tokens)
        over_batch = window.statistics, self.objective_settings, window.denominator
        loss, token_loss = objectives.micro_batch_loss(self.objective, tokens, *over_batch)
        window.sums.append(objectives.micro_batch_sums(tokens, token_loss, entropy_BT))
        is_last = len(window.sums) == len(window.parts)
        if training:
            self._window = None if is_last else window
        if is_last:
            self._log_window(window, "train" if training else "eval")
        # Gradients are summed over micro-batches and averaged over ranks.
        return loss * self.accelerator.num_processes

    def _parts(self) -> list[dict[str, Any]]:
        """Micro-batches of the update that starts now."""
        assert self._buffered_inputs is not None
        first, count = self._step % self.args.steps_per_generation, self.current_gradient_accumulation_steps
        parts = self._buffered_inputs[first : first + count]
        if len(parts) < count:  # after an epoch that ended in the middle of an update
            raise ConfigError("an update would need rollouts of two generation batches: use a dataset of whole batches")
        return parts

    def _open_window(self, model: Any, parts: list[dict[str, Any]], first: objectives.Tokens) -> _Window:
        """First pass over the whole optimizer batch; `first` is the forward pass of its first micro-batch."""
        by_response = self.objective.reduction == "sequence" or self.objective.constant_denominator
        masks = [self._mask(part) for part in parts]
        counts = [mask.any(dim=1).sum() if by_response else mask.sum() for mask in masks]
        denominator = self.accelerator.reduce(torch.stack(counts).sum(), reduction="sum").clamp(min=1)
        if self.objective.constant_denominator:
            denominator = denominator * self.max_completion_length
        statistics = None
        if self.objective.measure is not None:
            with self._without_gradient():
                others = [self._tokens(part, self._policy_logp(model, part)[0]) for part in parts[1:]]
            measured = [self.objective.measure(tokens, self.objective_settings) for tokens in [first, *others]]
            statistics = merge_over_ranks(reduce(lambda merged, more: merged.merge(more), measured))
        return _Window(parts, denominator, statistics)

    def _log_window(self, window: _Window, mode: str) -> None:
        found = merge_over_ranks(reduce(TokenSums.merge, window.sums)).summary()
        if found["nonfinite"]:
            raise NonFiniteUpdate(
                f"update {self.state.global_step}: {int(found['nonfinite'])} tokens with a non-finite ratio; no step "
                "was taken: restart from a checkpoint with a lower learning_rate or a smaller steps_per_generation"
            )
        if mode == "train":
            found |= age_statistics(self.state.global_step, torch.tensor([self._version]))
        for name, value in found.items():
            self._metrics[mode][PREFIX + name].append(value)

    def _tokens(self, inputs: dict[str, Any], logp_BT: Tensor) -> objectives.Tokens:
        return objectives.make_tokens(
            logp=logp_BT,
            behaviour_logp=inputs["behaviour_logp"],
            advantage=inputs["advantages"],
            mask=self._mask(inputs),
            proximal_logp=inputs["proximal_logp"] if self.objective.needs_proximal else None,
            check_values=False,
        )

    @contextlib.contextmanager
    def _without_gradient(self) -> Iterator[None]:
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            yield

    def _mask(self, inputs: dict[str, Any]) -> Tensor:
        mask_BT = inputs["completion_mask"].bool() & inputs["kept"].unsqueeze(1)
        return mask_BT & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask_BT

    def _policy_logp(
        self, model: Any, inputs: dict[str, Any], *, batch_size: int | None = None, compute_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the responses at the sampling temperature, and entropies on request, [B, T]."""
        logp_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            **{name: inputs.get(name) for name in EXTRA_INPUTS},
        )
        return logp_BT, entropy_BT
