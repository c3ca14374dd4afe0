"""A summary of a run in sentences: its result, its cost and its problems; and captions of metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from stalewise.config.run import held_out_warning
from stalewise.reporting.compare import unequal_work, work_of
from stalewise.reporting.read import Run, total_seconds, verifier_errors
from stalewise.statistics import format_duration
from stalewise.store.records import is_table, is_text, is_whole

ACCURACY = "accuracy"  # from eval.jsonl, all others are from metrics.jsonl


@dataclass(frozen=True, slots=True)
class Metric:
    """The caption of a metric, its definition, and when its value needs a closer look."""

    short: str
    definition: str
    check_when: str = ""

    @property
    def in_full(self) -> str:
        """Definition and warning in one text."""
        return f"{self.definition}. Check when {self.check_when}." if self.check_when else f"{self.definition}."


def _read_metrics() -> dict[str, Metric]:
    """The rows of metrics.md: key, caption, definition, warning. A test compares them with docs/metrics.md."""
    lines = files("stalewise.reporting").joinpath("metrics.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {key: Metric(*texts) for key, *texts in rows}


METRICS = _read_metrics()


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot of metrics against updates or time; `quantity` and `unit` label the vertical axis."""

    name: str
    title: str
    quantity: str
    unit: str
    keys: tuple[str, ...]
    is_share: bool = False  # between 0 and 1: all such charts have the same scale
    is_log: bool = False
    has_zero: bool = True  # the vertical axis includes 0
    is_against_time: bool = False
    limit: float | None = None  # drawn as a line

    @property
    def y_title(self) -> str:
        """The label of the vertical axis."""
        return f"{self.quantity} ({self.unit})"


REWARD = ("reward", ACCURACY)
CHARTS = (
    Chart("reward", "Reward and held-out accuracy", "reward, accuracy", "score", REWARD),
    Chart("reward-time", "Reward and accuracy against time", "reward, accuracy", "score", REWARD, is_against_time=True),
    Chart("ess", "Effective sample size", "ESS", "share, 0 to 1", ("ess", "ess_sequence"), is_share=True),
    Chart("clip", "Clipped and vetoed", "share of tokens", "0 to 1", ("clip_fraction", "veto_fraction"), is_share=True),
    Chart(
        "ratios",
        "Mean ratio by sign of the advantage",
        "mean ratio",
        "policy / behaviour",
        ("ratio_mean_positive", "ratio_mean_negative"),
        has_zero=False,
        limit=1.0,
    ),
    Chart(
        "largest",
        "Largest ratio by sign of the advantage",
        "policy / behaviour",
        "ratio, log scale",
        ("ratio_max_positive", "ratio_max_negative"),
        is_log=True,
    ),
    Chart("kl", "KL of policy and behaviour", "KL", "nats per token", ("kl_behaviour_policy", "kl_policy_behaviour")),
    Chart("reference", "KL of policy and reference", "KL", "nats per token", ("kl_reference",)),
    Chart("entropy", "Entropy", "entropy", "nats per token", ("entropy",)),
    Chart("length", "Response length", "mean length", "tokens", ("response_length",)),
    Chart(
        "shares",
        "Truncated, degenerate, unscored",
        "share",
        "0 to 1",
        ("truncated_fraction", "degenerate_fraction", "verifier_error_fraction"),
        is_share=True,
    ),
    Chart("age", "Age of the rollouts", "age", "updates", ("age_mean", "age_max")),
    Chart("drift", "Drift", "Σ‖Δθ‖", "Euclidean norm", ("drift", "batch_drift")),
    Chart("budget", "Drift limits used", "share", "1 is the limit", ("batch_budget", "horizon_budget"), limit=1.0),
    Chart("rate", "Learning rate", "learning rate", "per update", ("learning_rate",)),
    Chart("gradient", "Gradient norm", "‖gradient‖", "loss per unit of weight", ("grad_norm",)),
    Chart("seconds", "Time per update", "time", "seconds", ("seconds",)),
)


