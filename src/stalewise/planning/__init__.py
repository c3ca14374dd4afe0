"""Planning before a run: calibration by probe and sweep, safe learning rates, costs and memory; clusters."""
