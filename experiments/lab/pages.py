"""Renders kept results: a page with figures for each experiment, and the table of all in docs/results.md."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from experiments.lab.definition import Experiment
from experiments.lab.figures import figures
from experiments.lab.finding import COLLAPSE_RULE, UNKNOWN, Finding
from experiments.lab.results import (
    ArmResult,
    Results,
    best,
    collapsed,
    final,
    read_results,
    results_name,
    seconds,
    switches,
)
from experiments.lab.verdicts import rules

from stalewise.errors import ConfigError, nearest
from stalewise.store.atomic import write_atomic

PAGE = "README.md"
COMMAND = "python -m experiments.lab"
SETTING_TITLES = {"lab": "Laboratory", "real": "Real model"}


def found(experiment: Experiment) -> dict[str, tuple[Results, Finding]]:
    """Results and verdict of each setting that has results."""
    if experiment.table.verdict not in rules():
        hint = nearest(experiment.table.verdict, rules())
        raise ConfigError(f"experiment {experiment.name}: unknown verdict {experiment.table.verdict}; {hint}")
    made: dict[str, tuple[Results, Finding]] = {}
    for setting in experiment.settings:
        path = experiment.directory / results_name(setting)
        if path.is_file():
            made[setting] = _judged(path, path.stat().st_mtime_ns, experiment.table.verdict)
    return made


@cache
def _judged(path: Path, changed: int, verdict: str) -> tuple[Results, Finding]:
    """Cached by modification time: fitting the law takes seconds."""
    results = read_results(path)
    return results, rules()[verdict](results)


def import_results(experiments: Sequence[Experiment], source: Path, *, replace: bool = False) -> list[str]:
    """Copy results made elsewhere to their experiments; returns a sentence for each that is refused.

    Results of fewer jobs than the kept ones are refused unless `replace` is set, so that a trial does not overwrite a
    full run.
    """
    refused: list[str] = []
    for experiment in experiments:
        for setting in experiment.settings:
            path, kept = (
                directory / results_name(setting) for directory in (source / experiment.name, experiment.directory)
            )
            if not path.is_file() or path.parent.resolve() == experiment.directory.resolve():
                continue
            done = read_results(path).done  # raises if the format differs
            before = read_results(kept).done if kept.is_file() else 0
            if done < before and not replace:
                refused.append(
                    f"{kept} is kept: it has {before} jobs, {path} only {done}; --replace overwrites it, and the page "
                    "then shows the smaller number"
                )
            else:
                shutil.copyfile(path, kept)
    return refused


def render(experiments: Sequence[Experiment]) -> dict[Path, str]:
    """Content of every file rendered from the kept results."""
    files: dict[Path, str] = {}
    for experiment in experiments:
        made = found(experiment)
        drawn: dict[str, list[str]] = {}
        for setting, (results, finding) in made.items():
            pictures = figures()[experiment.table.verdict](results) if finding.verdict != UNKNOWN else {}
            for end, text in pictures.items():
                name = f"{setting}{end}.svg"
                files[experiment.directory / name] = text
                drawn.setdefault(setting, []).append(name)
        files[experiment.directory / PAGE] = page(experiment, made, drawn)
    return files


def write_files(files: Mapping[Path, str]) -> None:
    """Write the files whose content changed."""
    for path, text in files.items():
        if not path.is_file() or path.read_text() != text:
            write_atomic(path, text)


def page(
    experiment: Experiment, made: Mapping[str, tuple[Results, Finding]], drawn: Mapping[str, Sequence[str]]
) -> str:
    """The page of an experiment. The rule comes before the figures."""
    table = experiment.table
    rule = " ".join((inspect.getdoc(rules()[table.verdict]) or "").split())
    sources = [f"- {source.paper}, {source.place}: {source.says}." for source in table.sources]
    lines = [
        f"# {table.number}. {table.title}",
        "",
        f"**Claim.** {table.claim}",
        "",
        "**Sources.**",
        "",
        *sources,
        "",
        f"**Rule, stated before these runs.** {rule} Beyond doubt means that the 95% interval over seeds lies on one "
        "side. A single seed has no interval: then a difference of more than 0.05 counts.",
        "",
        "Exploratory laboratory runs with seed 0 chose the settings (η, µ, the length of runs). Seed 0 is in no "
        "result: seeds start at 1.",
        "",
        f"A run has collapsed if {COLLAPSE_RULE}.",
        "",
    ]
    if table.words:
        lines += [table.words, ""]
    for setting in experiment.settings:
        lines += [f"## {SETTING_TITLES[setting]}", "", f"{experiment.setting(setting).task}.", ""]
        lines += ["```sh", f"{COMMAND} {experiment.name} --setting {setting}", "```", ""]
        if setting not in made:
            lines += ["Not run yet.", ""]
            continue
        results, finding = made[setting]
        lines += [f"**Verdict: {finding.verdict}.** {finding.ours}.", "", f"{describe_runs(results)}", ""]
        lines += [f"- {line}" for line in finding.lines]
        lines += [""] if finding.lines else []
        for name in drawn.get(setting, ()):
            lines += [f"![{table.title}, {SETTING_TITLES[setting].lower()}]({name})", ""]
        lines += [*arm_table(results.arms), ""]
        lines += [f"- Failed: {name}: {reason}" for name, reason in results.record["failed"].items()]
        lines += [""] if results.record["failed"] else []
    if table.reading:
        lines += ["## Interpretation, written after the results", "", table.reading, ""]
    return "\n".join(lines).rstrip() + "\n"


def describe_runs(results: Results) -> str:
    """Number of jobs, hardware and time, as text."""
    record = results.record
    devices = {run.get("environment", {}).get("device") for arm in results.arms for run in arm.runs.values()}
    device = " and ".join(sorted(name for name in devices if name)) or "cpu"
    spent = sum(run.get("wall_seconds", 0.0) for arm in results.arms for run in arm.runs.values())
    seeds = sorted({len(arm.runs) for arm in results.arms})
    many = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' if seeds[0] > 1 else ''}"
    machines = " and ".join(f"{one['cores']} cores ({one['workers']} at a time)" for one in record["machine"])
    return (
        f"{record['done']} of {record['planned']} jobs done, {many} per arm; {device}, {machines}, "
        f"{spent:,.0f} s of jobs in all."
    )


def arm_table(arms: Sequence[ArmResult]) -> list[str]:
    """Table of all arms that are runs."""
    rows = [arm for arm in arms if arm.kind in ("train", "learn")]
    if not rows:
        return []
    head = "| arm | seeds | final accuracy [95%] | best during the run | collapsed | generations | seconds |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for arm in rows:
        lost, of = arm.count(collapsed)
        lines.append(
            f"| {arm.name} | {of} | {arm.mean(final)} | {arm.mean(best).value:.3f} | {lost} of {of} | "
            f"{arm.mean(switches).value:.0f} | {arm.mean(seconds).value:.1f} |"
        )
    return lines


def results_table(experiments: Sequence[Experiment]) -> str:
    """docs/results.md: the table of all experiments."""
    lines = [
        "# Results: the claims, reproduced small",
        "",
        "Each claim is tested in the laboratory (embedded policies, CPU) and on a real model (SmolLM2-135M-Instruct, "
        "GPU). The rule of each verdict was stated before these runs; where an estimate was changed afterwards, the "
        "page says so. Settings were chosen with seed 0, which is in no result. The runs are some thousand times "
        "smaller than the papers': a verdict says whether an effect is there, not how large it is elsewhere. Claims "
        "that are not shown, or whose opposite is shown, are listed like all others. [How to run them](experiments.md)."
        f" `{COMMAND} all --render-only` writes this page.",
        "",
        "| | claim | source | ours, 95% interval over seeds | verdict | command | hardware, time |",
        "|---|---|---|---|---|---|---|",
    ]
    for experiment in experiments:
        table = experiment.table
        made = found(experiment)
        source = "; ".join(f"{one.paper}, {one.place}: {one.says}" for one in table.sources)
        for place, setting in enumerate(experiment.settings):
            about = (
                [f"[{table.number}](../experiments/{experiment.name}/{PAGE})", table.claim, source]
                if place == 0
                else [""] * 3
            )
            command = f"`{COMMAND} {experiment.name} --setting {setting}`"
            if setting in made:
                results, finding = made[setting]
                cells = [f"{setting}: {finding.ours}", f"**{finding.verdict}**", command, hardware(results)]
            else:
                cells = [f"{setting}: –", "not run yet", command, "–"]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in [*about, *cells]) + " |")
    outside = [line for experiment in experiments for line in outside_checks(experiment)]
    if outside:
        lines += ["", "The outside check (one seed, 95% interval over questions):", ""]
        lines += [f"- {line}" for line in outside]
    return "\n".join(lines) + "\n"


def outside_checks(experiment: Experiment) -> list[str]:
    """Accuracy on questions unrelated to the training task."""
    made = found(experiment)
    return [
        f"{arm.name}: {run['accuracy']['value']:.1%} [{run['accuracy']['low']:.1%}, {run['accuracy']['high']:.1%}] of "
        f"{run['prompts']} questions"
        for results, _ in made.values()
        for arm in results.arms
        if arm.kind == "evaluate" and arm.name.startswith("GSM8K")
        for run in arm.runs.values()
    ]


def hardware(results: Results) -> str:
    """Device, seeds and seconds, as short text."""
    runs: list[Mapping[str, Any]] = [run for arm in results.arms for run in arm.runs.values()]
    device = next((name for run in runs if (name := run.get("environment", {}).get("device"))), "cpu")
    spent = sum(run.get("wall_seconds", 0.0) for run in runs)
    counts = sorted({len(arm.runs) for arm in results.arms})
    seeds = f"{counts[0]}–{counts[-1]} seeds" if counts[0] < counts[-1] else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    return f"{device}, {seeds}, {spent:,.0f} s of jobs"
