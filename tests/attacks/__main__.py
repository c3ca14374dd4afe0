"""All attacks: `make attack`. Prints one line of JSON for each; exit status 1 if one of them succeeded.

python -m attacks [--seed 0] [--scale 1.0] [--only damages]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from attacks import damage, inputs, kills
from tiny import TINY


def finished_run(folder: Path, kind: str) -> Path:
    """A run of one kind of scripts/soak.py."""
    sys.path.insert(0, str(kills.ROOT / "scripts"))
    soak: Any = import_module("soak")
    config = soak.tiny_config(folder, kind, "p3o", 0, kind)
    assert soak.wait(soak.start(config))
    return config.directory


def run_with_everything(folder: Path) -> Path:
    """A fork of a run of episodes, with a reference, a table of pass rates and further rewards."""
    from stalewise import fork
    from stalewise.api import run
    from stalewise.orchestrator.rescore import rescore

    config = fork(finished_run(folder, "episodes"), at=4, name="fork", settings={"optimizer.learning_rate": 5e-4})
    run(config)
    rescore(config.directory, weights={"turns": 1.0})
    return config.directory


def run_of_a_program(folder: Path) -> Path:
    """A run whose rows and reward a program gave."""
    from stalewise import train
    from stalewise.types import NullCallback

    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 30) for b in (11, 23, 47)]
    given = {**TINY, "runs": str(folder), "name": "program", "callback": NullCallback()}
    return train("embedded:arithmetic", rows, lambda response, answer: float(response == answer), **given).directory


def attack_files(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Damage of runs of several kinds, and of one that an earlier release has left."""
    runs = {kind: finished_run(folder, kind) for kind in ("collapsing", "spent")}
    runs |= {"fork": run_with_everything(folder), "program": run_of_a_program(folder)}
    shares = {"collapsing": 0.25, "spent": 0.15, "fork": 0.35, "program": 0.1}
    done = {kind: damage.attack(run, round(count * shares[kind]), seed) for kind, run in runs.items()}
    damage.without_checksums(runs["spent"])
    old = damage.attack(runs["spent"], count - sum(one["damages"] for one in done.values()), seed + 1)
    old["wrong"] = [text for text in old["wrong"] if "FOREIGN" in text]  # unnoticed ones are the reason for checksums
    done["without checksums"] = old
    return {"damages": count, "runs": done, "wrong": [text for one in done.values() for text in one.pop("wrong")]}


ATTACKS: dict[str, tuple[int, inputs.Attack]] = {
    "damages": (1000, attack_files),
    "configs": (2000, inputs.attack_configs),
    "options": (1500, inputs.attack_options),
    "rows": (1500, inputs.attack_rows),
    "interrupts": (30, kills.attack_commands),
    "kills": (200, kills.attack_runs),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of attacks")
    parser.add_argument("--only", choices=sorted(ATTACKS), action="append", help="this kind; may be repeated")
    arguments = parser.parse_args()
    failed = False
    for name in arguments.only or ATTACKS:
        count, attack = ATTACKS[name]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = attack(max(1, round(count * arguments.scale)), arguments.seed, Path(folder))
        failed |= bool(result["wrong"])
        print(json.dumps({"attack": name, **result, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
