"""The pure part: from raw times, accuracies and intervals to the figures. Imports nothing heavy."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

KEYS = (
    "learner_ratio",
    "mfu",
    "sampler_ratio",
    "time_to_accuracy_ratio",
    "time_to_accuracy_ratio_same_mu",
    "memory_ratio",
    "idle_share",
    "wallclock_ratio",
)
METHODS = ("trl", "trl_same_mu", "stalewise")


# ---------------------------------------------------------------- floating-point operations


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the operations of a forward and backward pass follow from."""

    body_parameters: int  # without embedding and output layer
    layers: int
    attention_width: int  # heads × size of a head
    hidden: int
    vocabulary: int


def shared_prompt_flops(
    shape: ModelShape, groups: Iterable[tuple[int, Sequence[int]]], *, is_frozen: bool = False
) -> float:
    """The same where the prompt of a group passes through the model once: (prompt length, its response lengths).

    That is the least that has to be computed; a response's attention still reads the keys of its prompt. Frozen
    weights, as those beneath adapters, need no gradients of their own: 4 operations per weight and token, not 6.
    """
    total, each = 0.0, 4.0 if is_frozen else 6.0
    for prompt, responses in groups:
        total += each * shape.body_parameters * (prompt + sum(responses))
        total += each * shape.hidden * shape.vocabulary * sum(responses)
        pairs = prompt**2 + sum((prompt + response) ** 2 - prompt**2 for response in responses)
        total += 6.0 * shape.layers * shape.attention_width * pairs
    return total


def training_flops(shape: ModelShape, prompt_lengths: Iterable[int], response_lengths: Iterable[int]) -> float:
    """Operations of one forward and backward pass over sequences, by the model's definition and no more.

    6 per body parameter and token; 6 · hidden · vocabulary per response token, since nothing else has to pass the
    output layer; causal attention: 2 · L² · width per layer forward (scores and values, half of each matrix), three
    times that with the backward pass. What an implementation recomputes is not counted.
    """
    total = 0.0
    for prompt, response in zip(prompt_lengths, response_lengths, strict=True):
        length = int(prompt) + int(response)
        body = 6.0 * shape.body_parameters * length
        output = 6.0 * shape.hidden * shape.vocabulary * int(response)
        attention = 6.0 * shape.layers * shape.attention_width * length**2
        total += body + output + attention
    return total


# ---------------------------------------------------------------- intervals of a trace


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what intervals (start, end) cover together."""
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered


def gaps(intervals: Iterable[tuple[float, float]]) -> list[float]:
    """Lengths of the holes between intervals, in order of time."""
    found: list[float] = []
    reach: float | None = None
    for start, end in sorted(intervals):
        if reach is not None and start > reach:
            found.append(start - reach)
        reach = end if reach is None else max(reach, end)
    return found


def gap_places(intervals: Iterable[tuple[float, float, str]], longer_than: float, most: int = 12) -> list[Record]:
    """Where the device waited: between which two names, how often and how long together, the longest first."""
    found: dict[tuple[str, str], list[float]] = {}
    reach, last = None, ""
    for start, end, name in sorted(intervals):
        if reach is not None and start - reach > longer_than:
            found.setdefault((last, name), []).append(start - reach)
        if reach is None or end > reach:
            reach, last = end, name
    places = sorted(found, key=lambda place: -sum(found[place]))[:most]
    return [
        {"after": a[:60], "before": b[:60], "count": len(found[a, b]), "ms": round(sum(found[a, b]) / 1e3, 3)}
        for a, b in places
    ]


def device_intervals(trace: Record) -> list[tuple[float, float, str]]:
    """(start, end, name) in µs of everything that ran on the device, from a Chrome trace of torch.profiler."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in kinds
    ]


# ---------------------------------------------------------------- time to an accuracy


def monotone(values: Sequence[float]) -> list[float]:
    """The rising sequence nearest to `values` in squares (pool adjacent violators): noise out, nothing gained.

    A peak that is not held is averaged with what comes after it, so it does not count as reached.
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] >= mean:
            before, size = blocks.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def target_accuracy(accuracies: Sequence[float]) -> float:
    """GRPO's final accuracy: the mean of its last two evaluations, since one alone is noisy."""
    return statistics.fmean(accuracies[-2:])


