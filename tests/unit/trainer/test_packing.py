"""Rollouts in one row, padded to few sizes, or in two halves."""

from __future__ import annotations

import numpy as np

from stalewise.trainer.micro_batch import Layout, micro_batches
from stalewise.trainer.packing import pack, pad_to_common_size, prompt_numbers, ranges, size_above, split_in_halves
from trainer_inputs import (
    CPU,
    of_lengths,
    rollouts,
)


def test_sizes_grow_by_a_ratio_or_by_one_step() -> None:
    assert [size_above(number, 1.05) for number in (1, 1000, 1030, 16_000)] == [32, 1024, 1056, 16544]
    assert ranges(np.array([10, 3]), np.array([2, 3])).tolist() == [10, 11, 3, 4, 5]


def test_rows_of_one_size_have_keys_of_one_size() -> None:
    tokens_to_keys: dict[int, set[int]] = {}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.integers(2, 130, 8 * int(rng.integers(24, 33))), 64)
        rows = of_lengths(lengths, prompt=37, size=8)
        plain = pack(rows, prompt_numbers(rows))
        (row,) = pad_to_common_size([plain])
        assert len(row.key_M) <= 1.25 * (len(plain.key_M) + len(row.input_ids_T) - len(plain.input_ids_T)) + 32
        tokens_to_keys.setdefault(len(row.input_ids_T), set()).add(len(row.key_M))
    assert 4 <= len(tokens_to_keys) <= 9 and all(len(keys) == 1 for keys in tokens_to_keys.values())


def test_the_largest_decides_the_size_of_all() -> None:
    rows = [rollouts(groups=groups) for groups in (30, 3)]
    made = pad_to_common_size([pack(one, prompt_numbers(one)) for one in rows])
    assert len({(len(x.input_ids_T), len(x.key_M), len(x.query_S), len(x.key_S)) for x in made}) == 1
    for one in made:
        assert one.query_S.sum() == len(one.input_ids_T) and one.key_S.sum() == len(one.key_M)


def test_halves_are_about_as_large_and_whole_where_that_would_cost_more() -> None:
    rows = rollouts(groups=40)
    parts = [part for part, _ in split_in_halves(rows)]
    assert len(parts) == 2
    assert np.concatenate([part.rollout_id for part in parts]).tolist() == rows.rollout_id.tolist()
    costs = [next(micro_batches(part, Layout(10_000), CPU)).tokens for part in parts]
    (whole,) = micro_batches(rows, Layout(10_000), CPU)
    assert max(costs) <= 1.03 * whole.tokens / 2
    # One long prompt would pass twice, and a single rollout has no halves.
    alike = rollouts(groups=1, size=8)
    assert len(split_in_halves(alike)) == 1 and len(split_in_halves(alike.take(np.array([0])))) == 1
