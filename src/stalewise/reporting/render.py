"""Charts in words, for whoever does not see them: first, last, lowest and highest value of every curve."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from stalewise import __version__
from stalewise.config import RunConfig
from stalewise.errors import StoreError
from stalewise.reporting.figures import (
    BUCKETS,
    LONGEST_CURVE,
    MOST_STAGE_LINES,
    Series,
    bucket_width,
    draw_charts,
    series_of,
    style_of,
)
from stalewise.reporting.read import UNIMPORTANT, Run, differing, flatten, read_runs
from stalewise.reporting.summary import interval, joined, ranking, shown, summarise
from stalewise.reporting.time_bars import Row, draw_bars, rows_of_runs, rows_of_stages
from stalewise.reporting.timeline import ACTIVITIES, IDLE
from stalewise.reporting.wording import CHARTS, METRICS, Chart
from stalewise.store.atomic import write_atomic


def chart_in_words(chart: Chart, runs: Sequence[Run]) -> str:
    """A sentence per curve."""
    where = "second" if chart.is_against_time else "update"
    sentences = [
        curve_in_words(series, f"{run.label}: {key}" if len(runs) > 1 else key, where)
        for run in runs
        for key in chart.keys
        for series in series_of(run, chart, key)
    ]
    return f"{chart.title}, {chart.y_title}. {' '.join(sentences)}"


def curve_in_words(series: Series, name: str, where: str) -> str:
    """First, last, lowest and highest value, and where they are.

    >>> curve_in_words(Series(np.arange(3.0), np.array([0.5, 0.25, 1.0])), "ess", "update")
    'ess: first 0.5 at update 0, last 1 at update 2, lowest 0.25 at update 1, highest 1 at update 2.'
    """
    known = np.isfinite(series.x) & np.isfinite(series.y)
    x, y = series.x[known], series.y[known]
    places = {"first": 0, "last": len(y) - 1, "lowest": int(y.argmin()), "highest": int(y.argmax())}
    parts = [f"{word} {y[place]:.4g} at {where} {x[place]:.6g}" for word, place in places.items()]
    return f"{name}{', taken back' if series.is_taken_back else ''}: {', '.join(parts)}."


def bars_in_words(rows: Sequence[Row]) -> str:
    """A sentence per bar: its length, and what it consists of.

    >>> bars_in_words([("stage 0", {"generate": 1.0, "learn": 3.0, "idle": 0.0})])
    'stage 0: 4.0 s, of which generate 25%, learn 75%.'
    """
    sentences: list[str] = []
    for name, seconds in rows:
        whole = sum(seconds.values())
        parts = [f"{activity} {part / whole:.0%}" for activity, part in seconds.items() if part] if whole else []
        sentences.append(f"{name}: {whole:.1f} s{', of which ' if parts else ''}{', '.join(parts)}.")
    return " ".join(sentences)


# The page: tables and figures into one HTML file that opens from disk, with nothing to load.

MOST_ROWS = 64  # of a table of stages or evaluations


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report on one run, or on several that are compared, and return its path.

    By default that of one run is `<run>/report/index.html`, and a comparison is `<first run>/report/comparison.html`.
    An `output` that is a directory gets an `index.html`.
    """
    runs = read_runs(directories)
    if output is None:
        output = runs[0].directory / "report" / ("index.html" if len(runs) == 1 else "comparison.html")
    elif output.is_dir():
        output = output / "index.html"
    page = render(runs)
    try:
        write_atomic(output, page)
    except StoreError as error:
        raise StoreError(f"{error}; name a place that can be written to with --output") from error
    return output


