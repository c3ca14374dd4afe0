"""One run on several ranks: the orchestrator runs on the first, the others carry out its orders.

The ranks first check that they share one config. Whatever ends one of them ends all. The run directory is then as after
`kill -9` at worst, and the same command continues.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stalewise import __version__
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import RunResult, flatten, read_result
from stalewise.config.sections import ModelSection, ObjectiveSection
from stalewise.distributed import ALONE, Message, Ranks, explain_lost_ranks, join, launched
from stalewise.errors import ConfigError, RankError, StalewiseError, StoppedByFirst, StoreError
from stalewise.models import pick_device
from stalewise.rollout.workers.rank_workers import RolloutRank
from stalewise.rollout.workers.worker import RunLocation
from stalewise.store import Batch, TokenColumn, open_batch
from stalewise.store.atomic import make_directory, remove_if_failed, sha256_file, temporary_name
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions
from stalewise.trainer.batch import unpack_rank_batch
from stalewise.trainer.parallel import KINDS
from stalewise.trainer.pending_update import out_of_memory
from stalewise.trainer.reference import Reference
from stalewise.trainer.trainer import Trainer


def make_trainer(
    config: RunConfig,
    checkpoint: Path,
    state: Mapping[str, Any],
    ranks: Ranks,
    kind: str,
    offloads: bool = False,
    *,
    rate_factor: float = 1.0,
    log: Callable[[str], object] = lambda text: None,
) -> Trainer:
    """A trainer that continues from a checkpoint, on every rank; `kind` is one of `parallel.KINDS`.

    `offloads`: the trainer will be in host memory at times. Frozen weights are copied there now, to save time later.
    """
    if ranks.is_first and ranks.others:
        record = {"config": config.model_dump(mode="json"), "checkpoint": str(checkpoint), "state": dict(state)}
        record |= {"rate_factor": rate_factor, "kind": kind, "manifest": sha256_file(checkpoint / "manifest.json")}
        ranks.send_to_all("learner", **record)
    trainer = Trainer(config, checkpoint, log, KINDS[kind](ranks))
    trainer.restore(checkpoint, dict(state))
    trainer.rate_factor = rate_factor
    if offloads:
        trainer.copy_frozen()
    return trainer


def compute_reference(reference: Reference, batch: Batch, column: TokenColumn, tokens: int, ranks: Ranks) -> int:
    """Compute the missing part of a reference column, with shards split over ranks; returns the tokens computed."""
    missing = [shard for shard in batch.manifest.shards if not column.has(shard)]
    record = {"objective": reference.section.model_dump(mode="json"), "model": reference.model.model_dump(mode="json")}
    record |= {"task": reference.task, "run": str(reference.run), "tokens": tokens}
    record |= {"batch": str(batch.directory), "column": str(column.directory)}
    for rank in ranks.others:
        ranks.send(rank, "reference", record | {"shards": [shard.index for shard in missing[rank :: ranks.world]]})
    total = reference.compute(batch, column, missing[:: ranks.world], tokens)
    for rank in ranks.others:
        report = ranks.receive(rank)
        if report.what == "failed":
            raise RankError(f"rank {rank} cannot compute its part of the reference: {report.record['error']}")
        total += report.record["tokens"]
    return total


def help_with_reference(location: RunLocation, batch: Path) -> None:
    """Compute the missing part of a reference column, last shard first, while the trainer begins at the first shard."""
    config = location.config
    if not config.objective.kl or location.run is None:
        return
    try:
        reference = Reference(config.objective, config.model, config.task.name, location.run)
        opened, tokens = open_batch(batch, verify=False), config.learner.tokens_per_micro_batch
        reference.compute(opened, reference.column(batch.name), opened.manifest.shards[::-1], tokens)
    except (OSError, StoreError):
        if batch.is_dir():
            raise  # otherwise the run was rolled back meanwhile


class RankWorker:
    """Carries out the orders of the first rank. `orders` maps the name of an order to what it does."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.trainer: Trainer | None = None
        self.orders: dict[str, Callable[[Message], object]] = {
            "learner": self._make_trainer,
            "update": self._update,
            "reference": self._compute_reference,
            "save": lambda order: self._current().gather(order.record["has_moments"]),
        }

    def follow(self) -> Mapping[str, Any]:
        """Carry out orders until the first rank sends `stop`; return what it sends with that."""
        while (order := self.ranks.receive()).what != "stop":
            self.orders[order.what](order)
        if order.record["exit_code"]:
            raise StoppedByFirst(order.record["exit_code"])
        return order.record

    def _current(self) -> Trainer:
        assert self.trainer is not None  # the first rank makes one before it gives any other order
        return self.trainer

    def _make_trainer(self, order: Message) -> None:
        self.trainer = None  # there may not be room for two
        record, checkpoint = order.record, Path(order.record["checkpoint"])
        config = make_config(record["config"], source="the first rank's config")
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        manifest = checkpoint / "manifest.json"
        if not manifest.is_file() or sha256_file(manifest) != record["manifest"]:
            raise RankError(
                f"rank {self.ranks.rank} sees another {checkpoint} than rank 0, or none: mount the same file system "
                "under the same path on all ranks"
            )
        read_state(checkpoint)  # compares checksums
        factor = record["rate_factor"]
        self.trainer = make_trainer(config, checkpoint, record["state"], self.ranks, record["kind"], rate_factor=factor)

    def _compute_reference(self, order: Message) -> None:
        record = order.record
        try:
            section, model = ObjectiveSection(**record["objective"]), ModelSection(**record["model"])
            if model.threads:
                torch.set_num_threads(model.threads)
            reference = Reference(section, model, record["task"], Path(record["run"]))
            batch = open_batch(record["batch"], verify=False)
            column = TokenColumn(Path(record["column"]), reference.key)
            shards = [shard for shard in batch.manifest.shards if shard.index in record["shards"]]
            tokens = reference.compute(batch, column, shards, record["tokens"])
        except StalewiseError as error:  # the first rank raises it
            self.ranks.send(0, "failed", {"error": str(error)})
        else:
            self.ranks.send(0, "computed", {"tokens": tokens})

    def _update(self, order: Message) -> None:
        trainer = self._current()
        try:
            trainer.follow(unpack_rank_batch(order) if order.arrays else None)
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.token_budget) from None


