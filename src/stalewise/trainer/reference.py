"""Log-probabilities of stored rollouts under a reference policy: a column, computed once for each generation batch.

The reference is loaded only while the column is computed, so that training holds one policy. The column is a file
beside each shard, in `columns/reference` of the run directory; the rollouts themselves never change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from stalewise.config.run_directory import REFERENCE_FILE
from stalewise.config.sections import ModelSection, ObjectiveSection
from stalewise.errors import ModelError, StoreError
from stalewise.models import pick_device, pick_precision, resolve_model
from stalewise.models.attention import PACKED, needs_grids, supports_packing
from stalewise.models.loading import load_model, load_tokenizer, pick_weights_dtype
from stalewise.store import Batch, RolloutColumns, ShardManifest, TokenColumn
from stalewise.store.atomic import sha256_file, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory, read_state
from stalewise.store.records import REFERENCE, read_record
from stalewise.trainer.logprobs import kernels_for, measure_logit_map, response_logp
from stalewise.trainer.micro_batch import Layout, micro_batches

FORMAT = "stalewise.reference/1"


def reference_path(section: ObjectiveSection, model: ModelSection, task: str) -> str:
    """The directory of the reference; an empty string if it is version 0 of the run."""
    if section.reference == "initial":
        return ""
    try:
        return resolve_model(model.path if section.reference == "base" else section.reference, task)
    except ModelError as error:
        raise ModelError(f"objective.reference: {error}") from error


def check_reference(section: ObjectiveSection, model: ModelSection, task: str, own: str) -> None:
    """Refuse a reference whose tokens differ from those of the policy at `own`; no weights are read."""
    if not section.kl or not (path := reference_path(section, model, task)):
        return
    theirs, ours = (load_tokenizer(directory).get_vocab() for directory in (path, own))
    if theirs != ours:
        token = min(key for key, _ in theirs.items() ^ ours.items())
        there, here = theirs.get(token, "no token"), ours.get(token, "no token")
        raise ModelError(
            f"objective.reference is {section.reference}, which has another vocabulary than the policy ({token!r} is "
            f"{there} there and {here} here): choose a reference with the same tokenizer"
        )


class Reference:
    """The reference policy of a run; `path` is its directory, `key` identifies its log-probabilities."""

    def __init__(self, section: ObjectiveSection, model: ModelSection, task: str, run: Path) -> None:
        """Find the reference; if it is version 0, the run directory must hold it."""
        self.section, self.model, self.task, self.run, self.name = section, model, task, run, section.reference
        self.path = Path(reference_path(section, model, task) or checkpoint_directory(run, 0))
        weights, temperature = self._check_key(), section.policy_temperature
        self.key = weights if temperature == 1 else f"{weights} at {temperature:g}"

    def _check_key(self) -> str:
        """Identify the weights, and refuse them if the run began with others."""
        if self.name == "initial":
            if not (self.path / "manifest.json").is_file():
                raise StoreError(f"{self.path} is missing, the reference of this run: restore it, or start a new run")
            key = sha256_file(self.path / "manifest.json")
        else:
            files = [file for file in sorted(self.path.glob("*")) if file.suffix in (".safetensors", ".bin")]
            digests = "".join(f"{file.name} {sha256_file(file)} " for file in files)
            key = hashlib.sha256((digests or str(self.path)).encode()).hexdigest()
        record = self.run / REFERENCE_FILE
        if not record.is_file():
            write_json_atomic(record, {"format": FORMAT, "reference": self.name, "key": key}, sealed=True)
        if read_record(record, REFERENCE)["key"] != key:
            raise StoreError(
                f"{self.path} has other weights than the reference with which {self.run} began: restore them, or "
                "choose another name for a new run"
            )
        return key

    def column(self, batch: str) -> TokenColumn:
        """The column of a generation batch, complete or not."""
        return TokenColumn(self.run / "columns" / "reference" / batch, self.key)

    def compute(self, batch: Batch, column: TokenColumn, shards: Sequence[ShardManifest], tokens: int) -> int:
        """Compute the column of `shards` where it is missing, with this many tokens a micro-batch; returns the tokens.

        Other processes may compute other shards, or the same: the values of a shard depend on nothing else.
        """
        policy, total = None, 0
        for shard in shards:
            if column.has(shard):
                continue
            if policy is None:
                if self.name == "initial":
                    read_state(self.path)  # compares its files with their checksums
                policy = LoadedReference(self.path, self.model, tokens, self.section.policy_temperature)
            column.write(shard, policy.logp(batch.rows_of(shard)))
            total += shard.tokens
        return total


class LoadedReference:
    """The reference on its device, for forward passes as in the trainer but without a gradient."""

    def __init__(self, path: Path, model: ModelSection, token_budget: int, temperature: float = 1.0) -> None:
        self.path, self.device = path, pick_device(model.device)
        self.precision = pick_precision(model.precision, self.device)
        self.model = load_model(str(path), device=self.device, dtype=pick_weights_dtype(model.precision))
        self.kernels = kernels_for(self.device, measure_logit_map(self.model).at(temperature))
        is_packed = supports_packing(self.model, self.precision)
        if is_packed:
            self.model.set_attn_implementation(PACKED)
        grids, pad_id = needs_grids(self.device, self.precision), load_tokenizer(str(path)).pad_token_id
        self.layout = Layout(token_budget, is_packed, grids, pad_id=pad_id)

    @torch.no_grad()
    def logp(self, rows: RolloutColumns) -> np.ndarray:
        """The log-probability of each response token, flat and in the order of the rows."""
        size = self.model.get_output_embeddings().weight.shape[0]
        largest = int(max(rows.prompt_ids.max(initial=-1), rows.response_ids.max(initial=-1)))
        if largest >= size:
            raise ModelError(
                f"the rollouts hold token {largest}, but the vocabulary of the reference {self.path} ends at "
                f"{size - 1}: name a reference with the policy's tokenizer in objective.reference"
            )
        values, offsets = np.empty(len(rows.response_ids), np.float32), rows.response_offsets
        autocast = torch.autocast(self.device.type, self.precision, enabled=self.precision is not torch.float32)
        for part in micro_batches(rows, self.layout, self.device):
            with autocast:
                logp_BT, _ = response_logp(self.model, part, dtype=self.precision, kernels=self.kernels)
            for row, logp_T in zip(part.rows, logp_BT.float().cpu().numpy(), strict=True):
                values[offsets[row] : offsets[row + 1]] = logp_T[: offsets[row + 1] - offsets[row]]
        return values
