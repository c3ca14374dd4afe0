"""Attacks on runs and on their inputs. `make attack` makes all of them, the ordinary suite a small sample."""
