"""Calibration: what a short probe costs and a sweep of runs survives, kept in a file, and the plans made from it."""
