"""A short real run that measures update norms, rewards and costs of a config.

Everything but peak memory is read from the run directory afterwards: journal, metrics and manifests.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import RunResult, read_config
from stalewise.errors import CalibrationError, ConfigError
from stalewise.planning import calibration
from stalewise.planning.calibration import Probe, UpdateNormPhase
from stalewise.store import batch_directories, open_batch, read_batch_manifest
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.reader import has_variance
from stalewise.store.records import EVALUATION, JOURNAL, METRIC, read_records
from stalewise.types import NullCallback, ProgressCallback

LEAST_UPDATES = 8  # enough for generation batches of two sizes after the first one, which includes warm-up
PHASE_ENDS = (2, 8, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe, its calibration file and its run directory."""

    probe: Probe
    path: Path
    directory: Path


def probe(
    config: RunConfig,
    *,
    train: Callable[[RunConfig, ProgressCallback], RunResult],
    updates: int = 32,
    callback: ProgressCallback | None = None,
) -> ProbeResult:
    """Run or resume the probe of a config with `train`, measure it, and write it to the calibration."""
    probing = probe_config(config, updates)
    was_complete = versions(probing.directory)[-1:] == [updates]
    train(probing, callback or NullCallback())
    if was_complete:
        before = calibration.earlier_calibration(config.runs, calibration.identity_of_config(config))
        peak = before.probe.peak_memory_bytes if before is not None and before.probe is not None else None
    else:
        peak = _peak_memory(config.model.device)
    measured = measure(probing.directory, peak)
    environment = read_json(probing.directory / "environment.json")
    engine = read_config(probing.directory).sampler.engine
    path = calibration.save_calibration(config, environment, engine=engine, probe=measured)
    return ProbeResult(measured, path, probing.directory)


def probe_config(config: RunConfig, updates: int) -> RunConfig:
    """The config of the probe: few updates, and generation batches of two sizes."""
    if updates < LEAST_UPDATES:
        raise ConfigError(f"--updates {updates}: a probe needs at least {LEAST_UPDATES}")
    record = config.model_dump(mode="json")
    schedule = {"kind": "synchronous", "updates": updates, "updates_per_generation": uneven_stage(updates)}
    plain = {"trackers": [], "recipe": "none", "guard": {}, "plan": {}, "storage": {}, "workers": {}}
    changes = {"name": f"{config.name}-probe", "schedule": schedule, **plain}
    return make_config({**record, **changes}, source="the config of the probe")


