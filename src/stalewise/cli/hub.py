"""The verbs that hand a run on: export to a directory, push to a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stalewise.cli import AsJson, _print_json, app
from stalewise.errors import ConfigError

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Version = Annotated[int | None, typer.Option(min=0, help="Version of the policy; the newest unless said.")]
Adapter = Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, and not the merged policy.")]
Rollouts = Annotated[bool, typer.Option("--rollouts", help="The rollouts as a dataset, and not a policy.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there, where it is an earlier export.")]


@app.command()
def export(
    run: RunDirectory,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Directory to write.")],
    version: Version = None,
    adapter: Adapter = False,
    rollouts: Rollouts = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a policy as a Hugging Face directory with a model card, or the rollouts as a dataset."""
    if rollouts and (adapter or version is not None):
        raise ConfigError("rollouts are exported all together: leave out --version and --adapter")
    from stalewise.files import read_json
    from stalewise.hub import export_policy, export_rollouts
    from stalewise.hub.folder import RECORD

    if rollouts:
        written = export_rollouts(run, directory, force=force)
    else:
        written = export_policy(run, directory, version=version, adapter=adapter, force=force)
    _print_json({"directory": str(written), **read_json(written / RECORD)}) if as_json else typer.echo(str(written))


@app.command()
def push(
    run: RunDirectory,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Name of the repository, as in owner/name.")],
    version: Version = None,
    adapter: Adapter = False,
    rollouts: Rollouts = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    to: Annotated[
        Path | None, typer.Option(help="Upload nothing: write what would be, at REPO_ID under this directory.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Upload a policy with its model card to the Hugging Face hub, or the rollouts as a dataset."""
    from stalewise.hub import push

    done = push(run, repo_id, version=version, adapter=adapter, rollouts=rollouts, private=private, to=to, force=force)
    _print_json({"place": done, "uploaded": to is None}) if as_json else typer.echo(done)
