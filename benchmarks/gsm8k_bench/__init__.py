"""The parts of benchmarks/gsm8k.py."""
