"""Decides what a run does next, and does it."""
