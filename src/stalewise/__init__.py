"""stalewise: reinforcement-learning post-training of language models on stale rollouts.

    config = stalewise.load_config("config.toml")
    result = stalewise.run(config)

`run`, `generate`, `learn`, `evaluate` and `report` are functions. `import stalewise` does not import torch: a name is
loaded when it is first used.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stalewise.api import evaluate, generate, learn, run
    from stalewise.config import RunConfig, load_config, make_config
    from stalewise.config.run_directory import RunResult
    from stalewise.reporting import write_report as report

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

_WHERE = {
    "RunConfig": "config",
    "RunResult": "config.run_directory",
    "evaluate": "api",
    "generate": "api",
    "learn": "api",
    "load_config": "config",
    "make_config": "config",
    "report": "reporting:write_report",
    "run": "api",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        if old := sys.modules.get(f"{__name__}.{name}"):  # one of _MOVED
            return old
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, renamed = _WHERE[name].partition(":")
    value = getattr(import_module(f"{__name__}.{module}"), renamed or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# Module paths that earlier documents showed. They warn, and go after one release.
_MOVED = {
    "checkpoints": "store.checkpoints",
    "compare": "reporting.compare",
    "diagnostics": "objectives.diagnostics",
    "files": "store.atomic",
    "generate.loop": "rollout.generate",
    "hub": "integrations.hub",
    "staleness.step_control": "objectives.batch_statistics",
    "workers.worker": "rollout.workers.worker",
}


def _alias(old: str, new: str) -> ModuleType:
    def read(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        warnings.warn(f"{old} has moved: import {new}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)

    module = ModuleType(old, f"Moved to `{new}`.")
    vars(module)["__getattr__"] = read
    return module


for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = _alias(f"{__name__}.{_old}", f"{__name__}.{_new}")
