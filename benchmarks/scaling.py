"""Does a token cost the same in a large run as in a small one? Store, learner and sampler by rollouts and by length.

    python benchmarks/scaling.py [--parts store,learner,sampler] [--out FILE] [--quick] [--deadline-s 500]
    python benchmarks/scaling.py --out FILE --table

Rollouts: 10³ to 10⁶ of 8 response tokens. Length: 64 to 4096 response tokens. Without a GPU the policy is a random
Llama with two layers and a context of 8192 tokens; with one, SmolLM2-135M-Instruct or what `--model` names. Its
responses end at the length that is asked for. A cost that rises by more than 25% from one size to a larger one is
compared with what a token asks for there: operations in the learner, bytes that decoding reads in the sampler.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from scales import work as scale_work
from scales.verdict import headline, markdown
from scales.work import SHORT, Settings
from versus.jobs import Job, Results, Runner, Step, work_on

PARTS = ("store", "learner", "sampler")
COUNTS = (1_000, 10_000, 100_000, 1_000_000)
LENGTHS = (64, 256, 1024, 4096)
WORKERS = {
    "store": scale_work.store,
    "learn-rollouts": scale_work.learn_rollouts,
    "learn-length": scale_work.learn_length,
    "sample-rollouts": scale_work.sample_rollouts,
    "sample-length": scale_work.sample_length,
}


def jobs_of(parts: list[str], settings: Settings, work: Path, counts: list[int], lengths: list[int]) -> list[Job]:
    """Store batches by rollouts are kept: the learner reads from them."""
    jobs: list[Job] = []
    if "store" in parts or "learner" in parts:
        for count in counts:
            options = {"count": count, "length": SHORT, "keep": True}
            needs = work / "made" / f"{count}x{SHORT}" if "learner" in parts else None
            jobs.append(Job(f"store/rollouts/{count}", [Step("store", options)], needs=needs))
    if "store" in parts:
        for length in lengths:
            options = {"count": settings.store_tokens // length, "length": length, "keep": False}
            jobs.append(Job(f"store/length/{length}", [Step("store", options)]))
    for part, verb in (("learner", "learn"), ("sampler", "sample")):
        if part in parts:
            jobs += [Job(f"{part}/rollouts/{n}", [Step(f"{verb}-rollouts", {"count": n})]) for n in counts]
            jobs += [Job(f"{part}/length/{n}", [Step(f"{verb}-length", {"length": n})]) for n in lengths]
    return jobs


def settings_for(arguments: argparse.Namespace) -> Settings:
    import torch

    gpu = {
        "device": "cuda",
        "model": arguments.model or "smollm2",
        "threads": 0,
        "update_tokens": 1 << 16,
        "sampler_rows": 256,
        "timed_updates": 8,
    }
    cpu = {"threads": os.cpu_count() or 1, "model": arguments.model or "tiny"}
    on_gpu = torch.cuda.is_available() if arguments.device is None else arguments.device.startswith("cuda")
    quick = {"store_tokens": 1 << 14, "update_tokens": 1 << 11, "timed_updates": 1, "sampler_rows": 8}
    chosen: dict[str, Any] = {**(gpu if on_gpu else cpu), **(quick if arguments.quick else {})}
    if arguments.threads is not None:
        chosen["threads"] = arguments.threads
    return Settings(**chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--deadline-s", type=float, default=float("inf"))
    parser.add_argument("--device")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="rollouts to measure at")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="response tokens to measure at")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work_on(arguments.worker, WORKERS, lambda record: Settings(**record))
        return
    if arguments.table:
        print(markdown(json.loads(arguments.out.read_text())))
        return
    settings = settings_for(arguments)
    kind = "h200" if settings.device.startswith("cuda") else "cpu"
    if arguments.quick and not arguments.out:
        raise SystemExit("--quick needs --out: its figures must not lie among the results")
    out = arguments.out or Path(__file__).resolve().parent / "results" / f"scaling-{kind}.json"
    counts, lengths = ([int(n) for n in text.split(",") if n] for text in (arguments.counts, arguments.lengths))
    results = Results(out, dataclasses.asdict(settings), headline)
    results.begin_sitting(settings.device)
    with tempfile.TemporaryDirectory(prefix="scaling-") as temporary:
        work = Path(temporary)
        runner = Runner(Path(__file__).resolve(), work, settings, results, deadline_s=arguments.deadline_s)
        jobs = jobs_of(arguments.parts.split(","), settings, work, counts, lengths)
        runner.run(jobs, again=arguments.again)
    results.write()
    print(markdown(results.record))
    print("\n".join(results.record["notes"]))


if __name__ == "__main__":
    main()