def time_to_accuracy(times: Sequence[float], accuracies: Sequence[float], target: float) -> float | None:
    """When the monotone fit of the accuracies first reaches the target, linear in between; None: never."""
    fitted = monotone(accuracies)
    slack = 1e-12  # the target is a mean of the same numbers, rounded in another order
    for i, value in enumerate(fitted):
        if value >= target - slack:
            if i == 0:
                return float(times[0])
            share = (target - fitted[i - 1]) / (value - fitted[i - 1])
            return float(times[i - 1] + min(1.0, max(0.0, share)) * (times[i] - times[i - 1]))
    return None


def journal_clock(journal: Sequence[Record], start: float, stage_ends: Sequence[int]) -> dict[str, Any]:
    """Seconds at which each learned-up-to version was there, from a run's journal; evaluation does not count.

    The first evaluation finds no sampler: what it took longer than the last one is loading, and counts. Checkpoints
    that are written only for the sake of an evaluation do not: they lie within a stage, and the other side's weights
    are saved with its clock stopped, too. `start` is the time at which the run was called.
    """
    evaluations = [record for record in journal if record["event"] == "evaluate"]
    excluded = {"evaluate": 0.0, "evaluation_checkpoints": 0.0}
    at: dict[int, float] = {}
    spent: dict[int, dict[str, float]] = {}  # by event, up to and with each version
    so_far = {"generate": 0.0, "learn": 0.0, "switch": 0.0}
    version = 0
    for record in journal:
        before = sum(excluded.values())
        if record["event"] == "learn":
            version = int(record["stop"])
            at[version] = float(record["time"]) - start - sum(excluded.values())
            spent[version] = {**so_far, "learn": so_far["learn"] + float(record["seconds"])}
        elif record["event"] == "evaluate":
            without_loading = evaluations[-1] if record is evaluations[0] else record
            excluded["evaluate"] += min(float(record["seconds"]), float(without_loading["seconds"]))
        elif (
            record["event"] == "switch"
            and record.get("reason") in ("checkpoint", "commit")
            and version not in stage_ends
        ):
            excluded["evaluation_checkpoints"] += float(record["seconds"])
        counted = float(record["seconds"]) - (sum(excluded.values()) - before)
        event = "switch" if record["event"] == "evaluate" else record["event"]
        so_far[event] = so_far.get(event, 0.0) + counted
    return {"at": at, "spent": spent, "excluded": excluded}


# ---------------------------------------------------------------- headline figures


def headline(runs: Mapping[str, Record]) -> dict[str, Any]:
    """All figures that the runs of a file support so far; the others are null. `notes` say why."""
    notes: list[str] = []
    figures: dict[str, Any] = dict.fromkeys(KEYS)
    figures |= learner_figures(runs, notes)
    figures |= sampler_figures(runs, notes)
    figures |= accuracy_figures(runs, notes)
    idle = runs.get("idle/stalewise", {})
    figures["idle_share"] = idle.get("idle_share")
    notes += [f"{part} was measured in more than one sitting" for part in parts_in_pieces(runs)]
    notes += [f"{name}: {run['error'].splitlines()[-1]}" for name, run in runs.items() if run.get("error")]
    return {**figures, "notes": notes}


def parts_in_pieces(runs: Mapping[str, Record]) -> list[str]:
    """Parts (a seed of the accuracy part counts as one) whose two sides were not measured in one call."""
    sittings: dict[str, set[Any]] = {}
    for name, run in runs.items():
        part, _, rest = name.partition("/")
        if rest:
            key = f"{part}, {rest.rpartition('/')[2]}" if part == "accuracy" else part
            sittings.setdefault(key, set()).add(run.get("sitting"))
    return [part for part, found in sittings.items() if len(found) > 1]


def fastest(runs: Mapping[str, Record], prefix: str, key: str = "tokens_per_second") -> tuple[str, Record]:
    """The run under a prefix with the largest number; ("", {}) where there is none."""
    found = {name: run for name, run in runs.items() if name.startswith(prefix) and run.get(key)}
    best = max(found, key=lambda name: found[name][key], default="")
    return best, found.get(best, {})


