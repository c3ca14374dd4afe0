"""What `benchmarks/versus_trl.py` is made of: the same work done by stalewise, by TRL and by transformers, measured."""
