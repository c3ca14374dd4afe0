"""stalewise's side: one run, and its clock by its journal."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .settings import Settings, our_record


def train(
    settings: Settings, arm: str, seed: int, rate: float, work: Path, *, name: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Run, or go on with, the run directory of this job."""
    import stalewise

    record = our_record(arm, settings, seed=seed, rate=rate, runs=work, name=name, changes=changes)
    config = stalewise.make_config(record, source="benchmark")
    resumed = (config.directory / "journal.jsonl").exists()
    start = time.time()
    stalewise.run(config)
    wall = time.time() - start
    journal = read_lines(config.directory / "journal.jsonl")
    metrics = read_lines(config.directory / "metrics.jsonl")
    evaluations = {int(line["version"]): line for line in read_lines(config.directory / "eval.jsonl")}
    clock = journal_clock(journal, first_excess([float(line.get("seconds") or 0.0) for line in metrics]))
    return {
        "resumed": resumed,
        "run_seconds": wall,
        "curve": [
            {"update": update, "seconds": clock["at"].get(update, 0.0 if update == 0 else None), **in_short(line)}
            for update, line in sorted(evaluations.items())
        ],
        "seconds": clock["at"].get(settings.updates_of(arm)),
        "startup_seconds": clock["startup"],
        "excluded_seconds": clock["excluded"],
        "by_event": clock["spent"],
        **tokens_of(journal, clock["spent"]),
        "metrics": _columns(metrics),
        "journal": journal,
    }


def first_excess(seconds: Sequence[float]) -> float:
    """What the first update took longer than the median one: there, things are compiled and set up.

    >>> first_excess([9.0, 1.0, 2.0, 3.0])
    6.5
    """
    return max(0.0, seconds[0] - statistics.median(seconds)) if seconds else 0.0


def journal_clock(journal: Sequence[Mapping[str, Any]], first_update: float = 0.0) -> dict[str, Any]:
    """Seconds from the first generation to each learned version, and where they went.

    Left out as start-up, since the other side loads its models before its clock begins: what came before the first
    generation, what the first turn to the learner took longer than the longest later one, and `first_update`, see
    `first_excess`. Left out besides: evaluations, and checkpoints from which nothing is generated. Time between two
    records of the journal counts. A record is written when its activity ends.
    """
    first = next((i for i, record in enumerate(journal) if record["event"] == "generate"), None)
    empty: dict[str, Any] = {"at": {}, "startup": {}, "spent": {}, "excluded": {}}
    if first is None:
        return empty
    begin = float(journal[first]["time"]) - float(journal[first]["seconds"])
    opening = float(journal[0]["time"]) - float(journal[0]["seconds"])
    turns = [float(one["seconds"]) for one in journal if one["event"] == "switch" and one.get("reason") == "learner"]
    startup = {
        "before_first_generation": begin - opening,
        "first_learner": max(0.0, turns[0] - max(turns[1:], default=0.0)) if turns else 0.0,
        "first_update": first_update,
    }
    needed = {int(record["version"]) for record in journal if record["event"] == "generate"}
    excluded = {"evaluate": 0.0, "evaluation_checkpoints": 0.0}
    spent = {"generate": 0.0, "learn": 0.0, "switch": 0.0}
    at: dict[int, float] = {}
    version, aside = 0, {"switch": startup["first_learner"], "learn": first_update}
    for record in journal[first:]:
        event, seconds = record["event"], float(record["seconds"])
        if event == "evaluate":
            excluded["evaluate"] += seconds
        elif event == "switch" and record.get("reason") in ("checkpoint", "commit") and version not in needed:
            excluded["evaluation_checkpoints"] += seconds
        else:
            spent[event] = spent.get(event, 0.0) + seconds - aside.pop(event, 0.0)
        if event == "learn":
            version = int(record["stop"])
            out = sum(excluded.values()) + startup["first_learner"] + first_update
            at[version] = float(record["time"]) - begin - out
    if at:
        spent["between"] = max(0.0, at[version] - sum(spent.values()))
    return {"at": at, "startup": startup, "spent": spent, "excluded": excluded}


def tokens_of(journal: Sequence[Mapping[str, Any]], spent: Mapping[str, float]) -> dict[str, Any]:
    """Response tokens that were sampled and learned from, and the seconds of both."""
    generated = [record for record in journal if record["event"] == "generate"]
    learned = [record for record in journal if record["event"] == "learn"]
    tokens = sum(int(record.get("tokens", 0)) for record in generated)
    updates = sum(int(record["stop"]) - int(record["first"]) for record in learned)
    rollouts = sum(int(record.get("rollouts", 0)) for record in generated)
    return {
        "response_tokens": tokens,
        "rollouts": rollouts,
        "learned_updates": updates,
        "generate_seconds": spent.get("generate"),
        "learn_seconds": spent.get("learn"),
    }


def in_short(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an evaluation that are kept; what each prompt scored is in the run directory."""
    accuracy = evaluation["accuracy"]
    value = accuracy["value"] if isinstance(accuracy, Mapping) else accuracy
    kept = ("prompts", "samples", "response_length", "truncated_fraction", "verifier_errors", "unparsed")
    return {"accuracy": value, **{key: evaluation[key] for key in kept if key in evaluation}}


def _columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    wanted = ("reward", "ess", "seconds", "grad_norm", "learning_rate", "clip_fraction", "veto_fraction")
    return {key: [line.get(key) for line in metrics] for key in wanted if metrics and key in metrics[0]}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
