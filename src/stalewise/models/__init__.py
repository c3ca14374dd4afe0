"""Models: loading, attention, fast operators and GPU kernels."""
