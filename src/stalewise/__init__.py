"""stalewise: reinforcement-learning post-training of language models on stale rollouts.

    config = stalewise.load_config("config.toml")
    result = stalewise.run(config)

The verbs `run`, `generate`, `learn`, `evaluate` and `report` are functions. Nothing heavy is imported before one of
them is called: `import stalewise` takes no torch along.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalewise.config import RunConfig, load_config, make_config
    from stalewise.report import write_report as report
    from stalewise.run import run
    from stalewise.rundirectory import RunResult
    from stalewise.verbs import evaluate, generate, learn

__version__ = "0.1.0"

__all__ = [
    "RunConfig",
    "RunResult",
    "__version__",
    "evaluate",
    "generate",
    "learn",
    "load_config",
    "make_config",
    "report",
    "run",
]

_NAMES = {
    "RunConfig": "config",
    "load_config": "config",
    "make_config": "config",
    "RunResult": "rundirectory",
}
# Each verb is also the name of a room, and Python puts an imported room into the package under its name. So it is the
# room itself that can be called: `stalewise.run(config)` and `from stalewise.run import Conductor` work in any order.
_VERBS = {
    "run": ("run", "run"),
    "generate": ("verbs", "generate"),
    "learn": ("verbs", "learn"),
    "evaluate": ("verbs", "evaluate"),
    "report": ("report", "write_report"),
}


class _Verb(ModuleType):
    """A room that is called by its verb."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        module, function = _VERBS[self.__name__.rpartition(".")[2]]
        return getattr(import_module(f"{__name__}.{module}"), function)(*arguments, **options)


class _Package(ModuleType):
    """Makes verbs of rooms when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _VERBS and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return import_module(f"{__name__}.{name}")
    if name in _NAMES:
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
