"""stalewise: reinforcement-learning post-training of language models on stale rollouts."""

__version__ = "0.1.0"
