"""The verbs of calibration: probe, sweep and plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from stalewise.cli.app import AsJson, ConfigFile, Settings, app, print_json, read_config_file
from stalewise.errors import CalibrationError, ConfigError

Number = TypeVar("Number", int, float)
OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="TOML file; `stalewise init` writes one.")
]


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(f"{option} {text}: expected numbers with commas between them, as in 4,16,64") from None


@app.command()
def probe(
    config: ConfigFile,
    updates: Annotated[int, typer.Option(help="Updates of the probing run.")] = 32,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure in a short run how far updates move, what rewards are like, and what everything costs."""
    checked = read_config_file(config, settings)
    from stalewise.api import run
    from stalewise.cli.progress import watching
    from stalewise.cli.tables import print_probe
    from stalewise.planning.probe import probe

    with watching() as callback:
        found = probe(checked, train=run, updates=updates, callback=callback)
    if as_json:
        places = {"directory": str(found.directory), "calibration": str(found.path)}
        print_json({**asdict(found.probe), **places})
    else:
        print_probe(found)


@app.command()
def sweep(
    config: ConfigFile,
    staleness: Annotated[str, typer.Option(help="Largest ages of a rollout to try, in updates, as in 4,16,64.")],
    lr: Annotated[str, typer.Option(help="Learning rates to try, as in 1e-4,3e-4,1e-3.")],
    updates: Annotated[int | None, typer.Option(min=2, help="Updates of each run; the config's unless said.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, each for a run of its own at every point.")] = "0",
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side; as many as the cores hold.")] = None,
    evaluations: Annotated[int, typer.Option(min=4, help="Evaluations along each run, to see it collapse.")] = 32,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find out at which staleness and learning rate runs collapse, and fit the law to it."""
    checked = read_config_file(config, settings)
    stalenesses = _numbers("--staleness", staleness, int)
    learning_rates = _numbers("--lr", lr, float)
    seed_list = _numbers("--seeds", seeds, int)
    from stalewise.cli.progress import watching
    from stalewise.cli.tables import print_sweep
    from stalewise.planning.calibration import CollapseRule
    from stalewise.planning.sweep import sweep

    with watching() as callback:
        found = sweep(
            checked,
            stalenesses=stalenesses,
            learning_rates=learning_rates,
            updates=updates,
            seeds=seed_list,
            rule=CollapseRule(evaluations=evaluations),
            jobs=jobs,
            callback=callback,
        )
    if as_json:
        places = {"map": str(found.map), "calibration": str(found.path)}
        print_json({**asdict(found.sweep), "failed": found.failed, **places})
    else:
        print_sweep(found)


@app.command()
def plan(
    config: OptionalConfigFile = None,
    cluster: Annotated[
        Path | None, typer.Option(help="TOML file with the rates of a cluster: compare schedules on it instead.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="With --cluster: also run each schedule through, request by request.")
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say which learning rate is safe, what the run costs, and how often to generate. Exit code 3 if nobody knows."""
    if (config is None) == (cluster is None):
        raise ConfigError("plan takes a config, or --cluster with a file of rates: give one of them")
    if cluster is not None:
        _plan_cluster(cluster, settings, simulate, as_json)
        return
    if simulate:
        raise ConfigError("--simulate goes with --cluster: a config is planned from its calibration")
    assert config is not None
    checked = read_config_file(config, settings)
    from stalewise.cli.tables import print_plan
    from stalewise.planning.planner import plan_config, require_calibration

    calibration = require_calibration(checked)
    found = plan_config(checked, calibration)
    if as_json:
        record: dict[str, Any] = asdict(found)
        record["is_safe"] = found.is_safe
        record["seconds"] = found.cost.seconds if found.cost is not None else None
        record["disk_bytes"] = found.cost.disk_bytes if found.cost is not None else None
        print_json(record)
    else:
        print_plan(checked, found, calibration)
    if found.problem:
        raise CalibrationError(found.problem)


def _plan_cluster(path: Path, settings: list[str] | None, simulated: bool, as_json: bool) -> None:
    from stalewise.cli.tables import print_cluster_plan
    from stalewise.config import parse_override
    from stalewise.planning.cluster.cluster_plan import load_cluster, plan_cluster

    rates = load_cluster(path, dict(parse_override(text) for text in settings or ()))
    found = plan_cluster(rates, simulated=simulated)
    print_json(found.record()) if as_json else print_cluster_plan(found)
