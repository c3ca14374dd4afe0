"""Hostile programs, verifiers and chat templates: `make attack`. Exit status 1 if one of them succeeded.

python -m attacks.hostile [--seed 0] [--count 300]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.programs import PROGRAMS
from attacks.running import attack, processes_with
from stalewise.errors import ModelError
from stalewise.tasks import make_verifier
from stalewise.tasks.sandbox import MECHANISMS, probe
from stalewise.types import Prompt

VERIFIERS = {  # what a hostile judge does: how the error of its response begins
    "setsid": "",
    "daemon": "",
    "kill the watcher": "",
    "pickle": "worker died",
    "hang with a child": "timeout",
    "half an answer": "timeout",
    "die with a child": "worker died: exit code 3",
    "fork many": "worker died: its processes exceeded the limit on processes",
    "memory": "worker died: its processes exceeded the limit on memory",
    "flood of answers": "worker died",
    "not JSON": "worker died",
    "JSON bomb": "worker died",
    "forged answer": "worker died",
    "answer of another kind": "worker died",
    "crash": "worker died",
}


def attack_by_program(name: str, mechanism: str, folder: Path) -> list[str]:
    """What a program of `PROGRAMS` achieved."""
    return attack(name, mechanism, folder)[1]


def attack_by_verifier(act: str, folder: Path) -> list[str]:
    """What a verifier achieved; other responses must be scored, and nothing be left."""
    mark = f"stalewise-judge-{os.getpid()}-{time.monotonic_ns()}"
    answer = json.dumps({"folder": str(folder), "mark": mark})
    limit_s = 1.0 if VERIFIERS[act] == "timeout" else 20.0
    options: dict[str, Any] = {"memory_mb": 500, "processes": 8, "limit_s": limit_s}
    verifier = make_verifier("python", function="attacks.judges:judge", workers=1, **options)
    before, hostile, after = verifier.score([Prompt("q", "", answer)] * 3, ["ok", act, "ok"])
    verifier.close()
    found = [f"process {pid} is left" for pid in processes_with(mark)]
    found += [f"{path} was written" for path in folder.iterdir()]
    if not hostile.error.startswith(VERIFIERS[act]) or bool(hostile.error) != bool(VERIFIERS[act]):
        found.append(f"its response has the error {hostile.error!r}, expected {VERIFIERS[act]!r}")
    if (before.value, after.value) != (0.25, 0.25):
        found.append(f"other responses have {before} and {after}")
    return found


def attack_by_template(name: str, folder: Path) -> list[str]:
    """What a chat template achieved."""
    from attacks.templates import HARMLESS, REFUSED, with_template
    from stalewise.models.loading import encode_prompts
    from stalewise.tasks.base import CHAT

    tokenizer = with_template(folder / "model", (REFUSED | HARMLESS)[name])
    try:
        encode_prompts([Prompt("q", "3+4", "7", CHAT)], tokenizer)
    except ModelError:
        return []
    except Exception as problem:
        return [f"it raised {type(problem).__name__}: {problem}"]
    return ["it was rendered"] if name in REFUSED else []


def attack_by_repository(kind: str, folder: Path) -> list[str]:
    """What the code of a model repository achieved while it was loaded, `yes` being on standard input."""
    from attacks.repositories import hostile_repository
    from stalewise.models import pick_device
    from stalewise.models.loading import load_model, load_tokenizer

    model = hostile_repository(folder / "model", kind, folder / "witness")
    for load in (load_tokenizer, lambda path: load_model(path, device=pick_device("cpu"))):
        try:
            load(str(model))
        except ModelError:
            continue
        except Exception as problem:
            return [f"it raised {type(problem).__name__}: {problem}"]
    return ["its code ran"] if (folder / "witness").exists() else []


def all_attacks() -> dict[str, Callable[[Path], list[str]]]:
    """Every attack, by its name."""
    from attacks.repositories import KINDS
    from attacks.templates import HARMLESS, REFUSED

    found: dict[str, Callable[[Path], list[str]]] = {}
    for way in (way for way in MECHANISMS if not probe(way)):
        for name in PROGRAMS:
            found[f"program, {way}: {name}"] = lambda folder, way=way, name=name: attack_by_program(name, way, folder)
    for kind, names, function in (
        ("verifier", VERIFIERS, attack_by_verifier),
        ("template", REFUSED | HARMLESS, attack_by_template),
        ("repository", KINDS, attack_by_repository),
    ):
        for name in names:
            found[f"{kind}: {name}"] = lambda folder, name=name, function=function: function(name, folder)
    return found


def attack_all(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Make `count` attacks, each kind once before any is repeated, in an order that the seed decides."""
    attacks, rng = all_attacks(), random.Random(seed)
    names = list(attacks)
    rng.shuffle(names)
    drawn = [names[number % len(names)] for number in range(count)]
    wrong = []
    for number, name in enumerate(drawn):
        own = folder / str(number)
        own.mkdir()
        wrong += [f"{name}: {problem}" for problem in attacks[name](own)]
    kinds = Counter(name.partition(":")[0] for name in drawn)
    return {"attacks": count, "kinds": dict(kinds), "different": len(set(drawn)), "wrong": wrong}


def main() -> None:
    """Make attacks and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    arguments = parser.parse_args()
    os.environ["STALEWISE_SECRET"] = "x"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 0)
        result = attack_all(arguments.count, arguments.seed, Path(folder))
    print(json.dumps({"attack": "hostile", **result, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
