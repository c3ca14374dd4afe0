"""What probe, sweep and plan print for a person."""

from __future__ import annotations

from stalewise.calibration.file import Calibration
from stalewise.calibration.planning import Choice, ConfigPlan, describe_safety, duration, rounded_down
from stalewise.calibration.probe import Probed
from stalewise.calibration.sweep import Swept
from stalewise.cli.show import _console, _table
from stalewise.config import RunConfig

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
    from stalewise.memory import estimate
    from stalewise.models import resolve_model

    console = _console()
    lines = [] if plan.problem else describe_safety(plan)
    if plan.staleness_allowed is not None:
        lines.append(f"its own η is safe up to S = {plan.staleness_allowed}")
    elif plan.staleness_problem:
        lines.append(plan.staleness_problem)
    lines += [f"note: {note}" for note in [*(plan.safe.notes if plan.safe is not None else ()), *plan.elsewhere]]
    if (cost := plan.cost) is not None:
        parts = {"learn": cost.learn, "generate": cost.generate, "switch": cost.switch, "evaluate": cost.evaluate}
        shares = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
        lines.append(f"time: about {duration(cost.seconds)} ({shares})")
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
        "–" if choice.seconds is None else duration(choice.seconds),
        "–" if choice.drift_updates is None else f"{choice.drift_updates:,}",
        "–" if choice.drift_seconds is None else duration(choice.drift_seconds),
    )
