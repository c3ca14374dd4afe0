"""The trainer: a policy and its optimizer between updates, and their checkpoints.

One update is in `step.py`. All state is in the checkpoint, so that training resumes exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stalewise.config import RunConfig
from stalewise.distributed import ALONE
from stalewise.errors import ModelError
from stalewise.models import pick_device, pick_precision
from stalewise.models.loading import load_tokenizer
from stalewise.models.transfer import HostBuffers, host_copies
from stalewise.objectives import get_objective
from stalewise.objectives.diagnostics import age_statistics
from stalewise.store import RolloutColumns
from stalewise.trainer.batch import RankBatch, UpdateBatch, make_update_batch
from stalewise.trainer.execution import Execution
from stalewise.trainer.lora import MergedWeights, load_policy
from stalewise.trainer.micro_batch import Layout
from stalewise.trainer.optimizer import learning_rate, moments_by_file, restore_moments
from stalewise.trainer.parallel import SingleProcess
from stalewise.trainer.pending_update import NonFiniteUpdate, PendingUpdate, Read, out_of_memory, step_metrics
from stalewise.trainer.snapshot import POLICY, Snapshot, save_model_config, stored_names, write_files
from stalewise.trainer.step import UpdateRule, compute_gradients, regularizers, update


class Trainer:
    """A policy and its optimizer between updates. `version` counts the updates that made the policy."""

    def __init__(
        self,
        config: RunConfig,
        checkpoint: Path,
        log: Callable[[str], object] = lambda text: None,
        parallel: SingleProcess | None = None,
    ) -> None:
        """Load a checkpoint; `parallel` spreads the policy over ranks."""
        self.config, self.log = config, log
        self.parallel = parallel = SingleProcess(ALONE) if parallel is None else parallel
        self.token_budget = config.learner.tokens_per_micro_batch
        self.objective = get_objective(config.objective.name)
        self.rule = UpdateRule(
            self.objective,
            self.objective.settings(config.objective.params),
            regularizers(config.objective),
            config.optimizer.max_grad_norm,
            vcpo=config.optimizer.step_control == "vcpo",
            record_tokens=config.learner.record_tokens,
        )
        self.device = pick_device(config.model.device)
        self.precision = pick_precision(config.model.precision, self.device)
        # A policy that is sharded may be too large for one device.
        load_to = torch.device("cpu") if parallel.is_sharded else self.device
        self.model, self.adapters = load_policy(config.model, checkpoint, load_to)
        self.stored = stored_names(
            checkpoint, MergedWeights(self.adapters) if self.adapters else self.model.state_dict()
        )
        self.tokenizer = load_tokenizer(str(checkpoint))
        self.execution = Execution(self.model, config, parallel, self.device, self.precision, log)
        self.names, self.optimizer = parallel.trained, self.execution.optimizer
        self.rate_factor = 1.0  # on the config's learning rate, where a guard has lowered it
        self.version = 0
        self.drift = 0.0
        self._snapshot_proximal()

    @property
    def steps(self) -> int:
        """Optimizer steps taken; an update with nothing to learn from counts in `version` only."""
        return self.execution.steps

    # ------------------------------------------------------------ checkpoints

    def restore(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Restore the rest of a checkpoint whose weights the constructor has loaded."""
        self.version = state["version"]
        self.execution.steps = state["steps"]
        self.drift = state["drift"]
        if self.steps:
            load = partial(self.parallel.load, device=self.device)
            restore_moments(self.optimizer, self.names, checkpoint, load, self.steps)
        if (checkpoint / "proximal.safetensors").is_file():
            self.execution.proximal = self.parallel.load(checkpoint / "proximal.safetensors", self.device)

    def save(self, directory: Path) -> dict[str, str]:
        """Write policy, tokenizer and optimizer state; the caller commits the directory.

        Files are copied to the host one by one. Returns the SHA-256 of files of tensors, as far as they are known.
        """
        files = self._content()
        if not self.stored:  # under other names or in several files, as only transformers can write them
            policy = files.pop(POLICY)
            on_host = host_copies(policy)[0] if self.adapters is None else self.adapters.merged()
            self.model.save_pretrained(directory, state_dict=on_host)
        self._save_small_files(directory)
        digests: dict[str, str] = {}
        for name, file in files.items():
            tensors = dict(file) if self.device.type == "cpu" else HostBuffers().copy(name, file)
            (digests[name],) = write_files({directory / name: tensors}).values()
        return digests

    def snapshot(self, buffers: HostBuffers) -> Snapshot | None:
        """Copy what `save` would write now into these buffers; None if only transformers can write it."""
        if not self.stored:
            return None
        copies = {name: buffers.copy(name, tensors) for name, tensors in self._content().items()}
        return Snapshot(copies, self._save_small_files)

    def snapshot_shapes(self) -> dict[tuple[str, str], tuple[torch.Size, torch.dtype]]:
        """Shapes and types that `snapshot` copies, by file and name; empty if other ranks are needed to know them."""
        if not self.stored or self.parallel.ranks.world > 1 or not self.steps:
            return {}
        files = {file: getattr(tensors, "sources", tensors) for file, tensors in self._content().items()}
        return {(file, name): (x.shape, x.dtype) for file, tensors in files.items() for name, x in tensors.items()}

    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors."""
        own = [*self.model.parameters(), *self.execution.proximal.values()]
        own += [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(tensor.nbytes for tensor in own) * (self.parallel.ranks.world if self.parallel.is_sharded else 1)

    def _content(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of a checkpoint by file."""
        has_moments = self.steps > 0
        self.parallel.ranks.send_to_all("save", has_moments=has_moments)
        policy, files = self.gather(has_moments)
        names = self.stored or policy.keys()
        if self.adapters is None:
            return {POLICY: {name: policy[name] for name in policy if name in names}, **files}
        merged = MergedWeights(self.adapters, self.stored or None)
        return {POLICY: merged, self.adapters.file: self.adapters.tensors(), **files}

    def _save_small_files(self, directory: Path) -> None:
        if self.stored:
            save_model_config(self.model, directory)
        if self.adapters is not None:
            self.adapters.save_config(directory)
        self.tokenizer.save_pretrained(directory)

    def policy(self) -> Mapping[str, Tensor]:
        """The weights to sample from, on the device. Adapters are merged one by one as weights are read."""
        return self.parallel.full_state() if self.adapters is None else MergedWeights(self.adapters)

    def gather(self, has_moments: bool) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Weights and further files, on the first rank; all ranks must call it."""
        full_tensor, policy = self.parallel.full_tensor, self.parallel.full_state()
        files = moments_by_file(self.optimizer, self.names, full_tensor) if has_moments else {}
        if proximal := self.execution.proximal:
            files["proximal.safetensors"] = {name: full_tensor(name, own) for name, own in proximal.items()}
        return policy, files

    def state(self) -> dict[str, Any]:
        """The scalars of a checkpoint: optimizer steps and drift."""
        return {"steps": self.steps, "drift": self.drift}

    def release_logits(self) -> None:
        """Free the memory of kept logits, which only updates need, while rollouts are sampled."""
        self.execution.kept.release()

    def copy_frozen(self) -> None:
        """Copy frozen weights to host memory now, so that `sleep` need not."""
        self.execution.copy_frozen()

    def sleep(self) -> None:
        """Move to host memory, from which the trainer can be saved; the next update wakes it."""
        self.execution.sleep()

    def wake(self) -> None:
        """Move back from host memory to the device."""
        self.execution.wake()

    @property
    def is_asleep(self) -> bool:
        """Whether the trainer is in host memory."""
        return bool(self.execution.offload.away)

    # ------------------------------------------------------------ updates

    def update(self, rows: RolloutColumns) -> dict[str, float]:
        """Take one update on these rollouts and return its metrics."""
        before = self.version, self.steps
        try:
            return self.enqueue(rows).metrics()
        except NonFiniteUpdate:
            self.version, self.execution.steps = before
            raise

    def gradient(self, rows: RolloutColumns) -> Tensor:
        """The gradient of an update on these rollouts as one vector, 0 with nothing to learn from; changes nothing."""
        self.execution.wake()
        batch, weights = self.prepare(rows), self.execution.weights
        weights.zero_gradients()
        if batch.ranks:
            compute_gradients(self.execution, self.rule, batch.ranks[0], batch.micro_batches)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self.names]
        weights.zero_gradients()
        return torch.cat([gradient.flatten() for gradient in gradients])

    def prepare(self, rows: RolloutColumns) -> UpdateBatch:
        """Do the work that does not depend on the policy; may run in another thread, ahead of `enqueue`."""
        limit, without_variance = self.config.sampler.max_new_tokens, self.config.batch.without_variance
        section = self.config.objective
        return self._split(make_update_batch(rows, self.objective, section, limit, without_variance))

    def enqueue(self, rows: RolloutColumns | UpdateBatch) -> PendingUpdate:
        """Enqueue one update on these rollouts without waiting for the device. Always raises the version by one."""
        self.execution.wake()
        batch = rows if isinstance(rows, UpdateBatch) else self.prepare(rows)
        statistics = batch.statistics | age_statistics(self.version, torch.from_numpy(batch.version_first))
        self._snapshot_proximal()
        if batch.ranks:
            pending = self._update_within_memory(batch, statistics)
        else:
            self.parallel.send_batches([])
            pending = PendingUpdate(statistics, None)
        self.version += 1
        return pending

    def follow(self, batch: RankBatch | None) -> None:
        """Take this rank's part in an update of the first rank; `batch` is None if there is nothing to learn from."""
        self._snapshot_proximal()
        if batch is not None:
            micro_batches = list(batch.micro_batches(self._layout(), self.device))
            update(self.execution, self.rule, batch, micro_batches, self._rate())
        self.version += 1

    def _update_within_memory(self, batch: UpdateBatch, statistics: dict[str, float]) -> PendingUpdate:
        """Update. If memory runs out for the first time, halve the token budget for good and try again."""
        steps = self.steps
        try:
            return self._update(batch, statistics)
        except torch.OutOfMemoryError:
            if self.steps > steps:  # the weights have changed: another try would be a second step
                raise ModelError("out of memory after a step: lower learner.tokens_per_micro_batch") from None
            if self.parallel.ranks.world > 1 or self.token_budget < self.config.learner.tokens_per_micro_batch:
                raise out_of_memory(self.token_budget) from None
        # Outside of the handler: its traceback would keep the activations alive.
        largest = max(micro_batch.padded_tokens for micro_batch in batch.micro_batches)  # which may not fill the budget
        self.token_budget = min(self.token_budget, largest) // 2
        self.log(f"out of memory with {largest} tokens in a micro-batch: from here on at most {self.token_budget}")
        self.execution.free_memory()
        try:
            return self._update(batch, statistics)
        except torch.OutOfMemoryError:
            raise out_of_memory(self.token_budget) from None

    def _update(self, batch: UpdateBatch, statistics: dict[str, float]) -> PendingUpdate:
        if batch.layout != self._layout():  # the batch was prepared before memory ran out
            batch = self._split(batch)
        self.parallel.send_batches(batch.ranks)
        rate = self._rate()
        scalars, tokens = update(self.execution, self.rule, batch.ranks[0], batch.micro_batches, rate)
        finish = partial(self._metrics, scalars, self.version, rate, batch)
        return PendingUpdate(statistics, finish, None if tokens is None else lambda: batch.token_record(*tokens()))

    def _metrics(self, scalars: Read, version: int, rate: float, batch: UpdateBatch) -> dict[str, float]:
        metrics = step_metrics(scalars(), version, rate, batch.ranks, drift_before=self.drift)
        self.drift = metrics["drift"]
        return metrics

    def _split(self, batch: UpdateBatch) -> UpdateBatch:
        world, lockstep = self.parallel.ranks.world, self.parallel.lockstep
        return batch.split(self._layout(), self.device, world=world, lockstep=lockstep)

    def _layout(self) -> Layout:
        return self.execution.layout(self.token_budget, self.tokenizer.pad_token_id)

    def _rate(self) -> float:
        return self.rate_factor * learning_rate(self.version, self.config.optimizer, self.config.schedule.updates)

    def _snapshot_proximal(self) -> None:
        """Renew the proximal policy every few updates, if the objective has one."""
        if self.objective.needs_proximal and self.version % self.config.objective.proximal_every == 0:
            self.execution.proximal = {name: weight.detach().clone() for weight, name in self.names.items()}
