"""What `benchmarks/scaling.py` is made of."""
