"""The contents of a run directory as plain records, for `stalewise inspect` and for scripts. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stalewise import store
from stalewise.config.run_directory import read_config, read_fork, read_result
from stalewise.errors import StoreError
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.records import EVALUATION, JOURNAL, SOURCES, read_record, read_records
from stalewise.store.reward_versions import FIRST, BatchRewards, reward_versions
from stalewise.types import Rollout


def inspect_run(directory: str | Path, *, verify: bool = False) -> dict[str, Any]:
    """The contents and the progress of a run; `verify` compares every shard with its checksum."""
    directory = Path(directory)
    config = read_config(directory)
    ledger = store.read_ledger(store.ledger_path(directory))
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
        "evaluations": read_records(directory / "eval.jsonl", EVALUATION),
        "seconds": read_result(directory, updates).seconds,
        "fork": {key: value for key, value in read_fork(directory).items() if key not in ("format", "schedule")},
        "rewards": [{"name": version.name, **version.record} for version in reward_versions(directory)],
        "rewards_used": sorted(set(rewards_used(directory).values())) or [FIRST],
        "config_changes": [
            line for line in read_records(directory / "journal.jsonl", JOURNAL) if line["event"] == "config"
        ],
    }


def _sources(directory: Path) -> list[dict[str, Any]]:
    """The batches of other runs that `stalewise learn` was given."""
    path = directory / "sources.json"
    return read_record(path, SOURCES)["batches"] if path.is_file() else []


def rewards_used(directory: Path) -> dict[int, str]:
    """The version of the rewards that a run used, by generation batch; batches with the first version are left out."""
    named = enumerate(_sources(directory))
    return {number: batch["rewards"] for number, batch in named if "rewards" in batch}


def numbered_batches(directory: Path) -> list[tuple[int, Path]]:
    """Generation batches with their number in the ledger."""
    own = store.batch_directories(directory / "rollouts")
    numbered = [(store.parse_batch_name(path).generation_batch, path) for path in own]
    return numbered or [(number, Path(batch["directory"])) for number, batch in enumerate(_sources(directory))]


def _batch(index: int, path: Path, ledger: list[store.LedgerEntry], verify: bool) -> dict[str, Any]:
    ages = [entry.age for entry in ledger if entry.generation_batch == index]
    record: dict[str, Any] = {
        "generation_batch": index,
        "version": store.parse_batch_name(path).version,
        "directory": str(path),
        "committed": store.is_committed(path),
        "updates": len(ages),
        "ages": [min(ages), max(ages)] if ages else None,
    }
    if not record["committed"]:
        shards = store.committed_shards(path)
        return record | {"shards": len(shards), "rows": sum(shard.rows for shard in shards)}
    manifest = store.open_batch(path).manifest if verify else store.read_batch_manifest(path)
    counts = ("rows", "tokens", "prompt_tokens", "truncated", "verifier_errors", "seconds", "outside_tokens", "turns")
    return record | {
        "shards": len(manifest.shards),
        **{name: getattr(manifest, name) for name in counts},
        "reward": manifest.reward_mean,
        "verifier_error_kinds": dict(manifest.extra.get("verifier_error_kinds", {})),
        "unparsed": manifest.extra.get("unparsed", 0),
        "timed_out": manifest.extra.get("timed_out", 0),
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
    """Rollouts with this value in the first batch that has any, since ids of several sources may coincide."""
    committed = [path for _, path in numbered_batches(directory) if store.is_committed(path)]
    for path in committed:
        batch = store.open_batch(path, verify=False)
        if (batch.column(column) == wanted).any():
            store.open_batch(path)  # compares the checksums before anything is shown
            rollouts = [rollout for rollout in batch.iter_rollouts() if getattr(rollout, column) == wanted]
            return [describe_rollout(directory, rollout, path) for rollout in rollouts]
    shards = [shard for path in committed for shard in store.read_batch_manifest(path).shards]
    if not shards:
        raise StoreError(f"{directory} has no committed {what}: nothing is committed yet")
    first, last = min(shard.rollout_first for shard in shards), max(shard.rollout_last for shard in shards)
    known = f"rollout ids are {first} to {last}; a group is a rollout id divided by the group size"
    if column == "group":
        groups = [int(group) for path in committed for group in store.open_batch(path, verify=False).column("group")]
        known = f"groups are {min(groups)} to {max(groups)}"
    raise StoreError(f"{directory} has no committed {what}: {known}")


def describe_rollout(directory: Path, rollout: Rollout, path: Path) -> dict[str, Any]:
    """A rollout as a plain record; `tokens` has the text and log-probability of each response token."""
    tokenizer = load_tokenizer(directory)

    def decode(ids: list[int]) -> str | None:
        return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)

    updates = [
        entry.update
        for entry in store.read_ledger(store.ledger_path(directory))
        if any(first <= rollout.rollout_id <= last for first, last in entry.rollout_ids)
    ]
    return {
        **asdict(rollout),
        "finish_reason": str(rollout.finish_reason),
        "batch": str(path),
        "prompt": decode(list(rollout.prompt_ids)),
        "segments": [segment._asdict() for segment in rollout.segments],
        "tokens": [
            {"id": token, "text": decode([token]), "logp": logp if is_own else None, "by": by}
            for token, logp, is_own, by in zip(
                rollout.response_ids, rollout.behaviour_logp, rollout.mask, rollout.sources, strict=True
            )
        ],
        "consumed_at": updates,
        "rewards": other_rewards(path, rollout.rollout_id),
    }


def other_rewards(batch: Path, rollout_id: int) -> dict[str, dict[str, Any]]:
    """The rewards that `rescore` gave a rollout, by the names of their versions."""
    return {
        name: {"reward": reward.value, "reward_parts": dict(reward.parts), "reward_error": reward.error}
        for name, reward in ((name, rewards.reward(rollout_id)) for name, rewards in rescored(batch).items())
    }


def rescored(batch: Path) -> dict[str, BatchRewards]:
    """The further rewards of a batch by the names of their versions, in the run that made it."""
    manifest, versions = store.read_batch_manifest(batch), reward_versions(batch.resolve().parent.parent)
    return {
        version.name: version.rewards_of(manifest, batch)
        for version in versions
        if batch.name in version.record["batches"]
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


def pass_counts(
    run: Path, *, stage: str = "all", passing: float = 1.0
) -> Iterator[tuple[str, str, dict[str, tuple[int, int]]]]:
    """Yield a checksum, a name, and counts by prompt id (passed, total) for each generation batch.

    `stage` is `all`, `first` or `last`. A rollout passes with a reward of at least `passing`; rollouts without a reward
    do not count.
    """
    batches = list(filter(store.is_committed, store.batch_directories(run / "rollouts")))
    if not batches:
        raise StoreError(f"{run} has no committed generation batch: `stalewise generate` makes one")
    for directory in {"all": batches, "first": batches[:1], "last": batches[-1:]}[stage]:
        batch = store.open_batch(directory)
        counts: dict[str, tuple[int, int]] = {}
        known = (record for record in batch.iter_records(["prompt_id", "reward"]) if record["reward"] is not None)
        for record in known:
            passed, total = counts.get(record["prompt_id"], (0, 0))
            counts[record["prompt_id"]] = passed + (record["reward"] >= passing), total + 1
        shards = "".join(shard.sha256 for shard in batch.manifest.shards)
        yield hashlib.sha256(shards.encode()).hexdigest()[:16], f"{run.name}/{directory.name}", counts
