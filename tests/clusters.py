"""A small cluster, and clusters drawn at random."""

from __future__ import annotations

import numpy as np

from stalewise.planning.cluster_hardware import (
    Cluster,
    FailureRates,
    GenerationRates,
    LearningRates,
    ResponseLengths,
    ScheduleSettings,
    TransferRates,
)

SMALL = Cluster(
    devices=4,
    generation=GenerationRates(
        tokens_per_second=4000.0, slots=32, tokens_per_second_alone=250.0, seconds_per_batch=0.5
    ),
    lengths=ResponseLengths(mean=500.0, sigma=0.7, most=2048, prompt=50.0),
    learning=LearningRates(tokens_per_second=3000.0, rollouts_per_update=32, seconds_per_update=0.1),
    schedule=ScheduleSettings(updates=64, updates_per_generation=4, stages=2, pipelined_updates_per_generation=8),
    transfer=TransferRates(1e9, 1e9, 1e9, 5e3, wake_up_seconds=1.0),
)


def drawn_cluster(number: int) -> Cluster:
    """A setting from the range for which the tolerance is stated."""
    random = np.random.default_rng(number)
    slots, mean = int(random.choice([16, 64, 256])), float(random.choice([300.0, 1500.0, 4000.0]))
    full = float(random.choice([2000.0, 12500.0]))
    return Cluster(
        devices=int(random.choice([2, 4, 8])),
        generation=GenerationRates(full, slots, full / slots * float(random.choice([2.0, 5.0]))),
        lengths=ResponseLengths(mean, float(random.uniform(0.2, 1.0)), 8192, prompt=100.0),
        learning=LearningRates(float(random.choice([2000.0, 9000.0])), int(random.choice([32, 128]))),
        schedule=ScheduleSettings(updates=32, updates_per_generation=4, stages=2, pipelined_updates_per_generation=4),
        transfer=TransferRates(15e9, 5e10, 5e9, 5e4, wake_up_seconds=5.0),
        failures=FailureRates(float(random.choice([0.0, 0.05])), 60.0, 1e10, checkpoint_every=8),
    )
