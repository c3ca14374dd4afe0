"""What lies in a run directory, as plain records: for `stalewise inspect` and for scripts. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """What a run holds and how far it is; with `verify`, after every shard was compared with its checksum."""
    directory = Path(directory)
    config = read_config(directory)
    ledger = read_ledger(ledger_path(directory))
    found = versions(directory)
    updates = _sources(directory)["updates"] or config.schedule.updates
    return {
        "directory": str(directory),
        "task": config.task.name,
        "model": config.model.path,
        "objective": config.objective.name,
        "schedule": config.schedule.kind,
        "updates": updates,
        "updates_done": found[-1] if found else 0,
        "updates_not_committed": len([entry for entry in ledger if not found or entry.update >= found[-1]]),
        "checkpoints": found,
        "batches": [_batch(index, path, ledger, verify) for index, path in numbered_batches(directory)],
        "evaluations": read_jsonl(directory / "eval.jsonl"),
        "seconds": read_result(directory, updates).seconds,
    }


def _sources(directory: Path) -> dict[str, Any]:
    """Where the rollouts of a run lie that learned from others' (`stalewise learn`)."""
    path = directory / "sources.json"
    if not path.is_file():
        return {"directories": [], "updates": 0}
    batches = read_json(path)["batches"]
    return {
        "directories": [Path(batch["directory"]) for batch in batches],
        "updates": sum(batch["updates"] for batch in batches),
    }


def numbered_batches(directory: Path) -> list[tuple[int, Path]]:
    """Generation batches with the number under which the ledger knows them."""
    own = [(parse_batch_name(path).generation_batch, path) for path in batch_directories(directory / "rollouts")]
    return own or list(enumerate(_sources(directory)["directories"]))


def _batch(index: int, path: Path, ledger: list[LedgerEntry], verify: bool) -> dict[str, Any]:
    used = [entry for entry in ledger if entry.generation_batch == index]
    record: dict[str, Any] = {
        "generation_batch": index,
        "version": parse_batch_name(path).version,
        "directory": str(path),
        "committed": is_committed(path),
        "updates": len(used),
        "ages": [min(entry.age for entry in used), max(entry.age for entry in used)] if used else None,
    }
    if not record["committed"]:
        shards = committed_shards(path)
        return record | {"shards": len(shards), "rows": sum(shard.rows for shard in shards)}
    manifest = open_batch(path).manifest if verify else read_batch_manifest(path)
    return record | {
        "shards": len(manifest.shards),
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "prompt_tokens": manifest.prompt_tokens,
        "reward": manifest.reward_mean,
        "truncated": manifest.truncated,
        "verifier_errors": manifest.verifier_errors,
        "verifier_error_kinds": dict(manifest.extra.get("verifier_error_kinds", {})),
        "unparsed": manifest.extra.get("unparsed", 0),
        "unparsed_examples": list(manifest.extra.get("unparsed_examples", ())),
        "samplers": [asdict(sampler) for sampler in manifest.samplers],
        "seconds": manifest.seconds,
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "verified": verify,
    }


def inspect_rollout(directory: str | Path, rollout_id: int) -> dict[str, Any]:
    """One rollout with its tokens, their log-probabilities and what became of it."""
    for rollout, path in _rollouts(Path(directory), "rollout_id", rollout_id):
        return describe_rollout(Path(directory), rollout, path)
    raise StoreError(f"{directory} has no committed rollout {rollout_id}: {_range(Path(directory))}")


def inspect_group(directory: str | Path, group: int) -> list[dict[str, Any]]:
    """All rollouts of a group: the same prompt, side by side."""
    found = [describe_rollout(Path(directory), *pair) for pair in _rollouts(Path(directory), "group", group)]
    if not found:
        raise StoreError(f"{directory} has no committed group {group}: {_range(Path(directory))}")
    return found


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
    return f"rollout ids go from {first} to {last}; a group is a rollout id divided by the group size"


def describe_rollout(directory: Path, rollout: Rollout, path: Path) -> dict[str, Any]:
    """A rollout as a plain record; `tokens` pairs each response token with its text and log-probability."""
    decode = _decoder(directory)
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


def _decoder(directory: Path) -> Callable[[list[int]], str | None]:
    """Token ids to text, by the tokenizer of the run's newest checkpoint; to None where there is none to ask."""
    found = versions(directory)
    path = checkpoint_directory(directory, found[-1]) / "tokenizer.json" if found else None
    if path is None or not path.is_file():
        return lambda ids: None
    from tokenizers import Tokenizer  # the Rust library alone: transformers would take seconds to import

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def visible(text: str) -> str:
    r"""Text with control characters, and whatever else moves a cursor, written as escapes.

    >>> visible("1\x1b[2J\n\u202e2é")
    '1\\x1b[2J\\n\\u202e2é'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
