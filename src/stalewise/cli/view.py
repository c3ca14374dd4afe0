"""What `stalewise watch` and `stalewise compare` show on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stalewise.cli.show import WIDE
from stalewise.compare import Comparison, Side
from stalewise.inspection import visible
from stalewise.report.live import Phase, Standing
from stalewise.report.summary import counted, duration, interval, shown

STYLES = {"running": "bold green", "finished": "green", "stopped": "bold yellow", "not started": "yellow"}
MOST_WARNINGS = 5
UNITS = {"generate": "rollouts", "learn": "updates of the stage", "evaluate": "responses"}


def console() -> Console:
    """Standard output; as wide as anything where it is no terminal, so that nothing is cut."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDE)


def view(now: Standing) -> RenderableType:
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


def _facts(now: Standing) -> Iterator[tuple[str, str]]:
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
        yield "left", f"about {duration(now.seconds_left)}"
    if now.reward is not None:
        yield "reward", f"{now.reward:.3f}, mean of the last updates"
    if now.ess is not None:
        yield "ESS", f"{now.ess:.3f}"
    if now.accuracy is not None:
        yield "accuracy", f"{interval(now.accuracy)} at version {now.accuracy['version']}"
    if now.batch_budget is not None and now.horizon_budget is not None:
        yield "budget", f"{now.batch_budget:.0%} of the batch's drift used, {now.horizon_budget:.0%} of the run's"
    if now.rollbacks:
        yield "taken back", counted(now.rollbacks, "time")
    whole = sum(now.seconds.values())
    if whole:
        parts = (f"{name} {seconds / whole:.0%}" for name, seconds in now.seconds.items() if seconds)
        yield "time", f"{duration(whole)}: {', '.join(parts)}"


def _phase(phase: Phase) -> str:
    amount = f"{phase.done:,} of {phase.total:,}" if phase.total else f"{phase.done:,}"
    return f"{phase.what} ({amount} {UNITS.get(phase.what, '')})" if phase.done or phase.total else phase.what


def print_comparison(result: Comparison) -> None:
    """The answer first, then the numbers behind it."""
    screen = console()

    def say(words: str, style: str = "") -> None:
        screen.print(Text(visible(words), style=style), soft_wrap=True)

    words = result.words
    say(f"{words[0].upper() if words.startswith('no ') else words[0]}{words[1:]}.", "bold")
    sure = min(max(result.probability_better, 0.001), 0.999)  # resamples do not tell more
    say(f"Probability that {result.b.name} is better: {sure:.1%}. {result.task}, {result.method}.")
    table = Table()
    for column in ("side", "runs", "accuracy [95%]", "training (s)"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for side in (result.a, result.b):
        table.add_row(visible(side.name), str(len(side.runs)), _accuracy(side), f"{side.seconds:.1f}")
    screen.print(table)
    say(f"{result.speed[0].upper() if result.speed.startswith('speed') else result.speed[0]}{result.speed[1:]}.")
    if result.settings:
        settings = Table()
        for column in ("setting that differs", result.a.name, result.b.name):
            settings.add_column(visible(column))
        for key, values in result.settings.items():
            settings.add_row(key, *(visible(", ".join(map(shown, side))) for side in values))
        screen.print(settings)
    for note in result.notes:
        say(f"note: {note}", "yellow")


def _accuracy(side: Side) -> str:
    return f"{side.accuracy.value:.3f} [{side.accuracy.low:.3f}, {side.accuracy.high:.3f}]"
