"""What the commands print for a person. On stdout, and in full when that is a file or a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stalewise.config import RunConfig
from stalewise.config.run_directory import RunResult
from stalewise.planning.calibration import Calibration
from stalewise.planning.cluster.cluster_plan import ClusterPlan, Outcome
from stalewise.planning.planner import Choice, ConfigPlan, describe_safety, rounded_down
from stalewise.planning.probe import Probed
from stalewise.planning.sweep import Swept
from stalewise.reporting.compare import ComparisonSide, RunComparison
from stalewise.reporting.inspection import visible
from stalewise.reporting.status import RunPhase, RunStatus
from stalewise.reporting.summary import count_noun, format_interval, format_value
from stalewise.statistics import format_duration

WIDE = 200  # columns for what is not a terminal: a script must not meet cut cells


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def _table(columns: Iterable[str], *, left: Iterable[str] = ()) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in set(left) else "right")
    return table


def _interval(interval: dict[str, float]) -> str:
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def print_result(result: RunResult, as_json: bool) -> None:
    """What a run came to."""
    record = {
        "directory": str(result.directory),
        "updates": result.updates,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
    }
    if as_json:
        print(json.dumps(record))
        return
    console = _console()
    for evaluation in result.evaluations:
        console.print(f"version {evaluation['version']}: accuracy {_interval(evaluation['accuracy'])}", markup=False)
    console.print(_seconds(result.seconds))
    console.print(str(result.directory), markup=False, soft_wrap=True)


def _seconds(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    parts = (f"{name} {value:.1f} s ({_percent(value, total)})" for name, value in seconds.items())
    return f"{total:.1f} s: {', '.join(parts)}"


def print_evaluation(result: Any) -> None:
    """avg@k and pass@k of one policy."""
    record = asdict(result)
    table = _table(("measure", "value", "95% interval"), left=("measure",))
    rows = {f"avg@{result.samples}": record["accuracy"]}
    rows |= {f"pass@{k}": found for k, found in record["pass_at"].items()}
    for name, found in rows.items():
        table.add_row(name, f"{found['value']:.3f}", f"{found['low']:.3f} – {found['high']:.3f}")
    console = _console()
    name = f"{result.task}, version {result.version}"
    console.print(f"{name}: {result.prompts} prompts, {result.samples} samples each", markup=False)
    console.print(table)
    console.print(
        f"{result.response_length:.1f} tokens per response, {result.truncated_fraction:.1%} truncated, "
        f"{result.seconds:.1f} s",
        markup=False,
    )
    if result.excluded:
        console.print(f"{result.excluded} prompts left out: training has seen them, or their ids are excluded")
    for kind, count in result.verifier_error_kinds.items():
        names = ", ".join(map(visible, result.verifier_error_prompts.get(kind, ())))
        console.print(f"{count} responses without a score: {visible(kind)}, at {names}", markup=False, soft_wrap=True)
    if result.unmatched:
        names = ", ".join(map(visible, result.unmatched_prompts))
        line = (
            f"{result.unmatched} gold answer(s) not right when given as an answer, since only a part is read: {names}"
        )
        console.print(line, markup=False, soft_wrap=True)
    _print_unparsed(console, result.unparsed, result.unparsed_examples)


def _print_unparsed(console: Console, count: int, examples: Sequence[Mapping[str, str]]) -> None:
    if count:
        console.print(f"no answer found in {count} responses, which count as wrong; for example:")
    for example in examples[:3]:
        line = f"  {visible(example['prompt_id'])}: {visible(example['response'])}"
        console.print(line, markup=False, soft_wrap=True)


def print_run(record: dict[str, Any]) -> None:
    """Batches, checkpoints and times of a run."""
    console = _console()
    console.print(record["directory"], markup=False, soft_wrap=True)
    console.print(
        f"{record['objective']} on {record['task']}, model {record['model']}, {record['schedule']}", markup=False
    )
    more = record["updates_not_committed"]
    lost = f"; {more} more since the last checkpoint would be taken again" if more else ""
    console.print(f"{record['updates_done']} of {record['updates']} updates{lost}")
    console.print(f"checkpoints: {', '.join(map(str, record['checkpoints'])) or 'none'}")
    console.print(_batches(record["batches"]))
    known = [batch for batch in record["batches"] if batch["committed"]]
    examples = [example for batch in known for example in batch["unparsed_examples"]]
    _print_unparsed(console, sum(batch["unparsed"] for batch in known), examples)
    for evaluation in record["evaluations"]:
        console.print(f"version {evaluation['version']}: accuracy {_interval(evaluation['accuracy'])}", markup=False)
    console.print(_seconds(record["seconds"]))


def _batches(batches: list[dict[str, Any]]) -> Table:
    columns = (
        "batch",
        "version",
        "rollouts",
        "tokens",
        "reward",
        "truncated",
        "verifier errors",
        "updates",
        "age",
        "tokens/s",
    )
    table = _table(columns)
    for batch in batches:
        name = str(batch["generation_batch"])
        if not batch["committed"]:
            table.add_row(name, str(batch["version"]), f"{batch['rows']:,}", f"not committed: {batch['shards']} shards")
            continue
        ages = "–" if batch["ages"] is None else "–".join(str(age) for age in dict.fromkeys(batch["ages"]))
        table.add_row(
            name,
            str(batch["version"]),
            f"{batch['rows']:,}",
            f"{batch['tokens']:,}",
            "unknown" if batch["reward"] is None else f"{batch['reward']:.3f}",
            _percent(batch["truncated"], batch["rows"]),
            _percent(batch["verifier_errors"], batch["rows"]),
            str(batch["updates"]),
            ages,
            f"{batch['tokens'] / batch['seconds']:,.0f}" if batch["seconds"] else "–",
        )
    return table


def print_rollout(record: dict[str, Any]) -> None:
    """One rollout, token by token."""
    console = _console()
    consumed = ", ".join(map(str, record["consumed_at"])) or "no update yet"
    lines = {
        "rollout": f"{record['rollout_id']} of group {record['group']}, in {record['batch']}",
        "prompt": f"{record['prompt_id']}  {_shown(record['prompt'])}",
        "response": _shown(record["text"]),
        "reward": _reward(record),
        "finished": f"{record['finish_reason']}, versions {record['version_first']} to {record['version_last']}",
        "sampler": ", ".join(
            f"{key} {value}" for key, value in [*record["sampler"].items(), ("seed", record["seed"])] if value != ""
        ),
        "consumed": f"at {consumed}",
    }
    for name, value in lines.items():
        console.print(f"{name:<9} {visible(value)}", markup=False, soft_wrap=True)
    table = _table(("place", "token", "text", "log-probability"), left=("text",))
    for place, token in enumerate(record["tokens"]):
        table.add_row(str(place), str(token["id"]), Text(_shown(token["text"])), f"{token['logp']:.4f}")
    console.print(table)


def _shown(text: str | None) -> str:
    return "(no tokenizer to read it with)" if text is None else visible(text)


def _reward(record: dict[str, Any]) -> str:
    if record["reward_error"]:
        return f"unknown: the verifier failed: {record['reward_error']}"
    parts = ", ".join(f"{name} {value:g}" for name, value in record["reward_parts"].items())
    return f"{record['reward']:g}" + (f" ({parts})" if parts else "")


def print_group(records: list[dict[str, Any]]) -> None:
    """The rollouts of a group side by side."""
    first = records[0]
    title = visible(f"group {first['group']}: {first['prompt_id']}  {_shown(first['prompt'])}")
    table = _table(("rollout", "reward", "tokens", "log-probability", "response"), left=("response",))
    for record in records:
        reward = "unknown" if record["reward_error"] else f"{record['reward']:g}"
        logp = sum(token["logp"] for token in record["tokens"])
        text = Text(_shown(record["text"]))
        table.add_row(str(record["rollout_id"]), reward, str(len(record["tokens"])), f"{logp:.3f}", text)
    console = _console()
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)


def print_checks(config: RunConfig, problem: str, as_json: bool) -> bool:
    """Print checks as they are done, or all of them as JSON; say whether all is well."""
    from stalewise.orchestrator.preflight import Check, examine, installation

    checks = [*installation(), Check("config", "bad", problem)] if problem else examine(config)
    console = _console()
    done: list[Check] = []
    for check in checks:
        done.append(check)
        if not as_json:
            style = {"ok": "green", "warning": "yellow", "bad": "bold red"}[check.status]
            line = Text.assemble((f"{check.status:<8}", style), f"{check.name:<16}{visible(check.detail)}")
            console.print(line, soft_wrap=True)
    good = not any(check.status == "bad" for check in done)
    if as_json:
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in done]}))
    return good


# What `stalewise watch` and `stalewise compare` show on a terminal.

STYLES = {"running": "bold green", "finished": "green", "stopped": "bold yellow", "not started": "yellow"}
MOST_WARNINGS = 5
UNITS = {"generate": "rollouts", "learn": "updates of the stage", "evaluate": "responses"}


def console() -> Console:
    """Standard output; as wide as anything where it is no terminal, so that nothing is cut."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDE)


