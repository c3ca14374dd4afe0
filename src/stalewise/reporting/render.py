"""Writes the report: tables and figures in one HTML file that opens from disk and loads nothing."""

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
from stalewise.config.run_directory import flatten
from stalewise.errors import StoreError
from stalewise.reporting.compare import flips_of
from stalewise.reporting.figures import (
    BUCKETS,
    FEWEST_BARS,
    LONGEST_CURVE,
    MOST_BARS,
    MOST_STAGE_LINES,
    MetricSeries,
    TimeBar,
    bucket_width,
    draw_bars,
    draw_charts,
    group_stages,
    run_bars,
    series_of,
    style_of,
)
from stalewise.reporting.read import ACTIVITIES, IDLE, UNIMPORTANT, Run, differing_keys, read_runs
from stalewise.reporting.summary import (
    CHART_SECTIONS,
    Chart,
    charts_of,
    format_interval,
    format_value,
    join_names,
    metric_of,
    ranking,
    summarize,
    summary_record,
)
from stalewise.store.atomic import write_atomic

MOST_ROWS = 64  # rows of a table of stages or evaluations
MOST_FLIPS = 12  # flips of each kind that are shown without unfolding
MOST_VERSIONS = 8  # columns of the table of flips


def write_report(directories: str | Path | Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report on one run or on several and return its path.

    The default is `<run>/report/index.html` for one run and `<first run>/report/comparison.html` for several. An
    `output` that is a directory gets an `index.html`.
    """
    paths = [directories] if isinstance(directories, str | Path) else directories
    return write_page(read_runs([Path(path) for path in paths]), None if output is None else Path(output))


def write_page(runs: Sequence[Run], output: Path | None) -> Path:
    """Write the report on runs that are read already."""
    if output is None:
        output = runs[0].directory / "report" / ("index.html" if len(runs) == 1 else "comparison.html")
    elif output.is_dir():
        output = output / "index.html"
    page = render(runs)
    try:
        write_atomic(output, page)
    except StoreError as error:
        raise StoreError(f"{error}; name another file or directory with --output") from error
    return output


def report_record(path: Path, runs: Sequence[Run]) -> dict[str, Any]:
    """The path of a report and the summaries on its first screen, as data."""
    heads = [summary_record(run) for run in runs]
    return {"path": str(path), "ranking": ranking(runs) if len(runs) > 1 else "", "runs": heads}


def render(runs: Sequence[Run]) -> str:
    """The page as text. It depends on the run directories alone, not on the date."""
    figures = draw_charts(runs)
    charts = {chart.name: chart for chart in charts_of(runs) if chart.name in figures}
    time = run_bars(runs)
    most_bars = max(FEWEST_BARS, MOST_BARS // len(runs))
    stages = {f"stages-{i}": group_stages(run.spent, most_bars) for i, run in enumerate(runs) if run.spent}
    names = {name for run in runs for name in run.seconds}
    page = _template().render(
        title=join_names([run.label for run in runs]) if len(runs) < 4 else f"{len(runs)} runs",
        release=__version__,
        runs=[(run, summarize(run)) for run in runs],
        sections={
            title: [charts[name] for name in names if name in charts]
            for title, names in CHART_SECTIONS.items()
            if any(name in charts for name in names)
        },
        first_section=next(iter(CHART_SECTIONS)),
        missing=[chart.title for chart in charts_of(runs) if chart.name not in figures],
        metric_of=metric_of,
        flips=[(run, found) for run in runs if (found := flips_of(run))],
        style_of=partial(style_of, is_single=len(runs) == 1),
        ranking=ranking(runs) if len(runs) > 1 else "",
        figures={
            **figures,
            "time": draw_bars(time, "run (name)"),
            **{name: draw_bars(bars, "stage (number)") for name, bars in stages.items()},
        },
        alternatives={
            **{chart.name: describe_chart(chart, runs) for chart in charts.values()},
            "time": f"Where the time of each run went. {describe_bars(time)}",
            **{name: f"Where the time of each stage went. {describe_bars(bars)}" for name, bars in stages.items()},
        },
        activities=[name for name in (*ACTIVITIES, *sorted(names - {*ACTIVITIES, IDLE}), IDLE) if name in names],
        most_rows=MOST_ROWS,
        most_flips=MOST_FLIPS,
        spread_versions=spread_versions,
        thinning=describe_thinning(runs),
        has_stage_lines=len(runs) == 1 and 0 < len(runs[0].stage_starts) <= MOST_STAGE_LINES,
        has_rollbacks=any(run.rollbacks for run in runs),
        stage_charts=list(zip(stages, [run.label for run in runs if run.spent], strict=True)),
        comparison=differences(runs) if len(runs) > 1 else None,
        config=config_table(runs),
        environment=_rows([run.environment for run in runs]),
        library=packed_plotly(),
        library_version=get_plotlyjs_version(),
    )
    return page.encode(errors="replace").decode()  # JSON can hold half a surrogate pair, UTF-8 cannot


def spread_versions(versions: Sequence[int]) -> list[int]:
    """At most MOST_VERSIONS of these versions, the first and the last among them."""
    indices = np.linspace(0, len(versions) - 1, min(len(versions), MOST_VERSIONS)).round().astype(int)
    return [versions[index] for index in dict.fromkeys(indices.tolist())]


def describe_chart(chart: Chart, runs: Sequence[Run]) -> str:
    """The text alternative of a chart, for screen readers: one sentence per curve."""
    unit = "second" if chart.is_against_time else "update"
    sentences = [
        describe_curve(series, f"{run.label}: {key}" if len(runs) > 1 else key, unit)
        for run in runs
        for key in chart.keys
        for series in series_of(run, chart, key)
    ]
    return f"{chart.title}, {chart.y_title}. {' '.join(sentences)}"


def describe_curve(series: MetricSeries, name: str, unit: str) -> str:
    """First, last, lowest and highest value of a curve, and where they are."""
    known = np.isfinite(series.x) & np.isfinite(series.y)
    x, y = series.x[known], series.y[known]
    rows = {"first": 0, "last": len(y) - 1, "lowest": int(y.argmin()), "highest": int(y.argmax())}
    parts = [f"{which} {y[row]:.4g} at {unit} {x[row]:.6g}" for which, row in rows.items()]
    return f"{name}{', rolled back' if series.is_rolled_back else ''}: {', '.join(parts)}."


def describe_bars(bars: Sequence[TimeBar]) -> str:
    """The text alternative of stacked bars: the length and the parts of each."""
    sentences: list[str] = []
    for name, seconds in bars:
        whole = sum(seconds.values())
        parts = [f"{activity} {part / whole:.0%}" for activity, part in seconds.items() if part] if whole else []
        sentences.append(f"{name}: {whole:.1f} s{', of which ' if parts else ''}{', '.join(parts)}.")
    return " ".join(sentences)


def describe_thinning(runs: Sequence[Run]) -> str:
    """How the curves were thinned; empty if none was."""
    widths = {run.label: bucket_width(run.updates) for run in runs if run.updates > LONGEST_CURVE}
    if not widths:
        return ""
    listed = "; ".join(f"{width} updates in {label}" for label, width in widths.items())
    return (
        f"Curves of more than {LONGEST_CURVE} updates are drawn with at most {BUCKETS} points. A point stands for "
        f"consecutive updates ({listed}): the line is their mean, the band goes from their minimum to their maximum."
    )


def describe_stage_end(record: Mapping[str, Any] | None) -> str:
    """Why a stage ended before its rollouts were used up."""
    if not record:
        return "\N{EN DASH}"
    numbers = [f"{name} {value:.3g}" for name, value in record.items() if isinstance(value, float)]
    reason = record.get("reason", "unknown")
    return f"{reason} ({', '.join(numbers)})" if numbers else reason


def differences(runs: Sequence[Run]) -> dict[str, list[tuple[str, list[Any]]]]:
    """Settings and environments that differ: rows of a name and one value per run."""
    # A setting that an older release did not have equals one that is not set.
    configs = [{k: v for k, v in run.config.items() if k not in UNIMPORTANT and v is not None} for run in runs]
    tables = {"settings": configs, "environment": [run.environment for run in runs]}
    return {name: _rows(listed, differing_keys(listed)) for name, listed in tables.items()}


def _rows(tables: Sequence[Mapping[str, Any]], keys: Sequence[str] | None = None) -> list[tuple[str, list[Any]]]:
    keys = list(dict.fromkeys(key for table in tables for key in table)) if keys is None else keys
    return [(key, [table.get(key) for table in tables]) for key in keys]


def config_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """All settings: key, description, one value per run, and whether any differs from the default."""
    described = descriptions(RunConfig)
    defaults = flatten(RunConfig().model_dump(mode="json"), keep_empty=True)
    rows: list[dict[str, Any]] = []
    for key, values in _rows([run.config for run in runs]):
        is_set = key not in UNIMPORTANT and any(value != defaults.get(key) for value in values)
        rows.append({"key": key, "description": described.get(key, ""), "values": values, "is_set": is_set})
    return rows


def descriptions(model: type[Any], prefix: str = "") -> dict[str, str]:
    """The description of every config field, by dotted key."""
    texts: dict[str, str] = {}
    for name, field in model.model_fields.items():
        texts[f"{prefix}{name}"] = field.description or ""
        if hasattr(field.annotation, "model_fields"):
            texts |= descriptions(field.annotation, f"{prefix}{name}.")
    return texts


@cache
def _template() -> jinja2.Template:
    """The template of the page, compiled once."""
    loader = jinja2.FunctionLoader(lambda name: files("stalewise.reporting").joinpath(name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"interval": format_interval, "value": format_value, "stage_end": describe_stage_end}
    return environment.get_template("template.html")


@cache
def packed_plotly() -> str:
    """plotly.js, gzipped and in base64: 2 MB instead of 4.8. Without a time stamp: the same run gives the same page.

    The browser unpacks it with DecompressionStream (Chrome 80, Firefox 113, Safari 16.4).
    """
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)).decode()
