"""Commands that calibrate and plan: probe, sweep and plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from stalewise.cli.app import AsJson, ConfigFile, Settings, app, load_packages, overrides, print_json, read_config_file
from stalewise.errors import CalibrationError, ConfigError

Number = TypeVar("Number", int, float)


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(f"{option} {text}: expected numbers separated by commas, as in 4,16,64") from None


@app.command()
def probe(
    config: ConfigFile,
    updates: Annotated[int, typer.Option(help="Updates of the probe.")] = 32,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure update norms, rewards, speed, memory and disk use in a short run."""
    checked = read_config_file(config, settings)
    load_packages()
    from stalewise.api import run
    from stalewise.cli.tables import print_probe
    from stalewise.planning.probe import probe
    from stalewise.reporting.progress import watching

    with watching() as callback:
        result = probe(checked, train=run, updates=updates, callback=callback)
    if as_json:
        print_json({**asdict(result.probe), "directory": str(result.directory), "calibration": str(result.path)})
    else:
        print_probe(result)


@app.command()
def sweep(
    config: ConfigFile,
    staleness: Annotated[str, typer.Option(help="Largest ages of a rollout to try, in updates, as in 4,16,64.")],
    lr: Annotated[str, typer.Option(help="Learning rates to try, as in 1e-4,3e-4,1e-3.")],
    updates: Annotated[int | None, typer.Option(min=2, help="Updates of each run; default: the config's.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds; one run per seed at every point.")] = "0",
    jobs: Annotated[int | None, typer.Option(min=1, help="Parallel runs; default: as many as cores allow.")] = None,
    evaluations: Annotated[int, typer.Option(min=4, help="Evaluations during each run, to detect collapse.")] = 32,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find the staleness and learning rates at which runs collapse, and fit the law."""
    checked = read_config_file(config, settings)
    from stalewise.cli.tables import print_sweep
    from stalewise.planning.calibration import CollapseRule
    from stalewise.planning.sweep import sweep
    from stalewise.reporting.progress import watching

    with watching() as callback:
        result = sweep(
            checked,
            stalenesses=_numbers("--staleness", staleness, int),
            learning_rates=_numbers("--lr", lr, float),
            updates=updates,
            seeds=_numbers("--seeds", seeds, int),
            rule=CollapseRule(evaluations=evaluations),
            jobs=jobs,
            callback=callback,
        )
    if as_json:
        paths = {"map": str(result.map), "calibration": str(result.path)}
        print_json({**asdict(result.sweep), "failed": result.failed, **paths})
    else:
        print_sweep(result)


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(help="TOML file; `stalewise init` writes one.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="TOML file of a cluster: compare schedules on it.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="With --cluster: also simulate each schedule.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Print the safe learning rate of a config, its costs, and how often to generate. Exit status 3 if unknown."""
    if config is None and cluster is not None:
        return _plan_cluster(cluster, settings, simulate, as_json)
    if config is None or cluster is not None:
        raise ConfigError("plan takes a config, or --cluster with a file of rates: give one of them")
    if simulate:
        raise ConfigError("--simulate needs --cluster: a config is planned from its calibration")
    checked = read_config_file(config, settings)
    from stalewise.cli.tables import print_plan
    from stalewise.models import resolve_model
    from stalewise.planning.planner import make_planner

    planner = make_planner(checked)
    result = planner.plan()
    if as_json:
        cost = result.cost
        totals = {"seconds": cost and cost.seconds, "disk_bytes": cost and cost.disk_bytes}
        print_json({**asdict(result), "is_safe": result.is_safe, **totals})
    else:
        load_packages()
        from stalewise.planning.memory import estimate  # needs torch and transformers, JSON does not

        memory = estimate(checked, resolve_model(checked.model.path, checked.task.name), alone=True)
        probe = planner.calibration.probe
        print_plan(result, str(memory or ""), probe.peak_memory_bytes if probe is not None else None)
    if result.problem:
        raise CalibrationError(result.problem)


def _plan_cluster(path: Path, settings: list[str] | None, simulated: bool, as_json: bool) -> None:
    from stalewise.cli.tables import print_cluster_plan
    from stalewise.planning.cluster_plan import load_cluster, plan_cluster

    result = plan_cluster(load_cluster(path, overrides(settings)), simulated=simulated)
    print_json(result.record()) if as_json else print_cluster_plan(result)