# The sections of the page: charts of one question each, folded on a phone.
CHART_SECTIONS = {
    "Reward and accuracy": ("reward", "reward-time", "parts", "tasks"),
    "Importance weights and clipping": ("ess", "clip", "ratios", "largest", "kl", "reference"),
    "Responses": ("entropy", "length", "shares"),
    "Age and drift": ("age", "drift", "budget"),
    "Optimizer and time": ("rate", "gradient", "seconds"),
}
PART, BY_TASK = "part/", "reward/"  # keys of metrics whose names depend on the task


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """All charts; those of reward parts and of the tasks of a mixture have the keys that the runs recorded."""
    recorded = list(dict.fromkeys(key for run in runs for key in run.metrics))
    parts, tasks = (tuple(key for key in recorded if key.startswith(start)) for start in (PART, BY_TASK))
    found = list(CHARTS)
    if parts:
        found.insert(2, Chart("parts", "Parts of the reward", "mean of the part", "score", parts))
    if tasks:
        found.insert(2, Chart("tasks", "Reward by task", "mean reward", "score", tasks))
    return found


def metric_of(key: str) -> Metric:
    """The caption and definition of a metric on the page."""
    if key.startswith(PART):
        name = key.removeprefix(PART)
        return Metric(f"mean of the reward part {name}", f"mean of {name} over the rollouts of the update that have it")
    if key.startswith(BY_TASK):
        name = key.removeprefix(BY_TASK)
        return Metric(f"mean reward of the task {name}", f"mean of R over the rollouts of {name} that have a score")
    return METRICS[key]


# Rules of thumb, as in docs/metrics.md.
LOW_ESS = 0.1
FRESH_LOG_RATIO = 0.1
MOST = 0.5
NEAR_LIMIT = 0.8  # fraction of the drift limits
HIGH_KL = 0.1  # nats per token
LARGE_RATIO = 10.0  # where the advantage is negative
SPIKE = 5.0  # times the median
DIP = 0.5  # fraction of the median
MOST_NAMED = 3  # updates of a spike

PRESENT_PARTICIPLE = {
    "generate": "generating",
    "learn": "learning",
    "switch": "switching",
    "wait": "waiting",
    "evaluate": "evaluating",
    "rollback": "rolling back",
}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The head of the page for one run."""

    verdict: str
    worked: str
    cost: str
    warnings: list[str]
    extremes: str  # the most unusual values of the run, whether or not they break a rule


def summarize(run: Run) -> RunSummary:
    """Verdict, sentences and warnings of one run."""
    verdict, accuracy = verdict_of(run)
    cost = " ".join(filter(None, (describe_progress(run), describe_lineage(run), describe_cost(run))))
    warnings = warnings_of(run)
    return RunSummary(verdict, accuracy, cost, warnings, describe_extremes(run, warnings))


def summary_record(run: Run) -> dict[str, Any]:
    """The head of the page as data, with names as in `watch --json`; None where a value is unknown."""
    ends = [run.evaluations[0], run.evaluations[-1]] if run.evaluations else []
    first, last = [accuracy_of(record) for record in ends] or (None, None)
    return {
        "directory": str(run.directory),
        "name": run.label,
        **asdict(summarize(run)),
        "first_accuracy": first,
        "accuracy": last,
        "update": run.updates,
        "updates": run.planned_updates,
        "rollouts": sum(batch.rows for batch in run.batches),
        "tokens": sum(batch.tokens for batch in run.batches),
        "rollbacks": len(run.rollbacks),
        "seconds": run.seconds,
    }


def accuracy_of(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The accuracy of an evaluation, with its interval and the version that has it."""
    return {"version": evaluation["version"], **evaluation["accuracy"]}


def describe_lineage(run: Run) -> str:
    """The run that this one was forked from, and settings changed at the fork and in place; empty if there are none."""
    sentences = [f"{words}." for words in describe_fork(run.fork)]
    for record in run.config_changes:
        sentences.append(f"At version {record.get('version', 0)} was changed: {format_changes(record['changes'])}.")
    return " ".join(sentences)


def describe_fork(record: Mapping[str, Any]) -> list[str]:
    """The runs that a run was forked from, the nearest first."""
    origins = [record, *record.get("ancestors", ())] if record else []
    return [
        f"{'Forked' if index == 0 else 'which was forked'} from {origin['run']} at version {origin['version']}"
        + (f" with {format_changes(origin['changes'])}" if origin["changes"] else " without a change")
        for index, origin in enumerate(origins)
    ]


