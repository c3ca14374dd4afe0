"""A learner on all ranks: the first one is asked for it, the others follow.

The conductor runs on the first rank alone and calls `make_learner`; what its learner then does, it has the others do as
well. They are in `follow`, which waits for an order, carries it out, and waits for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stalewise.checkpoints import read_state
from stalewise.config import RunConfig, make_config
from stalewise.distributed import Message, Ranks
from stalewise.errors import RankError, StoppedByFirst
from stalewise.files import sha256_file
from stalewise.learn.learner import Learner
from stalewise.learn.parallel import KINDS
from stalewise.learn.readings import out_of_memory
from stalewise.learn.shares import unpack_share


def make_learner(
    config: RunConfig,
    checkpoint: Path,
    state: Mapping[str, Any],
    ranks: Ranks,
    kind: str,
    *,
    rate_factor: float = 1.0,
    say: Callable[[str], object] = lambda text: None,
) -> Learner:
    """A learner that goes on from a checkpoint, on every rank; `kind` is one of `parallel.KINDS`."""
    if ranks.others:
        record = {"config": config.model_dump(mode="json"), "checkpoint": str(checkpoint), "state": dict(state)}
        record |= {"rate_factor": rate_factor, "kind": kind, "manifest": sha256_file(checkpoint / "manifest.json")}
        ranks.tell_all("learner", **record)
    learner = Learner(config, checkpoint, say, KINDS[kind](ranks))
    learner.restore(checkpoint, dict(state))
    learner.rate_factor = rate_factor
    return learner


class Follower:
    """A rank that is led. `orders` are what it can do, by name."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.learner: Learner | None = None
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

    def _led(self) -> Learner:
        assert self.learner is not None  # the first rank makes one before it gives any other order
        return self.learner

    def _make_learner(self, order: Message) -> None:
        self.learner = None  # there may not be room for two
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
        self.learner = Learner(config, checkpoint, parallel=KINDS[record["kind"]](self.ranks))
        self.learner.restore(checkpoint, dict(record["state"]))
        self.learner.rate_factor = record["rate_factor"]

    def _update(self, order: Message) -> None:
        learner = self._led()
        try:
            learner.follow(unpack_share(order) if order.arrays else None)
        except torch.OutOfMemoryError:
            raise out_of_memory(learner.token_budget) from None
