"""Staleness as a budget: when rollouts are made and used, how old they get, and which learning rate that allows."""
