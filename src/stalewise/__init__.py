"""stalewise: reinforcement-learning post-training of language models on stale rollouts.

    result = stalewise.train(model="…", dataset=rows, reward=function, updates=64)
    result = stalewise.run(stalewise.load_config("config.toml"))

`train`, `run`, `fork`, `generate`, `learn`, `rescore`, `evaluate` and `report` are functions, `objective` a decorator.
`import stalewise` does not import torch: a name is loaded when it is first used.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stalewise.api import evaluate, evaluate_suites, fork, generate, learn, rescore, run, train
    from stalewise.config import RunConfig, load_config, make_config
    from stalewise.config.run_directory import RunResult
    from stalewise.objectives.registry import register_objective as objective
    from stalewise.reporting.render import write_report as report

__version__ = "0.2.0"

__all__ = ["RunConfig", "RunResult", "__version__", "load_config", "make_config"]
__all__ += [
    "evaluate",
    "evaluate_suites",
    "fork",
    "generate",
    "learn",
    "objective",
    "report",
    "rescore",
    "run",
    "train",
]

_MODULES: dict[str, str] = dict.fromkeys(
    ("evaluate", "evaluate_suites", "fork", "generate", "learn", "rescore", "run", "train"), "api"
)
_MODULES |= dict.fromkeys(("RunConfig", "load_config", "make_config"), "config")
_MODULES |= {"RunResult": "config.run_directory", "objective": "objectives.registry", "report": "reporting.render"}
_CALLED = {"objective": "register_objective", "report": "write_report"}  # what their modules call them


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        if old := sys.modules.get(f"{__name__}.{name}"):  # one of _MOVED
            return old
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    value = globals()[name] = getattr(module, _CALLED.get(name, name))
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