def format_changes(changes: Mapping[str, Sequence[Any]]) -> str:
    """Settings with their values before and after."""
    return ", ".join(
        f"{key} = {format_value(after)} ({format_value(before)})" for key, (before, after) in changes.items()
    )


def describe_rewards(record: Mapping[str, Any], name: str) -> str:
    """One line: how many rewards changed, and their mean before and after."""
    before, after = (
        "unknown" if record.get(key) is None else f"{record[key]:.4f}" for key in ("mean_before", "mean_after")
    )
    share = record["changed"] / max(1, record["rollouts"])
    unscored = f"; without a score {record['unscored_before']:,} → {record['unscored_after']:,}"
    return (
        f"{name}: {record['changed']:,} of {record['rollouts']:,} rewards changed ({share:.1%}; {record['raised']:,} "
        f"higher, {record['lowered']:,} lower), mean {before} → {after}"
        + (unscored if record["unscored_before"] or record["unscored_after"] else "")
    )


def verdict_of(run: Run) -> tuple[str, str]:
    """A verdict of a few words, and a sentence with its numbers."""
    if not run.evaluations:
        return "Not evaluated", "No policy of this run has been evaluated."
    first, last = run.evaluations[0], run.evaluations[-1]
    how = f"mean of {last['samples']} samples on each of {last['prompts']} held-out prompts, 95% intervals"
    if (first["prompts"], first["samples"]) != (last["prompts"], last["samples"]):  # changed in place
        how += f"; version {first['version']}: {first['samples']} samples on each of {first['prompts']}"
    before, after = first["accuracy"], last["accuracy"]
    if len(run.evaluations) == 1:
        value = f"{format_interval(before)} ({how})"
        sentence = f"Held-out accuracy of version {first['version']} on {first['task']} is {value}"
        return "Not evaluated after learning", f"{sentence}; no other version has been evaluated."
    if after["low"] > before["high"]:
        verdict, verb, remark = "Improved", "rose", ""
    elif after["high"] < before["low"]:
        verdict, verb, remark = "Got worse", "fell", ""
    else:  # also where an end is NaN
        verdict, verb, remark = "No clear change", "went", "; the intervals overlap"
    sentence = f"Held-out accuracy on {last['task']} {verb} from {format_interval(before)} to {format_interval(after)}"
    where = "" if run.is_complete else f" at version {last['version']}"
    return verdict, f"{sentence}{where} ({how}{remark})."


def describe_progress(run: Run) -> str:
    """How many updates are done, and on which data."""
    objective = run.config.get("objective.name", "unknown")
    done = f"{run.updates:,} of {count_noun(run.planned_updates, 'update')} with {objective} are done"
    amounts = ((run.updates_rolled_back, "update"), (run.rollouts_rolled_back, "rollout"))
    parts = [count_noun(amount, noun) for amount, noun in amounts if amount]
    rolled_back = f"; another {join_names(parts)} were rolled back" if parts else ""
    sentence = f"{done}, on {_data_of(run)}{rolled_back}."
    return sentence if run.is_complete else f"The run is not finished: {sentence}"


def _data_of(run: Run) -> str:
    if run.sources:
        return f"{_count_batches(len(run.sources))} of other runs"
    if run.is_open_ended:
        made = _count_batches(len(run.batches))
    else:
        made = f"{len(run.batches)} of {_count_batches(run.schedule.generation_batches)}"
    rollouts = count_noun(sum(batch.rows for batch in run.batches), "rollout")
    tokens = count_noun(sum(batch.tokens for batch in run.batches), "response token")
    outside = sum(batch.outside_tokens for batch in run.batches)
    return f"{made} ({rollouts}, {tokens}{f' and {outside:,} from outside' if outside else ''})"


def describe_cost(run: Run) -> str:
    """The time of a run and of its second process, by activity."""
    if run.total_seconds <= 0:
        return "No time is on record."
    sentence = f"It took {format_duration(run.total_seconds)}: {time_shares(run.seconds)}."
    beside = total_seconds(run.generator)
    process = f" The generator process took {format_duration(sum(beside.values()))}: {time_shares(beside)}."
    return sentence + process if sum(beside.values()) else sentence


