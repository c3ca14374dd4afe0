"""Writing a generation batch under real crashes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stalewise import store
from stalewise.errors import StoreError
from stalewise.store import writer
from stored_rollouts import SOURCE, make_batch, make_rollouts

TESTS = Path(__file__).parents[2]

# For each n given: a forked process writes a batch of four shards and kills itself before its n-th fsync, rename, link.
# Forked, because most of such a process's time would go into starting Python.
WRITE = """
import os, sys
from pathlib import Path
from stalewise import store
from stalewise.store import writer
from stored_rollouts import make_rollouts
def deadly(function):
    def call(*arguments):
        global left
        left -= 1
        if left == -1:
            os.kill(os.getpid(), 9)
        return function(*arguments)
    return call
def write(root):
    directory = store.batch_directory(root, version=64, generation_batch=3)
    root.mkdir()
    with open(root / "said", "w") as said:
        for index in range(writer.next_shard(directory), 4):
            writer.write_shard(directory, index, make_rollouts(index * 150, 150))
            print(index, file=said, flush=True)
        writer.commit_batch(directory, shards=4, task="arithmetic")
        print("done", file=said, flush=True)
store.table_from_rollouts(make_rollouts(0, 1))  # pyarrow imports pandas at first use: not once per fork
os.fsync, os.replace, os.link = deadly(os.fsync), deadly(os.replace), deadly(os.link)
for word in sys.argv[2:]:
    left, root = int(word), Path(sys.argv[1], word)
    if (child := os.fork()) == 0:
        try:
            write(root)
        finally:
            os._exit(0)
    print(word, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def start_writer(root: Path, *kill_at: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITE, str(root), *map(str, kill_at)]
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def check_after_kill(root: Path, reference: dict[int, str]) -> None:
    directory, said = root / "g000003-v000064", (root / "said").read_text().split()
    present = store.committed_shards(directory)
    indices = [shard.index for shard in present]
    claimed = [int(word) for word in said if word != "done"]
    assert indices[: len(claimed)] == claimed  # what was reported committed is there
    assert len(indices) <= len(claimed) + 1 and indices == list(range(len(indices)))
    for shard in present:
        store.verify_shard(directory, shard)
        assert shard.sha256 == reference[shard.index]
    if "done" in said:
        assert store.is_committed(directory)
    if not store.is_committed(directory):
        with pytest.raises(StoreError, match=r"not a committed generation batch: manifest\.json is missing"):
            store.open_batch(directory)
        for index in range(writer.next_shard(directory), 4):
            writer.write_shard(directory, index, make_rollouts(index * 150, 150))
        writer.commit_batch(directory, shards=4, task="arithmetic")
    resumed = store.open_batch(directory)
    assert {shard.index: shard.sha256 for shard in resumed.manifest.shards} == reference


NEVER = 10**6


@pytest.mark.parametrize("attempts", [1, pytest.param(9, marks=pytest.mark.nightly)])
def test_kill_at_every_step_and_at_random_times(tmp_path: Path, attempts: int) -> None:
    # 1 new directory; 6 steps for each of 4 shards, 3 for the batch.
    steps = range(1 + 4 * 6 + 3)
    out, _ = start_writer(tmp_path, NEVER, *steps).communicate(timeout=60)
    codes = dict(zip(out.split()[::2], out.split()[1::2], strict=True))
    assert codes == {str(NEVER): "0", **{str(step): str(-signal.SIGKILL) for step in steps}}
    complete = store.open_batch(tmp_path / str(NEVER) / "g000003-v000064").manifest
    reference = {shard.index: shard.sha256 for shard in complete.shards}
    for step in steps:
        check_after_kill(tmp_path / str(step), reference)
    chance = random.Random(0)
    for attempt in range(attempts):
        root = tmp_path / f"random{attempt}"
        root.mkdir()
        process = start_writer(root, NEVER)
        first = root / str(NEVER) / "g000003-v000064" / "shard-00000.json"
        while not first.exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        check_after_kill(root / str(NEVER), reference)


@pytest.mark.parametrize("leftover", ["parquet", "json"])
@pytest.mark.parametrize("failing_link", [0, 1])
def test_no_leftover_is_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover: str, failing_link: int
) -> None:
    # Left by an earlier crash: a shard without manifest; left by a user: the manifest of a shard that was moved away.
    directory = make_batch(tmp_path, shards=1, rows=8)
    (directory / "manifest.json").unlink()
    for suffix in {"parquet", "json"} - {leftover}:
        (directory / f"shard-00000.{suffix}").unlink()
    links, link = iter(range(9)), os.link

    def fail(source: Path, target: Path) -> None:
        if next(links) == failing_link:
            raise KeyboardInterrupt
        link(source, target)

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(KeyboardInterrupt):
        writer.write_shard(directory, 0, make_rollouts(0, 8))
    assert store.committed_shards(directory) == []


def test_shard_that_comes_out_different_has_to_be_committed_anew(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, rows=8)
    store.shard_path(directory, 1).unlink()
    writer.write_shard(directory, 1, make_rollouts(1008, 8, tokens=3))
    assert not store.is_committed(directory)
    manifest = writer.commit_batch(directory, shards=3, task="arithmetic")
    assert store.open_batch(directory).manifest == manifest


def test_nothing_committed_is_written_again(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, rows=8)
    with pytest.raises(StoreError, match=r"shard-00001\.parquet is committed already"):
        writer.write_shard(directory, 1, make_rollouts(0, 1))
    with pytest.raises(StoreError, match="committed already"):
        writer.commit_batch(directory, shards=3, task="arithmetic")
    with pytest.raises(StoreError, match="no rollouts"):
        writer.write_shard(directory, 3, [])


def test_incomplete_or_overlapping_batches_are_not_committed(tmp_path: Path) -> None:
    directory = store.batch_directory(tmp_path, version=1, generation_batch=0)
    writer.write_shard(directory, 0, make_rollouts(0, 8))
    writer.write_shard(directory, 2, make_rollouts(15, 8))
    assert writer.next_shard(directory) == 1
    with pytest.raises(StoreError, match=r"3 shards expected, missing \[1\]"):
        writer.commit_batch(directory, shards=3, task="t")
    writer.write_shard(directory, 1, make_rollouts(8, 8))
    with pytest.raises(StoreError, match=r"2 shards expected, not expected \[2\]"):
        writer.commit_batch(directory, shards=2, task="t")
    with pytest.raises(StoreError, match=r"shard-00002.parquet starts at rollout 15, but .* ends at 15"):
        writer.commit_batch(directory, shards=3, task="t")
    assert not store.is_committed(directory)
