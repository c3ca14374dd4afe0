"""JSONL files that grow by one record at a time: metrics, ledger, journal, evaluations.

A record is appended with one write. A crash can leave one torn last line, which readers drop and report. Each line ends
with a checksum of itself and of the line before, so that no line can be changed, lost or moved unnoticed. The committed
lengths of a run's files are in its `records.json` (`commit_records`), so that a lost end is noticed, too; lines after
it may be lost in a power failure. Lines of older releases have no checksums: they are read as they are, and the next
line with a checksum covers them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stalewise.errors import StoreError
from stalewise.store.atomic import (
    CHECKSUM,
    RESTORE,
    check_format,
    digest,
    explain_write_errors,
    fsync_directory,
    json_default,
    make_directory,
    read_json,
    write_atomic,
    write_json_atomic,
)

log = logging.getLogger(__name__)

RECORDS = "records.json"  # the committed lengths of a run's JSONL files
RECORDS_FORMAT = "stalewise.records/1"
_SEALED_LINE = re.compile(rb'[,{] "checksum": "([0-9a-f]{16})"\}\n')
_SEAL_BYTES = len(b', "checksum": "0123456789abcdef"}\n')


class Line(NamedTuple):
    """One line of a JSONL file."""

    number: int
    raw: bytes
    end: int  # where the next one begins
    record: dict[str, Any]  # without the checksum
    problem: str  # empty: it is as it was written
    is_sealed: bool  # False: written by a release without checksums


def append_line(path: str | Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    """Append one record to a JSONL file, with its checksum: one write, then fsync. The newline commits it.

    A torn tail from an earlier crash is cut off first, or it would become a corrupt line in the middle. Without
    `durable` the file is not flushed, since that waits for everything that is being written; `commit_records` does it.
    """
    path, head = Path(path), _head(record)
    with explain_write_errors(path, len(head) + _SEAL_BYTES):
        is_new = not path.exists()
        make_directory(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            end = _end_of_last_line(descriptor)
            rest = _sealed_line(head, _seal_before_in(descriptor, end))
            try:
                while rest:  # one write, unless the disk fills up within the line: then the second one raises
                    rest = rest[os.write(descriptor, rest) :]
                if durable:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
        if is_new and durable:
            fsync_directory(path.parent)


def write_lines(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole JSONL file with checksums."""
    write_atomic(path, _sealed_lines(records, b"")[0])


def read_jsonl(path: str | Path, on_torn: Callable[[str], object] = log.warning) -> list[dict[str, Any]]:
    """Read the records of a JSONL file; a missing file has none.

    A last line that a crash has torn is left out and reported to `on_torn`. A corrupt or changed line elsewhere is a
    StoreError that names the line.
    """
    lines = scan_lines(path, on_torn)
    for line in lines:
        if line.problem:
            raise StoreError(f"{path}, line {line.number} is corrupt: {line.problem}; {RESTORE}")
    return [line.record for line in lines]


