"""Rollouts by column agree with the other ways of reading."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from stalewise import store
from stalewise.store.columns import concatenate
from stored_rollouts import make_rollouts, same


def test_every_way_of_reading_agrees(batch: store.Batch) -> None:
    expected = make_rollouts(1000, 1800)
    assert len(batch) == 1800
    assert all(same(a, b) for a, b in zip(expected, batch.iter_rollouts(), strict=True))
    rows = concatenate(list(batch.iter_rows()))
    assert rows.rollout_id.tolist() == [r.rollout_id for r in expected]
    for i in (0, 255, 256, 599, 600, 1799):
        assert rows.response(i).tolist() == list(expected[i].response_ids)
        assert rows.logp(i).tolist() == list(expected[i].behaviour_logp)
        assert rows.prompt(i).tolist() == list(expected[i].prompt_ids)
    assert rows.truncated.tolist() == [r.truncated for r in expected]
    assert np.array_equal(rows.reward, [r.reward for r in expected], equal_nan=True)
    assert np.array_equal(batch.column("reward"), rows.reward, equal_nan=True)
    assert batch.column("response_length").tolist() == rows.response_lengths.tolist()
    assert batch.column("prompt_length").tolist() == rows.prompt_lengths.tolist()
    assert batch.column("finish_reason").tolist() == [str(r.finish_reason) for r in expected]
    for record, rollout in zip(batch.iter_records(["rollout_id", "reward"]), expected, strict=True):
        reward = None if math.isnan(rollout.reward) else rollout.reward
        assert record == {"rollout_id": rollout.rollout_id, "reward": reward}
    for part in (rows, next(batch.iter_rows()), batch.take([1000])):  # torch.from_numpy wants writable arrays
        arrays = [getattr(part, f.name) for f in dataclasses.fields(part)]
        assert all(array.flags.writeable for array in arrays if array is not None)
