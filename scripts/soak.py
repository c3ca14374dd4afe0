"""Kill a run with SIGKILL again and again, and see that nothing is lost.

    python scripts/soak.py [--kills 200] [--seed 0] [--objective p3o] [--rank 0] [--kind staged] [--slow-writer 0]

A reference run is never stopped. The victim, with the same config, is killed at random moments (every other time within
a commit: before it flushes, links or renames a file) and started again, until it is done. Then weights must be equal to
the bit, metrics, ledger and evaluations equal but for times, and no committed shard may ever have been written again.
Nor may a committed shard or evaluation ever be of a version without a checkpoint: with `--slow-writer` each checkpoint
is committed up to that many seconds later, and every third kill comes just before that, while the run is ahead of its
checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.store import checkpoints
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.json_lines import read_jsonl
from stalewise.tasks.sandbox import probe

TIMES = {"seconds", "time"}
STEPS = 210  # of commits; a run makes about twice as many: a kill before one of them falls into any part of it


# Kinds of runs; one that collapses is taken back on the way.
KINDS: dict[str, dict[str, Any]] = {
    "staged": {"schedule": {"kind": "staged", "updates": 12, "stages": 3}},
    "synchronous": {  # learns from rollouts before the checkpoint of their policy is committed
        "schedule": {"kind": "synchronous", "updates": 12, "updates_per_generation": 2},
        "evaluation": {"prompts": 8, "samples": 2},
    },
    "pipelined": {"schedule": {"kind": "pipelined", "updates": 12, "updates_per_generation": 3, "lag": 2}},
    "spent": {"schedule": {"updates": 24, "end": "spent", "spent_ess": 0.995}},
    "verifier": {  # rewards from worker processes, and rows from a file
        "schedule": {"kind": "staged", "updates": 12, "stages": 3},
        "task": {
            "name": "jsonl",
            "options": {
                "path": "rows.jsonl",
                "verifier": "python",
                "verifier_options": {"function": "soak_judge:judge", "workers": 1, "limit_s": 60.0},
            },
        },
    },
    "episodes": {  # turns with environments, the column of a reference, and a table of pass rates
        "schedule": {"kind": "staged", "updates": 6, "stages": 3},
        "sampler": {"max_new_tokens": 20, "rollouts_per_shard": 16},
        "objective": {"name": "p3o", "kl": 0.01},
        "learner": {"tokens_per_micro_batch": 200},
        "task": {
            "name": "arithmetic",
            "options": {"environment": "sums", "environment_options": {"rounds": 2}},
            "difficulty": "difficulty.json",
        },
    },
    "collapsing": {
        "schedule": {"kind": "staged", "updates": 12, "stages": 3},
        "optimizer": {"learning_rate": 2e-2},
        "guard": {"action": "both", "window": 6, "rollbacks": 8},
        "evaluation": {"every": 4, "prompts": 16, "samples": 2},
    },
}


def tiny_config(runs: Path, name: str, objective: str, rank: int = 0, kind: str = "staged") -> RunConfig:
    """A run of a few seconds that does everything a run can do, several times."""
    settings = KINDS[kind]
    if kind == "episodes":
        settings = {**settings, "task": {**settings["task"], "difficulty": str(_write_table(runs))}}
    if kind == "verifier":
        options = {**settings["task"]["options"], "path": str(_write_rows(runs))}
        options["verifier_options"] = {**options["verifier_options"], "sandbox": not probe("landlock")}
        model = {"path": "arithmetic", "lora": {"rank": rank}}
        settings = {**settings, "model": model, "task": {**settings["task"], "options": options}}
    return make_config(
        {
            "name": name,
            "runs": str(runs),
            "model": {"lora": {"rank": rank}},
            "batch": {"prompts": 4, "group_size": 4},
            "sampler": {"max_new_tokens": 6, "rollouts_per_shard": 16},
            "objective": {"name": objective, "proximal_every": 3},
            "optimizer": {"learning_rate": 1e-3},
            "learner": {"tokens_per_micro_batch": 60},
            "checkpoints": {"every": 2},
            "evaluation": {"every": 4, "prompts": 8, "samples": 2},
            **settings,
        }
    )


def _write_rows(folder: Path) -> Path:
    """The rows of a run with a verifier of its own, and the module of that verifier, where Python finds it."""
    rows, module = folder / "rows.jsonl", folder / "soak_judge.py"
    if not rows.exists():
        lines = [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 50) for b in (11, 23, 37)]
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        module.write_text("def judge(prompt, response):\n    return float(response.strip() == prompt.answer)\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return rows


def _write_table(folder: Path) -> Path:
    """A table of pass rates that knows none of the prompts, which leaves all of them."""
    path = folder / "difficulty.json"
    if not path.exists():
        path.write_text(json.dumps({"format": "stalewise.difficulty/1", "batches": {}, "prompts": {"other": [1, 2]}}))
    return path


def start(
    config: RunConfig, steps_to_live: int | None = None, delay: float = 0.0, commits_to_live: int | None = None
) -> int:
    """Run in a forked child, which may kill itself within a commit or before that of a checkpoint; its process id.

    Each checkpoint of the child is committed `delay` seconds later.
    """
    child = os.fork()
    if child:
        return child
    import torch

    torch.set_num_threads(1)
    if delay:
        _delay_commits(delay, commits_to_live)
    if steps_to_live is not None:
        _kill_within_commit(steps_to_live)
    status = 1
    try:
        run(config)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _kill_within_commit(steps: int) -> None:
    """Kill this process before it flushes, links or renames a file for the n-th time."""
    left = [steps]

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def step(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*arguments)

        return step

    for name in ("fsync", "link", "replace", "rename"):
        setattr(os, name, counted(getattr(os, name)))


def _delay_commits(seconds: float, commits_to_live: int | None) -> None:
    real, left = checkpoints.commit_directory, [-1 if commits_to_live is None else commits_to_live]

    def commit_directory(temporary: Path, final: Path) -> None:
        time.sleep(seconds)
        left[0] -= 1
        if left[0] == -1:
            os.kill(os.getpid(), signal.SIGKILL)
        real(temporary, final)

    checkpoints.commit_directory = commit_directory


def check_commits(directory: Path) -> bool:
    """Whether the process was killed while a checkpoint was being written and the run was ahead of it.

    AssertionError where something is committed that depends on a version without a checkpoint.
    """
    made = versions(directory)
    newest = made[-1] if made else -1
    for shard in directory.glob("rollouts/g*/shard-*.json"):
        version = json.loads(shard.read_text())["version_last"]
        assert version <= newest, f"{shard} is of version {version}, and the newest checkpoint is {newest}"
    evaluated = [record["version"] for record in read_jsonl(directory / "eval.jsonl", on_torn=str)]
    assert all(version <= newest for version in evaluated), f"version {max(evaluated)} was evaluated, not written"
    return newest >= 0 and bool(list(directory.glob("checkpoints/.v*.tmp-*")))


def wait_for_learning(child: int, config: RunConfig) -> None:
    """Wait for the first checkpoint after the one that a run begins with; a child that ends before is left alone."""
    while (versions(config.directory) or [0])[-1] == 0 and os.path.exists(f"/proc/{child}/fd"):
        time.sleep(0.001)


def wait(child: int, limit: float | None = None) -> bool:
    """Whether the child ended well; after `limit` seconds it is killed."""
    deadline = None if limit is None else time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG if deadline else 0)
        if done:
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
                raise SystemExit("a run failed by itself: see the traceback above")
            return os.WIFEXITED(status)
        if deadline and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        time.sleep(0.001)


def committed_shards(directory: Path) -> set[tuple[int, int]]:
    """Inode and modification time of every shard that has a manifest: a second writing would change them."""
    shards = directory.glob("**/rollouts/*/shard-*.parquet")
    stats = [shard.stat() for shard in shards if shard.with_suffix(".json").exists()]
    return {(stat.st_ino, stat.st_mtime_ns) for stat in stats}


def outcome(config: RunConfig) -> dict[str, Any]:
    """All that two runs must have in common."""
    directory = config.directory
    final = checkpoint_directory(directory, config.schedule.updates)
    files = [*directory.glob("**/rollouts/*/shard-*.parquet"), *final.rglob("*.safetensors"), final / "state.json"]
    files += directory.glob("columns/reference/*/*.parquet")
    lines = ["metrics.jsonl", "ledger/updates.jsonl", "ledger/stages.jsonl", "eval.jsonl"]
    lines += [f"rollbacks/{place.name}/metrics.jsonl" for place in sorted(directory.glob("rollbacks/*"))]
    return {
        "files": {str(f.relative_to(directory)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(files)},
        **{name: json.dumps([_timeless(record) for record in read_jsonl(directory / name)]) for name in lines},
    }


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in TIMES}


def soak(
    runs: Path,
    *,
    kills: int,
    seed: int,
    objective: str,
    rank: int = 0,
    kind: str = "staged",
    slow_writer: float = 0.0,
) -> dict[str, Any]:
    """Run reference and victims; AssertionError where they differ. A victim that is done makes way for another."""
    rng = random.Random(seed)
    reference = tiny_config(runs, "reference", objective, rank, kind)
    began = time.monotonic()
    assert wait(start(reference))
    whole = time.monotonic() - began
    longest = whole / 4 if kind == "pipelined" else whole  # of a pipelined run from its first checkpoint on
    expected = outcome(reference)
    done = victims = 0
    killed_at: list[int] = []  # newest checkpoint when a process was killed
    killed_writing = killed_holding = 0
    while done < kills:
        victims += 1
        victim = tiny_config(runs, f"victim-{victims}", objective, rank, kind)
        finished, seen = False, set()
        while not finished:
            last_chance = done >= kills
            before_commit = slow_writer > 0 and not last_chance and done % 3 == 0
            within_commit = before_commit or (not last_chance and done % 2 == 1)
            delay = 0.0 if last_chance else rng.uniform(0, slow_writer)
            steps = rng.randrange(STEPS) if within_commit and not before_commit else None
            child = start(victim, steps, delay, rng.randrange(1, 4) if before_commit else None)
            if kind == "pipelined" and not within_commit and not last_chance:
                wait_for_learning(child, victim)  # its second process takes long to start
            finished = wait(child, None if last_chance or within_commit else rng.uniform(0, longest))
            done += not finished
            killed_at.append((versions(victim.directory) or [0])[-1] if not finished else 0)
            killed_writing += check_commits(victim.directory)
            killed_holding += bool(list(victim.directory.glob("rollouts/.g*.tmp-*/g*/manifest.json")))
            now = committed_shards(victim.directory)
            assert seen <= now, "a committed shard was lost or written again"
            seen = now
        found = outcome(victim)
        for part, value in expected.items():
            assert found[part] == value, f"{part} differs in {victim.directory}"
    return {
        "kills": done,
        "victims": victims,
        "kills_after_learning_began": sum(version > 0 for version in killed_at),
        "kills_while_writing": killed_writing,
        "kills_while_rollouts_waited": killed_holding,
        "rollbacks": len(list(reference.directory.glob("rollbacks/*"))),
        "generation_batches": len(list(reference.directory.glob("rollouts/g*"))),
        "seconds_of_one_run": round(whole, 2),
        "identical": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", default="p3o")
    parser.add_argument("--rank", type=int, default=0, help="of adapters; 0: all weights are trained")
    parser.add_argument("--kind", choices=sorted(KINDS), default="staged", help="of run to kill")
    parser.add_argument("--slow-writer", type=float, default=0.0, help="seconds by which checkpoints are delayed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        figures = soak(Path(runs), **vars(arguments))
    print(json.dumps(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