def scan_lines(path: str | Path, on_torn: Callable[[str], object] = log.warning) -> list[Line]:
    """The lines of a JSONL file, each with its problem, if any; a torn last line is left out."""
    path = Path(path)
    committed = _committed(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if committed is None:
            return []
        raise StoreError(f"{path} is missing: {committed[0]:,} bytes were committed; {RESTORE}") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    lines, before = _parse_lines(content), committed[0] if committed else 0
    if lines and lines[-1].problem and lines[-1].end - len(lines[-1].raw) >= before:
        number = lines.pop().number
        on_torn(f"{path}: the last line ({number}) is torn, as by a crash while it was written: left out")
    if committed is not None and (len(content) < before or _seal_before(content, before).decode() != committed[1]):
        what = f"the first {before:,} bytes are not those that {RECORDS} has the checksum of: lines are changed or lost"
        if not any(line.problem for line in lines):  # then the line itself is named
            lines.append(Line(len(lines) + 1, b"", len(content), {}, what, True))
    return lines


def truncate_jsonl(path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Drop the records for which `keep` is false, and a torn tail, in one atomic rewrite; return how many were dropped.

    On resume this removes what was recorded after the last checkpoint and will be recorded again.
    """
    path, torn = Path(path), list[str]()
    lines = scan_lines(path, torn.append)
    kept = [line for line in lines if _is_kept(path, line, keep)]
    if torn or len(kept) < len(lines):
        intact = next((i for i, line in enumerate(kept) if line.number != i + 1), len(kept))  # lines that stay in place
        head = b"".join(line.raw for line in kept[:intact])
        _uncommit(path, len(head))
        moved = [line.record for line in kept[intact:]]
        write_atomic(path, head + _sealed_lines(moved, _seal_before(head, len(head)))[0])
    return len(lines) - len(kept)


def _is_kept(path: Path, line: Line, keep: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        if not line.problem:
            return keep(line.record)
        problem = line.problem
    except (KeyError, TypeError) as error:
        problem = f"{error!r} in its record"
    raise StoreError(f"{path}, line {line.number} is damaged: {problem}; {RESTORE}")


def commit_records(run: str | Path, ends: Mapping[str, tuple[int, str]] | None = None) -> None:
    """Flush the JSONL files of a run and write their lengths to `records.json`, so that the loss of an end is noticed.

    `ends` are the lengths to commit (`record_ends`), if the files may have grown since.
    """
    run = Path(run)
    ends, before = record_ends(run) if ends is None else ends, committed_ends(run)
    changed = [run / name for name, end in ends.items() if end != before.get(name)]
    with explain_write_errors(run, 0):
        for path in (*changed, *{path.parent for path in changed}):  # new ones are entries of their directories
            fsync_directory(path)
    _write_ends(run, ends)


def record_ends(run: str | Path) -> dict[str, tuple[int, str]]:
    """The bytes of each JSONL file of a run up to its last whole line, and the checksum there, by name."""
    run = Path(run)
    paths = sorted((*run.glob("*.jsonl"), *run.glob("ledger/*.jsonl")))
    ends = {path.relative_to(run).as_posix(): _end_of(path) for path in paths}
    return {name: end for name, end in ends.items() if end[0]}


def committed_ends(run: str | Path) -> dict[str, tuple[int, str]]:
    """The bytes of each JSONL file of a run that are committed, and the checksum there, by name."""
    path = Path(run) / RECORDS
    if not path.is_file():
        return {}
    record = read_json(path)
    try:
        check_format(path, record["format"], RECORDS_FORMAT)
        return {name: (int(end["bytes"]), str(end["checksum"])) for name, end in record["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is corrupt: {error!r}; {RESTORE}") from error


def _write_ends(run: Path, ends: Mapping[str, tuple[int, str]]) -> None:
    if ends != committed_ends(run):
        files = {name: {"bytes": size, "checksum": checksum} for name, (size, checksum) in ends.items()}
        write_json_atomic(run / RECORDS, {"format": RECORDS_FORMAT, "files": files}, sealed=True)


def _run_of(path: Path) -> Path | None:
    """The directory whose `records.json` covers a JSONL file."""
    return next((parent for parent in (path.parent, path.parent.parent) if (parent / RECORDS).is_file()), None)


def _committed(path: Path) -> tuple[int, str] | None:
    run = _run_of(path)
    return None if run is None else committed_ends(run).get(path.relative_to(run).as_posix())


def _uncommit(path: Path, size: int) -> None:
    """Lower the committed length before truncating, so that a kill in between never leaves it beyond the file's end."""
    run = _run_of(path)
    if run is not None:
        name, ends = path.relative_to(run).as_posix(), committed_ends(run)
        if name in ends and ends[name][0] > size:
            _write_ends(run, {other: end for other, end in ends.items() if other != name})


def _end_of(path: Path) -> tuple[int, str]:
    """Where the last whole line of a file ends, and the checksum there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0, ""
    try:
        end = _last_newline(descriptor)
        return end, _seal_before_in(descriptor, end).decode()
    finally:
        os.close(descriptor)


def _parse_lines(content: bytes) -> list[Line]:
    lines: list[Line] = []
    *whole, tail = content.split(b"\n")  # not splitlines: that would also cut at a stray \r
    end, link, any_sealed = 0, b"", False
    for number, raw in enumerate([line + b"\n" for line in whole] + ([tail] if tail else []), start=1):
        record, problem = _parse_line(raw)
        seal = _SEALED_LINE.fullmatch(raw, max(0, len(raw) - _SEAL_BYTES))
        if seal is not None:
            before = link if any_sealed else _seal_before(content, end)
            if not problem and digest(before, raw[: seal.start()]).encode() != seal[1]:
                problem = "its checksum does not fit: it was changed, or the line before it was changed or is missing"
            link, any_sealed = seal[1], True
        elif any_sealed and not problem:
            problem = "it has no checksum, and lines before it have one"
        end += len(raw)
        lines.append(Line(number, raw, end, record, problem, seal is not None))
    return lines


def _parse_line(raw: bytes) -> tuple[dict[str, Any], str]:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return {}, str(error)
    # A line without its newline was not committed, even if the cut left valid JSON: `12` of `123`.
    if not raw.endswith(b"\n") or not isinstance(record, dict):
        return {}, "not a whole JSON object"
    record.pop(CHECKSUM, None)
    return record, ""


def _sealed_lines(records: Iterable[Mapping[str, Any]], link: bytes) -> tuple[bytes, bytes]:
    """Lines with checksums, chained to the checksum `link` of the line before; and the checksum of the last line."""
    lines: list[bytes] = []
    for record in records:
        lines.append(_sealed_line(_head(record), link))
        link = _seal_before(lines[-1], len(lines[-1]))
    return b"".join(lines), link


def _head(record: Mapping[str, Any]) -> bytes:
    """A record as JSON, up to the checksum; the comma (in an empty record the brace) belongs to the checksum."""
    return (
        json.dumps(record, default=json_default).encode().removesuffix(b"}").removesuffix(b"{" if not record else b"")
    )


def _sealed_line(head: bytes, link: bytes) -> bytes:
    return b'%b%b "%b": "%b"}\n' % (head, b"," if head else b"{", CHECKSUM.encode(), digest(link, head).encode())


def _seal_before(content: bytes, end: int) -> bytes:
    """The checksum of the line before `end`, on which the checksum of the next line depends.

    If that line has none (older releases), it is a digest of everything before `end`. It is empty at the beginning.
    """
    seal = _SEALED_LINE.fullmatch(content, max(0, end - _SEAL_BYTES), end)
    return seal[1] if seal else digest(content[:end]).encode() if end else b""


def _seal_before_in(descriptor: int, end: int) -> bytes:
    """`_seal_before` for an open file; reads only its tail if lines have checksums."""
    tail = os.pread(descriptor, _SEAL_BYTES, max(0, end - _SEAL_BYTES)) if end >= _SEAL_BYTES else b""
    seal = _SEALED_LINE.fullmatch(tail[: min(end, _SEAL_BYTES)])
    return seal[1] if seal else _seal_before(os.pread(descriptor, end, 0), end)


def _end_of_last_line(descriptor: int) -> int:
    """Cut a torn tail off an open file; return where the next line starts."""
    end = _last_newline(descriptor)
    if end < os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, end)
    return end


def _last_newline(descriptor: int) -> int:
    """Where the last whole line of an open file ends."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
