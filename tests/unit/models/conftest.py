from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest

from rotations import DEVICE


@pytest.fixture
def kernels() -> Any:
    """Those of `kernels/rope.py`, on a GPU or in Triton's interpreter."""
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and no TRITON_INTERPRET=1")
    from stalewise.models.kernels import rope

    return rope


# Runs each script that it is sent in a namespace of its own, and answers with what it printed, or with its traceback.
SCRIPTS = """
import contextlib, io, json, sys, traceback
for line in sys.stdin:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(json.loads(line), {})
        print(json.dumps([printed.getvalue(), ""]), flush=True)
    except BaseException:
        print(json.dumps(["", traceback.format_exc()]), flush=True)
"""


@pytest.fixture(scope="session")
def compiled() -> Iterator[Callable[[str], str]]:
    """Runs a script that compiles kernels, for which no GPU is needed; what it prints. One process imports torch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPTS]
    with subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def run(script: str) -> str:
            print(json.dumps(script), file=asked, flush=True)
            printed, error = json.loads(answers.readline())
            assert error == "", error[-2000:]
            return printed

        yield run
        asked.close()  # which ends it
