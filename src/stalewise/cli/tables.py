"""Prints results of commands as text and tables on stdout, never truncated if that is a file or a pipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stalewise.cli.app import print_json
from stalewise.config import RunConfig
from stalewise.config.run_directory import RunResult
from stalewise.errors import visible
from stalewise.reporting.compare import RunComparison
from stalewise.reporting.status import RunPhase, RunStatus
from stalewise.reporting.summary import (
    count_noun,
    describe_fork,
    describe_rewards,
    format_changes,
    format_interval,
    format_value,
)
from stalewise.reporting.trackers import measures_of
from stalewise.reporting.verification import Verification
from stalewise.statistics import format_duration

if TYPE_CHECKING:  # planning fits the law with scipy, which takes a second to import
    from stalewise.planning.cluster_plan import ClusterPlan, ScheduleOutcome
    from stalewise.planning.planner import ConfigPlan
    from stalewise.planning.probe import ProbeResult
    from stalewise.planning.sweep import SweepResult

WIDE = 200  # columns if stdout is not a terminal, so that scripts get whole cells
MIB, GIB = 2**20, 2**30
MOST_WARNINGS = 5
SHOWN_PROMPTS = 10
STATE_STYLES = {"running": "bold green", "finished": "green", "stopped": "bold yellow", "not started": "yellow"}
UNITS = {"generate": "rollouts", "learn": "updates of the stage", "evaluate": "responses"}


def stdout_console() -> Console:
    """Standard output; wide if it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def print_lines(*lines: str | Table | Text) -> None:
    """Print lines and tables. Plain strings have no markup, and long ones are not wrapped."""
    console = stdout_console()
    for line in lines:
        shown = "\n".join(map(visible, line.split("\n"))) if isinstance(line, str) else line
        console.print(shown, markup=False, soft_wrap=not isinstance(shown, Table))


