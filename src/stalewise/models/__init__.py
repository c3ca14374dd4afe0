"""Models: loading, attention, fast operators and GPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalewise.models.loading import resolve_model

__all__ = ["resolve_model"]


def __getattr__(name: str) -> Any:
    if name == "resolve_model":
        from stalewise.models.loading import resolve_model

        return resolve_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
