"""Reads run directories: the HTML report, comparisons, live status and the rollout browser. Imports no torch.

plotly is imported only when a report is drawn.
"""

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
