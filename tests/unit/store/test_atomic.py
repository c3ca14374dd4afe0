"""The commit protocol under real crashes: SIGKILL, full disks, torn lines, a second process."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stalewise.errors import StoreError
from stalewise.store import atomic as files
from stalewise.store.atomic import (
    RunLock,
    commit_directory,
    make_directory,
    read_json,
    remove_if_failed,
    remove_temporaries,
    sha256_file,
    temporary_name,
    write_atomic,
    write_json_atomic,
)
from stalewise.store.json_lines import append_line, read_jsonl, truncate_jsonl

SOURCE = str(Path(files.__file__).parents[2])


def start(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# ---------------------------------------------------------------- whole files


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "file"
    for content in (b"first", "zweite µ", memoryview(b"third")):
        write_atomic(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else bytes(content))
    assert os.listdir(path.parent) == ["file"]


def test_order_is_flush_file_then_rename_then_flush_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A kill cannot show a missing fsync, since the page cache survives it: so the order itself is tested.
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".tmp-")[0])
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"x"
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_atomic(tmp_path / "run" / "file", b"x")
    assert calls == [f"fsync {tmp_path.name}", "fsync .file", "replace", "fsync run"]


def test_what_has_a_temporary_name_is_flushed_when_it_is_committed(tmp_path: Path, flushed: list[str]) -> None:
    # A flush waits for whatever else is being written to the disk.
    temporary = temporary_name(tmp_path / "batch") / "batch"
    write_atomic(temporary / "deep" / "one", b"x")
    assert files.create_atomic(temporary / "other", b"y")
    write_json_atomic(temporary / "manifest.json", {})
    assert not flushed
    commit_directory(temporary, tmp_path / "batch")
    assert sorted(flushed[:-1]) == ["batch", "deep", "manifest.json", "one", "other"]
    assert flushed[-1] == tmp_path.name  # after the rename

    # Names that only look alike are a user's.
    for name in (".tmp-run", "run.tmp-0123456789ab", ".run.tmp-1"):
        flushed.clear()
        write_atomic(tmp_path / name / "file", b"x")
        assert len(flushed) == 3


def test_any_failure_keeps_the_old_content_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_json_round_trip_with_numpy_numbers_and_non_finite_ones(tmp_path: Path) -> None:
    record = {
        "a": np.float32(0.5),
        "b": np.int64(3),
        "c": np.arange(2),
        "p": Path("x"),
        "inf": -float("inf"),
        "s": "\ud800",
    }
    write_json_atomic(tmp_path / "j.json", record)
    expected = {"a": 0.5, "b": 3, "c": [0, 1], "p": "x", "inf": -float("inf"), "s": "\ud800"}
    assert read_json(tmp_path / "j.json") == expected
    with pytest.raises(TypeError, match="object"):
        write_json_atomic(tmp_path / "j.json", {"a": object()})
    assert read_json(tmp_path / "j.json") == expected


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe{}", b"[1]", b"[" * 100_000])
def test_corrupt_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"bad\.json is corrupt"):
        read_json(tmp_path / "bad.json")
    with pytest.raises(StoreError, match=r"none\.json is missing"):
        read_json(tmp_path / "none.json")


def test_what_the_system_does_not_give_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(
        StoreError, match=r"cannot read .*folder\.json: Is a directory; it should be a file you may read"
    ):
        read_json(tmp_path / "folder.json")


def test_sha256_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")  # the example of FIPS 180-2
    assert sha256_file(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# ---------------------------------------------------------------- full disk

FILL = """
import os, resource, sys
from pathlib import Path
from typing import Any
from stalewise.errors import StoreError
from stalewise.store.atomic import commit_directory, write_atomic
from stalewise.store.json_lines import append_line, read_jsonl
directory, limited = Path(sys.argv[1]), sys.argv[2] == "rlimit"
if limited:
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
write_atomic(directory / "kept", b"k" * 8192)
append_line(directory / "lines", {"n": 0})
for attempt in (lambda: write_atomic(directory / "kept", b"x" * 10**6),
                lambda: append_line(directory / "lines", {"text": "y" * 10**6})):
    try:
        attempt()
    except StoreError as error:
        print(error)
write_atomic(directory / "after", b"a")
append_line(directory / "lines", {"n": 1})
print(sorted(os.listdir(directory)), (directory / "kept").read_bytes() == b"k" * 8192,
      read_jsonl(directory / "lines"), sep="|")