def uneven_stage(updates: int) -> int:
    """µ with at least four generation batches (three if impossible), the last of them as small as possible."""
    sizes = [size for size in range(2, updates) if updates % size and -(-updates // size) >= 3]
    four = [size for size in sizes if -(-updates // size) >= 4]
    return max(four or sizes, key=lambda size: size - updates % size)


def measure(directory: Path, peak_memory_bytes: int | None = None) -> Probe:
    """Measure a finished run from its directory."""
    metrics = [record for record in read_records(directory / "metrics.jsonl", METRIC) if record.get("taken")]
    if not metrics:
        raise CalibrationError(f"{directory} took no update: no group has rewards that differ")
    journal = read_records(directory / "journal.jsonl", JOURNAL)
    evaluation = read_records(directory / "eval.jsonl", EVALUATION)[-1]
    manifests = [read_batch_manifest(batch) for batch in batch_directories(directory / "rollouts")]
    updates = versions(directory)[-1]
    newest = checkpoint_directory(directory, updates)
    rollouts = sum(manifest.rows for manifest in manifests)
    warm = metrics[2:] or metrics  # the first updates include one-time costs
    return Probe(
        updates=updates,
        phases=phases(metrics),
        **rewards(directory),
        **generation_costs(journal, {manifest.generation_batch: manifest.seconds for manifest in manifests}),
        seconds_per_update=_mean(record["seconds"] for record in warm),
        tokens_per_update=_mean(record["tokens"] for record in metrics),
        **switching_costs(journal),
        seconds_per_evaluated_response=evaluation["seconds"] / (evaluation["prompts"] * evaluation["samples"]),
        peak_memory_bytes=peak_memory_bytes,
        bytes_per_rollout=sum(shard.bytes for manifest in manifests for shard in manifest.shards) / rollouts,
        bytes_per_checkpoint=sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()),
    )


def phases(metrics: Sequence[dict[str, Any]]) -> list[UpdateNormPhase]:
    """G in windows that grow fourfold, since Adam's first steps are its longest."""
    found: list[UpdateNormPhase] = []
    for before, last in pairwise((0, *PHASE_ENDS)):
        if inside := [record for record in metrics if before <= record["update"] < last]:
            norms = np.array([record["update_norm_per_lr"] for record in inside])
            found.append(UpdateNormPhase(before + 1, inside[-1]["update"] + 1, float(norms.mean()), float(norms.std())))
    return found


def rewards(directory: Path) -> dict[str, Any]:
    """Mean reward, its variance within and between groups, and the share of groups whose rewards differ."""
    means, variances = [], []
    differing = 0  # groups whose rewards differ; a variance may be above 0 by rounding alone
    for path in batch_directories(directory / "rollouts"):
        batch = open_batch(path)
        group, reward = batch.column("group"), batch.column("reward")
        differing += len(np.unique(group[has_variance(reward, group)]))
        known = ~np.isnan(reward)
        _, index = np.unique(group[known], return_inverse=True)
        count = np.bincount(index)
        mean = np.bincount(index, reward[known]) / count
        variances.append(np.bincount(index, (reward[known] - mean[index]) ** 2) / count)
        means.append(mean)
    mean_P, variance_P = np.concatenate(means), np.concatenate(variances)
    return {
        "reward_mean": float(mean_P.mean()),
        "reward_variance_within": float(variance_P.mean()),
        "reward_variance_between": float(mean_P.var()),
        "teaching_share": differing / len(variance_P),
    }


def generation_costs(journal: Sequence[dict[str, Any]], least: dict[int, float]) -> dict[str, Any]:
    """Fit a line through seconds against rollouts over all generations but the first, which has one-time costs.

    `least` is the time the shards of each batch took. A record with clearly less time comes from a process that only
    finished an interrupted batch, and is ignored.
    """
    events = [record for record in journal if record["event"] == "generate" and record["generation_batch"] > 0]
    numbered = ((record["generation_batch"], record) for record in events)
    whole = {number: record for number, record in numbered if record["seconds"] >= 0.9 * least[number]}
    if not whole:
        raise CalibrationError("no generation of the probe ran uninterrupted: delete its directory and probe again")
    rows, seconds, tokens = (
        np.array([float(record[key]) for record in whole.values()]) for key in ("rollouts", "seconds", "tokens")
    )
    slope, fixed = seconds.sum() / rows.sum(), 0.0
    if len(set(rows)) > 1:
        line = np.polyfit(rows, seconds, 1)
        if line.min() > 0:  # otherwise noise hides the fixed cost
            slope, fixed = line
    return {
        "tokens_per_second": float(tokens.sum() / seconds.sum()),
        "generation_sizes": (int(rows.min()), int(rows.max())),
        "seconds_per_generation": float(fixed),
        "seconds_per_rollout": float(slope),
    }


def switching_costs(journal: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Cost of one switch, and of the start: the first checkpoint, the first trainer, memory for the first copy."""
    switches = [record for record in journal if record["event"] == "switch"]
    first, trainer, memory, checkpoint, commit, sampler, offload = (
        [record["seconds"] for record in switches if record.get("reason") == reason]
        for reason in ("first checkpoint", "learner", "memory", "checkpoint", "commit", "sampler", "offload")
    )
    later = _mean(trainer[1:] or trainer)
    start = sum(first[:1]) + sum(memory) + max(0.0, trainer[0] - later)
    waited = sum(commit) / len(checkpoint)  # for checkpoints that were not written before they were needed
    loading = _mean(sampler[1:] or sampler or [0.0]) + _mean(offload or [0.0])
    return {"seconds_per_switch": later + _mean(checkpoint) + waited + loading, "seconds_to_start": start}


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _peak_memory(device_name: str) -> int:
    import torch

    from stalewise.models import pick_device

    device = pick_device(device_name)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
