"""A run in words: did it work, what did it cost, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalewise.report.read import IDLE, Run, verifier_errors

# Rules of thumb of docs/metrics.md, and two of the same kind for shares that waste most of the work.
LOW_ESS = 0.1
FRESH_LOG_RATIO = 0.1
MOST = 0.5

PRESENT_PARTICIPLE = {"generate": "generating", "learn": "learning", "switch": "switching", "evaluate": "evaluating"}


@dataclass(frozen=True, slots=True)
class Summary:
    """The head of the page, for one run."""

    verdict: str
    paragraph: str
    warnings: list[str]


def summarise(run: Run) -> Summary:
    """Verdict, paragraph and warnings of one run."""
    verdict, accuracy = verdict_of(run)
    return Summary(verdict, " ".join([accuracy, progress_of(run), cost_of(run)]), warnings_of(run))


def verdict_of(run: Run) -> tuple[str, str]:
    """One word or two, and the sentence with the numbers behind them."""
    if not run.evaluations:
        return "Not evaluated", "No policy of this run has been evaluated."
    first, last = run.evaluations[0], run.evaluations[-1]
    how = f"mean of {last['samples']} samples on each of {last['prompts']} held-out prompts, 95% intervals"
    before, after = first["accuracy"], last["accuracy"]
    if len(run.evaluations) == 1:
        sentence = f"Held-out accuracy of version {first['version']} on {first['task']} is {interval(before)} ({how})"
        return "Not evaluated after learning", f"{sentence}; no other version has been evaluated."
    if after["low"] > before["high"]:
        verdict, verb, remark = "Improved", "rose", ""
    elif after["high"] < before["low"]:
        verdict, verb, remark = "Got worse", "fell", ""
    else:  # also where an end is NaN: then nothing is known
        verdict, verb, remark = "No clear change", "went", "; the intervals overlap"
    sentence = f"Held-out accuracy on {last['task']} {verb} from {interval(before)} to {interval(after)}"
    where = "" if run.is_complete else f" at version {last['version']}"
    return verdict, f"{sentence}{where} ({how}{remark})."


def progress_of(run: Run) -> str:
    """How far the run has come."""
    schedule = run.schedule
    rollouts = sum(batch.rows for batch in run.batches)
    tokens = sum(batch.tokens for batch in run.batches)
    made = f"{len(run.batches)} of {counted(schedule.generation_batches, 'generation batch', 'generation batches')}"
    sentence = (
        f"{run.updates:,} of {counted(schedule.updates, 'update')} with {run.config.get('objective.name', 'unknown')} "
        f"are done, on {made} ({counted(rollouts, 'rollout')}, {counted(tokens, 'response token')})."
    )
    return sentence if run.is_complete else f"The run is not finished: {sentence}"


def cost_of(run: Run) -> str:
    """Seconds, and what they went into."""
    if run.total_seconds <= 0:
        return "No time is on record."
    busy = [(name, seconds) for name, seconds in run.seconds.items() if name != IDLE]
    parts = [f"{seconds / run.total_seconds:.0%} {PRESENT_PARTICIPLE.get(name, name)}" for name, seconds in busy]
    parts.append(f"{run.seconds[IDLE] / run.total_seconds:.0%} idle")
    return f"It took {duration(run.total_seconds)}: {', '.join(parts)}."


def ranking(runs: Sequence[Run]) -> str:
    """Which run came out best, and which others may be as good."""
    known = [run for run in runs if run.evaluations and math.isfinite(run.evaluations[-1]["accuracy"]["value"])]
    if len({run.evaluations[-1]["task"] for run in known}) > 1:
        return "The runs have different tasks: their accuracies cannot be compared."
    if len(known) < 2:
        return "Fewer than two of the runs have been evaluated."
    last = {run.label: run.evaluations[-1]["accuracy"] for run in known}
    best = max(last, key=lambda label: last[label]["value"])
    near = [label for label in last if label != best and last[label]["high"] >= last[best]["low"]]
    sentence = f"{best} has the highest last accuracy, {interval(last[best])}"
    return (
        f"{sentence}; the intervals of {joined(near)} overlap with it." if near else f"{sentence}, clear of all others."
    )


def warnings_of(run: Run) -> list[str]:
    """What a reader should know before believing the curves: the value, what was expected, the way out."""
    return [*_rollout_warnings(run), *_update_warnings(run), *_age_warnings(run), *run.notes]


def _rollout_warnings(run: Run) -> list[str]:
    found: list[str] = []
    limit = run.config.get("sampler.max_new_tokens", "unknown")
    rows = sum(batch.rows for batch in run.batches)
    truncated = sum(batch.truncated for batch in run.batches) / rows if rows else 0.0
    if truncated > MOST:
        found.append(
            f"{truncated:.0%} of the rollouts are truncated at sampler.max_new_tokens = {limit}; raise that limit."
        )
    evaluated = max((record["truncated_fraction"] for record in run.evaluations), default=0.0)
    if evaluated > MOST:
        found.append(f"In an evaluation {evaluated:.0%} of the responses are truncated at {limit} tokens.")
    if errors := verifier_errors(run):
        kinds = ", ".join(f"{kind} ({count})" for kind, count in errors.most_common(5))
        found.append(f"The verifier failed on {counted(errors.total(), 'response')}: {kinds}; they have no score.")
    return found


def _update_warnings(run: Run) -> list[str]:
    found: list[str] = []
    skipped = int((run.finite("taken") == 0).sum())
    if skipped:
        found.append(f"{skipped} of {counted(run.updates, 'update')} had nothing to learn from and changed no weights.")
    degenerate = run.finite("degenerate_fraction")
    if len(degenerate) and degenerate.mean() > MOST:
        found.append(
            f"{degenerate.mean():.0%} of the groups have equal rewards and teach nothing; the task is too easy or too "
            "hard for this policy."
        )
    ess = run.finite("ess")
    if len(ess) and ess.min() < LOW_ESS:
        share = (ess < LOW_ESS).mean()
        found.append(
            f"ESS falls to {ess.min():.3g} and is below {LOW_ESS} in {share:.0%} of the updates: few tokens carry the "
            "estimate; use more stages or a lower learning rate."
        )
    if nonfinite := run.finite("nonfinite").sum():
        found.append(f"{counted(int(nonfinite), 'token')} had a ratio that is not finite.")
    taken = run.column("taken") == 1
    for key in ("loss", "grad_norm", "ess", "ess_sequence", "drift"):
        values = run.column(key)
        count = int((~np.isfinite(values[taken])).sum()) if len(values) else 0
        if count:
            found.append(f"{key} is not finite in {counted(count, 'update')}; there the curve has a gap.")
    return found


def _age_warnings(run: Run) -> list[str]:
    found: list[str] = []
    age, log_ratio = run.column("age_max"), run.column("log_ratio_max_abs")
    fresh = log_ratio[age == 0] if len(age) == len(log_ratio) else log_ratio[:0]
    fresh = fresh[np.isfinite(fresh)]
    if len(fresh) and fresh.max() > FRESH_LOG_RATIO:
        found.append(
            f"On fresh rollouts log-ratios reach {fresh.max():.3g}; expected at most {FRESH_LOG_RATIO}. Sampler and "
            "learner disagree about the same policy: compare their precision and sampling settings."
        )
    worst = run.finite("age_max").max(initial=0.0)
    if worst > run.schedule.worst_age:
        found.append(f"Rollouts reach age {worst:.0f}; the schedule allows {run.schedule.worst_age}.")
    return found


def interval(record: Mapping[str, Any]) -> str:
    """A mean with its interval.

    >>> interval({"value": 0.5, "low": 0.25, "high": 0.75})
    '0.500 [0.250, 0.750]'
    """
    value, low, high = (record[key] for key in ("value", "low", "high"))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]" if math.isfinite(value) else "unknown"


def joined(names: Sequence[str]) -> str:
    """A list in a sentence.

    >>> joined(["a"]), joined(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def counted(number: int, one: str, more: str = "") -> str:
    """A number and its noun.

    >>> counted(1, "update"), counted(4096, "update")
    ('1 update', '4,096 updates')
    """
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds for a person.

    >>> duration(7.26), duration(95), duration(7384)
    ('7.3 s', '1 min 35 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"
