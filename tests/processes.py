"""Programs in processes of their own, forked from the server that ranks come from: it has imported torch already."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ranks import CONTEXT


def begin(source: str, *words: object, directory: Path) -> ForkServerProcess:
    """`python -c SOURCE WORDS`; what it prints goes to `stdout.txt` and `stderr.txt` in the directory."""
    process = CONTEXT.Process(target=_program, args=(source, [str(word) for word in words], directory))
    process.start()
    return process


def completed(source: str, *words: object, directory: Path, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """What such a program returned and printed, once it has ended."""
    process = begin(source, *words, directory=directory)
    process.join(timeout)
    code = process.exitcode
    process.kill()
    process.join()
    assert code is not None, f"the program did not end within {timeout} s"
    out, err = ((directory / name).read_text() for name in ("stdout.txt", "stderr.txt"))
    return subprocess.CompletedProcess([source, *map(str, words)], code, out, err)


def _program(source: str, words: list[str], directory: Path) -> None:
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    sys.argv = ["-c", *words]
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
