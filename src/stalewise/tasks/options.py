"""Type checks of the options of tasks and verifiers: a pydantic model for each, made from the signature of its class.

An option of the wrong type is refused before anything is opened: `evaluation_path = 1` would be the descriptor of an
open file of this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from stalewise.errors import TaskError, nearest

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
