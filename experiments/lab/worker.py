"""A process that does one job after the other: imports and first calls are paid for once.

Jobs come as lines of JSON on standard input, answers go out as lines of JSON. When the input ends, so does the process,
in the middle of a job, too: then nobody waits for it, and what it committed is kept. Imports no typer, rich or plotly.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path


def main(out: Path) -> None:
    """Work until there are no more jobs."""
    # What libraries print goes to the log; the way back to the crew is a descriptor of its own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    from experiments.lab.perform import perform

    while True:
        job = json.loads(jobs.get())
        problem = ""
        try:
            perform(job, out)
        except Exception as error:  # whatever it is, the other jobs must go on; the log has all of it
            traceback.print_exc()
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        answers.write(json.dumps({"key": job["key"], "problem": problem}) + "\n")


def _listen(jobs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
