"""Peak memory of the verbs on stores of growing size: what a verb shows is bounded, and so must be what it holds.

python -m attacks.memory [--rollouts 20000 200000] [--only inspect]

The stores are synthetic: a small run, to which rollouts of 24 tokens are added, 1,000 to a shard. Each verb runs in a
process of its own, which reads its peak at its end. Prints one line of JSON, with exit status 1 if a verb failed
or its peak grew by more than `LIMIT_KB` for each thousand rollouts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stalewise import store
from stalewise.api import run as train
from stalewise.config import make_config
from stalewise.store.json_lines import append_line, commit_records
from stalewise.store.schema import SCHEMA
from stalewise.types import NullCallback
from tiny import tiny_record

PROGRAM = """
import atexit, runpy, sys
from pathlib import Path
place = Path(sys.argv.pop(1))
atexit.register(lambda: place.write_text(Path("/proc/self/status").read_text()))
runpy.run_module("stalewise", run_name="__main__", alter_sys=True)
"""
PER_SHARD, PER_UPDATE, GROUP = 1000, 1000, 8
# For each thousand rollouts. The browser keeps an index of all of them, `rescore` the rewards of a generation batch.
LIMIT_KB = {"serve": 800, "rescore": 1000}
OTHERS_KB = 400  # such as the pass rates of `difficulty`, which are what it shows


def make_store(folder: Path, count: int) -> Path:
    """A run with this many rollouts more, in two generation batches."""
    config = make_config(tiny_record(folder, f"run-{count}"))
    train(config, callback=NullCallback())
    run, first, update = config.directory, 10_000, 4
    shard = _table(run)
    for batch in (2, 3):
        directory = store.batch_directory(run / "rollouts", version=4, generation_batch=batch)
        shards = count // 2 // PER_SHARD
        for index in range(shards):
            store.write_shard(directory, index, _moved(shard, first + index * PER_SHARD))
        store.commit_batch(directory, shards=shards, task="arithmetic")
        for _ in range(shards * PER_SHARD // PER_UPDATE):
            ids = ((first, first + PER_UPDATE - 1),)
            store.append_entry(store.ledger_path(run), store.LedgerEntry(update, batch, 4, 0, ids))
            append_line(run / "metrics.jsonl", {"update": update, "generation_batch": batch, "reward": 0.5, "ess": 0.9})
            first, update = first + PER_UPDATE, update + 1
    commit_records(run)
    return run


def _table(run: Path) -> pa.Table:
    """A shard of rollouts like those of the run."""
    batch = store.open_batch(store.batch_directories(run / "rollouts")[0])
    rows = pa.concat_tables(batch.iter_tables()).combine_chunks()
    return rows.take(np.arange(PER_SHARD) % len(rows))


def _moved(table: pa.Table, first: int) -> pa.Table:
    """The shard with other ids."""
    ids = np.arange(first, first + PER_SHARD)
    changed = {"rollout_id": ids, "group": ids // GROUP, "prompt_id": [f"arithmetic/{i // GROUP}" for i in ids]}
    for name, values in changed.items():
        place = SCHEMA.get_field_index(name)
        table = table.set_column(place, SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))
    return table


def verbs(run: Path, folder: Path) -> dict[str, list[str]]:
    """The words of each verb."""
    where, other = str(run), folder / "other"
    shutil.copytree(run, other, dirs_exist_ok=True)
    return {
        "watch": ["watch", where],
        "inspect": ["inspect", where],
        "inspect --rollout": ["inspect", where, "--rollout", "10000"],
        "inspect --verify": ["inspect", where, "--verify"],
        "report": ["report", where, "--output", str(folder / "report.html")],
        "compare": ["compare", where, str(other)],
        "verify": ["verify", where],
        "difficulty": ["difficulty", where, "--output", str(folder / "table.json")],
        "rescore": ["rescore", where, "--weight", "correct=0.5"],
        "fork": ["fork", where, "--at", "4", "--set", "schedule.updates=2000", "--name", "forked"],
        "export": ["export", where, str(folder / "exported")],
        "export --rollouts": ["export", where, str(folder / "dataset"), "--rollouts"],
        "serve": ["serve", where, "--port", "0"],
    }


def peak(words: list[str], folder: Path) -> tuple[float, float, str]:
    """Peak memory of a verb in MiB, its seconds, and what it said if it failed."""
    began, status = time.monotonic(), folder / "status"
    command = [sys.executable, "-u", "-c", PROGRAM, str(status), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        assert process.stdout is not None
        told = _browse(process) if words[0] == "serve" else process.stdout.read()
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert found is not None
    return int(found[1]) / 1024, time.monotonic() - began, told[-300:] if process.returncode else ""


def _browse(process: subprocess.Popen[str]) -> str:
    """Open the list of rollouts and search in it, then stop the server."""
    assert process.stdout is not None
    told = ""
    while not (found := re.search(r"http://\S+:\d+/\S+", told)):
        line = process.stdout.readline()
        assert line, told
        told += line
    for path in ("report", "api/overview", "api/groups", "api/groups?text=zzz", "api/groups?sort=reward"):
        with urllib.request.urlopen(f"{found[0].removesuffix('/')}/{path}", timeout=300) as answer:
            answer.read()
    process.send_signal(signal.SIGINT)
    return told + process.stdout.read()


def attack(sizes: list[int], only: str = "") -> dict[str, Any]:
    """Peaks of the verbs for each size, and those that grow with the store."""
    peaks: dict[str, dict[int, float]] = {}
    seconds: dict[str, float] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in sizes:
            own = Path(folder, str(count))
            own.mkdir()
            run = make_store(own, count)
            for name, words in verbs(run, own).items():
                if only and only != name:
                    continue
                megabytes, seconds[name], told = peak(words, own)
                peaks.setdefault(name, {})[count] = round(megabytes)
                print(f"{name} with {count:,} rollouts: {megabytes:.0f} MiB", file=sys.stderr, flush=True)
                wrong += [f"{name} with {count:,} rollouts: {told}"] if told else []
    for name, found in peaks.items():
        least, most = min(found), max(found)
        grown = (found[most] - found[least]) * 1024 / max(1, (most - least) / 1000)
        if grown > LIMIT_KB.get(name, OTHERS_KB):
            wrong.append(f"{name} takes {grown:.0f} KiB more for each thousand rollouts")
    return {"peak_mb": peaks, "seconds": {name: round(one, 1) for name, one in seconds.items()}, "wrong": wrong}


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    result = attack(arguments.rollouts, arguments.only)
    print(json.dumps({"attack": "memory", **result}))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
