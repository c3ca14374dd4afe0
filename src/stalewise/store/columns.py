"""Rollouts by column, for the learner: flat token arrays with offsets, no Python object per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stalewise.types import FinishReason

# What `Rows` is made from; nothing else has to be decoded.
ROW_COLUMNS = (
    "rollout_id",
    "group",
    "prompt_ids",
    "response_ids",
    "behaviour_logp",
    "reward",
    "finish_reason",
    "version_first",
    "version_last",
)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutColumns:
    """R rollouts. Row i has the prompt `prompt_ids[prompt_offsets[i] : prompt_offsets[i + 1]]`, and so on.

    All arrays are owned and writable, so `torch.from_numpy` takes them as they are.
    """

    rollout_id: npt.NDArray[np.int64]  # [R]
    group: npt.NDArray[np.int64]  # [R]
    reward: npt.NDArray[np.float64]  # [R], NaN where the verifier failed
    truncated: npt.NDArray[np.bool_]  # [R]
    version_first: npt.NDArray[np.int32]  # [R]
    version_last: npt.NDArray[np.int32]  # [R]
    prompt_ids: npt.NDArray[np.int32]  # [all prompt tokens]
    prompt_offsets: npt.NDArray[np.int64]  # [R + 1]
    response_ids: npt.NDArray[np.int32]  # [all response tokens]
    behaviour_logp: npt.NDArray[np.float32]  # [all response tokens]
    response_offsets: npt.NDArray[np.int64]  # [R + 1]

    def __len__(self) -> int:
        return len(self.rollout_id)

    @property
    def prompt_lengths(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of each row, [R]."""
        return np.diff(self.prompt_offsets)

    @property
    def response_lengths(self) -> npt.NDArray[np.int64]:
        """Response tokens of each row, [R]."""
        return np.diff(self.response_offsets)

    def prompt(self, row: int) -> npt.NDArray[np.int32]:
        """Prompt tokens of one row (a view)."""
        return self.prompt_ids[self.prompt_offsets[row] : self.prompt_offsets[row + 1]]

    def response(self, row: int) -> npt.NDArray[np.int32]:
        """Response tokens of one row (a view)."""
        return self.response_ids[self.response_offsets[row] : self.response_offsets[row + 1]]

    def logp(self, row: int) -> npt.NDArray[np.float32]:
        """Behaviour log-probabilities of one row (a view), one per response token."""
        return self.behaviour_logp[self.response_offsets[row] : self.response_offsets[row + 1]]

    def take(self, rows: npt.ArrayLike) -> RolloutColumns:
        """Return the given rows (positions, not rollout ids) in the given order."""
        positions = np.asarray(rows, dtype=np.int64)
        prompt_places, prompt_offsets = _places(self.prompt_offsets, positions)
        response_places, response_offsets = _places(self.response_offsets, positions)
        return RolloutColumns(
            rollout_id=self.rollout_id[positions],
            group=self.group[positions],
            reward=self.reward[positions],
            truncated=self.truncated[positions],
            version_first=self.version_first[positions],
            version_last=self.version_last[positions],
            prompt_ids=self.prompt_ids[prompt_places],
            prompt_offsets=prompt_offsets,
            response_ids=self.response_ids[response_places],
            behaviour_logp=self.behaviour_logp[response_places],
            response_offsets=response_offsets,
        )


def rows_from_table(table: pa.Table) -> RolloutColumns:
    """Make `Rows` of a table that has at least ROW_COLUMNS."""
    prompt_ids, prompt_offsets = _flat(table.column("prompt_ids"), np.int32)
    response_ids, response_offsets = _flat(table.column("response_ids"), np.int32)
    behaviour_logp, _ = _flat(table.column("behaviour_logp"), np.float32)
    finish_reason = table.column("finish_reason").to_numpy()
    return RolloutColumns(
        rollout_id=numbers(table.column("rollout_id"), np.int64),
        group=numbers(table.column("group"), np.int64),
        reward=numbers(table.column("reward"), np.float64),
        truncated=np.asarray(finish_reason == FinishReason.LENGTH.value, dtype=np.bool_),
        version_first=numbers(table.column("version_first"), np.int32),
        version_last=numbers(table.column("version_last"), np.int32),
        prompt_ids=prompt_ids,
        prompt_offsets=prompt_offsets,
        response_ids=response_ids,
        behaviour_logp=behaviour_logp,
        response_offsets=response_offsets,
    )


def concatenate(parts: Sequence[RolloutColumns]) -> RolloutColumns:
    """Put the rows of several `Rows` one after the other. There must be at least one."""
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(RolloutColumns)):
        arrays = [getattr(part, name) for part in parts]
        if name.endswith("_offsets"):
            starts = np.cumsum([0] + [array[-1] for array in arrays[:-1]])
            shifted = [array[:-1] + start for array, start in zip(arrays, starts, strict=True)]
            arrays = [*shifted, starts[-1:] + arrays[-1][-1]]
        columns[name] = np.concatenate(arrays)
    return RolloutColumns(**columns)


def numbers(column: pa.ChunkedArray, dtype: type) -> npt.NDArray[Any]:
    """Copy a numeric column into a writable numpy array; null becomes NaN."""
    return np.array(column.to_numpy(), dtype=dtype)


def _flat(column: pa.ChunkedArray, dtype: type) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    values, lengths = [np.empty(0, dtype)], [np.empty(0, np.int64)]
    for chunk in column.chunks:
        values.append(chunk.flatten().to_numpy())
        lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
    offsets = np.zeros(len(column) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return np.concatenate(values), offsets


def _places(
    offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the tokens of `rows` lie in the flat array, and the offsets they get once they are gathered."""
    lengths = offsets[rows + 1] - offsets[rows]
    gathered = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=gathered[1:])
    within = np.arange(gathered[-1]) - np.repeat(gathered[:-1], lengths)
    return np.repeat(offsets[rows], lengths) + within, gathered
