"""Renders kept results: a page with figures for each experiment, and the table of all in docs/results.md."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.lab.definition import Experiment
from experiments.lab.figures import figures
from experiments.lab.gsm8k import RULES, benchmark_findings
from experiments.lab.plan import COLLAPSE_RULE, FIRST_SEED, TUNING_SEEDS, WIDENINGS
from experiments.lab.results import Results, read_results, results_name
from experiments.lab.statistics import mean_of
from experiments.lab.verdicts import UNKNOWN, Finding, judge, rules

from stalewise.errors import ConfigError, nearest
from stalewise.store.atomic import write_atomic

PAGE = "README.md"
LEAST_P = "1e-6"  # that is printed
TIMED = "[on an H200](benchmarks.md#gsm8k-against-trl-with-vllm)"
BENCHMARK = "../../docs/benchmarks.md#gsm8k-against-trl-with-vllm"
COMMAND = "python -m experiments.lab"
SETTING_TITLES = {"lab": "Laboratory", "real": "Real model"}
DESIGN = (
    "Every run has warm-up and cosine decay, except where the page says otherwise, and is evaluated on 500 held-out "
    "questions with 4 samples each. A run's score is the mean of its last three evaluations, or 0 if it did not reach "
    f"its end. Learning rates are tuned on seeds {TUNING_SEEDS[0]} and {TUNING_SEEDS[1]}, with the same grid for every "
    "arm of a claim; where the best rate of any arm is at an edge, all arms get one more rate at that end, a larger "
    f"one also where an arm is to collapse and does so at none, at most {WIDENINGS} times. Arms are then judged on "
    f"seeds from {FIRST_SEED} on, which nothing else has used. The number of seeds is that with which the margin is "
    "found (one-sided 5%, power 90%), from the two largest standard deviations among the tuning runs, within the range "
    "that the definition allows; the table says how many were asked for. Intervals are Welch's, 95%. A verdict needs a "
    "p-value below 0.05 after Holm's correction over all claims of the setting and their opposites."
)

OTHERWISE = (
    "Other than said above, a run is evaluated on all 1,319 test questions with 4 samples each, and its score is its "
    "accuracy after the last update: evaluations are 32 updates apart, so the mean of the last three would reach back "
    "to the middle of the run. Learning rates are tuned on seed 101, three for each arm, and arms are judged on seeds "
    "from 0 on. GPU time sets their number."
)
UNTUNED = (
    "Nothing is tuned here: learning rates and the number of seeds are set in advance, and with so few seeds an effect "
    "may be missed ([how often](../../docs/experiments.md#on-a-real-model))."
)


@dataclass(frozen=True, slots=True)
class Judged:
    """Results with what the rule says of them, and the verdict among all claims."""

    results: Results | None  # None: the runs are those of a benchmark
    finding: Finding
    verdict: str
    p: float
    seeds: tuple[int, int] = 0, 0  # of the arms with fewest and most


def found(experiments: Sequence[Experiment]) -> dict[tuple[str, str], Judged]:
    """By experiment and setting, where there are results of this design; `real` also from the benchmark on GSM8K."""
    known: dict[str, dict[str, tuple[Results | None, Finding, tuple[int, int]]]] = {}
    benchmark = benchmark_findings(experiments[0].directory.parents[1]) if experiments else {}
    for experiment in experiments:
        for setting in experiment.settings:
            if (rule := experiment.rule(setting)) not in rules():
                hint = nearest(rule, rules())
                raise ConfigError(f"experiment {experiment.name}: unknown verdict {rule}; {hint}")
            results = read_results(experiment.directory / results_name(setting))
            if results is not None:
                finding = rules()[rule](results)
                counts = [len(arm.runs) for arm in results.arms] or [0]
                seeds = min(counts), max(counts)
                known.setdefault(setting, {})[experiment.name] = (results, finding, seeds)
        if experiment.table.verdict in benchmark:
            finding, fewest = benchmark[experiment.table.verdict]
            known.setdefault("real", {})[experiment.name] = (None, finding, (fewest, fewest))
    made: dict[tuple[str, str], Judged] = {}
    for setting, by_name in known.items():
        planned = sum(setting in settings_of(experiment) for experiment in experiments)
        verdicts = judge({name: finding for name, (_, finding, _) in by_name.items()}, planned)
        for name, (results, finding, seeds) in by_name.items():
            made[name, setting] = Judged(results, finding, *verdicts[name], seeds)
    return made


def import_results(experiments: Sequence[Experiment], source: Path, *, replace: bool = False) -> list[str]:
    """Copy results made elsewhere to their experiments; returns a sentence for each that is refused.

    Results of fewer jobs than the kept ones are refused unless `replace` is set, so that a trial does not overwrite a
    full run. Results of the superseded design give way.
    """
    refused: list[str] = []
    for experiment in experiments:
        for setting in experiment.settings:
            path, kept = (
                directory / results_name(setting) for directory in (source / experiment.name, experiment.directory)
            )
            if (new := read_results(path)) is None or path.parent.resolve() == experiment.directory.resolve():
                continue
            before = old.done if (old := read_results(kept)) is not None else 0
            if new.done < before and not replace:
                refused.append(
                    f"{kept} is kept: it has {before} jobs, {path} only {new.done}; --replace overwrites it, and the "
                    "page then shows the smaller number"
                )
            elif new.done:
                shutil.copyfile(path, kept)
    return refused


def render(experiments: Sequence[Experiment]) -> dict[Path, str]:
    """Content of every file rendered from results of this design. Pages of the superseded design stay as they are."""
    judged = found(experiments)
    files: dict[Path, str] = {}
    for experiment in experiments:
        drawn: dict[str, list[str]] = {}
        made = {
            setting: judged[key] for setting in settings_of(experiment) if (key := (experiment.name, setting)) in judged
        }
        for setting, one in made.items():
            if one.results is None:
                continue
            for end, text in figures(experiment.table.verdict, one.results).items():
                name = f"{setting}{end}.svg"
                files[experiment.directory / name] = text
                drawn.setdefault(setting, []).append(name)
        if made:
            files[experiment.directory / PAGE] = page(experiment, made, drawn)
    return files


def write_files(files: Mapping[Path, str]) -> None:
    """Write the files whose content changed."""
    for path, text in files.items():
        if not path.is_file() or path.read_text() != text:
            write_atomic(path, text)


def page(experiment: Experiment, made: Mapping[str, Judged], drawn: Mapping[str, Sequence[str]]) -> str:
    """The page of an experiment. The rule comes before the figures."""
    table = experiment.table
    rule = rule_in_words(table.verdict)
    sources = [f"- {source.paper}, {source.place}: {source.says}." for source in table.sources]
    lines = [f"# {table.number}. {table.title}", "", f"**Claim.** {table.claim}", "", "**Sources.**", "", *sources, ""]
    lines += [f"**Rule, stated before these runs.** {rule}", "", DESIGN, ""]
    lines += [f"A run has collapsed if {COLLAPSE_RULE}.", ""]
    if table.words:
        lines += [table.words, ""]
    for setting, one in made.items():
        if one.results is None:
            lines += benchmark_section(table.verdict, one)
            continue
        own = experiment.setting(setting).verdict
        lines += [f"## {SETTING_TITLES[setting]}", "", f"{experiment.setting(setting).task}.", ""]
        lines += ["```sh", f"{COMMAND} {experiment.name} --setting {setting}", "```", ""]
        lines += [f"**Rule.** {rule_in_words(own)}", ""] if own else []
        lines += [UNTUNED, ""] if setting == "real" and not one.results.tuning else []
        p = f" (p {with_sign(one.p)} after Holm)" if one.verdict != UNKNOWN else ""
        lines += [f"**Verdict: {one.verdict}**{p}. {one.finding.ours}.", "", describe_runs(one.results), ""]
        lines += [f"- {line}" for line in one.finding.lines]
        lines += [""] if one.finding.lines else []
        for name in drawn.get(setting, ()):
            lines += [f"![{table.title}, {SETTING_TITLES[setting].lower()}]({name})", ""]
        lines += [*arm_table(one.results), "", *tuning_table(one.results)]
        lines += [f"- Failed: {name}: {reason}" for name, reason in one.results.record["failed"].items()]
        lines += [""] if one.results.record["failed"] else []
    if table.reading:
        lines += ["## Interpretation, written after the results", "", table.reading, ""]
    return "\n".join(lines).rstrip() + "\n"


def settings_of(experiment: Experiment) -> list[str]:
    """Settings that it defines, and `real` where the benchmark on GSM8K has its runs."""
    return list(dict.fromkeys([*experiment.settings, *(["real"] if experiment.table.verdict in RULES else [])]))


def benchmark_section(rule: str, one: Judged) -> list[str]:
    """What the runs of the benchmark on GSM8K say of a claim."""
    text = " ".join((inspect.getdoc(RULES[rule]) or "").split())
    lines = ["## Real model", "", f"The runs of [the benchmark on GSM8K]({BENCHMARK}), Qwen2.5-Coder-0.5B-Instruct."]
    lines += [
        "",
        OTHERWISE,
        "",
        f"**Rule.** {text}",
        "",
        f"**Verdict: {one.verdict}** (p {with_sign(one.p)} after Holm). {one.finding.ours}.",
    ]
    return [*lines, "", *(f"- {line}" for line in one.finding.lines), ""]


def rule_in_words(name: str) -> str:
    """The docstring of a rule in one line."""
    return " ".join((inspect.getdoc(rules()[name]) or "").split())


def describe_runs(results: Results) -> str:
    """Number of jobs and what they took, as text; and whether runs with a real model began with different policies."""
    text = f"{results.record['done']} of {results.record['planned']} jobs done, {time_of(results)}."
    runs = [run for arm in results.arms for run in arm.runs.values() if results.record["setting"] == "real"]
    starts = sorted({run["evaluations"]["accuracy"][0] for run in runs if "evaluations" in run})
    many = ", ".join(map(str, starts))
    return text + (f" **Runs begin with policies of different accuracy: {many}.**" if len(starts) > 1 else "")


def time_of(results: Results) -> str:
    """CPU time in the laboratory; with a real model the jobs' own time on the GPU that they share."""
    record = results.record
    if record["setting"] == "lab":
        return f"{record['cpu_seconds']:,} core-seconds"
    at_once = max(machine["workers"] for machine in record["machine"])
    return f"{record['wall_seconds']:,} s of jobs, {at_once} at a time on one GPU"


