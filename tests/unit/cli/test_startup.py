"""What a command has imported at its end: torch and transformers take seconds, and most commands need neither."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import pytest

from stalewise.config import RunConfig

HEAVY = {
    *("torch", "transformers", "accelerate", "tokenizers", "scipy", "pandas", "matplotlib", "sklearn", "sympy"),
    *("datasets", "peft", "fsspec", "huggingface_hub", "boto3", "pyarrow.dataset"),
}
MOST_SECONDS = 10.0  # of CPU time, without torch: at most one on a quiet machine, five on a busy one


class Started(NamedTuple):
    exit_code: int
    shown: str
    heavy: set[str]
    seconds: float  # of CPU time


# Runs each command that it is sent in a process that is forked from this one, which has imported what nearly all of
# them import, and nothing heavy: that is most of a second, which each would need again.
COMMANDS = f"""
import atexit, json, os, sys, time
import numpy, pyarrow.parquet, stalewise.cli.tables, stalewise.reporting.read, stalewise.store
print(*({HEAVY!r} & set(sys.modules)), flush=True)
for line in sys.stdin:
    words, out = json.loads(line)
    if (child := os.fork()) == 0:
        for number, name in enumerate((os.devnull, out, out)):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        atexit.register(lambda: print(time.process_time(), *({HEAVY!r} & set(sys.modules)), file=sys.stderr))
        sys.argv = ["stalewise", *words]
        from stalewise.__main__ import main
        main()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Started]]:
    command, places = [sys.executable, "-c", COMMANDS], tmp_path_factory.mktemp("printed")
    with subprocess.Popen(command, env=environment(), stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout
        assert answers.readline() == "\n"

        def run(*words: str) -> Started:
            out = places / str(len(list(places.iterdir())))
            print(json.dumps([words, str(out)]), file=asked, flush=True)
            exit_code, printed = int(answers.readline()), out.read_text()
            seconds, *heavy = printed.splitlines()[-1].split()
            return Started(exit_code, printed, set(heavy), float(seconds))

        yield run
        asked.close()  # which ends it


# pyarrow imports pandas, where it is installed, to make any array of numpy's.
# A card is made by the hub's own package, and that of a policy has the defaults of its objective.
CARD, POLICY_CARD = {"huggingface_hub"}, {"huggingface_hub", "torch"}


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("watch RUN --once", set()),
        ("inspect RUN", set()),
        ("inspect RUN --rollout 0", {"tokenizers", "pandas"}),
        ("verify RUN", set()),
        ("flips RUN", set()),
        ("compare RUN COPY", set()),
        ("difficulty RUN", set()),
        ("report RUN --output NEW.html", set()),
        ("export RUN NEW", POLICY_CARD),
        ("export RUN NEW --rollouts", CARD),
        ("push RUN owner/name --to NEW --rollouts", CARD),
        ("rescore COPY", {"pandas"}),
        ("fork COPY --at 2", set()),
        ("fork COPY --set schedule.updates=8", set()),
        ("plan COPY --json", set()),
    ],
)
def test_what_reads_a_run_imports_what_it_needs(
    start: Callable[..., Started], tiny_run: RunConfig, tmp_path: Path, words: str, needed: set[str]
) -> None:
    places = {"RUN": tiny_run.directory, "COPY": tmp_path / "copy", "NEW": tmp_path / "new"}
    if "COPY" in words:
        shutil.copytree(tiny_run.directory, places["COPY"])
    for word, place in places.items():
        words = words.replace(word, str(place))
    done = start(*words.split())
    assert done.exit_code in (0, 3) and done.heavy <= needed, done.shown  # 3: no safe learning rate is known
    assert done.seconds < MOST_SECONDS or "torch" in needed


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    code = f"""
import atexit, sys, time
atexit.register(lambda: print(time.process_time(), *({HEAVY!r} & set(sys.modules)), file=sys.stderr))
sys.argv = ["stalewise", "--help"]
from stalewise.__main__ import main
main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and float(done.stderr) < MOST_SECONDS, done.stderr


def test_eval_says_what_it_does_before_it_imports_torch(tiny_run: RunConfig) -> None:
    """Seconds before its result; with `--json`, too."""
    code = f"""
import sys
from stalewise.cli import app
import stalewise.models
def import_packages():
    print({HEAVY!r} & set(sys.modules))
    sys.exit(7)
stalewise.models.import_packages = import_packages
app(["eval", {str(tiny_run.directory)!r}, "--json"], prog_name="stalewise")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (7, "set()\n"), done.stderr
    assert done.stderr == f"evaluating version 4 of {tiny_run.directory}: arithmetic, 8 prompts with 2 responses\n"