"""


def check_full_disk(output: str, directory: str) -> None:
    first, second, state = output.splitlines()
    assert first == f"disk full while writing {directory}/kept: free 1,000,000 bytes; run the same command again"
    assert second.startswith(f"disk full while writing {directory}/lines: free 1,000,0")
    assert state == "['after', 'kept', 'lines']|True|[{'n': 0}, {'n': 1}]"


def test_file_size_limit_harms_nothing_committed(tmp_path: Path) -> None:
    check_full_disk(finish(start(FILL, tmp_path, "rlimit")), str(tmp_path))


def test_a_really_full_file_system_harms_nothing_committed(tmp_path: Path) -> None:
    # A file system of 64 kB in the child's own mount namespace; needs no root where user namespaces are allowed.
    mount = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && "
    allowed = shutil.which("unshare") and subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount + "true"], capture_output=True
    )
    if not allowed or allowed.returncode:
        pytest.skip("no user namespaces here; the file size limit above goes the same way")
    prefix = ("unshare", "-rm", "sh", "-c", mount + 'exec "$@"', "sh")
    check_full_disk(finish(start(FILL, tmp_path, "tmpfs", prefix=prefix)), str(tmp_path))


def test_other_write_errors_are_explained(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot write .*: File name too long"):
        write_atomic(tmp_path / ("n" * 300), b"")


# ---------------------------------------------------------------- lines


def test_torn_tail_is_reported_left_out_and_overwritten(tmp_path: Path) -> None:
    path, reports = tmp_path / "m.jsonl", []
    assert read_jsonl(path) == []
    append_line(path, {"n": 1})
    first = len(path.read_bytes())
    append_line(path, {"n": 22})
    whole = path.read_bytes()
    for cut in range(first + 1, len(whole)):  # a crash after any byte of the second line, newline excluded
        path.write_bytes(whole[:cut])
        assert read_jsonl(path, on_torn=reports.append) == [{"n": 1}]
        append_line(path, {"n": 333})
        assert read_jsonl(path, on_torn=pytest.fail) == [{"n": 1}, {"n": 333}]
    assert len(reports) == len(whole) - first - 1
    assert "m.jsonl" in reports[0] and "(2)" in reports[0]


def test_a_long_torn_tail_is_cut_exactly(tmp_path: Path) -> None:
    for committed in (b"", b'{"n": 1}\n'):
        path = tmp_path / "m.jsonl"
        path.write_bytes(committed + b'{"text": "' + b"z" * 10_000)
        append_line(path, {"n": 2})
        assert path.read_bytes().startswith(committed + b'{"n": 2, "checksum": "')
        assert path.read_bytes().count(b"\n") == committed.count(b"\n") + 1


def test_corrupt_line_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for bad in (b'{"n": 1', b"", b"3", b"\x00\x00"):
        path.write_bytes(b'{"n": 0}\n' + bad + b'\n{"n": 2}\n')
        with pytest.raises(StoreError, match=r"m\.jsonl, line 2 is corrupt"):
            read_jsonl(path)
        with pytest.raises(StoreError, match=r"m\.jsonl, line 2 is damaged"):
            truncate_jsonl(path, lambda _: True)


def test_truncate_keeps_the_bytes_of_what_it_keeps(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert truncate_jsonl(path, lambda _: False) == 0 and not path.exists()
    path.write_bytes(b'{"n":0, "x": 1e-3}\n{"n":1}\n{"n":2}\n{"n"')
    assert truncate_jsonl(path, lambda record: record["n"] < 2) == 1
    assert path.read_bytes() == b'{"n":0, "x": 1e-3}\n{"n":1}\n'
    inode = path.stat().st_ino
    assert truncate_jsonl(path, lambda _: True) == 0
    assert path.stat().st_ino == inode  # nothing to drop, nothing rewritten


@example([{"half a pair": "\ud800"}, {}, {"": math.inf}])
@given(
    st.lists(
        st.dictionaries(st.text(), st.text(alphabet=st.characters(exclude_categories=())) | st.floats(allow_nan=False))
    )
)
def test_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("lines") / "m.jsonl"
    for record in records:
        append_line(path, record)
    assert read_jsonl(path, on_torn=pytest.fail) == records


# ---------------------------------------------------------------- directories


def test_commit_directory_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "checkpoints" / "v000001"
    temporary = temporary_name(final)
    (temporary / "inner").mkdir(parents=True)
    (temporary / "inner" / "weights").write_bytes(b"w")
    (temporary / "manifest.json").write_text("{}")
    synced: set[str] = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: (synced.add(Path(os.readlink(f"/proc/self/fd/{d}")).name), fsync(d)))
    commit_directory(temporary, final)
    assert {"weights", "inner", "manifest.json", temporary.name, "checkpoints"} <= synced
    assert (final / "inner" / "weights").read_bytes() == b"w" and not temporary.exists()
    again = temporary_name(final)
    again.mkdir()
    with pytest.raises(StoreError, match="v000001 exists already"):
        commit_directory(again, final)
    assert remove_temporaries(tmp_path) == 1
    assert os.listdir(tmp_path / "checkpoints") == ["v000001"]


def test_full_disk_removes_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = temporary_name(tmp_path / "v1")
    temporary.mkdir()
    (temporary / "weights").write_bytes(b"12345")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")  # fsync reports it late where allocation is delayed

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"disk full while writing .*v1: free 5 bytes"):
        commit_directory(temporary, tmp_path / "v1")
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- one process at a time

HOLD = """
import os, sys, time
from stalewise.store.atomic import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
if sys.argv[2] == "alone":
    print("locked", flush=True)
