"""Errors a user can meet. Each is also the standard class it refines, so `except ValueError` keeps working.

A message says what is wrong, where, and what to do. The command line prints it as one line and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StalewiseError(Exception):
    """Anything that is the input's fault and not ours."""

    exit_code = 2


class ConfigError(StalewiseError, ValueError):
    """A setting that is unknown, of the wrong type, or that contradicts another one."""


class TaskError(StalewiseError, ValueError):
    """A task that has no prompts, cannot be loaded, or whose verifier does not work."""


class ModelError(StalewiseError, ValueError):
    """A model directory that is missing, incomplete, or not a causal language model with a usable tokenizer."""


class StoreError(StalewiseError, RuntimeError):
    """Rollouts, checkpoints or a run directory that are corrupt, half written, busy or of another format."""


class EngineError(StalewiseError, RuntimeError):
    """An engine that is not there, does not answer, lacks what learning needs, or has other weights than it should."""


class HubError(StalewiseError, RuntimeError):
    """A hub that cannot be reached, does not know who asks, or refuses what it is given."""


class CalibrationError(StalewiseError, LookupError):
    """The law is asked about a model, or about a place in the (S, T) plane, for which it was never fitted."""

    exit_code = 3


class RankError(StalewiseError, RuntimeError):
    """Ranks of one launch that see different files, or one that is no more."""

    exit_code = 5


class StoppedByFirst(RankError):
    """The first rank has ended the run and said why: no other need say anything."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the first rank has ended the run")
        self.exit_code = exit_code


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant.

    >>> nearest("grpoo", ["grpo", "dapo"])
    'did you mean grpo?'
    >>> nearest("xyz", ["grpo", "dapo"])
    'known: dapo, grpo'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
