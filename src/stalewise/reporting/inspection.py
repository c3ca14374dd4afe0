"""The contents of a run directory as plain records, for `stalewise inspect` and for scripts. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stalewise.config.run_directory import read_config, read_result
from stalewise.errors import StoreError
from stalewise.store import (
    LedgerEntry,
    batch_directories,
    committed_shards,
    is_committed,
    ledger_path,
    open_batch,
    parse_batch_name,
    read_batch_manifest,
    read_ledger,
)
from stalewise.store.atomic import read_json, read_jsonl
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.types import Rollout


def inspect_run(directory: str | Path, *, verify: bool = False) -> dict[str, Any]:
    """The contents and the progress of a run; `verify` compares every shard with its checksum."""
    directory = Path(directory)
    config = read_config(directory)
    ledger = read_ledger(ledger_path(directory))
    checkpoints = versions(directory)
    updates = sum(batch["updates"] for batch in _sources(directory)) or config.schedule.updates
    return {
        "directory": str(directory),
        "task": config.task.name,
        "model": config.model.path,
        "objective": config.objective.name,
        "schedule": config.schedule.kind,
        "updates": updates,
        "updates_done": checkpoints[-1] if checkpoints else 0,
        "updates_not_committed": len([e for e in ledger if not checkpoints or e.update >= checkpoints[-1]]),
        "checkpoints": checkpoints,
        "batches": [_batch(index, path, ledger, verify) for index, path in numbered_batches(directory)],
        "evaluations": read_jsonl(directory / "eval.jsonl"),
        "seconds": read_result(directory, updates).seconds,
    }


def _sources(directory: Path) -> list[dict[str, Any]]:
    """The batches of other runs that `stalewise learn` was given."""
    path = directory / "sources.json"
    return read_json(path)["batches"] if path.is_file() else []


def numbered_batches(directory: Path) -> list[tuple[int, Path]]:
    """Generation batches with their number in the ledger."""
    own = [(parse_batch_name(path).generation_batch, path) for path in batch_directories(directory / "rollouts")]
    return own or [(number, Path(batch["directory"])) for number, batch in enumerate(_sources(directory))]


def _batch(index: int, path: Path, ledger: list[LedgerEntry], verify: bool) -> dict[str, Any]:
    ages = [entry.age for entry in ledger if entry.generation_batch == index]
    record: dict[str, Any] = {
        "generation_batch": index,
        "version": parse_batch_name(path).version,
        "directory": str(path),
        "committed": is_committed(path),
        "updates": len(ages),
        "ages": [min(ages), max(ages)] if ages else None,
    }
    if not record["committed"]:
        shards = committed_shards(path)
        return record | {"shards": len(shards), "rows": sum(shard.rows for shard in shards)}
    manifest = open_batch(path).manifest if verify else read_batch_manifest(path)
    counts = ("rows", "tokens", "prompt_tokens", "truncated", "verifier_errors", "seconds")
    return record | {
        "shards": len(manifest.shards),
        **{name: getattr(manifest, name) for name in counts},
        "reward": manifest.reward_mean,
        "verifier_error_kinds": dict(manifest.extra.get("verifier_error_kinds", {})),
        "unparsed": manifest.extra.get("unparsed", 0),
        "unparsed_examples": list(manifest.extra.get("unparsed_examples", ())),
        "samplers": [asdict(sampler) for sampler in manifest.samplers],
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "verified": verify,
    }


def inspect_rollout(directory: str | Path, rollout_id: int) -> dict[str, Any]:
    """One rollout with its tokens, their log-probabilities and the updates that used it."""
    return _inspect(Path(directory), "rollout_id", rollout_id, f"rollout {rollout_id}")[0]


def inspect_group(directory: str | Path, group: int) -> list[dict[str, Any]]:
    """All rollouts of a group, which share a prompt."""
    return _inspect(Path(directory), "group", group, f"group {group}")


def _inspect(directory: Path, column: str, wanted: int, what: str) -> list[dict[str, Any]]:
    records = [describe_rollout(directory, *pair) for pair in _rollouts(directory, column, wanted)]
    if not records:
        raise StoreError(f"{directory} has no committed {what}: {_range(directory)}")
    return records


def _rollouts(directory: Path, column: str, wanted: int) -> Iterator[tuple[Rollout, Path]]:
    """Rollouts with this value in the first batch that has any: ids of several sources may coincide."""
    for _, path in numbered_batches(directory):
        if not is_committed(path):
            continue
        batch = open_batch(path, verify=False)
        if (batch.column(column) == wanted).any():
            yield from ((r, path) for r in batch.iter_rollouts() if getattr(r, column) == wanted)
            return


def _range(directory: Path) -> str:
    committed = [read_batch_manifest(path) for _, path in numbered_batches(directory) if is_committed(path)]
    shards = [shard for manifest in committed for shard in manifest.shards]
    if not shards:
        return "nothing is committed yet"
    first, last = min(shard.rollout_first for shard in shards), max(shard.rollout_last for shard in shards)
    return f"rollout ids are {first} to {last}; a group is a rollout id divided by the group size"


def describe_rollout(directory: Path, rollout: Rollout, path: Path) -> dict[str, Any]:
    """A rollout as a plain record; `tokens` has the text and log-probability of each response token."""
    tokenizer = load_tokenizer(directory)

    def decode(ids: list[int]) -> str | None:
        return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)

    updates = [
        entry.update
        for entry in read_ledger(ledger_path(directory))
        if any(first <= rollout.rollout_id <= last for first, last in entry.rollout_ids)
    ]
    return {
        **asdict(rollout),
        "finish_reason": str(rollout.finish_reason),
        "batch": str(path),
        "prompt": decode(list(rollout.prompt_ids)),
        "tokens": [
            {"id": token, "text": decode([token]), "logp": logp}
            for token, logp in zip(rollout.response_ids, rollout.behaviour_logp, strict=True)
        ],
        "consumed_at": updates,
    }


def load_tokenizer(run: Path) -> Any:
    """The newest readable tokenizer of a run's checkpoints; None if there is none."""
    from tokenizers import Tokenizer  # importing transformers would take seconds

    for version in reversed(versions(run)):
        path = checkpoint_directory(run, version) / "tokenizer.json"
        with contextlib.suppress(Exception):  # the library raises no class of its own
            if path.is_file():
                return Tokenizer.from_file(str(path))
    return None


def visible(text: str) -> str:
    """Text with control characters and other unprintable characters as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