def learner_figures(runs: Mapping[str, Record], notes: list[str]) -> dict[str, Any]:
    """Speed, utilisation and memory of the learner, against the configuration of TRL that is its fastest."""
    ours = runs.get("learner/stalewise", {})
    name, theirs = fastest(runs, "learner/trl/")
    found: dict[str, Any] = {key: ours[key] for key in ("mfu", "mfu_prompts_each") if key in ours}
    if ours.get("tokens_per_second") and theirs:
        notes.append(f"learner: TRL's fastest configuration is {name.rpartition('/')[2]}")
        found["learner_ratio"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
        found["learner_ratio_without_scoring"] = ours["tokens_per_second"] / theirs["tokens_per_second_update_only"]
        found["memory_ratio"] = ratio(ours.get("peak_bytes"), theirs.get("peak_bytes"))
    whole = runs.get("memory/stalewise-whole", {})
    plain = [run for key, run in runs.items() if key.startswith("learner/trl/") and run.get("whole_update_at_once")]
    for run in plain:
        kind = "gradient_checkpointing" if run["gradient_checkpointing"] else "same_micro_batch"
        ours_bytes = ours.get("peak_bytes") if run["gradient_checkpointing"] else whole.get("peak_bytes")
        found[f"memory_ratio_{kind}"] = ratio(ours_bytes, run.get("peak_bytes"))
    return found


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, or None where one of the two is not known."""
    return numerator / denominator if numerator and denominator else None


def sampler_figures(runs: Mapping[str, Record], notes: list[str]) -> dict[str, Any]:
    """Our sampler against transformers `generate` at its best batch size and way of getting log-probabilities."""
    ours = runs.get("sampler/stalewise", {}).get("tokens_per_second")
    name, theirs = fastest(runs, "sampler/generate/")
    if not ours or not theirs:
        return {}
    notes.append(f"sampler: generate is fastest at {name.rpartition('/')[2]} with log-probabilities by {theirs['way']}")
    _, bare = fastest(runs, "sampler/generate/", "tokens_per_second_without_logp")
    return {
        "sampler_ratio": ours / theirs["tokens_per_second"],
        "sampler_ratio_without_logp": ours / bare["tokens_per_second_without_logp"],
    }


def accuracy_figures(runs: Mapping[str, Record], notes: list[str]) -> dict[str, Any]:
    """Ratios per seed, and their median and range."""
    seeds = sorted({int(name.rpartition("seed")[2]) for name in runs if name.startswith("accuracy/")})
    found: dict[str, Any] = {"per_seed": {}}
    for seed in seeds:
        three = {method: runs.get(f"accuracy/{method}/seed{seed}", {}) for method in METHODS}
        done = {method: run for method, run in three.items() if run.get("curves")}
        if {"trl", "stalewise"} <= done.keys():
            found["per_seed"][str(seed)] = seed_figures(seed, done, notes)
    for key in ("time_to_accuracy_ratio", "time_to_accuracy_ratio_same_mu", "wallclock_ratio"):
        for suffix in ("", "_all_questions"):
            values = [figures.get(key + suffix) for figures in found["per_seed"].values()]
            known = [value for value in values if value is not None]
            if known:
                found[key + suffix] = statistics.median(known)
                found[f"{key}{suffix}_range"] = [min(known), max(known)]
    return found


def seed_figures(seed: int, done: Mapping[str, Record], notes: list[str]) -> dict[str, Any]:
    """The ratios of one seed; a time that is not there is said in words."""
    seconds = {method: run["seconds"] for method, run in done.items()}
    found: dict[str, Any] = {"wallclock_ratio": seconds["trl"] / seconds["stalewise"], "seconds": seconds}
    for curve in done["trl"]["curves"]:
        suffix = "" if curve == "held_out" else "_all_questions"
        target = target_accuracy(done["trl"]["curves"][curve])
        reached = {method: time_to_accuracy(run["times"], run["curves"][curve], target) for method, run in done.items()}
        updates = {
            method: time_to_accuracy(run["updates"], run["curves"][curve], target) for method, run in done.items()
        }
        found |= {
            f"target{suffix}": target,
            f"seconds_to_target{suffix}": reached,
            f"updates_to_target{suffix}": updates,
        }
        for method, run in done.items():
            count, equal = updates[method], done["trl"]["updates"][-1]
            if count is None:
                last = run["curves"][curve][-1]
                notes.append(f"seed {seed}, {curve}: {method} never reaches {target:.3f} (its last is {last:.3f})")
            elif count > equal:
                notes.append(
                    f"seed {seed}, {curve}: {method} reaches {target:.3f} after {count:.0f} updates, not {equal}"
                )
        ours = reached["stalewise"]
        for method, key in (("trl", "time_to_accuracy_ratio"), ("trl_same_mu", "time_to_accuracy_ratio_same_mu")):
            found[key + suffix] = ratio(reached.get(method), ours)
            if ours is None and reached.get(method) is not None:
                found[key + suffix] = 0.0  # as slow as can be, in the median and in the range as well
            elif ours and method in done and reached[method] is None:
                # It takes longer than it was given: what is known is a bound.
                found[key + suffix] = done[method]["times"][-1] / ours
                notes.append(f"seed {seed}, {curve}: {key} is at least what is said, since {method} was ended before")
    return found
