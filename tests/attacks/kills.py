"""Kills runs of every kind again and again (scripts/soak.py), and interrupts commands while they import."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = ("pipelined", "collapsing", "episodes", "spent", "verifier", "staged")  # those that take longest come first
LEFTOVERS = ("stalewise-*", "pymp-*", "tmp*")  # in a folder for temporary files


def attack_runs(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """At least `kills` kills in all, evenly over the kinds; each kind in a process of its own, which forks.

    Afterwards nothing may be left: no process, and where temporary files go only what the last kill of a kind left.
    """
    each = -(-kills // len(KINDS))
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as threads:
        done = dict(zip(KINDS, threads.map(lambda kind: _soak(kind, each, seed, folder / kind), KINDS), strict=True))
    wrong = [f"{kind}: {one['error']}" for kind, one in done.items() if "error" in one]
    wrong += [f"{kind}: {name} is left" for kind, one in done.items() for name in one.get("left", ())]
    return {"kills": sum(one.get("kills", 0) for one in done.values()), "kinds": done, "wrong": wrong}


def _soak(kind: str, kills: int, seed: int, temporary: Path) -> dict[str, Any]:
    """What scripts/soak.py says of a kind, and what the killed runs left; a run that is not killed cleans up first."""
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "STALEWISE_ATTACK": f"{os.getpid()}-{kind}"}
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--kills", str(kills), "--seed", str(seed)]
    result = subprocess.run([*command, "--kind", kind], capture_output=True, text=True, env=environment)
    if result.returncode:
        return {"error": result.stderr[-2000:]}
    left = [path.name for pattern in LEFTOVERS for path in temporary.glob(pattern)]
    left += [f"process {pid}" for pid in _processes_of(environment["STALEWISE_ATTACK"])]
    return {**json.loads(result.stdout), "left": left}


def _processes_of(mark: str) -> list[str]:
    """Processes whose environment has this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def attack_commands(count: int, seed: int, folder: Path, longest: float = 4.0) -> dict[str, Any]:
    """Ctrl-C at a random moment, mostly within an import: one line or nothing, and no traceback."""
    rng, wrong, statuses = random.Random(seed), list[str](), list[int]()
    for number in range(count):
        config = folder / "config.toml"
        config.write_text(f'name = "interrupted-{number}"\nruns = "{folder}"\n')
        words = [["train", str(config)], ["doctor", str(config)], ["--help"]][number % 3]
        process = subprocess.Popen(
            [sys.executable, "-m", "stalewise", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        )
        wait = rng.uniform(0.3, longest)  # before that Python itself is starting
        time.sleep(wait)
        told = _interrupt(process)
        statuses.append(process.returncode)
        if "Traceback" in told and ("__main__.py" in told or "/cli/" in told):  # before that, Python itself starts
            wrong.append(f"{words[0]} after {wait:.2f} s: {told[-600:]}")
    return {"interrupts": count, "ended_by_them": sum(status != 0 for status in statuses), "wrong": wrong}


def _interrupt(process: subprocess.Popen[str]) -> str:
    """What a process says that is interrupted: again after two minutes, since Python ignores it in a destructor."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=120)[1]
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return f"Traceback of nothing: __main__.py did not end. {process.communicate()[1]}"
