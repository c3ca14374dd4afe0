"""Damages files of a run, one at a time, and asks every reader whether it noticed.

A damage is noticed if `verify` finds it. One that is not must change nothing: neither a figure of the report and of
`inspect`, nor a weight. No reader may end in anything but a StalewiseError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stalewise.config.run_directory import read_fork
from stalewise.errors import StalewiseError
from stalewise.reporting.inspection import inspect_run
from stalewise.reporting.read import read_run
from stalewise.reporting.verification import check_run, verify_run
from stalewise.store import TokenColumn, batch_directories, is_committed, read_batch_manifest, read_ledger
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions
from stalewise.store.records import REFERENCE, read_record
from stalewise.store.reward_versions import RewardVersion, reward_versions
from stalewise.tasks.difficulty import COPY, read_table

# Not records of the run: the lock's text, and what is made anew from the others.
UNIMPORTANT = ("run.lock", ".log", "report/", "work/")

KNOWN: dict[str, list[float]] = {}  # numbers of a column by the checksum of their shard, from before any damage

Damage = Callable[[bytes, random.Random], bytes | None]


def flip_bit(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_digit(content: bytes, rng: random.Random) -> bytes:
    places = [match.start() for match in re.finditer(rb"[0-9]", content[: 2**20])] or [0]
    place = rng.choice(places)
    return content[:place] + str(rng.randrange(10)).encode() + content[place + 1 :]


def change_letter(content: bytes, rng: random.Random) -> bytes:
    places = [match.start() for match in re.finditer(rb"[a-z_]", content[: 2**20])] or [0]
    place = rng.choice(places)
    return content[:place] + rng.choice("abcdefghijklmnopqrstuvwxyz").encode() + content[place + 1 :]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def zeros(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    size = min(512, len(content) - start)
    return content[:start] + bytes(size) + content[start + size :]


def drop_line(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def repeat_line(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def swap_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def append(content: bytes, rng: random.Random) -> bytes:
    return content + rng.choice([b"\0", b"x", b'{"update": 1}\n', b"\n"])


def delete(content: bytes, rng: random.Random) -> None:
    return None


ANY: list[Damage] = [flip_bit, cut, zeros, append, delete]
TEXT: list[Damage] = [
    *ANY,
    change_digit,
    change_digit,
    change_letter,
    change_letter,
    drop_line,
    repeat_line,
    swap_lines,
]


@contextlib.contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    """The file with another content, or gone."""
    before = path.read_bytes()
    path.unlink()  # not written over: checksums are kept by size and time
    if content is not None:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)


def figures(run: Path) -> dict[str, Any]:
    """What readers show of a run, and a hash of its newest weights."""
    shown = read_run(run)
    newest = checkpoint_directory(run, versions(run)[-1])
    return {
        "metrics": {key: values.tolist() for key, values in shown.metrics.items()},
        "evaluations": shown.evaluations,
        "suites": shown.suites,
        "batches": [repr(batch) for batch in shown.batches],
        "rollbacks": [repr(one) for one in shown.rollbacks],
        "seconds": shown.seconds,
        "config": shown.config,
        "environment": shown.environment,
        "inspected": inspect_run(run),
        "ledger": [repr(entry) for entry in read_ledger(run / "ledger" / "updates.jsonl")],
        "forked": read_fork(run),
        "difficulty": repr(read_table(run / COPY, read_json)) if (run / COPY).is_file() else "",
        "rewards": [_rewards(one, run) for one in reward_versions(run)],
        "columns": [_column(run, path) for path in sorted(run.glob("columns/reference/*"))],
        "rows": [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(run.glob("data/*/*"))],
        "weights": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in newest.glob("*.safetensors")},
    }


def _rewards(version: RewardVersion, run: Path) -> list[Any]:
    batches = filter(is_committed, batch_directories(run / "rollouts"))
    tables = [version.rewards_of(read_batch_manifest(path), path).table.to_pylist() for path in batches]
    return [version.name, tables, {key: value for key, value in version.record.items() if key != "batches"}]


def _column(run: Path, path: Path) -> list[float]:
    """The numbers of a column as a run uses them: what is missing, or of something else, is computed again."""
    shards = read_batch_manifest(run / "rollouts" / path.name).shards
    column = TokenColumn(path, read_record(run / "reference.json", REFERENCE)["key"])
    numbers: list[float] = []
    for one in shards:
        values = column.read(one, 0, one.response_tokens).tolist() if column.has(one) else KNOWN[one.sha256]
        KNOWN.setdefault(one.sha256, values)
        numbers += values
    return numbers


def outcome(run: Path, before: str) -> str:
    """`noticed`, `harmless`, `UNNOTICED`, or the last line of a traceback."""
    try:
        noticed = bool(verify_run(run).damaged)
        try:
            check_run(run)
            read_state(checkpoint_directory(run, versions(run)[-1]))  # what `train` does before it goes on
        except (StalewiseError, IndexError):
            noticed = noticed or not versions(run)
            assert noticed, "train refuses what verify does not name"
        try:
            after = json.dumps(figures(run), default=repr)
            noticed = noticed or bool(read_run(run).notes)
        except StalewiseError:
            return "noticed"
        return "noticed" if noticed else "harmless" if after == before else "UNNOTICED"
    except StalewiseError:
        return "noticed"
    except Exception as error:
        return f"FOREIGN {type(error).__name__}: {traceback.format_exc().splitlines()[-3].strip()}: {error}"


def without_checksums(run: Path) -> None:
    """The run as a release without checksums has left it."""
    for path in [*run.rglob("*.jsonl"), *run.rglob("*.json")]:
        if "checkpoints" not in path.parts or path.name == "manifest.json":
            path.write_text(re.sub(r',\s+"checksum": "[0-9a-f]{16}"', "", path.read_text()))
    for path in [run / "records.json", *run.glob("rollbacks/*/records.json"), *run.rglob("tokens/u*.json")]:
        path.unlink(missing_ok=True)


def attack(run: Path, count: int, seed: int) -> dict[str, Any]:
    """Damage `count` files of the run, of each kind of file about as many; what became of each."""
    rng = random.Random(seed)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in files if not any(part in str(path.relative_to(run)) for part in UNIMPORTANT)]
    kinds: dict[str, list[Path]] = {}
    for path in files:
        kinds.setdefault(re.sub(r"\d+", "#", str(path.relative_to(run))), []).append(path)
    before = json.dumps(figures(run), default=repr)
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(count):
        path = rng.choice(kinds[list(kinds)[number % len(kinds)]])
        damage = rng.choice(TEXT if path.suffix in (".json", ".jsonl", ".toml", ".txt") else ANY)
        content = path.read_bytes()
        changed = damage(content, rng)
        if changed == content:
            found["nothing changed"] += 1
            continue
        with damaged(path, changed):
            result = outcome(run, before)
        found[result.partition(" ")[0]] += 1
        if result not in ("noticed", "harmless"):
            wrong.append(f"{damage.__name__} of {path.relative_to(run)}: {result}")
    return {"damages": count, "kinds_of_files": len(kinds), **found, "wrong": wrong}
