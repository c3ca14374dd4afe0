"""Scores responses with a function of the user's."""

from __future__ import annotations

import importlib.util

from stalewise.errors import TaskError
from stalewise.tasks.base import load
from stalewise.tasks.verifiers.judge_process import Judge
from stalewise.tasks.verifiers.pool import ProcessVerifier


class PythonVerifier(ProcessVerifier):
    """A function "module:function", called with (prompt, response) in a worker process.

    It returns the reward as a number, or a dict of numbers with the key "reward"; the others are its parts. A dict
    without "reward" is an error: neither the sum nor the mean of the parts would be an obvious reward.
    """

    def __init__(self, function: str, *, workers: int | None = None, limit_s: float = 5.0):
        module, colon, name = function.partition(":")
        if not (module and colon and name.isidentifier()):
            raise TaskError(f"verifier python: function={function!r} must look like 'module:function'")
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise TaskError(f"verifier python: there is no module {module!r} on the Python path")
        super().__init__(f"{__name__}:load_judge", {"function": function}, workers=workers, limit_s=limit_s)


def load_judge(function: str) -> Judge:
    """Import the user's function; runs in a worker."""
    judge = load(function)
    if not callable(judge):
        raise TypeError(f"{function} is not a function")
    return judge
