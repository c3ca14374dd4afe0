"""Run a plan of measurements within a time limit, for example on a rented GPU.

    python benchmarks/measure.py PLAN.toml --seconds 1700 --out DIRECTORY
    python benchmarks/measure.py PLAN.toml --list

A plan is a TOML file of steps, which run one after the other; neighbours with the same `beside` run at the same time:

    [[step]]
    name = "switches"
    run = "benchmarks/switches.py --sizes 0.5b --out $OUT/switches.json"   # a script of this repository
    seconds = 180                       # limit; then the step and all that it started are ended
    least = 120                         # optional: skipped if less time is left
    beside = "a name"                   # optional
    shared = true                       # optional: its processes compute on one GPU at once (multi-process service)
    environment = { PYTHONPATH = "$VLLM:$PYTHONPATH" }                     # optional
    remove = ["$OUT/work"]              # optional: files and directories that are gone afterwards, for room on the disk

`$OUT` is DIRECTORY, `$LEFT` how many seconds the step has, less ten; other variables come from the environment, and a
missing one is reported before anything runs. The output of a step is in
DIRECTORY/NAME.log, its state in DIRECTORY/measure.json. The same command continues: steps that succeeded are not run
again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.child_processes import end, exit_when_told, finish, last_words, multi_process_service, start

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True)
class Step:
    """One command and its time limit."""

    name: str
    run: str
    seconds: float
    least: float = 0.0
    beside: str = ""
    shared: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    remove: Sequence[str] = ()

    @property
    def variables(self) -> set[str]:
        """Environment variables that it needs."""
        texts = (self.run, *self.environment.values(), *self.remove)
        return {name for text in texts for name in VARIABLE.findall(text)}


def read_plan(path: Path) -> list[Step]:
    """The steps of a plan, or one message about what is wrong with it."""
    try:
        steps = [Step(**step) for step in tomllib.loads(path.read_text())["step"]]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is not a plan: it needs [[step]] tables with name, run, seconds ({error})") from None
    names = [step.name for step in steps]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"{path}: two steps are called {', '.join(sorted(twice))}; rename one")
    return steps


def fill(text: str, variables: Mapping[str, str]) -> str:
    """Put variables in; PYTHONPATH may be empty."""
    return VARIABLE.sub(lambda found: variables.get(found[1], ""), text)


def check_variables(steps: list[Step], variables: Mapping[str, str]) -> None:
    """End with a message if a step needs what the environment does not have."""
    wanted = {name for step in steps for name in step.variables} - {"OUT", "LEFT", "PYTHONPATH"}
    if missing := sorted(wanted - variables.keys()):
        raise SystemExit(f"set {', '.join(missing)} in the environment: steps of the plan name them")


@dataclass
class Running:
    """A step's process, and when it must end."""

    step: Step
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    end: float

    def ended(self) -> dict[str, Any] | None:
        """State, exit status and seconds, once it has ended or its time is over; None before."""
        if self.process.poll() is None and time.monotonic() < self.end:
            return None
        code = finish(self.process, 0)
        state = "cut" if code is None else "done" if code == 0 else "failed"
        found = {"state": state, "code": code, "seconds": round(time.monotonic() - self.began, 1)}
        return found if state == "done" else {**found, "said": last_words(self.log)}


def begin(step: Step, out: Path, seconds: float, shared: Mapping[str, str]) -> Running:
    """Start a step that has so many seconds; `shared` is the environment of one that shares a GPU."""
    variables = {
        **os.environ,
        **(shared if step.shared else {}),
        "OUT": str(out),
        "LEFT": str(max(0, int(seconds) - 10)),
    }
    added = {name: fill(value, variables) for name, value in step.environment.items()}
    command = [sys.executable, *(fill(word, variables) for word in shlex.split(step.run))]  # values may have spaces
    command[1] = str(ROOT / command[1]) if command[1].endswith(".py") else command[1]
    log, now = out / f"{step.name}.log", time.monotonic()
    return Running(step, start(command, log, {**variables, **added}), log, now, now + seconds)


def remove(step: Step, out: Path) -> None:
    """Remove what a step leaves and nothing needs."""
    for place in step.remove:
        path = Path(fill(place, {**os.environ, "OUT": str(out)}))
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def make(steps: list[Step], out: Path, left: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run steps at the same time; yields what became of each when it has ended."""
    with multi_process_service() if any(step.shared for step in steps) else contextlib.nullcontext({}) as shared:
        running = [begin(step, out, min(step.seconds, left), shared) for step in steps]
        try:
            while running:
                for one in list(running):
                    if found := one.ended():
                        running.remove(one)
                        remove(one.step, out)
                        yield one.step.name, found
                time.sleep(0.05)
        finally:
            for one in running:
                end(one.process)


def work(steps: list[Step], out: Path, seconds: float) -> dict[str, Any]:
    """Run the steps that are not done, in order, while there is time for them."""
    exit_when_told()
    record_path, until = out / "measure.json", time.monotonic() + seconds
    record: dict[str, Any] = json.loads(record_path.read_text()) if record_path.exists() else {}
    missing = [step for step in steps if record.get(step.name, {}).get("state") != "done"]
    for _, together in groupby(enumerate(missing), key=lambda item: item[1].beside or item[0]):
        left, chosen = until - time.monotonic(), list[Step]()
        for _, step in together:
            if left > step.least:
                chosen.append(step)
            else:
                print(f"{step.name}: not begun, {left:.0f} s are left", flush=True)
        for name, found in make(chosen, out, left):
            record[name] = found
            print(f"{name}: {found['state']} after {found['seconds']:.0f} s", flush=True)
            temporary = record_path.with_suffix(".tmp")
            temporary.write_text(json.dumps(record, indent=1) + "\n")
            os.replace(temporary, record_path)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path("measured"))
    parser.add_argument("--list", action="store_true", help="show the steps, and run nothing")
    arguments = parser.parse_args()
    steps = read_plan(arguments.plan)
    if arguments.list:
        for step in steps:
            print(f"{step.name:24} {step.seconds:5.0f} s  {step.run}")
        return 0
    check_variables(steps, os.environ)
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = work(steps, arguments.out.resolve(), arguments.seconds)
    return 0 if all(record.get(step.name, {}).get("state") == "done" for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
