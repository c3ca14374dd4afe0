"""The learner: a policy with float32 weights, its optimizer, and one update as a method.

An update reads the whole optimizer batch, in two phases where the objective needs it, so that the gradient does not
depend on the token budget. Everything it holds is in the checkpoint: loading one and going on is exact.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stalewise.attention import PACKED, needs_grids, packs, to_device
from stalewise.compilation import compile_layers, compiling_pays
from stalewise.config import RunConfig
from stalewise.diagnostics import TokenSums, age_statistics, drift_statistics
from stalewise.errors import ModelError, StalewiseError
from stalewise.learn.batching import Layout, MicroBatch, micro_batches
from stalewise.learn.graphs import GraphedBody
from stalewise.learn.logp import PLAIN_KERNELS, check_output_layer, compiled_kernels, response_logp
from stalewise.learn.lora import load_policy
from stalewise.learn.optimizer import copies, distance, learning_rate, moments_by_file, read_moments, restore_moments
from stalewise.learn.pending import PendingUpdate, Read, recorded, to_host
from stalewise.learn.update_batch import UpdateBatch, loss_denominator, make_update_batch
from stalewise.models import load_tokenizer, pick_device, pick_precision, turn_dropout_off
from stalewise.objectives import Tokens, get_objective, make_tokens, micro_batch_loss
from stalewise.staleness.step_control import vcpo_factor
from stalewise.store import Rows, TokenRecord

Step = tuple[Callable[[], dict[str, float]], Callable[[], TokenRecord] | None]


class NonFiniteUpdate(StalewiseError, ArithmeticError):
    """An update whose gradient or ratios are not finite: nothing was changed."""

    exit_code = 4


class Learner:
    """Holds policy and optimizer between updates. `version` counts the updates that made the policy."""

    def __init__(self, config: RunConfig, checkpoint: Path, say: Callable[[str], object] = lambda text: None) -> None:
        """`say` is told what a person should know."""
        self.config = config
        self.say = say
        self.token_budget = config.learner.tokens_per_micro_batch
        self.objective = get_objective(config.objective.name)
        self.settings = self.objective.settings(config.objective.params)
        self.device = pick_device(config.model.device)
        self.precision = pick_precision(config.model.precision, self.device)
        self.model, self.adapters = load_policy(config, checkpoint, self.device)
        self.tokenizer = load_tokenizer(str(checkpoint))
        check_output_layer(self.model)
        if config.learner.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.train()  # transformers recomputes activations in training mode only
            turn_dropout_off(self.model)
        self.packed = packs(self.model, self.precision)
        if self.packed:
            self.model.set_attn_implementation(PACKED)
        else:
            self.say(f"{type(self.model).__name__} cannot be packed: its micro-batches are padded, which costs time")
        self.kernels = PLAIN_KERNELS
        if compiled := compiling_pays(config, self.model):
            compile_layers(self.model)
            self.kernels = compiled_kernels()
        self.names = {parameter: name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.body: GraphedBody | None = None
        if compiled and self.packed and self._can_be_graphed():
            self.body = GraphedBody(self.model, list(self.names), self.precision)
        optimizer = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.names,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.rate_factor = 1.0  # on the config's learning rate, where a guard has lowered it
        self.version = 0
        self.steps = 0  # updates that were taken: one with nothing to learn from is counted in `version` alone
        self.drift = 0.0
        self.proximal: dict[str, Tensor] = {}
        self._snapshot_proximal()

    def _can_be_graphed(self) -> bool:
        """Recomputed activations and float32 attention do things that a graph cannot hold."""
        low = self.precision is not torch.float32
        return self.device.type == "cuda" and low and not self.config.learner.gradient_checkpointing

    # ------------------------------------------------------------ checkpoints

    def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go on from a checkpoint whose weights the constructor has loaded."""
        self.version, self.steps, self.drift = state["version"], state["steps"], state["drift"]
        if self.steps:
            restore_moments(self.optimizer, self.names, read_moments(checkpoint, self.device), self.steps)
        if (checkpoint / "proximal.safetensors").is_file():
            self.proximal = load_file(checkpoint / "proximal.safetensors", device=str(self.device))

    def save(self, directory: Path) -> None:
        """Write policy, tokenizer and optimizer state; the caller commits the directory."""
        files = moments_by_file(self.optimizer, self.names) if self.steps else {}
        if self.proximal:
            files["proximal.safetensors"] = self.proximal
        with ThreadPoolExecutor() as threads:  # each of them is as large as the policy
            written = [threads.submit(save_file, tensors, directory / name) for name, tensors in files.items()]
            (self.model.save_pretrained if self.adapters is None else self.adapters.save)(directory)
            self.tokenizer.save_pretrained(directory)
            for file in written:
                file.result()

    def state(self) -> dict[str, Any]:
        """The numbers that belong to a checkpoint."""
        return {"steps": self.steps, "drift": self.drift}

    # ------------------------------------------------------------ one update

    def update(self, rows: Rows) -> dict[str, float]:
        """Take one update on these rollouts and say what happened."""
        before = self.version, self.steps
        try:
            return self.enqueue(rows).metrics()
        except NonFiniteUpdate:
            self.version, self.steps = before
            raise

    def gradient(self, rows: Rows) -> Tensor:
        """What an update on these rollouts would follow, as one vector; nothing is changed. 0 where nothing teaches."""
        batch, _ = make_update_batch(rows, self.config, self.objective)
        self.optimizer.zero_grad(set_to_none=self.body is None)
        if batch is not None:
            self._backward(batch, list(self._micro_batches(batch)))
        found = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self.names]
        self.optimizer.zero_grad(set_to_none=self.body is None)
        return torch.cat([gradient.flatten() for gradient in found])

    def enqueue(self, rows: Rows) -> PendingUpdate:
        """Take one update on these rollouts, without waiting for the device. The version rises by one in any case."""
        batch, described = make_update_batch(rows, self.config, self.objective)
        described |= age_statistics(self.version, torch.from_numpy(rows.version_first))
        if self.version % self.config.objective.proximal_every == 0:
            self._snapshot_proximal()
        pending = PendingUpdate(described, *(self._step_within_memory(batch) if batch is not None else (None, None)))
        self.version += 1
        return pending

    def _step_within_memory(self, batch: UpdateBatch) -> Step:
        """One step; where the device runs out of memory on the way, once with half the token budget from here on."""
        taken = self.steps
        try:
            return self._step(batch)
        except torch.OutOfMemoryError:
            if self.steps > taken:  # the weights have changed: once more would be twice
                raise ModelError("out of memory after a step: lower learner.tokens_per_micro_batch") from None
            if self.token_budget < self.config.learner.tokens_per_micro_batch:
                raise ModelError(
                    f"out of memory with {self.token_budget} tokens a micro-batch: lower "
                    "learner.tokens_per_micro_batch, or set learner.gradient_checkpointing"
                ) from None
        # Out of the handler, whose traceback would keep the activations alive.
        self.token_budget //= 2
        self.body = None
        self.say(f"out of memory: from here on {self.token_budget} tokens a micro-batch, half of what the config says")
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return self._step(batch)

    def _step(self, batch: UpdateBatch) -> Step:
        """Enqueue one step; the results wait for it and say what happened, and what it saw of each token."""
        self.optimizer.zero_grad(set_to_none=self.body is None)
        parts = list(self._micro_batches(batch))
        loss, sums, places, seen = self._backward(batch, parts)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.names, self.config.optimizer.max_grad_norm)
        # Decided on the device, where waiting would leave it idle: a step on such numbers changes nothing.
        unusable = ~(torch.stack([loss, grad_norm]).isfinite().all() & (places < 0).all())
        rate = learning_rate(
            self.version,
            peak=self.config.optimizer.learning_rate,
            updates=self.config.schedule.updates,
            warmup_updates=self.config.optimizer.warmup_updates,
            schedule=self.config.optimizer.schedule,
        )
        rate *= self.rate_factor
        controlled = self.config.optimizer.step_control == "vcpo"
        factor = vcpo_factor(sums.sequence_weights) if controlled else loss.new_ones(())
        # As float32, which is what a fused step reads on a GPU.
        norm = self._take_step((rate * factor).float() if controlled else rate, unusable)
        numbers = torch.stack([x.double() for x in (loss, grad_norm, factor, norm)])
        read = to_host(torch.cat([numbers, places.double(), sums.pack()]))
        ids = [batch.rows.rollout_id[part.rows] for part in parts]
        widths = [part.mask_BT.shape[1] for part in parts]
        return partial(self._read_step, read, self.version, rate, ids, widths), seen

    def _read_step(
        self, read: Read, update: int, rate: float, ids: list[np.ndarray], widths: list[int]
    ) -> dict[str, float]:
        numbers, places, packed = read().tensor_split([4, 4 + len(ids)])
        loss, grad_norm, factor, norm = numbers.tolist()
        stats = TokenSums.unpack(packed).summary()
        if stats["nonfinite"] or not (math.isfinite(grad_norm) and math.isfinite(loss)):
            raise NonFiniteUpdate(
                f"update {update}: {int(stats['nonfinite'])} tokens with a non-finite ratio"
                f"{_name_places(ids, widths, places.tolist())}, gradient norm {grad_norm:g}, loss {loss:g}; nothing "
                "was changed: start a new run with a lower optimizer.learning_rate or more stages"
            )
        if not math.isfinite(norm):
            raise NonFiniteUpdate(
                f"update {update} at learning rate {rate * factor:g} made weights that are not finite; "
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

    def _take_step(self, rate: float | Tensor, unusable: Tensor) -> Tensor:
        """One optimizer step at this rate, none where it is unusable; the norm of the change of all weights."""
        weights = [parameter.detach() for parameter in self.names]
        before = copies(weights)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # The name under which torch's gradient scaler tells a fused optimizer to leave everything as it is.
        vars(self.optimizer)["found_inf"] = unusable.float()
        self.optimizer.step()
        self.steps += 1
        return distance(before, weights)

    def _backward(
        self, batch: UpdateBatch, parts: list[MicroBatch]
    ) -> tuple[Tensor, TokenSums, Tensor, Callable[[], TokenRecord] | None]:
        """Both phases over all micro-batches; gradients are left on the parameters.

        The third is, for each micro-batch, the place of its first token with a non-finite ratio, or −1.
        """
        proximal = [self._proximal_logp(part) for part in parts]
        denominator = loss_denominator(batch, self.config, self.objective)
        statistics = None
        if self.objective.measure is not None and len(parts) > 1:
            with torch.no_grad():
                measured = [
                    self.objective.measure(
                        self._tokens(part, batch, near, self._forward(part, self.body)[0]), self.settings
                    )
                    for part, near in zip(parts, proximal, strict=True)
                ]
            statistics = reduce(lambda merged, more: merged.merge(more), measured)
        losses, all_sums, places, seen = [], [], [], []
        for part, near in zip(parts, proximal, strict=True):
            logp_BT, entropy_BT = self._forward(part, self.body)
            tokens = self._tokens(part, batch, near, logp_BT)
            if len(parts) == 1:  # the batch in one piece needs no pass of its own for its statistics
                statistics = self.objective.first_pass(tokens, self.settings)
            loss, sums, token_loss = micro_batch_loss(
                self.objective, tokens, statistics, self.settings, denominator, entropy_BT=entropy_BT
            )
            loss.backward()
            losses.append(loss.detach())
            all_sums.append(sums)
            places.append(_first_nonfinite(tokens))
            seen.append((logp_BT.detach(), token_loss))
        sums = reduce(lambda merged, more: merged.merge(more), all_sums)
        tokens = recorded(batch, parts, seen) if self.config.learner.record_tokens else None
        return torch.stack(losses).sum(), sums, torch.stack(places), tokens

    def _micro_batches(self, batch: UpdateBatch) -> Iterator[MicroBatch]:
        layout = Layout(
            token_budget=self.token_budget,
            packed=self.packed,
            grids=needs_grids(self.device, self.precision),
            few_sizes=self.body is not None,
            pad_id=self.tokenizer.pad_token_id,
        )
        return micro_batches(batch.rows, layout, self.device)

    def _forward(self, part: MicroBatch, body: GraphedBody | None = None) -> tuple[Tensor, Tensor]:
        enabled = self.precision is not torch.float32
        with torch.autocast(self.device.type, dtype=self.precision, enabled=enabled):
            return response_logp(self.model, part, dtype=self.precision, kernels=self.kernels, body=body)

    def _tokens(self, part: MicroBatch, batch: UpdateBatch, proximal_logp: Tensor | None, logp_BT: Tensor) -> Tokens:
        return make_tokens(
            logp=logp_BT,
            behaviour_logp=part.behaviour_logp_BT,
            advantage=to_device(batch.advantage[part.rows].numpy(), self.device),
            mask=part.mask_BT & to_device(batch.keep[part.rows].numpy(), self.device).unsqueeze(1),
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
            return self._forward(part)[0]  # without graphs, which know the policy's own weights alone

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


def _first_nonfinite(tokens: Tokens) -> Tensor:
    """Place in the flattened [B, T] of the first token whose ratio is not a finite number, −1 where there is none."""
    log_ratio_BT = tokens.log_ratio_BT.detach()
    bad = (tokens.mask_BT & ~(log_ratio_BT.isfinite() & log_ratio_BT.exp().isfinite())).flatten()
    return torch.where(bad.any(), bad.int().argmax(), -1)


def _name_places(ids: list[np.ndarray], widths: list[int], places: list[float]) -> str:
    """Name the first bad token of each micro-batch by rollout and place in the response."""
    named = [
        f"rollout {rollouts[int(place) // width]} token {int(place) % width}"
        for rollouts, width, place in zip(ids, widths, places, strict=True)
        if place >= 0
    ]
    return f" ({', '.join(named[:3])})" if named else ""
