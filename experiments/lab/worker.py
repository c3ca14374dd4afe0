"""Worker process: runs one job after another, so imports and first calls are paid for once.

    python -m experiments.lab.worker OUT WORKERS

Reads jobs as lines of JSON on stdin and answers with lines of JSON. Exits when stdin ends, even in the middle of a job:
the parent is gone then, and what was committed is kept. Imports no typer, rich or plotly.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path


def main(out: Path, workers: int) -> None:
    """Run jobs until stdin ends; `workers` such processes share the machine."""
    # What libraries print goes to the log; answers to the pool have a descriptor of their own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    from experiments.lab.run_job import free_memory, run_job

    gc.freeze()  # what was imported stays: the collection after each job need not walk it
    while True:
        job = json.loads(jobs.get())
        problem = ""
        try:
            run_job(job, out, workers)
        except Exception as error:  # any failure: the other jobs must go on; the log has the traceback
            traceback.print_exc()
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        with contextlib.suppress(RuntimeError):  # of a broken device: the next job says so
            free_memory()  # not before: while an error is handled, its frames hold the tensors
        answers.write(json.dumps({"key": job["key"], "problem": problem}) + "\n")


def _listen(jobs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
