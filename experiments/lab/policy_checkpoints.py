"""Checkpoints of the policy alone: with a real model, moments would be two thirds of what a run writes at each refresh.

A run that is cut off cannot continue from them and begins again.
"""

from __future__ import annotations

import shutil
import weakref

from stalewise.config import RunConfig
from stalewise.models.transfer import HostBuffers
from stalewise.orchestrator.checkpoint_writer import CheckpointWriter, fits_beside
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.trainer.snapshot import POLICY, Snapshot
from stalewise.trainer.trainer import Trainer


class PolicyWriter(CheckpointWriter):
    """Writes what rollouts are sampled from, and not what learning continues from."""

    def copy(self, trainer: Trainer) -> Snapshot | None:
        """The policy in host memory; None where that is short, and everything is written."""
        policy = trainer._content()[POLICY]
        self._copied = None
        if not trainer.stored or not fits_beside(sum(one.nbytes for one in policy.values()) - self.buffers.nbytes):
            return None
        snapshot = Snapshot({POLICY: self.buffers.copy(POLICY, policy)}, trainer._save_small_files)
        self._copied = weakref.ref(trainer), trainer.version, snapshot.policy
        return snapshot

    def reserve(self, trainer: Trainer | None) -> None:
        """Nothing: it would get memory for moments, too."""


def write_policies_alone(orchestrator: Orchestrator) -> None:
    """Let a run that has not begun write no moments."""
    orchestrator.writer.close(orchestrator.callback.log)
    orchestrator.writer = PolicyWriter(orchestrator.run_log, HostBuffers())
    orchestrator.writer.on_commit = orchestrator.held.commit


def begin_again(config: RunConfig) -> None:
    """Remove what a run left that was cut off."""
    shutil.rmtree(config.directory, ignore_errors=True)
