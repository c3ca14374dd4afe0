"""Compiling parts of a model, where that pays: a minute's work for a GPU that trains for many."""

from __future__ import annotations

from typing import Any

from stalewise.config import RunConfig
from stalewise.kernels import can_compile

# Below these a run is over before compiled layers have earned the time that compiling takes.
WORTHWHILE_PARAMETERS = 50_000_000
WORTHWHILE_UPDATES = 512


def compiling_pays(config: RunConfig, model: Any) -> bool:
    """What `learner.compile` says; `auto`: on a GPU, for a model and a run that are large enough."""
    if config.learner.compile != "auto":
        return config.learner.compile == "always"
    large = sum(parameter.numel() for parameter in model.parameters()) >= WORTHWHILE_PARAMETERS
    long = config.schedule.updates >= WORTHWHILE_UPDATES
    return model.device.type == "cuda" and large and long and can_compile()


def compile_layers(model: Any, backend: str = "inductor") -> None:
    """Compile each layer by itself: they are alike, so one compilation serves all. Names of weights do not change."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True, backend=backend)


def compile_pieces(model: Any, backend: str = "inductor") -> None:
    """Compile what lies around attention: decoding writes to a cache on the way, which a compiler cannot follow."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(dynamic=True, backend=backend)
