"""Planning for clusters: hardware, makespan, simulation."""
