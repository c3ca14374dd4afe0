"""What `plan --cluster` prints for a person."""

from __future__ import annotations

from stalewise.calibration.cluster import ClusterPlan, Outcome
from stalewise.calibration.planning import duration
from stalewise.cli.show import _console, _table

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
        duration(outcome.stage_seconds),
        duration(outcome.seconds),
        duration(outcome.generate_seconds),
        f"{outcome.learner_idle:.1%}",
        f"{outcome.generator_idle:.1%}",
        f"{outcome.network_bytes_per_day / GIB:,.0f} GiB",
        f"{outcome.disk_bytes_per_day / GIB:,.0f} GiB",
    )
