"""Errors for users. Each is also a standard exception, so `except ValueError` works.

A message says what is wrong, where, and what to do. The command line prints it as one line and exits with `exit_code`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StalewiseError(Exception):
    """An error caused by the input or the environment, not by a bug."""

    exit_code = 2


class ConfigError(StalewiseError, ValueError):
    """A setting that is unknown, of the wrong type, or contradicts another one."""


class TaskError(StalewiseError, ValueError):
    """A task that has no prompts, cannot be loaded, or whose verifier does not work."""


class ModelError(StalewiseError, ValueError):
    """A model directory that is missing, incomplete, or not a causal language model with a usable tokenizer."""


class StoreError(StalewiseError, RuntimeError):
    """Rollouts, checkpoints or a run directory that are corrupt, incomplete, in use or of another format."""


class EngineError(StalewiseError, RuntimeError):
    """An engine that is missing, does not answer, lacks a required feature, or has the wrong weights."""


class HubError(StalewiseError, RuntimeError):
    """A hub that cannot be reached, or refuses the login or the upload."""


class CalibrationError(StalewiseError, LookupError):
    """A model, or a point in the (S, T) plane, for which the law was never fitted."""

    exit_code = 3


class RankError(StalewiseError, RuntimeError):
    """Ranks that see different files, or a rank that ended."""

    exit_code = 5


class StoppedByFirst(RankError):
    """The first rank has ended the run and printed why; the other ranks print nothing."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the first rank has ended the run")
        self.exit_code = exit_code


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant.

    >>> nearest("grpoo", ["grpo", "dapo"])
    'did you mean grpo?'
    >>> nearest("xyz", ["grpo", "dapo"])
    'known: dapo, grpo'
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


def visible(text: str) -> str:
    """Text with control characters and other unprintable characters as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
