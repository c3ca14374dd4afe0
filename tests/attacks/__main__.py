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


def finished_run(folder: Path, kind: str) -> Path:
    """A run of one kind of scripts/soak.py."""
    sys.path.insert(0, str(kills.ROOT / "scripts"))
    soak: Any = import_module("soak")
    config = soak.tiny_config(folder, kind, "p3o", 0, kind)
    assert soak.wait(soak.start(config))
    return config.directory


def attack_files(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Damage of a run with rollbacks, of a run of stages, and of one that an earlier release has left."""
    runs = {kind: finished_run(folder, kind) for kind in ("collapsing", "spent")}
    done = {kind: damage.attack(run, count * 2 // 5, seed) for kind, run in runs.items()}
    damage.without_checksums(runs["spent"])
    old = damage.attack(runs["spent"], count - 2 * (count * 2 // 5), seed + 1)
    old["wrong"] = [text for text in old["wrong"] if "FOREIGN" in text]  # unnoticed ones are the reason for checksums
    done["without checksums"] = old
    return {"damages": count, "runs": done, "wrong": [text for one in done.values() for text in one.pop("wrong")]}


ATTACKS: dict[str, tuple[int, inputs.Attack]] = {
    "damages": (1000, attack_files),
    "configs": (2000, inputs.attack_configs),
    "options": (1500, inputs.attack_options),
    "rows": (1500, inputs.attack_rows),
    "interrupts": (30, kills.attack_commands),
    "kills": (200, lambda count, seed, folder: kills.attack_runs(count, seed)),
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
