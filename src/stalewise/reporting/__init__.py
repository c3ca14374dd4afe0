"""Reads run directories: report, comparison, status and rollout browser. Imports no torch, and plotly on first use."""