def view(now: RunStatus) -> RenderableType:
    """A run as it stands, one fact a line."""
    title = Text.assemble(
        (visible(now.name), "bold"),
        f"  {visible(now.objective)} on {visible(now.task)}  ",
        (now.state, STYLES.get(now.state, "yellow")),
        f"  {visible(now.holder)}",
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    bar = ProgressBar(total=now.updates, completed=now.update, width=32)
    grid.add_row("updates", Group(Text(f"{now.update:,} of {now.updates:,} ({now.update / now.updates:.0%})"), bar))
    for name, words in _facts(now):
        grid.add_row(name, Text(words))
    for place, warning in enumerate(now.warnings[:MOST_WARNINGS]):
        grid.add_row("warnings" if place == 0 else "", Text(visible(warning), style="yellow"))
    if (more := len(now.warnings) - MOST_WARNINGS) > 0:
        grid.add_row("", f"and {more} more: stalewise report shows all")
    return Group(title, grid)


def _facts(now: RunStatus) -> Iterator[tuple[str, str]]:
    if not now.update:
        yield "learned", "nothing yet: no update is on record"
    if now.stage is not None:
        open_end = "in all" if now.state == "finished" else "so far; it ends when it is spent"
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
        yield "taken back", count_noun(now.rollbacks, "time")
    whole = sum(now.seconds.values())
    if whole:
        parts = (f"{name} {seconds / whole:.0%}" for name, seconds in now.seconds.items() if seconds)
        yield "time", f"{format_duration(whole)}: {', '.join(parts)}"


def _phase(phase: RunPhase) -> str:
    amount = f"{phase.done:,} of {phase.total:,}" if phase.total else f"{phase.done:,}"
    return f"{phase.what} ({amount} {UNITS.get(phase.what, '')})" if phase.done or phase.total else phase.what


def print_comparison(result: RunComparison) -> None:
    """The answer first, then the numbers behind it."""
    screen = console()

    def log(words: str, style: str = "") -> None:
        screen.print(Text(visible(words), style=style), soft_wrap=True)

    words = result.words
    log(f"{words[0].upper() if words.startswith('no ') else words[0]}{words[1:]}.", "bold")
    sure = min(max(result.probability_better, 0.001), 0.999)  # resamples do not tell more
    log(f"Probability that {result.b.name} is better: {sure:.1%}. {result.task}, {result.method}.")
    table = Table()
    for column in ("side", "runs", "accuracy [95%]", "training (s)"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side in (result.a, result.b):
        table.add_row(visible(side.name), str(len(side.runs)), _accuracy(side), f"{side.seconds:.1f}")
    screen.print(table)
    log(f"{result.speed[0].upper() if result.speed.startswith('speed') else result.speed[0]}{result.speed[1:]}.")
    if result.settings:
        settings = Table()
        for column in ("setting that differs", result.a.name, result.b.name):
            settings.add_column(visible(column))
        for key, values in result.settings.items():
            settings.add_row(key, *(visible(", ".join(map(format_value, side))) for side in values))
        screen.print(settings)
    for note in result.notes:
        log(f"note: {note}", "yellow")


def _accuracy(side: ComparisonSide) -> str:
    return f"{side.accuracy.value:.3f} [{side.accuracy.low:.3f}, {side.accuracy.high:.3f}]"


# What probe, sweep and plan print for a person.

MIB = 2**20


def print_probe(found: Probed) -> None:
    """What a probe measured."""
    probe, console = found.probe, _console()
    table = _table(("updates", "G = ‖Δθ‖/η", "spread"))
    for phase in probe.phases:
        table.add_row(f"{phase.first}–{phase.last}", f"{phase.mean:,.4g}", f"{phase.spread:,.3g}")
    console.print(table)
    small, large = probe.generation_sizes
    memory = "unknown" if probe.peak_memory_bytes is None else f"{probe.peak_memory_bytes / MIB:,.0f} MiB"
    lines = {
        "reward": f"{probe.reward_mean:.3f}; variance within groups {probe.reward_variance_within:.3f}, between them "
        f"{probe.reward_variance_between:.3f}; {probe.teaching_share:.0%} of the groups teach",
        "generating": f"{probe.tokens_per_second:,.0f} tokens/s; {1e3 * probe.seconds_per_rollout:.3g} ms per rollout "
        f"and {probe.seconds_per_generation:.3g} s per generation (timed at {small:,} and {large:,} rollouts)",
        "learning": f"{probe.seconds_per_update:.3g} s per update of {probe.tokens_per_update:,.0f} tokens",
        "switching": f"{probe.seconds_per_switch:.3g} s each time, {probe.seconds_to_start:.3g} s at the start",
        "memory": f"{memory} at its peak",
        "disk": f"{probe.bytes_per_rollout:,.0f} bytes per rollout, {probe.bytes_per_checkpoint / MIB:,.1f} MiB per "
        "checkpoint",
    }
    for name, text in lines.items():
        console.print(f"{name:<11}{text}", markup=False, soft_wrap=True)
    console.print(str(found.path), markup=False, soft_wrap=True)


def print_sweep(found: Swept) -> None:
    """The runs of a sweep and the constants of the law."""
    sweep, console = found.sweep, _console()
    table = _table(("S", "η", "T", "seed", "collapsed at", "best accuracy", "last accuracy", "G"))
    for run in sorted(sweep.runs, key=lambda run: run.key):
        collapsed = "–" if run.collapsed_at is None else str(run.collapsed_at)
        accuracy = (f"{run.best_accuracy:.3f}", f"{run.last_accuracy:.3f}")
        settings = (str(run.staleness), f"{run.learning_rate:g}", str(run.updates), str(run.seed))
        table.add_row(*settings, collapsed, *accuracy, f"{run.update_norm_per_lr:.4g}")
    console.print(table)
    rule = sweep.rule
    lines = [
        f"collapsed: the mean of {rule.smoothing} evaluations of held-out accuracy fell below {rule.fraction:g} of its "
        f"best and did not come back within {rule.window}, or the run ended below it, or an update was not finite; "
        f"{rule.evaluations} evaluations in a run",
        sweep.fit.describe() if sweep.fit is not None else f"no fit: {sweep.problem}",
        f"G = {sweep.update_norm_per_lr:.4g}, the median of the runs"
        + (" that survived" if any(run.collapsed_at is None for run in sweep.runs) else ", none of which survived"),
        *(f"failed: {name}: {reason}" for name, reason in found.failed.items()),
        str(found.map),
        str(found.path),
    ]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def print_plan(config: RunConfig, plan: ConfigPlan, calibration: Calibration) -> None:
    """Whether a config is safe, what it costs, and what other schedules would cost."""
    from stalewise.models.loading import resolve_model
    from stalewise.planning.memory import estimate

    console = _console()
    lines = [] if plan.problem else describe_safety(plan)
    if plan.staleness_allowed is not None:
        lines.append(f"its own η is safe up to S = {plan.staleness_allowed}")
    elif plan.staleness_problem:
        lines.append(plan.staleness_problem)
    lines += [f"note: {note}" for note in [*(plan.safe.notes if plan.safe is not None else ()), *plan.elsewhere]]
    if (cost := plan.cost) is not None:
        parts = {"learn": cost.learn, "generate": cost.generate, "switch": cost.switch, "evaluate": cost.evaluate}
        shares = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
        lines.append(f"time: about {format_duration(cost.seconds)} ({shares})")
        disk = f"rollouts {cost.rollout_bytes / MIB:,.1f}, checkpoints {cost.checkpoint_bytes / MIB:,.1f}"
        lines.append(f"disk: {cost.disk_bytes / MIB:,.1f} MiB ({disk})")
    else:
        lines.append("time and disk: not known; `stalewise probe CONFIG` measures them")
    if (needed := estimate(config, resolve_model(config.model.path, config.task.name))) is not None:
        lines.append(f"memory: {needed}")
    if calibration.probe is not None and calibration.probe.peak_memory_bytes is not None:
        lines.append(f"memory at the peak of the probe: {calibration.probe.peak_memory_bytes / MIB:,.0f} MiB")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if plan.safe is not None or plan.cost is not None:
        _print_choices(plan)


def _print_choices(plan: ConfigPlan) -> None:
    console = _console()
    columns = ("µ", "S", "safe η", "binds", f"time for T = {plan.updates}", "updates as far", "time as far", "")
    table = _table(columns, left=("binds", ""))
    for choice in plan.choices:
        table.add_row(*_choice_cells(choice), "← fastest" if choice.updates_per_generation == plan.fastest else "")
    console.print(table)
    rate = min(plan.learning_rate, plan.safe.horizon_limit) if plan.safe is not None else plan.learning_rate
    console.print(f"as far: as T·η = {plan.updates * rate:.3g} moves the policy, at the safe η of each µ", markup=False)
    if plan.drift_reduced:
        console.print("the config itself goes further than R_crit allows; this is what is safe", markup=False)
    if plan.fastest is not None:
        console.print(f"fastest at equal safety: µ = {plan.fastest} updates on each generation", markup=False)


def _choice_cells(choice: Choice) -> tuple[str, ...]:
    safe = choice.plan
    return (
        str(choice.updates_per_generation),
        str(choice.staleness),
        "unknown" if safe is None else rounded_down(safe.learning_rate),
        "" if safe is None else safe.binding,
        "–" if choice.seconds is None else format_duration(choice.seconds),
        "–" if choice.drift_updates is None else f"{choice.drift_updates:,}",
        "–" if choice.drift_seconds is None else format_duration(choice.drift_seconds),
    )


# What `plan --cluster` prints for a person.

GIB = 2**30
COLUMNS = ("schedule", "µ", "S", "generate + learn on", "a stage", "all", "generating", "learner idle")
MORE = ("generator idle", "network/day", "disk/day")


def print_cluster_plan(plan: ClusterPlan) -> None:
    """A row for each schedule, with a second one below it for its simulation; then what staging saves."""
    console = _console()
    table = _table((*COLUMNS, *MORE), left=("schedule",))
    for one in plan.schedules:
        table.add_row(*_cells(one.formula))
        if one.simulated is not None:
            table.add_row("  simulated", "", "", "", *_cells(one.simulated)[4:])
    console.print(table)
    simulated = all(one.simulated is not None for one in plan.schedules)
    console.print(f"staged over synchronous: {_savings(plan, False)}", markup=False)
    if simulated:
        console.print(f"in the simulation: {_savings(plan, True)}", markup=False)
    console.print("the split of devices is the one that ends first, by formula", markup=False)


def _savings(plan: ClusterPlan, simulated: bool) -> str:
    whole, generating = plan.speed_up("staged", simulated=simulated), plan.generation_speed_up(simulated)
    return f"{whole:.2f}× as fast, generating alone {generating:.2f}×"


def _cells(outcome: Outcome) -> tuple[str, ...]:
    devices = f"{outcome.generating} + {outcome.learning}" if outcome.is_split else f"all {outcome.learning}"
    return (
        outcome.name,
        str(outcome.updates_per_generation),
        str(outcome.worst_age),
        devices,
        format_duration(outcome.stage_seconds),
        format_duration(outcome.seconds),
        format_duration(outcome.generate_seconds),
        f"{outcome.learner_idle:.1%}",
        f"{outcome.generator_idle:.1%}",
        f"{outcome.network_bytes_per_day / GIB:,.0f} GiB",
        f"{outcome.disk_bytes_per_day / GIB:,.0f} GiB",
    )