def seeds_of(one: Judged) -> str:
    """Number of judged seeds, how many the power calculation asked for, where it was made, and what is left to do."""
    fewest, most = one.seeds
    asked = one.results.tuning.get("seeds_asked") if one.results else None
    count = f"{most}" if fewest == most else f"{fewest} to {most}"
    words = f"{count} seeds" + ("" if asked is None else f" ({asked} asked for)")
    done, planned = (one.results.record["done"], one.results.record["planned"]) if one.results else (0, 0)
    return words + (f", {done} of {planned} jobs" if done < planned else "")


def with_sign(p: float) -> str:
    """A p-value after its sign; how small the smallest are rests on scores being normal."""
    return f"= {p:.2g}" if p >= float(LEAST_P) else f"< {LEAST_P}"


def arm_table(results: Results) -> list[str]:
    """Table of all arms that are runs; the law's, which are many, are in its figure."""
    rows = [arm for arm in results.arms if arm.kind == "train"]
    if not rows or "T" in rows[0].axes:
        return []
    lines = ["| arm | η | seeds | score [95%] | best on the way | collapsed |", "|---|---|---|---|---|---|"]
    for arm in rows:
        lost, of = arm.collapses
        best = mean_of(arm.best).value
        lines.append(f"| {arm.name} | {arm.rate:g} | {of} | {arm.mean} | {best:.3f} | {lost} of {of} |")
    return lines