def time_shares(seconds: Mapping[str, float]) -> str:
    """The share of each activity that took any time."""
    whole = sum(seconds.values())
    parts = {PRESENT_PARTICIPLE.get(name, name): part / whole for name, part in seconds.items() if part}
    return ", ".join(f"{share:.0%} {name}" for name, share in parts.items())


def ranking(runs: Sequence[Run]) -> str:
    """Which run has the highest accuracy, and which others may be as good."""
    known = [run for run in runs if run.evaluations and math.isfinite(run.evaluations[-1]["accuracy"]["value"])]
    if len({run.evaluations[-1]["task"] for run in known}) > 1:
        return "The runs have different tasks: their accuracies cannot be compared."
    if len(known) < 2:
        return "Fewer than two of the runs have been evaluated."
    last = {run.label: run.evaluations[-1]["accuracy"] for run in known}
    best = max(last, key=lambda label: last[label]["value"])
    near = [label for label in last if label != best and last[label]["high"] >= last[best]["low"]]
    sentence = f"{best} has the highest last accuracy, {format_interval(last[best])}"
    sentence += f"; the intervals of {join_names(near)} overlap it" if near else ", above all others"
    work = {run.label: work_of(run) for run in known}
    unequal = {label: unequal_work(work[best], work[label]) for label in work if label != best}
    listed = [f"; unequal work of {best} and {label}: {words}" for label, words in unequal.items() if words]
    return f"{sentence}{''.join(listed)}."


def warnings_of(run: Run) -> list[str]:
    """Warnings about the run: the value, the expected value, and what to do."""
    unfinished = [
        f"generation batch {name} is not complete ({count_noun(rows, 'rollout')} so far): left out"
        for name, rows in run.unfinished.items()
    ]
    return [*findings(run), *unfinished]


def findings(run: Run) -> list[str]:
    """The warnings without unfinished batches, which are normal while a run goes on."""
    found = [*_course_warnings(run), *_budget_warnings(run), *_rollout_warnings(run), *_update_warnings(run)]
    return [*found, *_spike_warnings(run), *_age_warnings(run), *run.notes]


def _course_warnings(run: Run) -> Iterator[str]:
    yield from (describe_rollback(rollback.record) for rollback in run.rollbacks)
    best = max(run.evaluations, key=lambda record: record["accuracy"]["low"], default=None)
    if best is not None and run.evaluations[-1]["accuracy"]["high"] < best["accuracy"]["low"]:
        yield (
            f"Version {best['version']} was better than the last one: accuracy {format_interval(best['accuracy'])}; "
            "use its checkpoint if it is kept, or a lower learning rate."
        )
    if few := _held_out_warning(run):
        yield f"{few}."


def _held_out_warning(run: Run) -> str:
    """A warning if the last evaluation had fewer prompts than the config asks for; empty if not, or unknown."""
    asked = run.config.get("evaluation.prompts")
    if not run.evaluations or not isinstance(asked, int):
        return ""
    last = run.evaluations[-1]
    changes = [record for record in run.config_changes if "evaluation.prompts" in record["changes"]]
    if any(record.get("version", 0) >= last["version"] for record in changes):  # it may have been before the change
        return ""
    return held_out_warning(last["task"], last["prompts"] + last.get("excluded", 0), asked)


def describe_rollback(record: Mapping[str, Any]) -> str:
    """Why a run was rolled back, and how it continued."""
    factor, batches = record.get("learning_rate_factor", 1.0), record.get("batches") or ()
    led = ", ".join(map(str, record.get("led_there") or ()))
    known = all(isinstance(record.get(key), float) for key in ("value", "best"))
    parts = [
        f" ({record['value']:.3g}; its best was {record['best']:.3g})" if known else "",
        f"; learned before it from generation batch {led}" if led else "",
        f"; the learning rate is {factor:g} of the config's since then" if factor != 1 else "",
        f"; {_count_batches(len(batches))} rolled back, too" if batches else "",
    ]
    versions = f"from version {record['from_version']} to {record['to_version']}"
    return f"The run was rolled back {versions}: {record['reason']}{''.join(parts)}."


