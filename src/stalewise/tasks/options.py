"""Type checks of the options of tasks and verifiers: a pydantic model for each, made from the signature of its class.

An option of the wrong type is refused before anything is opened: `evaluation_path = 1` would be the descriptor of an
open file of this process.

`named_files` finds the files that options name: a task's data, and the modules of its reward functions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import is_importable

_REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[\w.]+")  # module:name

_EXPECTED = {
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "mapping_type": "expected a table",
    "dict_type": "expected a table",
    "Verifier": "expected a verifier, or the name of one",
    "Sequence": "expected a list",
    "path_type": "expected a path as text",
}


@lru_cache(maxsize=256)
def options_model(factory: Callable[..., Any]) -> type[BaseModel]:
    """The model of the options of a class or function. Nothing is converted: "3" is not a number."""
    fields: dict[str, Any] = {
        name: (_type_of(parameter), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in _signature(factory).parameters.items()
    }
    config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    aliases = {f"option_{name}": value for name, value in fields.items()}  # `json` and `copy` are methods of a model
    return create_model(f"Options of {factory.__name__}", __config__=config, **aliases)


def check_options(kind: str, name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise a TaskError for unknown, missing or wrongly typed options; `kind` and `name` are for the message."""
    parameters = _signature(factory).parameters
    for option in options:
        if option not in parameters:
            advice = nearest(option, parameters) if parameters else "it takes none"
            raise TaskError(f"{kind} {name} has no option {option!r}; {advice}")
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in options:
            raise TaskError(f"{kind} {name} needs the option {parameter.name!r}")
    try:
        options_model(factory).model_validate({f"option_{option}": value for option, value in options.items()})
    except ValidationError as error:
        raise TaskError(f"{kind} {name}: {'; '.join(_problems(error))}: correct it in the task's options") from None


def _problems(error: ValidationError) -> list[str]:
    """One sentence for each wrong option; the alternatives of a union are joined."""
    expected: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for problem in error.errors():
        option = str(problem["loc"][0]).removeprefix("option_")
        kind = problem.get("ctx", {}).get(
            "class", problem["type"]
        )  # the class that it should be an instance of, if any
        expected.setdefault(option, []).append(_EXPECTED.get(kind, problem["msg"][0].lower() + problem["msg"][1:]))
        values.setdefault(option, problem["input"])
    return [f"{name} is {values[name]!r:.60}, {' or '.join(dict.fromkeys(texts))}" for name, texts in expected.items()]


def _signature(factory: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(factory, eval_str=True)


def _type_of(parameter: inspect.Parameter) -> Any:
    annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
    # pydantic would take a text for a collection of its characters.
    return list[str] | tuple[str, ...] | set[str] | frozenset[str] if annotation == Collection[str] else annotation


# ---------------------------------------------------------------- files that options name


def named_files(options: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What each option that names a file says, and the path of that file, by the option's dotted name.

    `module:name` names the file of the module. What that file imports is not covered, nor are directories.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, text in _texts(options, ""):
        with contextlib.suppress(ValueError):  # a module that has no file; the task itself tells what it cannot find
            if (path := _file_of(text)) is not None:
                found[name] = text, path
    return found


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Every text in nested tables and lists, with its dotted name."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list):
        yield from _texts(dict(enumerate(value)), name)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{name}.{key}" if name else str(key))


def _file_of(text: str) -> str | None:
    """The path of the file that a text names, if there is one."""
    path = os.path.expanduser(text)
    if os.path.isfile(path):
        return path
    reference = _REFERENCE.fullmatch(text)
    return None if reference is None else _file_of_module(reference[1])


def _file_of_module(name: str) -> str | None:
    """The file of a module; nothing is imported, not even the package that it is in."""
    if not is_importable(name):
        return None
    package, *inner = name.split(".")
    spec = importlib.util.find_spec(package)
    for part in inner:
        if spec is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or [])
    origin = None if spec is None else spec.origin
    return origin if origin is not None and os.path.isfile(origin) else None
