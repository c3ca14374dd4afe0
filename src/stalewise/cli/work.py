"""`stalewise generate … --worker` and `--ray`: workers of a run, here or on a cluster."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from stalewise.config import parse_override
from stalewise.progress import watching

TERMINATED = 143  # what a shell reports for a process that SIGTERM ended

if TYPE_CHECKING:
    from stalewise.workers.worker import WorkDone


def work(source: str, worker: str | None, ray: int | None, once: bool, settings: Sequence[str], as_json: bool) -> None:
    """Work until the run is complete, or until nothing is asked for; say what was done."""
    overrides = dict(parse_override(text) for text in settings)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(TERMINATED)
    )  # takes leave: others need not wait for a sign of life
    with watching() as watcher:
        if ray is not None:
            from stalewise.workers.cluster import work_on_ray

            done = work_on_ray(source, workers=ray, overrides=overrides, once=once, watcher=watcher)
        else:
            from stalewise.workers.worker import work as work_here

            done = [work_here(source, worker=worker or "", overrides=overrides, once=once, watcher=watcher)]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in done]))
    for one in done if not as_json else ():
        typer.echo(_words(one))


def _words(done: WorkDone) -> str:
    notes = [
        f"{count} {what}"
        for count, what in ((done.taken_over, "taken over"), (done.too_late, "too late and dropped"))
        if count
    ]
    more = f" ({', '.join(notes)})" if notes else ""
    return f"{done.worker}: {done.shards:,} shards with {done.rollouts:,} rollouts{more}"
