"""Workers and figures of benchmarks/learner.py."""
