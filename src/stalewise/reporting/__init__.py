"""Reads run directories: report, comparison, status and rollout browser. Imports no torch, and plotly on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stalewise.reporting.render import write_report

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":
        from stalewise.reporting.render import write_report

        return write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
