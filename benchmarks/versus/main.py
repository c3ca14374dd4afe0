"""The command line of the comparison: which measurements each part consists of, and what is shown of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stalewise.config import parse_override

from .figures import headline
from .jobs import Job, Results, Runner, Step, work_on
from .plot import draw
from .settings import CPU, CUDA, QUICK, Settings, from_record
from .table import markdown, problems

PARTS = ("learner", "sampler", "memory", "idle", "accuracy")


# ---------------------------------------------------------------- workers, imported where they are called


def workers() -> dict[str, Callable[..., dict[str, Any]]]:
    """By name. TRL is imported in TRL's processes alone: it takes seconds, and ours must not need it."""
    from . import evaluating, ours, sampling

    def theirs(name: str) -> Callable[..., dict[str, Any]]:
        def call(*arguments: Any, **options: Any) -> dict[str, Any]:
            from . import theirs as module

            return getattr(module, name)(*arguments, **options)

        return call

    return {
        "prepare": ours.prepare,
        "learner": ours.trainer,
        "idle": ours.idle,
        "train": ours.train,
        "sample": sampling.ours,
        "generate": sampling.generate,
        "evaluate": evaluating.evaluate,
        "trl-learner": theirs("learner"),
        "trl-train": theirs("train"),
    }


# ---------------------------------------------------------------- parts as jobs


def jobs_of(part: str, settings: Settings, work: Path) -> list[Job]:
    """What a part measures, in order."""
    return {
        "learner": _learner_jobs,
        "sampler": _sampler_jobs,
        "memory": _memory_jobs,
        "idle": lambda settings: [Job("idle/stalewise", [Step("idle")])] if settings.cuda else [],
        "accuracy": lambda settings: _accuracy_jobs(settings, work),
    }[part](settings)


def _learner_jobs(settings: Settings) -> list[Job]:
    jobs = [Job("learner/stalewise", [Step("learner")])]
    for batch in settings.trl_batches:
        # Checkpointing is TRL's default; it costs time and saves memory, so it is tried at the largest batch.
        tried = settings.trl_checkpointing and batch == max(settings.trl_batches)
        for checkpointing in (False, True) if tried else (False,):
            name = f"learner/trl/batch{batch}{'-checkpointing' if checkpointing else ''}"
            jobs.append(Job(name, [Step("trl-learner", {"batch": batch, "checkpointing": checkpointing})]))
    return jobs


def _sampler_jobs(settings: Settings) -> list[Job]:
    sizes = settings.generate_batches
    generate = [Job(f"sampler/generate/batch{size}", [Step("generate", {"batch": size})]) for size in sizes]
    return [Job("sampler/stalewise", [Step("sample")]), *generate]


def _memory_jobs(settings: Settings) -> list[Job]:
    """Ours with a whole update in one micro-batch, as TRL's is; the rest comes from the learner's runs."""
    return [Job("memory/stalewise-whole", [Step("learner", {"whole": True})])] if settings.cuda else []


def _accuracy_jobs(settings: Settings, work: Path) -> list[Job]:
    """TRL's usual loop and ours seed by seed, so that a deadline leaves whole seeds; then TRL with our µ."""
    jobs: list[Job] = []
    first = [(method, seed) for seed in settings.seeds for method in ("trl", "stalewise")]
    for method, seed in [*first, *(("trl_same_mu", seed) for seed in settings.seeds)]:
        name = f"{method}-seed{seed}"
        run = work / "runs" / name
        if method == "stalewise":
            train = Step("train", {"seed": seed, "name": name})
        else:
            train = Step("trl-train", {"seed": seed, "name": name, "method": method})
        saved = run / "checkpoints" if method == "stalewise" else run
        evaluate = Step("evaluate", {"directory": str(saved), "updates": settings.evaluated(method)})
        jobs.append(Job(f"accuracy/{method}/seed{seed}", [train, evaluate], clean_up=_remover(run)))
    return jobs


def _remover(directory: Path) -> Callable[[], object]:
    return lambda: shutil.rmtree(directory, ignore_errors=True)


# ---------------------------------------------------------------- command line


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of results; what is there already is kept and not done again")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--again", action="store_true", help="do what is there already again")
    parser.add_argument("--deadline-s", type=float, default=float("inf"), help="start nothing after so many seconds")
    parser.add_argument("--work", type=Path, help="where rollouts and weights lie meanwhile; a temporary directory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our config")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="only draw --out")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    for field in dataclasses.fields(Settings):
        if field.name != "our_settings":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=_reader(field.default), default=None)
    return parser


def _reader(default: Any) -> Callable[[str], Any]:
    if isinstance(default, tuple):
        return lambda text: tuple(int(part) for part in text.split(","))
    return type(default)


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The preset of the device, made quick, then what the command line says."""
    import torch

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    preset = CUDA if device.startswith("cuda") else CPU
    said = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(Settings)}
    changes = {name: value for name, value in said.items() if value is not None}
    if arguments.set:
        changes["our_settings"] = dict(parse_override(text) for text in arguments.set)
    quick = QUICK if arguments.quick else {}
    settings = dataclasses.replace(preset, **{**quick, **changes, "device": device})
    settings.check()
    return settings


def main(script: Path, description: str | None, argv: Sequence[str] | None = None) -> None:
    arguments = make_parser(description).parse_args(argv)
    if arguments.worker:
        work_on(arguments.worker, workers(), from_record)
        return
    if arguments.table or arguments.plot:
        _show(arguments)
        return
    settings = settings_from(arguments)
    out = arguments.out or script.parent / "results" / f"versus_trl-{'h200' if settings.cuda else 'cpu'}.json"
    if arguments.quick and not arguments.out:
        raise SystemExit("--quick needs --out: its figures must not lie among the results")
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    results = Results(out, settings.identity(), headline)
    results.begin_sitting(settings.device)
    with tempfile.TemporaryDirectory(prefix="versus-") as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        runner = Runner(script, work, settings, results, deadline_s=arguments.deadline_s)
        prepared = work / "runs" / "stage" / "checkpoints"
        prepare = Job("prepare", [Step("prepare")], needs=prepared)
        jobs = [job for part in PARTS if part in parts for job in jobs_of(part, settings, work)]
        if any(runner.is_missing(job, again=arguments.again) for job in jobs):
            runner.run([prepare, *jobs], again=arguments.again)
    record = json.loads(out.read_text()) if out.exists() else results.record
    print(markdown(record))
    print("\n".join(problems(record)))


def _show(arguments: argparse.Namespace) -> None:
    if not arguments.out or not arguments.out.is_file():
        raise SystemExit(f"--table and --plot read --out, and {arguments.out} is not a file")
    record = json.loads(arguments.out.read_text())
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(draw(record) + "\n")
    if arguments.table:
        print(markdown(record))