def _budget_warnings(run: Run) -> Iterator[str]:
    limits = {
        "batch_budget": "within one generation batch; use more stages or a lower learning rate",
        "horizon_budget": "over the run; use fewer updates or a lower learning rate",
    }
    for key, advice in limits.items():
        used = run.finite(key).max(initial=0.0)
        if used >= NEAR_LIMIT:
            amount = "more than all" if used > 1 else f"{used:.0%}"
            yield f"{key} reaches {used:.2f}: {amount} of the drift that the law allows {advice}."


def _rollout_warnings(run: Run) -> Iterator[str]:
    limit = run.config.get("sampler.max_new_tokens", "unknown")
    rows = sum(batch.rows for batch in run.batches)
    truncated = sum(batch.truncated for batch in run.batches) / rows if rows else 0.0
    if truncated > MOST:
        yield f"{truncated:.0%} of the rollouts are truncated at sampler.max_new_tokens = {limit}; raise it."
    evaluated = max((record["truncated_fraction"] for record in run.evaluations), default=0.0)
    if evaluated > MOST:
        yield f"In an evaluation {evaluated:.0%} of the responses are truncated at {limit} tokens."
    if errors := verifier_errors(run):
        kinds = ", ".join(f"{kind} ({count})" for kind, count in errors.most_common(5))
        failed = sum(batch.verifier_errors for batch in run.batches) / rows if rows else 0.0
        share = f" ({failed:.1%} of the rollouts)" if failed else ""
        yield f"The verifier failed on {count_noun(errors.total(), 'response')}{share}: {kinds}; they have no score."
    count, prompts = unparsed(run)
    if count:
        where = f", for example at {', '.join(prompts[:3])}" if prompts else ""
        yield f"No answer was found in {count_noun(count, 'response')}{where}; they count as wrong."
    if late := sum(record["timed_out"] for record in _records(run) if is_whole(record.get("timed_out"))):
        yield f"{count_noun(late, 'program')} took too long; they count as wrong."


def _records(run: Run) -> list[Any]:
    """The records of the verifier's errors, of each batch and of each evaluation."""
    return [*(batch.extra for batch in run.batches), *run.evaluations]


def unparsed(run: Run) -> tuple[int, list[str]]:
    """How many responses have no answer that the verifier could read, and the prompts of some."""
    records = _records(run)
    lists = [record.get("unparsed_examples") for record in records]
    examples = [example for listed in lists if isinstance(listed, list) for example in listed]
    names = [example["prompt_id"] for example in examples if is_table(example) and is_text(example.get("prompt_id"))]
    counts = [record["unparsed"] for record in records if is_whole(record.get("unparsed"))]
    return sum(counts), list(dict.fromkeys(names))


def _update_warnings(run: Run) -> Iterator[str]:
    if skipped := int((run.finite("taken") == 0).sum()):
        updates = count_noun(run.updates, "update")
        yield f"{skipped} of {updates} had nothing to learn from and changed no weights."
    degenerate = run.finite("degenerate_fraction")
    if len(degenerate) and degenerate.mean() > MOST:
        yield (
            f"{degenerate.mean():.0%} of the groups have equal rewards and give no gradient; the task is too easy or "
            "too hard for this policy."
        )
    ess = run.finite("ess")
    if len(ess) and ess.min() < LOW_ESS:
        share = (ess < LOW_ESS).mean()
        yield (
            f"ESS falls to {ess.min():.3g} and is below {LOW_ESS} in {share:.0%} of the updates: few tokens carry the "
            "estimate; use more stages or a lower learning rate."
        )
    if nonfinite := run.finite("nonfinite").sum():
        yield f"{count_noun(int(nonfinite), 'token')} had a ratio that is not finite."
    taken = run.column("taken") == 1
    for key in ("loss", "grad_norm", "ess", "ess_sequence", "drift"):
        values = run.column(key)
        count = int((~np.isfinite(values[taken])).sum()) if len(values) else 0
        if count:
            yield f"{key} is not finite in {count_noun(count, 'update')}; the curve has a gap there."


