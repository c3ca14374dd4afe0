"""The report: reads run directories and writes one HTML page that needs no network. Imports no torch."""

from stalewise.report.render import write_report

__all__ = ["write_report"]