def tuning_table(results: Results) -> list[str]:
    """The trials of every arm, and the calculation of seeds."""
    tuning = results.tuning
    if not tuning:
        return []
    rates = [f"{rate:g}" for rate in tuning["rates"]]
    lines = ["Mean score on the tuning seeds by learning rate (best in bold), and standard deviation over seeds:", ""]
    lines += ["| arm | " + " | ".join(rates) + " | SD |", "|---" * (len(rates) + 2) + "|"]
    for arm, by_rate in tuning["scores"].items():
        best = f"{tuning['best'][arm]:g}" if tuning["is_complete"] else ""
        cells: list[str] = []
        for rate in rates:
            value = f"{sum(by_rate[rate]) / len(by_rate[rate]):.3f}" if by_rate[rate] else "–"
            cells.append(f"**{value}**" if rate == best else value)
        spread = f"{tuning['spread'][arm]:.3f}" if tuning["is_complete"] else "–"
        lines.append(f"| {arm} | " + " | ".join(cells) + f" | {spread} |")
    if not tuning["is_complete"]:
        return [*lines, "", "The tuning is not complete, so that no arm is judged yet.", ""]
    words = f"The grid was widened by {tuning['widened']} steps." if tuning["widened"] else "The grid was not widened."
    if tuning["edges"]:
        words += f" At an edge of it still: {', '.join(tuning['edges'])}."
    words += (
        f" A difference of {tuning['margin']:g} asks for {tuning['seeds_asked']} seeds of each arm; "
        f"{tuning['seeds_run']} are planned."
    )
    return [*lines, "", words, ""]


