"""Turns a name and options, as they stand in a configuration, into an object, or into an error that helps."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from stalewise.errors import TaskError, nearest


def build(kind: str, name: str, known: Mapping[str, str], options: Mapping[str, Any]) -> Any:
    """Call what `known[name]` refers to ("module:class") with the options; `kind` is for the messages."""
    if name not in known:
        raise TaskError(f"unknown {kind} {name!r}; {nearest(name, known)}")
    module, _, function = known[name].partition(":")
    factory = getattr(importlib.import_module(module), function)
    named = inspect.signature(factory).parameters
    for option in options:
        if option not in named:
            advice = nearest(option, named) if named else "it takes none"
            raise TaskError(f"{kind} {name} has no option {option!r}; {advice}")
    for parameter in named.values():
        if parameter.default is parameter.empty and parameter.name not in options:
            raise TaskError(f"{kind} {name} needs the option {parameter.name!r}")
    return factory(**options)


def need(module: str, extra: str, what: str) -> None:
    """Refuse, with the remedy, where an optional package is missing; looks without importing it."""
    try:
        missing = importlib.util.find_spec(module) is None
    except ValueError:  # blocked by a None in sys.modules
        missing = True
    if missing:
        raise TaskError(f"{what} needs the package {module}: pip install 'stalewise[{extra}]'")
