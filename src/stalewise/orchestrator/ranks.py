"""A learner on all ranks: the first one is asked for it, the others follow.

The conductor runs on the first rank alone and calls `make_learner`; what its learner then does, it has the others do as
well. They are in `follow`, which waits for an order, carries it out, and waits for the next one.
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
from stalewise.config.run_directory import RunResult, flat, read_result
from stalewise.distributed import ALONE, Message, Ranks, join, launched, noticing
from stalewise.errors import ConfigError, RankError, StalewiseError, StoppedByFirst
from stalewise.models.loading import pick_device
from stalewise.rollout.workers.rank_workers import RolloutRank
from stalewise.store.atomic import make_directory, sha256_file, temporary_name
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions
from stalewise.trainer.batch import unpack_rank_batch
from stalewise.trainer.parallel import KINDS
from stalewise.trainer.pending_update import out_of_memory
from stalewise.trainer.trainer import Trainer


def make_trainer(
    config: RunConfig,
    checkpoint: Path,
    state: Mapping[str, Any],
    ranks: Ranks,
    kind: str,
    *,
    rate_factor: float = 1.0,
    log: Callable[[str], object] = lambda text: None,
) -> Trainer:
    """A learner that goes on from a checkpoint, on every rank; `kind` is one of `parallel.KINDS`."""
    if ranks.others:
        record = {"config": config.model_dump(mode="json"), "checkpoint": str(checkpoint), "state": dict(state)}
        record |= {"rate_factor": rate_factor, "kind": kind, "manifest": sha256_file(checkpoint / "manifest.json")}
        ranks.tell_all("learner", **record)
    trainer = Trainer(config, checkpoint, log, KINDS[kind](ranks))
    trainer.restore(checkpoint, dict(state))
    trainer.rate_factor = rate_factor
    return trainer


class RankWorker:
    """A rank that is led. `orders` are what it can do, by name."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.trainer: Trainer | None = None
        self.orders: dict[str, Callable[[Message], object]] = {
            "learner": self._make_learner,
            "update": self._update,
            "save": lambda order: self._led().gather(order.record["has_moments"]),
        }

    def follow(self) -> Mapping[str, Any]:
        """Do what the first rank says until it says that the run is over, and how it ended."""
        while (order := self.ranks.hear()).what != "stop":
            self.orders[order.what](order)
        if order.record["exit_code"]:
            raise StoppedByFirst(order.record["exit_code"])
        return order.record

    def _led(self) -> Trainer:
        assert self.trainer is not None  # the first rank makes one before it gives any other order
        return self.trainer

    def _make_learner(self, order: Message) -> None:
        self.trainer = None  # there may not be room for two
        record, checkpoint = order.record, Path(order.record["checkpoint"])
        config = make_config(record["config"], source="the first rank's config")
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        manifest = checkpoint / "manifest.json"
        if not manifest.is_file() or sha256_file(manifest) != record["manifest"]:
            raise RankError(
                f"rank {self.ranks.rank} sees another {checkpoint} than rank 0, or none: all ranks need the same file "
                "system under the same path"
            )
        read_state(checkpoint)  # compares its files with their checksums
        self.trainer = Trainer(config, checkpoint, parallel=KINDS[record["kind"]](self.ranks))
        self.trainer.restore(checkpoint, dict(record["state"]))
        self.trainer.rate_factor = record["rate_factor"]

    def _update(self, order: Message) -> None:
        trainer = self._led()
        try:
            trainer.follow(unpack_rank_batch(order) if order.arrays else None)
        except torch.OutOfMemoryError:
            raise out_of_memory(trainer.token_budget) from None


# Several processes at one run: they find each other, see that they mean the same run, and the first one leads.
# The others follow until it is done. Whatever ends one of them ends all: the first one says why, where it can; the run
# directory is as after `kill -9` at worst, and the same command goes on.

LOOK_S = 5.0  # that a file which one rank wrote may take to be seen by another


def meet(config: RunConfig) -> Ranks:
    """The processes that were launched for this run; alone where it is one."""
    return ALONE if launched().world == 1 else join(pick_device(config.model.device))


def together(config: RunConfig, lead: Callable[[Ranks], RunResult]) -> RunResult:
    """Call `lead` on the first rank; on the others do what it says until it is done. All get the result.

    Ranks that mean another run are refused before anything is done.
    """
    ranks = meet(config)
    if ranks.world == 1:
        return lead(ranks)
    with noticing(ranks):
        _compare(config, ranks)
        if not ranks.is_first:
            return read_result(config.directory, _follow(ranks)["updates"])
        try:
            result = lead(ranks)
        except BaseException as error:
            ranks.dismiss(exit_code=error.exit_code if isinstance(error, StalewiseError) else 1)
            raise
        ranks.dismiss(exit_code=0, updates=result.updates)
        return result


def _follow(ranks: Ranks) -> Mapping[str, Any]:
    with RolloutRank(ranks) as hand:
        follower = RankWorker(ranks)
        follower.orders["generate"] = hand.generate
        return follower.follow()


def _compare(config: RunConfig, ranks: Ranks) -> None:
    """See that all ranks have the same config, packages and run directory; an error names the rank and what differs."""
    if not ranks.is_first:
        probe = Path(ranks.hear().record["probe"])
        ranks.tell(0, "facts", {"facts": _facts(config), "sees": _sees(probe)})
        return
    probe = temporary_name(config.directory / "probe")
    make_directory(config.directory)
    probe.touch()
    try:
        ranks.tell_all("compare", probe=str(probe))
        facts = _facts(config)
        differences = [_difference(rank, facts, ranks.hear(rank).record, probe.parent) for rank in ranks.others]
    finally:
        probe.unlink(missing_ok=True)
    if found := [difference for difference in differences if difference]:
        ranks.dismiss(exit_code=ConfigError.exit_code)
        raise ConfigError("; ".join(found[:3]))


def _difference(rank: int, first: Mapping[str, Any], record: Mapping[str, Any], directory: Path) -> str:
    """What another rank has that differs from the first rank's, as a sentence; empty where nothing does."""
    theirs: Mapping[str, Any] = record["facts"]
    names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
    if names:
        shown = [f"{name} is {theirs.get(name)!r} there and {first.get(name)!r} on rank 0" for name in names[:3]]
        return f"rank {rank} means another run: {'; '.join(shown)}: start all ranks with the same config and packages"
    if not record["sees"]:
        return f"rank {rank} does not see what rank 0 writes to {directory}: all ranks need the same file system there"
    return ""


def _facts(config: RunConfig) -> dict[str, Any]:
    """Whatever must be the same on all ranks."""
    newest = versions(config.directory)[-1:]
    manifests = [checkpoint_directory(config.directory, found) / "manifest.json" for found in newest]
    return {
        **flat(config.model_dump(mode="json")),
        "the release of stalewise": __version__,
        "the release of Python": platform.python_version(),
        **{f"the release of {package}": version(package) for package in ("torch", "transformers", "numpy")},
        **{f"the checkpoint {path.parent}": f"sha256 {sha256_file(path)[:12]}" for path in manifests},
    }


def _sees(probe: Path) -> bool:
    until = time.monotonic() + LOOK_S
    while not probe.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
