"""The rollout browser and its local server. Reads a run directory; imports no torch."""

from stalewise.reporting.browser.http_server import RunServer, make_server

__all__ = ["RunServer", "make_server"]
