"""Mutated configs, options and rows: each is taken, or refused with a StalewiseError; nothing else."""

from __future__ import annotations

import copy
import datetime
import json
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stalewise.config import RunConfig, make_config, read_toml
from stalewise.errors import StalewiseError
from stalewise.tasks import TASKS, make_task, make_verifier
from stalewise.tasks.base import load
from stalewise.tasks.options import options_model
from stalewise.tasks.verifiers import VERIFIERS

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, 2**63, -(2**70), 10**400, 0.0, 0.5, -0.5, 1e308, math.nan, math.inf),
    *(
        "",
        "x",
        "1",
        "a\0b",
        "\ud800",
        "../..",
        "/",
        "/proc/self/mem",
        "x" * 300,
        "x" * 5000,
        "{problem}",
        "{problem",
        "µ",
    ),
    *(
        "<b>",
        "\x1b[31m",
        "number",
        "exact",
        "math",
        "python",
        "json:loads",
        "a:b:c",
        "..:x",
        "os:path",
        "first",
        "+",
        "+-*",
    ),
    *([], [1], ["a"], [[1]], [None], {}, {"a": 1}, {"problem": "p", "answer": "a"}, [{"problem": "p", "answer": "1"}]),
    *((), ("a",), {"verifier": "exact"}, datetime.date(2026, 1, 1), datetime.time(1), b"bytes", object()),
]
Attack = Callable[[int, int, Path], dict[str, Any]]
FIELDS = ["problem", "answer", "id", "response", "x"]
LISTED = {"verifier": ["number", "exact", "python", "math", "function"], "chat": [True], "split": ["train"]}


def value(rng: random.Random, depth: int = 0) -> Any:
    if depth < 2 and rng.random() < 0.15:
        return {str(rng.choice(VALUES))[:20]: value(rng, depth + 1) for _ in range(rng.randrange(3))}
    if depth < 2 and rng.random() < 0.1:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return copy.deepcopy(rng.choice(VALUES[:-1])) if rng.random() < 0.98 else VALUES[-1]


def mutated(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A config with one to four settings changed, added, removed or renamed."""
    record = copy.deepcopy(record)
    for _ in range(rng.randint(1, 4)):
        tables = [record] + [table for table in record.values() if isinstance(table, dict)]
        table = rng.choice(tables)
        keys = list(table) or ["x"]
        key, what = rng.choice(keys), rng.randrange(5)
        if what == 0:
            table.pop(key, None)
        elif what == 1:
            table[f"{key}{rng.choice('xyz')}"] = table.get(key)
        elif what == 2:
            table[rng.choice(["x", "\0", "", "format", "checksum", "a.b"])] = value(rng)
        else:
            table[key] = value(rng)
    return record


def attack_configs(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Mutated tables, and mutated bytes of a TOML file."""
    rng, outcome = random.Random(seed), _Outcome()
    whole = RunConfig().model_dump(mode="json")
    from stalewise.config.template import config_template

    text = config_template("jsonl", name="a").encode()
    for number in range(count):
        if number % 5 == 0:
            path = folder / "config.toml"
            changed = bytearray(text)
            for _ in range(rng.randint(1, 6)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            path.write_bytes(changed)
            outcome.of(lambda path=path: make_config(read_toml(path)), f"config {number}")
        else:
            record = mutated(whole, rng)
            outcome.of(lambda record=record: make_config(record), f"config {number}")
    return outcome.record(count)


def attack_options(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Random options of every task and verifier; a task that is made gives prompts."""
    rng, outcome = random.Random(seed), _Outcome()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(12)))
    names = [*(("task", name) for name in TASKS), *(("verifier", name) for name in VERIFIERS)]
    for number in range(count):
        kind, name = names[number % len(names)]
        known = options_model(load((TASKS if kind == "task" else VERIFIERS)[name])).model_fields
        fields = [field.removeprefix("option_") for field in known if field != "option_seed"]
        picked = rng.sample(fields, min(len(fields), rng.randint(1, 3)))
        options = {key: rng.choice(LISTED.get(key, [None])) if rng.random() < 0.2 else value(rng) for key in picked}
        if "path" in fields and rng.random() < 0.8:
            options["path"] = str(rows)
        if name == "hf" and "/" not in str(options.get("path", "/")):
            options["path"] = str(rows)  # never a name on the hub
        if kind == "task":
            outcome.of(partial(_use, name, options), f"{name} {options!r:.200}")
        else:
            make = partial(make_verifier, name, **options)
            outcome.of(lambda make=make: make().close(), f"{name} {options!r:.200}")
    return outcome.record(count)


def attack_rows(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Files of random rows, and of random bytes."""
    rng, outcome = random.Random(seed), _Outcome()
    for number in range(count):
        path = folder / "attacked.jsonl"
        path.write_bytes(rng.choice([b"\n", b"\r\n", b"\r", b"\n\n"]).join(_lines(rng)))
        options = {"path": str(path), "held_out": 0, "chat": rng.random() < 0.5}
        options["verifier"] = rng.choice(["exact", "number"])
        outcome.of(partial(_use, "jsonl", options), f"rows {number}: {path.read_bytes()[:300]!r}")
    return outcome.record(count)


def _lines(rng: random.Random) -> list[bytes]:
    lines: list[bytes] = []
    for _ in range(rng.randint(1, 6)):
        keys = rng.sample(FIELDS, rng.randint(1, 5)) if rng.random() < 0.3 else FIELDS[:2]
        row = {key: value(rng) if rng.random() < 0.2 else str(rng.randrange(99)) for key in keys}
        line = bytearray(json.dumps(row, default=str).encode())
        if rng.random() < 0.1:
            line[rng.randrange(len(line))] = rng.randrange(256)
        lines.append(bytes(line))
    return lines


def _use(name: str, options: dict[str, Any]) -> None:
    task = make_task(name, **options)
    try:
        held_out = [] if options.get("held_out") == 0 else task.evaluation_prompts(1)
        prompts = [*task.prompts(0, 2), *held_out]
        if name in ("jsonl", "hf") and options.get("verifier", "number") in ("number", "exact"):
            task.verifier.score(prompts, ["1"] * len(prompts))
    finally:
        task.verifier.close()


class _Outcome:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def of(self, call: Any, what: str) -> None:
        try:
            call()
            self.counts["taken"] += 1
        except StalewiseError as error:
            self.counts["refused"] += 1
            if not str(error).strip():
                self.wrong.append(f"{what}: refused without a word")
        except Exception as error:
            self.counts["FOREIGN"] += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.wrong.append(f"{type(error).__name__} at {place.filename}:{place.lineno}: {error!s:.80}: {what}")

    def record(self, count: int) -> dict[str, Any]:
        return {"inputs": count, **self.counts, "wrong": self.wrong}
