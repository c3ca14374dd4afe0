"""The rollout browser and its local server: reads a run directory and nothing else. Imports no torch."""

from stalewise.browser.server import RunServer, make_server

__all__ = ["RunServer", "make_server"]
