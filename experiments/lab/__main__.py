"""`python -m experiments.lab`: makes the runs of experiments where little more than torch is installed.

Figures and pages are rendered elsewhere, from the results: `stalewise reproduce all --render-only --from DIR`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.lab.definition import SETTINGS, load_experiments
from experiments.lab.reproducing import default_experiments, reproduce

from stalewise.errors import StalewiseError


def main() -> None:
    """Parse, run, print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m experiments.lab", description=__doc__)
    parser.add_argument("names", nargs="+", help="experiments, or all")
    parser.add_argument("--setting", choices=SETTINGS, default="lab")
    parser.add_argument("--seeds", type=int, help="fewer seeds than the experiments ask for")
    parser.add_argument("--workers", type=int, help="jobs side by side")
    parser.add_argument("--deadline-s", type=float, help="start no job after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--experiments", type=Path, default=default_experiments())
    parser.add_argument("--keep-runs", action="store_true", help="keep weights and rollouts, too")
    arguments = parser.parse_args()
    try:
        names = [] if arguments.names == ["all"] else arguments.names
        found = reproduce(
            load_experiments(arguments.experiments, names),
            arguments.setting,
            out=arguments.out,
            seeds=arguments.seeds,
            workers=arguments.workers,
            deadline_s=arguments.deadline_s,
            keep_runs=arguments.keep_runs,
            log=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except StalewiseError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps({**asdict(found), "results": [str(path) for path in found.results]}))


if __name__ == "__main__":
    main()
