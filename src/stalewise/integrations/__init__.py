"""Objectives, diagnostics and rollout store inside other trainers, and exports to the Hugging Face hub."""
