"""The layers of a model for the learner: compiled where that pays, else each norm made one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stalewise.compilation import compile_layers, compiling_pays
from stalewise.config import RunConfig
from stalewise.norms import fuse_norms


def quicken_layers(model: Any, config: RunConfig, *, is_sharded: bool, say: Callable[[str], object]) -> bool:
    """Make the layers as fast as they can be for this run; whether they are compiled.

    Those whose weights lie on several ranks are left as they are: what either gains there was never measured.
    """
    compiled = not is_sharded and compiling_pays(config, model)
    if compiled:
        compile_layers(model, config.learner.keep_activations)
    elif config.learner.keep_activations < 1:
        say("learner.keep_activations changes nothing here: it is for compiled layers")
    if model.device.type == "cuda" and not (compiled or is_sharded):
        fuse_norms(model)
    return compiled
