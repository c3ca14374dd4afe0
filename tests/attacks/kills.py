"""Kills runs of every kind again and again (scripts/soak.py), and interrupts commands while they import."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = ("staged", "spent", "pipelined", "collapsing", "verifier")


def attack_runs(kills: int, seed: int) -> dict[str, Any]:
    """At least `kills` kills in all, evenly over the kinds; each kind in a process of its own, which forks."""
    each = -(-kills // len(KINDS))
    done: dict[str, Any] = {}
    for kind in KINDS:
        command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--kills", str(each), "--seed", str(seed)]
        result = subprocess.run([*command, "--kind", kind], capture_output=True, text=True)
        done[kind] = json.loads(result.stdout) if result.returncode == 0 else {"error": result.stderr[-2000:]}
    wrong = [f"{kind}: {one['error']}" for kind, one in done.items() if "error" in one]
    return {"kills": sum(one.get("kills", 0) for one in done.values()), "kinds": done, "wrong": wrong}


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
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
        statuses.append(process.returncode)
        if "Traceback" in told and "stalewise" in told:  # not of Python's own start
            wrong.append(f"{words[0]} after {wait:.2f} s: {told[-600:]}")
    return {"interrupts": count, "ended_by_them": sum(status != 0 for status in statuses), "wrong": wrong}