def _spike_warnings(run: Run) -> Iterator[str]:
    """Single updates far from the others: curves of hundreds of updates hide them."""
    limit = run.config.get("optimizer.max_grad_norm", 1.0)
    norm = run.finite("grad_norm")
    bound = max(SPIKE * float(np.median(norm)) if len(norm) else 0.0, limit if isinstance(limit, float | int) else 1.0)
    if where := _name_updates(run, "grad_norm", above=bound):
        yield f"{where}; gradients are scaled down to a norm of {limit:g}. Look at the rollouts of these updates."
    ess = run.finite("ess_sequence")
    if where := _name_updates(run, "ess_sequence", below=DIP * float(np.median(ess)) if len(ess) else 0.0):
        yield f"{where}: there few responses carry the estimate. Use more stages or a lower learning rate."
    if where := _name_updates(run, "kl_behaviour_policy", above=HIGH_KL):
        yield f"{where}: there the policy has moved far from the one that generated the rollouts."
    if where := _name_updates(run, "ratio_max_negative", above=LARGE_RATIO):
        yield f"{where}: responses that are to become less likely have become more likely."


def _name_updates(run: Run, key: str, *, above: float = math.inf, below: float = -math.inf) -> str:
    """Describe the updates in which a metric passes a bound: the farthest value, how many, and which."""
    values, update = run.column(key), run.column("update")
    rows = np.flatnonzero((values > above) | (values < below))
    if not len(rows):
        return ""
    rows = rows[np.argsort(values[rows])[:: 1 if math.isfinite(below) else -1]]  # the farthest first
    named = ", ".join(f"{update[row]:.0f}" for row in rows[:MOST_NAMED])
    more = f", … ({len(rows)} updates)" if len(rows) > MOST_NAMED else ""
    verb = "falls to" if math.isfinite(below) else "reaches"
    median = float(np.median(run.finite(key)))
    return f"{key} {verb} {values[rows[0]]:.3g}, median {median:.3g}: update {named}{more}"


def describe_extremes(run: Run, warnings: Sequence[str] = ()) -> str:
    """The largest gradient and the lowest effective sample size, with their updates, where no warning names them."""
    parts: list[str] = []
    for key, word, pick in (("grad_norm", "largest", np.nanargmax), ("ess_sequence", "lowest", np.nanargmin)):
        if len(run.finite(key)) and not any(warning.startswith(f"{key} ") for warning in warnings):
            values = np.where(np.isfinite(run.column(key)), run.column(key), np.nan)
            row = int(pick(values))
            parts.append(
                f"{word} {key} {values[row]:.3g} at update {run.column('update')[row]:.0f} "
                f"(median {np.median(run.finite(key)):.3g})"
            )
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""


def _age_warnings(run: Run) -> Iterator[str]:
    age, log_ratio = run.column("age_max"), run.column("log_ratio_max_abs")
    fresh = log_ratio[age == 0] if len(age) == len(log_ratio) else log_ratio[:0]
    fresh = fresh[np.isfinite(fresh)]
    if len(fresh) and fresh.max() > FRESH_LOG_RATIO:
        yield (
            f"On fresh rollouts log-ratios reach {fresh.max():.3g}; expected at most {FRESH_LOG_RATIO}. Sampler and "
            "trainer disagree about the same policy: compare their precision and sampling settings."
        )
    worst = run.finite("age_max").max(initial=0.0)
    if worst > run.schedule.worst_age and not run.is_open_ended and not run.sources:
        yield f"Rollouts reach age {worst:.0f}; the schedule allows {run.schedule.worst_age}."


def format_interval(record: Mapping[str, Any]) -> str:
    """A mean with its interval."""
    value, low, high = (record[key] for key in ("value", "low", "high"))
    return f"{value:.3f} [{low:.3f}, {high:.3f}]" if math.isfinite(value) else "unknown"


def join_names(names: Sequence[str]) -> str:
    """Names as a list in a sentence."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def count_noun(number: int, one: str, more: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _count_batches(number: int) -> str:
    return count_noun(number, "generation batch", "generation batches")


def format_value(value: Any) -> str:
    """A value of a config as it is written there."""
    if value is None:
        return "\N{EN DASH}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
