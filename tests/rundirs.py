"""Run directories as the orchestrator leaves them, for tests of what reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from stalewise.config import make_config, write_resolved
from stalewise.reporting.read import Run
from stalewise.reporting.summary import ACCURACY, CHARTS, summarize
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line
from stalewise.store.manifest import BatchManifest, manifest_record

PLOTTED = [key for chart in CHARTS for key in chart.keys]


def write_run(directory: Path, *, updates: int = 8, done: int | None = None, **config: Any) -> Path:
    """A staged run of two stages as the orchestrator leaves it, complete or after `done` updates."""
    done = updates if done is None else done
    record = {"schedule": {"updates": updates, "stages": 2}, "objective": {"name": "grpo"}} | config
    write_resolved(make_config(record), directory / "config.resolved.json")
    write_json_atomic(directory / "environment.json", {"python": "3.11.7", "device": "cpu", "threads": 2})
    stage = {u: {"generation_batch": 2 * u // updates} for u in range(done)}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(metrics(u) | stage[u]) + "\n" for u in range(done)))
    if done == updates:
        add_journal(directory, "generate", 100.0, 10.0, generation_batch=0)
        add_journal(directory, "learn", 120.0, 20.0, first=0, stop=updates)
    add_evaluation(directory, 0, 0.4)
    if done == updates:
        add_evaluation(directory, updates, 0.8)
    for stage in range(2):
        if done > stage * updates // 2:
            add_batch(directory, stage, stage * updates // 2)
    return directory


def metrics(update: int, **changes: float) -> dict[str, float]:
    values = dict.fromkeys([key for key in PLOTTED if key != ACCURACY], 0.25)
    return {"update": update, **values, "taken": 1.0, "loss": 0.5, "nonfinite": 0.0, "age_max": 0.0} | {
        "kl_behaviour_policy": 0.05,
        **changes,
    }


def add_evaluation(directory: Path, version: int, value: float, **changes: Any) -> None:
    accuracy = {"value": value, "low": value - 0.05, "high": value + 0.05}
    record = {"version": version, "task": "arithmetic", "prompts": 128, "samples": 4, "accuracy": accuracy}
    record |= {"pass_at": {"1": accuracy}, "response_length": 3.5, "truncated_fraction": 0.0}
    append_line(
        directory / "eval.jsonl",
        {**record, "verifier_errors": 0, "verifier_error_kinds": {}, "seconds": 2.0, **changes},
    )


def add_journal(directory: Path, event: str, time: float, seconds: float, **notes: Any) -> None:
    append_line(directory / "journal.jsonl", {"time": time, "event": event, "seconds": seconds, **notes})


def add_batch(directory: Path, index: int, version: int, **changes: Any) -> None:
    values: dict[str, Any] = {"rows": 1024, "tokens": 4096, "prompt_tokens": 0, "reward_mean": 0.4, "truncated": 0}
    values |= {"verifier_errors": 0, "seconds": 1.5, "samplers": (), "shards": (), **changes}
    manifest = BatchManifest(generation_batch=index, version=version, task="arithmetic", **values)
    path = directory / "rollouts" / f"g{index:06d}-v{version:06d}" / "manifest.json"
    write_json_atomic(path, manifest_record(manifest))


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def warnings(run: Run) -> str:
    return "\n".join(summarize(run).warnings)
