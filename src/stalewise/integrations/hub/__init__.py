"""Policies and rollouts as a hub wants them: an ordinary directory with a card, here or uploaded. Imports no torch."""

from stalewise.integrations.hub.export import export_policy, export_rollouts
from stalewise.integrations.hub.push import push

__all__ = ["export_policy", "export_rollouts", "push"]
