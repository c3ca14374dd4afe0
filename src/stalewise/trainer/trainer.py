"""The learner: a policy with float32 weights, its optimizer, and one update as a method.

An update reads the whole optimizer batch, in two phases where the objective needs it, so that the gradient does not
depend on the token budget. Everything it holds is in the checkpoint: loading one and going on is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stalewise.config import RunConfig
from stalewise.distributed import ALONE
from stalewise.errors import ModelError
from stalewise.models.attention import PACKED, needs_grids, packs
from stalewise.models.compilation import optimize_layers, recording_pays
from stalewise.models.loading import load_tokenizer, pick_device, pick_precision, turn_dropout_off
from stalewise.models.transfer import host_copies
from stalewise.objectives import Tokens, get_objective, make_tokens, micro_batch_loss, micro_batch_sums
from stalewise.objectives.batch_statistics import vcpo_factor
from stalewise.objectives.diagnostics import TokenSums, age_statistics
from stalewise.store import RolloutColumns, TokenRecord
from stalewise.trainer.batch import UpdateBatch, loss_denominator, make_update_batch
from stalewise.trainer.cuda_graphs import GraphedBody
from stalewise.trainer.logprobs import check_output_layer, kernels_for, response_logp
from stalewise.trainer.lora import load_policy
from stalewise.trainer.micro_batch import Layout, MicroBatch
from stalewise.trainer.optimizer import adamw, learning_rate, moments_by_file, read_moments, restore_moments
from stalewise.trainer.parallel import Alone, SeenTokens
from stalewise.trainer.pending_update import PendingUpdate, Read, to_host
from stalewise.trainer.prefetch import LaidOut, Prepared, lay_out_share
from stalewise.trainer.rank_batch import RankBatch, RankBatches, deal_update, seen_of_tokens
from stalewise.trainer.step_metrics import NonFiniteUpdate, first_nonfinite, out_of_memory, read_step
from stalewise.trainer.weights import FlatWeights, SideStream, Weights

Step = tuple[Callable[[], dict[str, float]], Callable[[], TokenRecord] | None]


class Trainer:
    """Holds policy and optimizer between updates. `version` counts the updates that made the policy."""

    def __init__(
        self,
        config: RunConfig,
        checkpoint: Path,
        log: Callable[[str], object] = lambda text: None,
        parallel: Alone | None = None,
    ) -> None:
        """`say` is told what a person should know; `parallel` says how the policy lies on several ranks."""
        self.config = config
        self.parallel = parallel = Alone(ALONE) if parallel is None else parallel
        self.log = log
        self.token_budget = config.learner.tokens_per_micro_batch
        self.objective = get_objective(config.objective.name)
        self.settings = self.objective.settings(config.objective.params)
        self.device = pick_device(config.model.device)
        self.precision = pick_precision(config.model.precision, self.device)
        # A policy that is split over ranks may be too large for one device.
        self.model, self.adapters = load_policy(
            config, checkpoint, torch.device("cpu") if parallel.is_sharded else self.device
        )
        self.tokenizer = load_tokenizer(str(checkpoint))
        check_output_layer(self.model)
        if config.learner.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.train()  # transformers recomputes activations in training mode only
            turn_dropout_off(self.model)
        parallel.put(self.model, self.device)
        self.packed = packs(self.model, self.precision)
        if self.packed:
            self.model.set_attn_implementation(PACKED)
        else:
            self.log(f"{type(self.model).__name__} cannot be packed: its micro-batches are padded, which costs time")
        parallel.find_trained()
        self.names = parallel.trained
        self.kernels = kernels_for(self.device)
        self.compiled = optimize_layers(self.model, config, is_sharded=parallel.is_sharded, log=self.log)
        self.side_stream = SideStream(self.device)
        self.body: GraphedBody | None = None
        self.weights = Weights(list(self.names))
        if self.packed and self._can_be_graphed():
            self.weights = FlatWeights(list(self.names), self.side_stream)
            self.body = GraphedBody(self.model, self.weights, self.precision)
        self.optimizer = adamw(self.names, config.optimizer)
        self.rate_factor = 1.0  # on the config's learning rate, where a guard has lowered it
        self.version = 0
        self.steps = 0  # updates that were taken: one with nothing to learn from is counted in `version` alone
        self.drift = 0.0
        self.proximal: dict[str, Tensor] = {}
        self._snapshot_proximal()

    def _can_be_graphed(self) -> bool:
        """Recomputed activations and float32 attention do what a graph cannot hold; gradients share one tensor."""
        fits = self.precision is not torch.float32 and len({weight.dtype for weight in self.names}) == 1
        fits = fits and not (self.parallel.is_sharded or self.config.learner.gradient_checkpointing)
        return self.device.type == "cuda" and fits and recording_pays(self.config, self.model)

    # ------------------------------------------------------------ checkpoints

    def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go on from a checkpoint whose weights the constructor has loaded."""
        self.version, self.steps, self.drift = state["version"], state["steps"], state["drift"]
        if self.steps:
            moments = read_moments(checkpoint, partial(self.parallel.load, device=self.device))
            restore_moments(self.optimizer, self.names, moments, self.steps)
        if (checkpoint / "proximal.safetensors").is_file():
            self.proximal = self.parallel.load(checkpoint / "proximal.safetensors", self.device)

    def save(self, directory: Path) -> None:
        """Write policy, tokenizer and optimizer state; the caller commits the directory."""
        has_moments = self.steps > 0
        self.parallel.call("save", has_moments=has_moments)
        policy, files = self.gather(has_moments)
        policy = {} if self.adapters else policy or self.model.state_dict()
        policy, *others = host_copies(policy, *files.values())
        with ThreadPoolExecutor() as threads:  # each of them is as large as the policy
            written = threads.map(save_file, others, [directory / name for name in files])
            if self.adapters is None:
                self.model.save_pretrained(directory, state_dict=policy)
            else:
                self.adapters.save(directory)
            self.tokenizer.save_pretrained(directory)
            list(written)  # and say what went wrong

    def gather(self, has_moments: bool) -> tuple[dict[str, Tensor] | None, dict[str, dict[str, Tensor]]]:
        """Weights (None: the model has them), and the files beside them, on the first rank; all take part."""
        whole, policy = self.parallel.whole, self.parallel.whole_policy()
        files = moments_by_file(self.optimizer, self.names, whole) if has_moments else {}
        if self.proximal:
            files["proximal.safetensors"] = {name: whole(name, own) for name, own in self.proximal.items()}
        return policy, files

    def state(self) -> dict[str, Any]:
        """The numbers that belong to a checkpoint."""
        return {"steps": self.steps, "drift": self.drift}

    # ------------------------------------------------------------ one update

    def update(self, rows: RolloutColumns) -> dict[str, float]:
        """Take one update on these rollouts and say what happened."""
        before = self.version, self.steps
        try:
            return self.enqueue(rows).metrics()
        except NonFiniteUpdate:
            self.version, self.steps = before
            raise

    def gradient(self, rows: RolloutColumns) -> Tensor:
        """What an update on these rollouts would follow, as one vector; nothing is changed. 0 where nothing teaches."""
        laid_out = self.prepare(rows).laid_out
        self.weights.zero_gradients()
        if laid_out is not None:
            self._backward(laid_out.dealt.shares[0], laid_out.parts)
        found = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self.names]
        self.weights.zero_gradients()
        return torch.cat([gradient.flatten() for gradient in found])

    def prepare(self, rows: RolloutColumns) -> Prepared:
        """Do what does not depend on the policy; may be called from another thread, ahead of `enqueue`."""
        batch, described = make_update_batch(rows, self.config, self.objective)
        return Prepared(described, rows.version_first, None if batch is None else self._lay_out(batch))

    def enqueue(self, rows: RolloutColumns | Prepared) -> PendingUpdate:
        """Take one update on these rollouts, without waiting for the device. The version rises by one in any case."""
        prepared = rows if isinstance(rows, Prepared) else self.prepare(rows)
        described = prepared.described | age_statistics(self.version, torch.from_numpy(prepared.version_first))
        self._snapshot_if_due()
        if prepared.laid_out is None:
            self.parallel.hand_out(None)
        step = (None, None) if prepared.laid_out is None else self._step_within_memory(prepared.laid_out)
        self.version += 1
        return PendingUpdate(described, *step)

    def follow(self, share: RankBatch | None) -> None:
        """Take part in an update that the first rank has dealt out; None: there is nothing to learn from."""
        self._snapshot_if_due()
        if share is not None:
            self._step(share, lay_out_share(share, self._layout(), self.device))
        self.version += 1

    def _step_within_memory(self, laid_out: LaidOut) -> Step:
        """One step; where memory ends on the way, once more with half the tokens a micro-batch, and so from here on."""
        taken = self.steps
        try:
            return self._lead(laid_out)
        except torch.OutOfMemoryError:
            if self.steps > taken:  # the weights have changed: once more would be twice
                raise ModelError("out of memory after a step: lower learner.tokens_per_micro_batch") from None
            if self.parallel.ranks.world > 1 or self.token_budget < self.config.learner.tokens_per_micro_batch:
                raise out_of_memory(self.token_budget) from None
        # Out of the handler, whose traceback would keep the activations alive.
        largest = max(part.places for part in laid_out.parts)  # a budget that it does not fill may be halved in vain
        self.token_budget = min(self.token_budget, largest) // 2
        self.body = None
        self.log(f"out of memory with {largest} tokens in a micro-batch: from here on at most {self.token_budget}")
        self.side_stream.join()  # it holds activations
        self.weights = Weights(list(self.names))
        self.weights.zero_gradients()
        if not self.steps:  # memory may have ended half-way through making the moments
            self.optimizer.state.clear()
        torch.cuda.empty_cache()
        try:
            return self._lead(laid_out)
        except torch.OutOfMemoryError:
            raise out_of_memory(self.token_budget) from None

    def _lead(self, laid_out: LaidOut) -> Step:
        """Hand an update out and enqueue this rank's share; the results wait for it and say what it saw."""
        if laid_out.layout != self._layout():  # it was laid out before memory ran out
            laid_out = self._lay_out(laid_out.dealt.batch)
        self.parallel.hand_out(dealt := laid_out.dealt)
        read, rate, seen = self._step(dealt.shares[0], laid_out.parts)
        finish = partial(self._read_step, read, self.version, rate, dealt)
        return finish, None if seen is None else partial(dealt.token_record, seen)

    def _step(self, share: RankBatch, parts: list[MicroBatch]) -> tuple[Read, float, SeenTokens | None]:
        """Enqueue one step; its numbers, its learning rate, and what it saw of each token."""
        self.weights.zero_gradients()
        loss, sums, places, seen = self._backward(share, parts)
        self.parallel.sum_gradients()
        loss, places, sums = self.parallel.together(loss, places, sums, share.whole.passes)
        self.weights.remember()
        grad_norm = self.parallel.norm(self.weights.gradient_norm())
        self.weights.clip_gradients(self.config.optimizer.max_grad_norm, grad_norm)
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
        self._take_step((rate * factor).float() if controlled else rate, unusable)
        norm = self.parallel.norm(self.weights.moved())
        numbers = loss, grad_norm, factor, norm
        with self.side_stream.reading(numbers, places, sums):  # beside the next update
            read = to_host(torch.cat([torch.stack([x.double() for x in numbers]), places.double(), sums.pack()]))
        return read, rate, seen

    def _read_step(self, read: Read, update: int, rate: float, dealt: RankBatches) -> dict[str, float]:
        metrics = read_step(read(), update, rate, dealt, drift_before=self.drift)
        self.drift = metrics["drift"]
        return metrics

    def _take_step(self, rate: float | Tensor, unusable: Tensor) -> None:
        """One optimizer step at this rate, none where it is unusable."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # The name under which torch's gradient scaler tells a fused optimizer to leave everything as it is.
        vars(self.optimizer)["found_inf"] = unusable.float()
        self.side_stream.join()  # which copies the weights
        self.optimizer.step()
        self.steps += 1
        if self.body is not None:
            self.body.weights_changed()

    def _backward(
        self, share: RankBatch, parts: list[MicroBatch]
    ) -> tuple[Tensor, TokenSums, Tensor, SeenTokens | None]:
        """Both phases over all micro-batches; gradients are left on the parameters.

        The third is, for each micro-batch, the place of its first token with a non-finite ratio, or −1.
        """
        both = [(part, self._proximal_logp(part)) for part in parts]
        statistics = None
        if self.objective.measure is not None and share.whole.passes > 1:
            with torch.no_grad():
                passed = (self._tokens(part, near, self._forward(part, self.body)[0]) for part, near in both)
                measured = [self.objective.measure(tokens, self.settings) for tokens in passed]
            statistics = self.parallel.merge(reduce(lambda merged, more: merged.merge(more), measured))
        losses, all_sums, places, seen = [], [], [], []
        for part, near in both:
            logp_BT, entropy_BT = self._forward(part, self.body)
            tokens = self._tokens(part, near, logp_BT)
            if share.whole.passes == 1:  # the batch in one piece needs no pass of its own for its statistics
                statistics = self.objective.first_pass(tokens, self.settings)
                statistics = None if statistics is None else self.parallel.merge(statistics)
            denominator = share.whole.denominator
            loss, token_loss = micro_batch_loss(self.objective, tokens, statistics, self.settings, denominator)
            with self.side_stream.reading(tokens, token_loss, entropy_BT):
                all_sums.append(micro_batch_sums(tokens, token_loss, entropy_BT))
                places.append(first_nonfinite(tokens))
            loss.backward()
            losses.append(loss.detach())
            seen.append((logp_BT.detach(), token_loss))
        with self.side_stream.reading(parts, seen):
            packed = reduce(lambda merged, more: merged.merge(more), all_sums).pack()
            keep = self.config.learner.record_tokens
            logp_N, flags_N = seen_of_tokens(parts[: share.own * keep], seen[: share.own * keep], self.device)
            place_P = torch.stack(places)
        self.side_stream.join(packed, logp_N, flags_N, place_P)
        recorded = self.parallel.collect(logp_N, flags_N, share.whole.tokens) if keep else None
        return torch.stack(losses).sum(), TokenSums.unpack(packed), place_P, recorded

    def _lay_out(self, batch: UpdateBatch) -> LaidOut:
        layout, denominator = self._layout(), loss_denominator(batch, self.config, self.objective)
        world, in_step = self.parallel.ranks.world, self.parallel.in_step
        dealt = deal_update(batch, layout, denominator, world=world, in_step=in_step)
        return LaidOut(layout, dealt, lay_out_share(dealt.shares[0], layout, self.device))

    def _layout(self) -> Layout:
        graphed, grids = self.body is not None, needs_grids(self.device, self.precision)
        halves = graphed and self.compiled  # kernels of plain layers are too large to leave gaps for another half
        pad_id = self.tokenizer.pad_token_id
        return Layout(self.token_budget, self.packed, grids, few_sizes=graphed, side_by_side=halves, pad_id=pad_id)

    def _forward(self, part: MicroBatch, body: GraphedBody | None = None) -> tuple[Tensor, Tensor]:
        enabled = self.precision is not torch.float32
        cached = not self.parallel.is_sharded  # rounded weights would stay after the weights themselves are let go
        with torch.autocast(self.device.type, dtype=self.precision, enabled=enabled, cache_enabled=cached):
            forward = self.parallel.through(response_logp)
            return forward(self.model, part, dtype=self.precision, kernels=self.kernels, body=body)

    def _tokens(self, part: MicroBatch, proximal_logp: Tensor | None, logp_BT: Tensor) -> Tokens:
        return make_tokens(
            logp=logp_BT,
            behaviour_logp=part.behaviour_logp_BT,
            advantage=part.of_rows["advantage"],
            mask=part.mask_BT & part.of_rows["keep"].unsqueeze(1),
            proximal_logp=proximal_logp,
            check_values=False,
        )

    # ------------------------------------------------------------ the proximal policy

    def _snapshot_if_due(self) -> None:
        if self.version % self.config.objective.proximal_every == 0:
            self._snapshot_proximal()

    def _snapshot_proximal(self) -> None:
        if self.objective.needs_proximal:
            self.proximal = {name: weight.detach().clone() for weight, name in self.names.items()}

    def _proximal_logp(self, part: MicroBatch) -> Tensor | None:
        if not self.proximal:
            return None
        with torch.no_grad(), self.parallel.swapped(self.proximal):
            return self._forward(part)[0]  # without graphs, which know the policy's own weights alone