class PlainTable(Table):
    """A table whose cells are plain text: markup and control characters in names have no effect."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row."""
        super().add_row(*(Text(visible(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def make_table(columns: Iterable[str], *, left: Sequence[str] = (), title: str | None = None) -> Table:
    """A table whose columns are aligned to the right, except those in `left`."""
    table = PlainTable(title=None if title is None else visible(title))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def print_verification(found: Verification) -> None:
    """Print the damaged files, what depends on each and how to restore it; then the files that were compared."""
    lines: list[str] = []
    for damage in found.damaged:
        lines += [
            f"damaged: {damage.file}: {damage.problem}",
            f"  depends on it: {damage.depends}",
            f"  again: {damage.again}",
        ]
    lines += [f"not covered: {text}" for text in found.not_covered]
    compared = ", ".join(f"{count} {kind}" for kind, count in found.files.items())
    size = f"{found.bytes / MIB:,.1f} MiB in {found.seconds:.1f} s"
    verdict = f"{len(found.damaged)} damaged" if found.damaged else "none is damaged"
    print_lines(*map(visible, [*lines, f"compared with their checksums: {compared} ({size}); {verdict}"]))


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _seconds(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    parts = (f"{name} {value:.1f} s ({_percent(value, total)})" for name, value in seconds.items())
    return f"{total:.1f} s: {', '.join(parts)}"


def _accuracies(evaluations: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"version {record['version']}: accuracy {format_interval(record['accuracy'])}"
        + "".join(
            f"; {visible(task)} {format_interval(scores['accuracy'])}"
            for task, scores in record.get("by_task", {}).items()
        )
        for record in evaluations
    ]


def print_result(result: RunResult, as_json: bool) -> None:
    """Evaluations, times and directory of a run."""
    if as_json:
        record = {"updates": result.updates, "evaluations": result.evaluations, "seconds": result.seconds}
        record |= {"unscored": result.unscored, "suites": result.suites}
        print_json({"directory": str(result.directory), **record})
        return
    if result.suites:
        print_lines(suite_table(list(result.suites.values())))
    if result.unscored:
        print_lines(f"{result.unscored:.1%} of the rollouts could not be scored and were left out")
    print_lines(*_accuracies(result.evaluations), _seconds(result.seconds), str(result.directory))


def print_evaluation(result: Any) -> None:
    """avg@k and pass@k of one policy."""
    table = make_table(("measure", "value", "95% interval"), left=("measure",))
    for name, measure in measures_of(asdict(result)).items():
        table.add_row(name, f"{measure['value']:.3f}", f"{measure['low']:.3f} – {measure['high']:.3f}")
    print_lines(
        f"{result.task}, version {result.version}: {result.prompts} prompts, {result.samples} samples each",
        table,
        f"{result.response_length:.1f} tokens per response, {result.truncated_fraction:.1%} truncated, "
        f"{result.seconds:.1f} s",
    )
    if result.majority is None and result.samples > 1:
        print_lines("majority@k is unavailable: the reward function returns no 'answer'")
    for label, scores in result.by_task.items():
        print_lines(visible(f"{label}: accuracy {format_interval(scores['accuracy'])} on {scores['prompts']} prompts"))
    if result.excluded:
        print_lines(f"{result.excluded} prompts left out: they were used in training, or their ids are excluded")
    for kind, count in result.verifier_error_kinds.items():
        names = ", ".join(map(visible, result.verifier_error_prompts.get(kind, ())))
        print_lines(f"{count} responses without a score: {visible(kind)}, at {names}")
    if result.unmatched:
        names = ", ".join(map(visible, result.unmatched_prompts))
        print_lines(
            f"{result.unmatched} gold answers are scored as wrong, since the verifier parses only part of them: {names}"
        )
    print_lines(*_unparsed(result.unparsed, result.unparsed_examples))


def suite_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Evaluations on several suites, one row each."""
    columns = ("suite", "version", "prompts", "k", "avg@k", "pass@k", "majority@k", "truncated", "left out")
    table = make_table(columns, left=("suite",))
    for record in records:
        passed, majority = list(record["pass_at"].values())[-1], record.get("majority")
        table.add_row(
            Text(visible(record["suite"])),
            *(str(record[key]) for key in ("version", "prompts", "samples")),
            *(format_interval(interval) for interval in (record["accuracy"], passed)),
            format_interval(majority) if majority else "–",
            f"{record['truncated_fraction']:.1%}",
            str(record.get("excluded", 0)),
        )
    return table


def print_flips(record: Mapping[str, Any]) -> None:
    """Print the prompts that only one of two versions solves."""
    before, after = record["before"], record["after"]
    counts = f"{len(record['gained'])} gained, {len(record['lost'])} lost, {record['same']} as before"
    name = f"{visible(record['suite'])}: " if record["suite"] else ""
    print_lines(
        f"{name}version {before} → {after}, {record['prompts']} prompts: {counts} (p = {record['p_value']:.3g})"
    )
    for which in ("gained", "lost"):
        if record[which]:
            table = make_table((which, f"score of {before}", f"score of {after}", "prompt"), left=(which, "prompt"))
            for flip in record[which]:
                text = flip["text"] if flip["text"] is not None else "unknown"
                scores = (f"{flip[key]:.2f}" for key in ("score_before", "score_after"))
                table.add_row(Text(visible(flip["prompt_id"])), *scores, Text(visible(text)[:100]))
            print_lines(table)


def _unparsed(count: int, examples: Sequence[Mapping[str, str]]) -> list[str]:
    head = [f"no answer found in {count} responses, which count as wrong; for example:"] if count else []
    return head + [f"  {visible(example['prompt_id'])}: {visible(example['response'])}" for example in examples[:3]]


def print_checks(config: RunConfig, problem: str, as_json: bool) -> bool:
    """Print each check when it is done, or all as JSON; return whether none failed."""
    from stalewise.orchestrator.preflight import Check, examine, installation

    done: list[Check] = []
    for check in [*installation(), Check("config", "bad", problem)] if problem else examine(config):
        done.append(check)
        if not as_json:
            style = {"ok": "green", "warning": "yellow", "bad": "bold red"}[check.status]
            print_lines(Text.assemble((f"{check.status:<8}", style), f"{check.name:<16}{visible(check.detail)}"))
    good = not any(check.status == "bad" for check in done)
    if as_json:
        print_json({"ok": good, "checks": [asdict(check) for check in done]})
    return good


def print_run(record: dict[str, Any]) -> None:
    """Batches, checkpoints and times of a run."""
    more = record["updates_not_committed"]
    lost = f"; {more} more since the last checkpoint would be repeated" if more else ""
    committed = [batch for batch in record["batches"] if batch["committed"]]
    examples = [example for batch in committed for example in batch["unparsed_examples"]]
    print_lines(
        record["directory"],
        f"{record['objective']} on {record['task']}, model {record['model']}, {record['schedule']}",
        *(visible(line) for line in describe_fork(record["fork"])),
        *(
            visible(f"at version {line['version']} was changed: {format_changes(line['changes'])}")
            for line in record["config_changes"]
        ),
        f"{record['updates_done']} of {record['updates']} updates{lost}",
        f"checkpoints: {', '.join(map(str, record['checkpoints'])) or 'none'}",
        _batches(record["batches"]),
        *_unparsed(sum(batch["unparsed"] for batch in committed), examples),
        *(visible(f"rewards {describe_rewards(rewards, rewards['name'])}") for rewards in record["rewards"]),
        *([f"learned from the rewards {', '.join(used)}"] if (used := record["rewards_used"]) != ["first"] else []),
        *_accuracies(record["evaluations"]),
        _seconds(record["seconds"]),
    )


def _batches(batches: list[dict[str, Any]]) -> Table:
    counts = ("batch", "version", "rollouts", "tokens")
    has_episodes = any(batch.get("outside_tokens") for batch in batches)
    counts += ("from outside", "turns") if has_episodes else ()
    table = make_table((*counts, "reward", "truncated", "verifier errors", "updates", "age", "tokens/s"))
    for batch in batches:
        head = (str(batch["generation_batch"]), str(batch["version"]), f"{batch['rows']:,}")
        if not batch["committed"]:
            table.add_row(*head, f"not committed: {batch['shards']} shards")
            continue
        table.add_row(
            *head,
            f"{batch['tokens']:,}",
            *((f"{batch['outside_tokens']:,}", f"{batch['turns']:,}") if has_episodes else ()),
            "unknown" if batch["reward"] is None else f"{batch['reward']:.3f}",
            _percent(batch["truncated"], batch["rows"]),
            _percent(batch["verifier_errors"], batch["rows"]),
            str(batch["updates"]),
            "–" if batch["ages"] is None else "–".join(str(age) for age in dict.fromkeys(batch["ages"])),
            f"{batch['tokens'] / batch['seconds']:,.0f}" if batch["seconds"] else "–",
        )
    return table


def print_rollout(record: dict[str, Any]) -> None:
    """One rollout, token by token."""
    settings = [*record["sampler"].items(), ("seed", record["seed"])]
    lines = {
        "rollout": f"{record['rollout_id']} of group {record['group']}, in {record['batch']}",
        "prompt": f"{record['prompt_id']}  {_text(record['prompt'])}",
        "response": _text(record["text"]),
        "reward": _reward(record),
        **{f"  {name}": _reward(rewards) for name, rewards in record["rewards"].items()},
        "finished": f"{record['finish_reason']}, versions {record['version_first']} to {record['version_last']}",
        "sampler": ", ".join(f"{key} {value}" for key, value in settings if value != ""),
        "consumed": f"at {', '.join(map(str, record['consumed_at'])) or 'no update yet'}",
    }
    if record["segments"]:
        lines["turns"] = ", ".join(f"{segment['by']} {segment['tokens']}" for segment in record["segments"]) + " tokens"
    table = make_table(("position", "token", "text", "log-probability"), left=("text",))
    for position, token in enumerate(record["tokens"]):
        logp = f"by {token['by']}" if token["logp"] is None else f"{token['logp']:.4f}"
        table.add_row(str(position), str(token["id"]), Text(_text(token["text"])), visible(logp))
    print_lines(*(f"{name:<9} {visible(value)}" for name, value in lines.items()), table)


def _text(text: str | None) -> str:
    return "(no tokenizer to decode it)" if text is None else visible(text)


def _reward(record: dict[str, Any]) -> str:
    if record["reward_error"]:
        return f"unknown: the verifier failed: {record['reward_error']}"
    parts = ", ".join(f"{name} {value:g}" for name, value in record["reward_parts"].items())
    return f"{record['reward']:g}" + (f" ({parts})" if parts else "")


def print_group(records: list[dict[str, Any]]) -> None:
    """The rollouts of a group side by side."""
    first = records[0]
    table = make_table(("rollout", "reward", "tokens", "log-probability", "response"), left=("response",))
    for record in records:
        reward = "unknown" if record["reward_error"] else f"{record['reward']:g}"
        own = [token["logp"] for token in record["tokens"] if token["logp"] is not None]
        text = Text(_text(record["text"]))
        table.add_row(str(record["rollout_id"]), reward, str(len(own)), f"{sum(own):.3f}", text)
    print_lines(visible(f"group {first['group']}: {first['prompt_id']}  {_text(first['prompt'])}"), table)


def status_view(now: RunStatus) -> RenderableType:
    """The status of a run, one fact per line."""
    title = Text.assemble(
        (visible(now.name), "bold"),
        f"  {visible(now.objective)} on {visible(now.task)}  ",
        (now.state, STATE_STYLES.get(now.state, "yellow")),
        f"  {visible(now.holder)}",
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    bar = ProgressBar(total=now.updates, completed=now.update, width=32)
    grid.add_row("updates", Group(Text(f"{now.update:,} of {now.updates:,} ({now.update / now.updates:.0%})"), bar))
    for name, text in _facts(now):
        grid.add_row(name, Text(text))
    for index, warning in enumerate(now.warnings[:MOST_WARNINGS]):
        grid.add_row("" if index else "warnings", Text(visible(warning), style="yellow"))
    if (more := len(now.warnings) - MOST_WARNINGS) > 0:
        grid.add_row("", f"and {more} more: stalewise report shows all")
    return Group(title, grid)


def _facts(now: RunStatus) -> Iterator[tuple[str, str]]:
    if not now.update:
        yield "learned", "nothing yet: no update is on record"
    if now.stage is not None:
        open_end = "in all" if now.state == "finished" else "so far; a stage ends when it is spent"
        yield "stage", f"{now.stage + 1} of {now.stages}" if now.stages else f"{now.stage + 1} {open_end}"
    if now.phases:
        yield ("phase" if now.state == "running" else "next"), "; ".join(map(_phase, now.phases))
    if now.updates_per_second is not None:
        yield "rate", f"{now.updates_per_second:,.1f} updates/s while learning"
    if now.seconds_left and now.state in ("running", "maybe running"):
        yield "left", f"about {format_duration(now.seconds_left)}"
    if now.reward is not None:
        yield "reward", f"{now.reward:.3f}, mean of the last updates"
    if now.ess is not None:
        yield "ESS", f"{now.ess:.3f}"
    if now.accuracy is not None:
        yield "accuracy", f"{format_interval(now.accuracy)} at version {now.accuracy['version']}"
    if now.batch_budget is not None and now.horizon_budget is not None:
        yield "budget", f"{now.batch_budget:.0%} of the batch's drift used, {now.horizon_budget:.0%} of the run's"
    if now.rollbacks:
        yield "rolled back", count_noun(now.rollbacks, "time")
    if whole := sum(now.seconds.values()):
        parts = (f"{name} {seconds / whole:.0%}" for name, seconds in now.seconds.items() if seconds)
        yield "time", f"{format_duration(whole)}: {', '.join(parts)}"


def _phase(phase: RunPhase) -> str:
    amount = f"{phase.done:,} of {phase.total:,}" if phase.total else f"{phase.done:,}"
    return f"{phase.what} ({amount} {UNITS.get(phase.what, '')})" if phase.done or phase.total else phase.what


def print_comparison(result: RunComparison) -> None:
    """The answer first, then the numbers behind it."""

    def sentence(text: str, *starts: str) -> str:  # capitalized, unless it starts with the name of a run
        return f"{text[0].upper() if text.startswith(starts) else text[0]}{text[1:]}."

    sure = min(max(result.probability_better, 0.001), 0.999)  # the precision of the resamples
    table = make_table(("side", "runs", "accuracy [95%]", *result.a.work, "training (s)"), left=("side",))
    for side in (result.a, result.b):
        work = ("unknown" if math.isnan(amount) else f"{amount:,.0f}" for amount in side.work.values())
        accuracy = format_interval(asdict(side.accuracy))
        table.add_row(visible(side.name), str(len(side.runs)), accuracy, *work, f"{side.seconds:.1f}")
    print_lines(
        Text(visible(sentence(result.words, "no ")), style="bold"),
        visible(f"Probability that {result.b.name} is better: {sure:.1%}. {result.task}, {result.method}."),
        table,
        visible(sentence(result.speed, "speed")),
    )
    if result.settings:
        columns = list(map(visible, ("setting that differs", result.a.name, result.b.name)))
        settings = make_table(columns, left=columns)
        for key, values in result.settings.items():
            settings.add_row(key, *(visible(", ".join(map(format_value, side))) for side in values))
        print_lines(settings)
    print_lines(*(Text(visible(f"note: {note}"), style="yellow") for note in result.notes))


def print_probe(result: ProbeResult) -> None:
    """Measurements of a probe."""
    probe = result.probe
    table = make_table(("updates", "G = ‖Δθ‖/η", "spread"))
    for phase in probe.phases:
        table.add_row(f"{phase.first}–{phase.last}", f"{phase.mean:,.4g}", f"{phase.spread:,.3g}")
    small, large = probe.generation_sizes
    memory = "unknown" if probe.peak_memory_bytes is None else f"{probe.peak_memory_bytes / MIB:,.0f} MiB"
    lines = {
        "reward": f"{probe.reward_mean:.3f}; variance within groups {probe.reward_variance_within:.3f}, between them "
        f"{probe.reward_variance_between:.3f}; rewards differ in {probe.teaching_share:.0%} of the groups",
        "generating": f"{probe.tokens_per_second:,.0f} tokens/s; {1e3 * probe.seconds_per_rollout:.3g} ms per rollout "
        f"and {probe.seconds_per_generation:.3g} s per generation (timed at {small:,} and {large:,} rollouts)",
        "learning": f"{probe.seconds_per_update:.3g} s per update of {probe.tokens_per_update:,.0f} tokens",
        "switching": f"{probe.seconds_per_switch:.3g} s each time, {probe.seconds_to_start:.3g} s at the start",
        "memory": f"{memory} at its peak",
        "disk": f"{probe.bytes_per_rollout:,.0f} bytes per rollout, {probe.bytes_per_checkpoint / MIB:,.1f} MiB per "
        "checkpoint",
    }
    print_lines(table, *(f"{name:<11}{text}" for name, text in lines.items()), str(result.path))


def print_sweep(result: SweepResult) -> None:
    """The runs of a sweep and the constants of the law."""
    sweep = result.sweep
    table = make_table(("S", "η", "T", "seed", "collapsed at", "best accuracy", "last accuracy", "G"))
    for run in sorted(sweep.runs, key=lambda run: run.key):
        collapsed = "–" if run.collapsed_at is None else str(run.collapsed_at)
        accuracy = (f"{run.best_accuracy:.3f}", f"{run.last_accuracy:.3f}")
        settings = (str(run.staleness), f"{run.learning_rate:g}", str(run.updates), str(run.seed))
        table.add_row(*settings, collapsed, *accuracy, f"{run.update_norm_per_lr:.4g}")
    rule, survived = sweep.rule, any(run.collapsed_at is None for run in sweep.runs)
    print_lines(
        table,
        f"collapsed: the mean of {rule.smoothing} evaluations of held-out accuracy fell below {rule.fraction:g} of its "
        f"best and did not recover within {rule.window}, or the run ended below it, or an update was not finite; "
        f"{rule.evaluations} evaluations per run",
        sweep.fit.describe() if sweep.fit is not None else f"no fit: {sweep.problem}",
        f"G = {sweep.update_norm_per_lr:.4g}, the median of the runs"
        + (" that survived" if survived else ", none of which survived"),
        *(f"failed: {name}: {reason}" for name, reason in result.failed.items()),
        str(result.map),
        str(result.path),
    )


def print_plan(plan: ConfigPlan, memory: str, peak_memory_bytes: int | None) -> None:
    """Whether a config is safe, its costs, and those of other schedules."""
    from stalewise.planning.planner import describe_safety

    lines = [] if plan.problem else describe_safety(plan)
    if plan.staleness_allowed is not None:
        lines.append(f"its own η is safe up to S = {plan.staleness_allowed}")
    elif plan.staleness_problem:
        lines.append(plan.staleness_problem)
    lines += [f"note: {note}" for note in [*(plan.safe.notes if plan.safe is not None else ()), *plan.elsewhere]]
    if (cost := plan.cost) is not None:
        parts = {"learn": cost.learn, "generate": cost.generate, "switch": cost.switch, "evaluate": cost.evaluate}
        shares = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
        disk = f"rollouts {cost.rollout_bytes / MIB:,.1f}, checkpoints {cost.checkpoint_bytes / MIB:,.1f}"
        lines += [
            f"time: about {format_duration(cost.seconds)} ({shares})",
            f"disk: {cost.disk_bytes / MIB:,.1f} MiB ({disk})",
        ]
    else:
        lines.append("time and disk: unknown; `stalewise probe CONFIG` measures them")
    lines += [f"memory: {memory}"] if memory else []
    if peak_memory_bytes is not None:
        lines.append(f"memory at the peak of the probe: {peak_memory_bytes / MIB:,.0f} MiB")
    print_lines(*lines)
    if plan.safe is not None or plan.cost is not None:
        _print_choices(plan)


def _print_choices(plan: ConfigPlan) -> None:
    from stalewise.planning.planner import rounded_down

    columns = ("µ", "S", "safe η", "binds", f"time for T = {plan.updates}", "updates as far", "time as far", "")
    table = make_table(columns, left=("binds", ""))
    for choice in plan.choices:
        safe, size, updates = choice.plan, choice.updates_per_generation, choice.drift_updates
        durations = (choice.seconds, choice.drift_seconds)
        seconds, drift_seconds = ("–" if value is None else format_duration(value) for value in durations)
        table.add_row(
            str(size),
            str(choice.staleness),
            *(("unknown", "") if safe is None else (rounded_down(safe.learning_rate), safe.binding)),
            seconds,
            "–" if updates is None else f"{updates:,}",
            drift_seconds,
            "← fastest" if size == plan.fastest else "",
        )
    rate = min(plan.learning_rate, plan.safe.horizon_limit) if plan.safe is not None else plan.learning_rate
    print_lines(table, f"as far: to the drift of T·η = {plan.updates * rate:.3g}, at the safe η of each µ")
    if plan.drift_reduced:
        print_lines("the config itself drifts further than R_crit allows; this is the safe drift")
    if plan.fastest is not None:
        print_lines(f"fastest at equal safety: µ = {plan.fastest} updates on each generation")


def print_cluster_plan(plan: ClusterPlan) -> None:
    """A row per schedule, with its simulation below it, and the savings of staging."""
    times = ("a stage", "all", "generating", "trainer idle", "generator idle", "network/day", "disk/day")
    table = make_table(("schedule", "µ", "S", "generate + learn on", *times), left=("schedule",))
    for schedule in plan.schedules:
        table.add_row(*_cluster_cells(schedule.formula))
        if schedule.simulated is not None:
            table.add_row("  simulated", "", "", "", *_cluster_cells(schedule.simulated)[4:])
    print_lines(table)
    simulated = (
        {"in the simulation": True} if all(schedule.simulated is not None for schedule in plan.schedules) else {}
    )
    for name, is_simulated in {"staged over synchronous": False, **simulated}.items():
        whole, generating = plan.speed_up("staged", simulated=is_simulated), plan.generation_speed_up(is_simulated)
        print_lines(f"{name}: {whole:.2f}× as fast, generating alone {generating:.2f}×")
    print_lines("the split of devices is the fastest one by formula")


def _cluster_cells(outcome: ScheduleOutcome) -> tuple[str, ...]:
    return (
        outcome.name,
        str(outcome.updates_per_generation),
        str(outcome.worst_age),
        f"{outcome.generating} + {outcome.learning}" if outcome.is_split else f"all {outcome.learning}",
        *(format_duration(seconds) for seconds in (outcome.stage_seconds, outcome.seconds, outcome.generate_seconds)),
        *(f"{idle:.1%}" for idle in (outcome.learner_idle, outcome.generator_idle)),
        *(f"{size / GIB:,.0f} GiB" for size in (outcome.network_bytes_per_day, outcome.disk_bytes_per_day)),
    )


def print_difficulty(record: Mapping[str, Any], prompts: Mapping[str, Any], output: Path | None) -> None:
    """Print how many prompts never, always and sometimes pass, and the hardest of the last kind."""
    added = f", {record['added']} of them new" if record["added"] else ""
    print_lines(f"{record['prompts']:,} prompts, {record['rollouts']:,} rollouts, {record['batches']} batches{added}")
    print_lines(f"never passed {record['never']:,}, always {record['always']:,}, between {record['between']:,}")
    print_lines(f"pass rate from {record['low']:g} to {record['high']:g}: {record['in_range']:,} prompts")
    hardest = sorted(prompts.items(), key=lambda item: (item[1].rate, -item[1].rollouts, item[0]))
    for name, counts in [item for item in hardest if 0 < item[1].rate < 1][:SHOWN_PROMPTS]:
        print_lines(f"  {counts.rate:6.1%}  {counts.passed:>4}/{counts.rollouts:<4} {name}")
    if output is not None:
        print_lines(str(output))