def results_table(experiments: Sequence[Experiment]) -> str | None:
    """docs/results.md: the table of all experiments, and what each means; None without results of this design."""
    judged = found(experiments)
    if not judged:
        return None
    lines = [
        "# Results: the claims, tested small",
        "",
        "A verdict says whether an effect is there in runs that are some thousand times smaller than the papers', not "
        "how large it is elsewhere. The rule of each verdict was stated before its runs; the pages of claims 1 and 8 "
        "say what was changed later. Claims that are not shown, or whose opposite is shown, are listed like all "
        "others. [How to run them](experiments.md). "
        f"`{COMMAND} all --render-only` writes this page.",
        "",
        DESIGN,
        "",
        "| | claim | source | ours, 95% interval | verdict | p (Holm) | seeds, time |",
        "|---|---|---|---|---|---|---|",
    ]
    for experiment in experiments:
        table = experiment.table
        source = "; ".join(f"{one.paper}, {one.place}: {one.says}" for one in table.sources)
        about = [f"[{table.number}](../experiments/{experiment.name}/{PAGE})", table.claim, source]
        for setting in settings_of(experiment):
            one = judged.get((experiment.name, setting))
            cells = [f"{setting}: –", "not run yet", "–", "–"]
            if one is not None:
                time = f"{seeds_of(one)}, {time_of(one.results) if one.results else TIMED}"
                cells = [
                    f"{setting}: {one.finding.ours}",
                    f"**{one.verdict}**",
                    with_sign(one.p).removeprefix("= "),
                    time,
                ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in [*about, *cells]) + " |")
            about = [""] * 3
    for experiment in experiments:
        made = [
            (setting, one.results) for setting in experiment.settings if (one := judged.get((experiment.name, setting)))
        ]
        if made and made[0][1] and (table := experiment.table).reading:
            lines += ["", f"## {table.number}. {table.title}", "", table.reading, ""]
            endings = figures(table.verdict, made[0][1])
            place = f"../experiments/{experiment.name}/{made[0][0]}{list(endings)[-1]}.svg"
            lines += [f"![{table.title}: {table.claim}]({place})"]
    return "\n".join(lines) + "\n"
