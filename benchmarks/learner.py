"""What an update costs on one device, by size of the model, gradient checkpointing and way of running the passes.

    python benchmarks/learner.py [--parts '{0.5b,1.5b}/full/*/*'] [--out FILE] [--deadline-s 540]
    python benchmarks/learner.py --out FILE --table

Random weights in Qwen2.5's shapes and made-up rollouts, so nothing is downloaded. A part is `size/kind/memory/mode`:

    size    0.5b, 1.5b, 7b (with moments in 8 bits, since with float32 it does not fit)
    kind    full, lora (rank 16 on bfloat16 weights): updates alone; stage, lora-stage: generation before and after them
    memory  plain, recompute (gradient checkpointing)
    mode    launches, graphs, compile, both, or auto: what a config without `learner.compile` gets

For each: tokens/s, share of the measured rate of matrix products, peak bytes beside the estimate of `doctor`,
milliseconds by group of kernels, and the seconds that nothing can avoid. What is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.child_processes import ending, finish, start
from learner_bench.figures import Part, headline, parts_of, table
from versus.jobs import Results

DEFAULT = "{0.5b,1.5b}/full/*/*,7b/full/recompute/*,{0.5b,1.5b,7b}/lora/recompute/{launches,auto}"
DEFAULT += ",7b/stage/recompute/auto,7b/lora-stage/recompute/auto"
# A device that is almost full must not be lost to fragments.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
TINY = {"device": "cpu", "threads": 1, "prompt_tokens": 8, "max_new_tokens": 12, "fewest_tokens": 4, "warmup": 1}
TINY |= {"distinct": 1, "timed": 2, "matmul_size": 128}


def main() -> None:
    arguments = _arguments()
    if arguments.worker:
        from learner_bench.work import work_on_parts

        work_on_parts(json.loads(arguments.worker.read_text()))
        return
    if arguments.table:
        print(table(json.loads(arguments.out.read_text())))
        return
    parts = parts_of(arguments.parts)
    changes = {"changes": arguments.changes} if arguments.changes else {}
    results = Results(arguments.out, dataclasses.asdict(_settings(arguments)) | changes, headline)
    results.begin_sitting(results.record["settings"]["device"])
    start = time.monotonic()
    for _, group in groupby(parts, key=lambda part: (part.size, part.kind)):
        waiting = [part for part in group if arguments.again or _is_missing(results, part)]
        while waiting and time.monotonic() - start < arguments.deadline_s:
            done = measure(waiting, results, arguments.deadline_s - (time.monotonic() - start))
            waiting = [part for part in waiting if part.name not in done]
        if waiting:
            print(f"deadline: {', '.join(part.name for part in waiting)} not measured; the same command goes on")
            break
    results.write()
    print(table(results.record))
    print(json.dumps(results.record["fastest"], indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "learner-h200.json")
    parser.add_argument("--parts", default=DEFAULT, help="names; * and {a,b} stand for several")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU; for parts of the size tiny")
    parser.add_argument("--settings", default="{}", help="other sizes of the measurement, as JSON")
    parser.add_argument("--changes", default="", help="changes of every config, as JSON by table")
    parser.add_argument("--again", action="store_true", help="measure parts anew")
    parser.add_argument("--deadline-s", type=float, default=float("inf"))
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> Any:
    from learner_bench.work import Settings

    return Settings(**(TINY if arguments.tiny else {}), **json.loads(arguments.settings))


def _is_missing(results: Results, part: Part) -> bool:
    return results.runs.get(part.name, {"error": "not measured"}).get("error") is not None


def measure(parts: list[Part], results: Results, seconds: float) -> set[str]:
    """Measure in one process, up to where it ends; returns the names of the parts that have a result."""
    print(f"{len(parts)} parts from {parts[0].name} …", flush=True)
    with tempfile.TemporaryDirectory(prefix="learner-") as temporary:
        work = Path(temporary)
        result, log = work / "result.jsonl", work / "log"
        record = {"settings": results.record["settings"], "parts": [dataclasses.asdict(part) for part in parts]}
        (work / "spec.json").write_text(json.dumps({**record, "work": str(work), "result": str(result)}))
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(work / "spec.json")]
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
        process = start(command, log, {**ALLOCATOR, **os.environ, **quiet})
        code = finish(process, None if seconds == float("inf") else seconds)
        found = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
        for one in found:
            results.add(one.pop("name"), one)
        done = {part.name for part in parts[: len(found)]}
        if code:  # the process died within a part
            results.add(parts[len(found)].name, {"error": "\n".join(ending(code, log))})
            done.add(parts[len(found)].name)
    for name in sorted(done):
        run = results.runs[name]
        said = str(run["error"]).splitlines()[-1] if run.get("error") else f"{run['tokens_per_second']:,.0f} tokens/s"
        print(f"  {name}: {run.get('part_seconds', 0):.0f} s  {said}", flush=True)
    return done


if __name__ == "__main__":
    main()
