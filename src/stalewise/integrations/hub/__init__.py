"""Exports policies and rollouts as directories with a card, and uploads them to a hub. Imports no torch."""

from stalewise.integrations.hub.export import export_policy, export_rollouts, push

__all__ = ["export_policy", "export_rollouts", "push"]
