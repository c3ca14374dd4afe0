"""The rollout browser and its local server: reads a run directory and nothing else. Imports no torch."""

from stalewise.reporting.browser.http_server import RunServer, make_server

__all__ = ["RunServer", "make_server"]
