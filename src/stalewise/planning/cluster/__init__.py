"""Compares schedules on a cluster described by measured rates: formulas, checked by a simulation."""