def render(runs: Sequence[Run]) -> str:
    """The page as text. It depends on the run directories alone: no date, no random names."""
    loader = jinja2.FunctionLoader(lambda name: files("stalewise.reporting").joinpath(name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"interval": interval, "shown": shown, "ending": ending}
    figures = draw_charts(runs)
    charts = [chart for chart in CHARTS if chart.name in figures]
    time = rows_of_runs(runs)
    stages = {f"stages-{place}": rows_of_stages(run, len(runs)) for place, run in enumerate(runs) if run.spent}
    names = {name for run in runs for name in run.seconds}
    activities = [name for name in (*ACTIVITIES, *sorted(names - {*ACTIVITIES, IDLE}), IDLE) if name in names]
    page = environment.get_template("template.html").render(
        title=joined([run.label for run in runs]) if len(runs) < 4 else f"{len(runs)} runs",
        release=__version__,
        runs=[(run, summarise(run)) for run in runs],
        charts=charts,
        missing=[chart.title for chart in CHARTS if chart.name not in figures],
        words=METRICS,
        style_of=partial(style_of, is_single=len(runs) == 1),
        ranking=ranking(runs) if len(runs) > 1 else "",
        figures={
            **figures,
            "time": draw_bars(time, "run (name)"),
            **{name: draw_bars(rows, "stage (number)") for name, rows in stages.items()},
        },
        alternatives={
            **{chart.name: chart_in_words(chart, runs) for chart in charts},
            "time": f"Where the time of each run went. {bars_in_words(time)}",
            **{name: f"Where the time of each stage went. {bars_in_words(rows)}" for name, rows in stages.items()},
        },
        activities=activities,
        most_rows=MOST_ROWS,
        thinning=thinning(runs),
        has_stage_lines=len(runs) == 1 and 0 < len(runs[0].stage_starts) <= MOST_STAGE_LINES,
        has_rollbacks=any(run.rollbacks for run in runs),
        stage_charts=list(zip(stages, [run.label for run in runs if run.spent], strict=True)),
        comparison=comparison(runs) if len(runs) > 1 else None,
        config=config_table(runs),
        environment=environment_table(runs),
        library=packed_library(),
        library_version=get_plotlyjs_version(),
    )
    return page.encode(errors="replace").decode()  # half a character, which JSON can hold, would be no UTF-8


def thinning(runs: Sequence[Run]) -> str:
    """How the curves were thinned, to be said on the page; empty where none was."""
    widths = {run.label: bucket_width(run.updates) for run in runs if run.updates > LONGEST_CURVE}
    if not widths:
        return ""
    several = "; ".join(f"{width} updates in {label}" for label, width in widths.items())
    return (
        f"Curves of more than {LONGEST_CURVE} updates are drawn with at most {BUCKETS} points. A point stands for "
        f"consecutive updates ({several}): the line is their mean, the band goes from their minimum to their maximum."
    )


def comparison(runs: Sequence[Run]) -> dict[str, list[tuple[str, list[Any]]]]:
    """Settings and environments that differ: rows of a name and one value per run."""
    # A setting that an older release did not know yet is as good as one that is not set.
    configs = [{k: v for k, v in run.config.items() if k not in UNIMPORTANT and v is not None} for run in runs]
    return {
        "settings": [(key, [table.get(key) for table in configs]) for key in differing(configs)],
        "environment": [
            (key, [run.environment.get(key) for run in runs]) for key in differing([run.environment for run in runs])
        ],
    }


def config_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All settings, in the order of the config: key, what it means, one value per run, and whether it is no default."""
    described = descriptions(RunConfig)
    defaults = flatten(RunConfig().model_dump(mode="json"))
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows: list[dict[str, Any]] = []
    for key in keys:
        values = [run.config.get(key) for run in runs]
        is_set = key not in UNIMPORTANT and any(value != defaults.get(key) for value in values)
        rows.append({"key": key, "words": described.get(key, ""), "values": values, "is_set": is_set})
    return rows


def environment_table(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """What the numbers may depend on besides the config."""
    keys = dict.fromkeys(key for run in runs for key in run.environment)
    return [(key, [run.environment.get(key) for run in runs]) for key in keys]


def descriptions(model: type[Any], prefix: str = "") -> dict[str, str]:
    """The sentence that every field of the config is, by dotted key."""
    found: dict[str, str] = {}
    for name, field in model.model_fields.items():
        found[f"{prefix}{name}"] = field.description or ""
        if hasattr(field.annotation, "model_fields"):
            found |= descriptions(field.annotation, f"{prefix}{name}.")
    return found


def ending(record: Mapping[str, Any] | None) -> str:
    """Why a stage ended before its rollouts were used up, as the ledger of stages says.

    >>> ending({"reason": "effective sample size", "ess": 0.87, "bound": 0.9, "planned_updates": 32})
    'effective sample size (ess 0.87, bound 0.9)'
    >>> ending({"reason": "all of it was used", "planned_updates": 8})
    'all of it was used'
    """
    if not record:
        return "\N{EN DASH}"
    numbers = [f"{name} {value:.3g}" for name, value in record.items() if isinstance(value, float)]
    reason = record.get("reason", "unknown")
    return f"{reason} ({', '.join(numbers)})" if numbers else reason


@cache
def packed_library() -> str:
    """plotly.js, gzipped and in base64: 2 MB instead of 4.8, so that the page with its curves stays below 5 MB.

    The browser unpacks it (DecompressionStream: Chrome 80, Firefox 113, Safari 16.4). No time stamp goes in, so the
    same run gives the same page.
    """
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)).decode()
