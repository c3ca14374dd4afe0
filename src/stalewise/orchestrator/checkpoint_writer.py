"""Commits checkpoints in a thread while the run goes on.

The next stage is generated, or the next updates are taken, while the last policy is still being written. Its evaluation
and its rollouts are committed only after it: both wait for `join`, though the run may learn from the rollouts before
(`HeldRollouts`). If the process is killed in between, the directory is as if it was killed before the checkpoint, and
the same command continues.
"""

from __future__ import annotations

import contextlib
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import psutil

from stalewise.errors import StalewiseError, StoreError
from stalewise.orchestrator.run_log import RunLog
from stalewise.store.atomic import is_disk_full
from stalewise.store.checkpoints import SpareFiles

if TYPE_CHECKING:  # they need torch, for which `doctor` does not wait
    from torch import Tensor

    from stalewise.models.transfer import HostBuffers
    from stalewise.trainer.snapshot import Snapshot
    from stalewise.trainer.trainer import Trainer

SHARE = 0.5  # share of the free host memory that the copy of a checkpoint may take

Notes = dict[str, Any]  # for the journal


class CheckpointWriter:
    """Writes one checkpoint at a time. `version` is the one being written, until `join`; None if all are committed.

    `buffers` hold the copy that is written. `on_commit` is called by `join` after a commit.
    """

    def __init__(self, run_log: RunLog, buffers: HostBuffers) -> None:
        self.run_log = run_log
        self.buffers = buffers
        self._is_reserved = False
        self.version: int | None = None
        self.on_commit: Callable[[], object] = lambda: None
        self.spare = SpareFiles()
        # The last copy: its trainer, its version, its weights.
        self._copied: tuple[weakref.ref[Trainer], int, Mapping[str, Tensor]] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # On a disk that is told of freed space (discard), removing a checkpoint can take as long as writing one.
        self._removing = ThreadPoolExecutor(1, thread_name_prefix="removal")
        self._commit: Future[Notes] | None = None
        self._reserved: Future[None] | None = None
        self._rest: deque[Future[None]] = deque()

    def copy(self, trainer: Trainer) -> Snapshot | None:
        """A checkpoint's content in host memory; None if that is short, or only transformers can write it."""
        self._copied = None  # the buffers are overwritten
        fits = fits_beside(trainer.checkpoint_bytes() - self.buffers.nbytes)
        snapshot = trainer.snapshot(self.buffers) if fits else None
        self._copied = weakref.ref(trainer), trainer.version, {} if snapshot is None else snapshot.policy
        return snapshot

    def policy(self, trainer: Trainer) -> Mapping[str, Tensor]:
        """The trainer's weights. While it is in host memory, those of its last copy, or none if that is older."""
        if not trainer.is_asleep:
            return trainer.policy()
        copied = self._copied
        is_of_it = copied is not None and copied[0]() is trainer and copied[1] == trainer.version
        return copied[2] if copied is not None and is_of_it else {}

    def begin(
        self, version: int, commit: Callable[[], Notes], afterwards: Callable[[], object] | None, nbytes: int = 0
    ) -> None:
        """Commit a checkpoint in the background, then do `afterwards`; neither may touch the trainer.

        The `afterwards` of the checkpoint before may still run, unless the disk has little room for `nbytes` more.
        Under a quota the room is unknown, so a commit that finds the disk full waits for it and is tried once more. If
        it failed, its error is raised after this commit, so that the updates of this checkpoint are not lost.
        """
        self.join()
        try:
            while self._rest and (len(self._rest) > 1 or self._rest[0].done() or not self._has_room(nbytes)):
                self._wait_for_rest()
        except Exception:
            self.version, self._commit = version, self._threads.submit(commit)
            self.join()
            raise
        before = self._rest[0] if self._rest else None

        def try_commit() -> Notes:
            try:
                return commit()
            except StoreError as error:
                if not is_disk_full(error) or (before is None and not self.spare):
                    raise
            wait([before] if before else [])
            self.spare.remove()
            return commit()

        self.version = version
        committed = self._commit = self._threads.submit(try_commit)

        def rest(afterwards: Callable[[], object]) -> None:
            if committed.exception() is None:
                afterwards()

        if afterwards is not None:
            self._rest.append(self._removing.submit(rest, afterwards))

    def reserve(self, trainer: Trainer | None) -> None:
        """Allocate the memory of the first copy while updates run, since that takes longer than the copy itself."""
        if self._is_reserved or trainer is None or self._commit is not None:
            return
        shapes = trainer.snapshot_shapes()
        self._is_reserved = True

        def reserve() -> None:
            with contextlib.suppress(MemoryError, RuntimeError):  # if memory is still short then, `copy` returns None
                self.buffers.reserve(shapes)

        if shapes and fits_beside(trainer.checkpoint_bytes()):
            self._reserved = self._threads.submit(reserve)

    def free_buffers(self) -> None:
        """Wait until the buffers may be filled again, since the checkpoint in them is committed."""
        self.join()
        if self._reserved is not None:
            reserved, self._reserved = self._reserved, None
            with self.run_log.timed("switch", reason="memory"):
                reserved.result()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is not committed yet."""
        return self._commit is not None and not self._commit.done()

    def check(self) -> None:
        """Raise the error of a checkpoint that has failed, without waiting."""
        if self._commit is not None and self._commit.done() and self._commit.exception() is not None:
            self.join()

    def join(self) -> None:
        """Wait until the checkpoint is committed. An error of it is raised once."""
        if self._commit is None:
            return
        commit, version = self._commit, self.version
        with self.run_log.timed("switch", reason="commit", version=version) as notes:
            try:
                notes |= commit.result()
            except Exception as error:
                self._commit = self.version = None
                if isinstance(error, StalewiseError):
                    raise
                raise StoreError(
                    f"the checkpoint of version {version} could not be written: {type(error).__name__}: {error}; the "
                    "run goes on from the one before: run the same command again"
                ) from error
            self._commit = self.version = None
            self.on_commit()

    def finish(self) -> None:
        """Wait until nothing is left to do in the background."""
        self.free_buffers()
        while self._rest:
            self._wait_for_rest()
        self.spare.remove()

    def spare_for(self, nbytes: int) -> SpareFiles | None:
        """Where the files of a removed checkpoint are kept for reuse; None if space is short, so that none are kept."""
        if self._has_room(nbytes):
            return self.spare
        self.spare.remove()
        return None

    def close(self, log: Callable[[str], object]) -> None:
        """End the threads when their work is done. Errors are logged only, since another error may be being raised."""
        try:
            for step in (self.join, self.finish):
                try:
                    step()
                except StalewiseError as error:
                    log(str(error))
        finally:
            self._threads.shutdown()
            self._removing.shutdown()
            self.spare.remove()

    def _wait_for_rest(self) -> None:
        try:
            self._rest.popleft().result()
        except BaseException:
            self._rest.clear()  # the next one fails for the same reason
            raise

    def _has_room(self, nbytes: int) -> bool:
        """Whether the disk holds this many bytes more, with as much left for everything else."""
        try:
            return 2 * nbytes <= shutil.disk_usage(self.run_log.directory).free
        except OSError:  # the next write reports it better
            return False


def fits_beside(nbytes: int) -> bool:
    """Whether host memory holds this many bytes more, with as much left for everything else."""
    return nbytes <= SHARE * psutil.virtual_memory().available
