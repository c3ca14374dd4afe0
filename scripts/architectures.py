"""Train tiny random models of many families for two updates, and compare every recorded log-probability with a plain
forward pass.

    python scripts/architectures.py [--families llama,mamba] [--jobs 2] [--limit 300] [--json FILE] [--write]

Each family runs twice, the second time with gradient checkpointing, in a process of its own with a time limit. A family
is right, refused (with the message), wrong (it trained on log-probabilities that are off) or broken (a traceback).
Exit status 1 if any is wrong or broken. `--write` renews the table in docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402

from families import FAMILIES, build, differences, settings  # noqa: E402
from stalewise.api import run  # noqa: E402
from stalewise.config import make_config  # noqa: E402
from stalewise.errors import StalewiseError  # noqa: E402
from stalewise.types import NullCallback  # noqa: E402

TOLERANCE = 1e-3  # nats, in float32
PAGE, BEGIN, END = ROOT / "docs" / "models.md", "<!-- architectures: begin -->", "<!-- architectures: end -->"
PASSES = {"plain": {}, "checkpointed": {"gradient_checkpointing": True}}


class Notes(NullCallback):
    """Keeps what a run logs."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)


def examine(family: str, directory: Path) -> dict[str, Any]:
    """Build the model and run it."""
    try:
        model = build(family, directory / "model")
    except Exception as error:
        return {"class": "", "outcome": "not built", "reason": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"class": type(model).__name__}
    for name, learner in PASSES.items():
        found[name] = attempt(directory, name, learner)
    return found


def attempt(directory: Path, name: str, learner: dict[str, Any]) -> dict[str, Any]:
    """One run: its outcome, and how far it is from a plain forward pass."""
    notes, start = Notes(), time.perf_counter()
    try:
        run(make_config(settings(directory / "model", directory, name, **learner)), notes)
    except StalewiseError as error:
        return {"outcome": "refused", "reason": " ".join(str(error).replace(str(directory), "").split())}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return {"outcome": "broken", "reason": f"{type(error).__name__} in {where}: {' '.join(str(error).split())}"}
    seconds = time.perf_counter() - start
    sampling, learning = differences(directory / "model", directory / name)
    packed = not any("does not support packing" in line for line in notes.lines)
    is_right = sampling <= TOLERANCE and learning <= TOLERANCE  # NaN is not
    return {
        "outcome": "right" if is_right else "wrong",
        "sampling": sampling,
        "learning": learning,
        "packed": packed,
        "seconds": round(seconds, 1),
    }


def child(family: str, connection: Any) -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        connection.send(examine(family, Path(directory)))


def in_process(family: str, limit: float) -> dict[str, Any]:
    """Examine a family in a forked process, which is ended after `limit` seconds."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(family, there))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(limit) else {"outcome": "broken", "reason": f"no end within {limit:g} s"}
    except EOFError:
        process.join()
        found = {"outcome": "broken", "reason": f"the process ended with status {process.exitcode}"}
    process.kill()
    process.join()
    print(f"{family:20} {describe(found)}", file=sys.stderr, flush=True)
    return found


def describe(found: dict[str, Any]) -> str:
    if "outcome" in found:
        return f"{found['outcome']}: {found['reason']}"
    return " | ".join(
        f"{name}: {one['outcome']} "
        + (one.get("reason", "") or f"{one['sampling']:.1e} sampling, {one['learning']:.1e} learning")
        for name, one in found.items()
        if name in PASSES
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one family")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--write", action="store_true", help="renew the table in docs/models.md")
    arguments = parser.parse_args()
    families = [name for name in arguments.families.split(",") if name] or sorted(FAMILIES)
    with ThreadPoolExecutor(arguments.jobs) as threads:
        results = dict(zip(families, threads.map(lambda one: in_process(one, arguments.limit), families), strict=True))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")
    outcomes = [
        one["outcome"]
        for found in results.values()
        for one in ([found] if "outcome" in found else [found[name] for name in PASSES])
    ]
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    return int(any(outcome in ("wrong", "broken", "not built") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