elif os.fork() == 0:
    print(os.getpid(), flush=True)  # by the child itself: only now is it sure to have run its at-fork handlers
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_second_process_is_told_the_pid_and_kill_frees_the_lock(tmp_path: Path, how: str) -> None:
    process = start(HOLD, tmp_path, how)
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    try:
        with pytest.raises(StoreError, match=f"in use by process {process.pid} on .* since "):
            RunLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
        process.wait()
        # In the forked case a child of the killed process is still alive: it must not keep the lock.
        with RunLock(tmp_path):
            holder = json.loads((tmp_path / RunLock.FILE).read_text())
            assert holder["pid"] == os.getpid() and set(holder) == {"pid", "host", "since"}
    finally:
        process.kill()
        if how == "fork":
            os.kill(int(said), signal.SIGKILL)
        process.communicate()


def test_lock_within_one_process(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    with lock:
        for other in (lock, RunLock(tmp_path / "run")):
            with pytest.raises(StoreError, match=r"locked already|in use by process"):
                other.acquire()
    with lock:  # released, and good for another turn
        pass
    lock.release()


def test_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / RunLock.FILE).write_text("")
        with pytest.raises(StoreError, match="in use by another process"):
            RunLock(tmp_path).acquire()


def test_a_lock_that_is_taken_back_leaves_no_two_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, really = RunLock(tmp_path), RunLock(tmp_path), os.open
    first.acquire()

    def opened(path: Any, *given: Any, **named: Any) -> int:  # the first one leaves once the second one has its file
        descriptor = really(path, *given, **named)
        if Path(path) == first.path:
            first.release_and_remove()
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    with second:
        assert not second.is_gone
        with pytest.raises(StoreError, match="in use by process"):
            RunLock(tmp_path).acquire()
    second.acquire()
    second.release_and_remove()  # it has not made the file
    assert first.path.exists()


def test_what_was_made_for_a_block_that_fails_is_removed_unless_it_is_used(tmp_path: Path) -> None:
    def left(used: str) -> list[str]:
        with pytest.raises(KeyboardInterrupt), remove_if_failed(tmp_path / "a" / "b"):
            make_directory(tmp_path / "a" / "b")
            (tmp_path / used).touch()
            raise KeyboardInterrupt
        return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))

    assert left("") == []
    assert left("a/used") == ["a", "a/used"]
    assert left("a/b/used") == ["a", "a/b", "a/b/used", "a/used"]


@pytest.mark.parametrize("kind", ["device", "pipe", "directory"])
def test_what_has_no_end_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.json"
    {"device": lambda: path.symlink_to("/dev/zero"), "pipe": lambda: os.mkfifo(path), "directory": path.mkdir}[kind]()
    with pytest.raises(StoreError, match="Is a directory" if kind == "directory" else "is not an ordinary file"):
        read_json(path)


def test_a_file_where_a_directory_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for path in (tmp_path / "runs", tmp_path / "runs" / "first" / "checkpoints"):
        with pytest.raises(StoreError, match=rf"^{tmp_path}/runs is a file: move it, or name another directory$"):
            make_directory(path)
