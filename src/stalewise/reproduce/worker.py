"""A process that does one job after the other: imports and first calls are paid for once.

Jobs come as lines of JSON on standard input, answers go out as lines of JSON. Imports neither typer, rich nor plotly.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def main(out: Path) -> None:
    """Work until there are no more jobs."""
    # What libraries print goes to the log; the way back to the crew is a descriptor of its own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from stalewise.reproduce.perform import perform

    for line in sys.stdin:
        job = json.loads(line)
        problem = ""
        try:
            perform(job, out)
        except Exception as error:  # whatever it is, the other jobs must go on; the log has all of it
            traceback.print_exc()
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        answers.write(json.dumps({"key": job["key"], "problem": problem}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