VISIBLE_S = 5.0  # time for a file of one rank to become visible to another


def join_ranks(device: str) -> Ranks:
    """The processes that were launched for this run; `ALONE` if there is one."""
    return ALONE if launched().world == 1 else join(pick_device(device))


def run_on_all_ranks(config: RunConfig, lead: Callable[[Ranks], RunResult]) -> RunResult:
    """Call `lead` on the first rank, and carry out its orders on the others. All return the result."""
    ranks = join_ranks(config.model.device)
    if ranks.world == 1:
        return lead(ranks)
    with explain_lost_ranks(ranks), remove_if_failed(config.directory):
        _compare(_facts(config.model_dump(mode="json"), config.directory), config.directory, ranks)
        if not ranks.is_first:
            with RolloutRank(ranks) as rollout_rank:
                worker = RankWorker(ranks)
                worker.orders["generate"] = rollout_rank.generate
                return read_result(config.directory, worker.follow()["updates"])
        try:
            result = lead(ranks)
        except BaseException as error:
            ranks.stop_others(exit_code=error.exit_code if isinstance(error, StalewiseError) else 1)
            raise
        ranks.stop_others(exit_code=0, updates=result.updates)
        return result


def _compare(facts: Mapping[str, Any], directory: Path, ranks: Ranks) -> None:
    """Check that all ranks share config, packages and run directory; the error names the rank and what differs."""
    if not ranks.is_first:
        probe = Path(ranks.receive().record["probe"])
        ranks.send(0, "facts", {"facts": facts, "sees": _becomes_visible(probe)})
        return
    probe = temporary_name(directory / "probe")
    make_directory(directory)
    probe.touch()
    try:
        ranks.send_to_all("compare", probe=str(probe))
        differences = [_difference(rank, facts, ranks.receive(rank).record, directory) for rank in ranks.others]
    finally:
        probe.unlink(missing_ok=True)
    if found := [difference for difference in differences if difference]:
        ranks.stop_others(exit_code=ConfigError.exit_code)
        raise ConfigError("; ".join(found[:3]))


def _difference(rank: int, first: Mapping[str, Any], record: Mapping[str, Any], directory: Path) -> str:
    """How another rank differs from the first one, as a sentence; empty if it does not."""
    theirs: Mapping[str, Any] = record["facts"]
    names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    if names:
        shown = [f"{name} is {theirs.get(name)!r} there and {first.get(name)!r} on rank 0" for name in names[:3]]
        return f"rank {rank} has another run: {'; '.join(shown)}: start all ranks with the same config and packages"
    if not record["sees"]:
        return f"rank {rank} does not see what rank 0 writes to {directory}: all ranks need the same file system there"
    return ""


def _facts(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Values that must be equal on all ranks."""
    manifests = [checkpoint_directory(directory, found) / "manifest.json" for found in versions(directory)[-1:]]
    return {
        **flatten(config),
        "the release of stalewise": __version__,
        "the release of Python": platform.python_version(),
        **{f"the release of {package}": version(package) for package in ("torch", "transformers", "numpy")},
        **{f"the checkpoint {path.parent}": f"sha256 {sha256_file(path)[:12]}" for path in manifests},
    }


def _becomes_visible(probe: Path) -> bool:
    until = time.monotonic() + VISIBLE_S
    while not (exists := probe.exists()) and time.monotonic() <= until:
        time.sleep(0.05)
    return exists
