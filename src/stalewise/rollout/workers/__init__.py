"""Several processes generate one batch: work orders, shard claims, heartbeats, and the worker process."""
