"""Verifiers by name. A verifier's module is imported when it is made."""

from __future__ import annotations

from typing import Any

from stalewise.tasks.base import Verifier, build
from stalewise.tasks.verifiers.error_counts import ErrorCounts, count_errors

__all__ = ["VERIFIERS", "ErrorCounts", "count_errors", "make_verifier"]

VERIFIERS = {
    "code": "stalewise.tasks.verifiers.code:CodeVerifier",
    "exact": "stalewise.tasks.verifiers.number:ExactVerifier",
    "function": "stalewise.tasks.verifiers.python:FunctionVerifier",
    "judge": "stalewise.tasks.verifiers.judge:JudgeVerifier",
    "math": "stalewise.tasks.verifiers.math:MathVerifier",
    "number": "stalewise.tasks.verifiers.number:NumberVerifier",
    "python": "stalewise.tasks.verifiers.python:PythonVerifier",
}


def make_verifier(name: str, **options: Any) -> Verifier:
    """Make a verifier by name: code, exact, judge, math, number or python; function is for `stalewise.train`."""
    return build("verifier", name, VERIFIERS, options)
