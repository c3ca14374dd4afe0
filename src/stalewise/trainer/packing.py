"""Packs rollouts into one row of tokens: each prompt once, followed by all of its responses. Host arrays only.

For CUDA graphs, rows are padded to a few common sizes, and may be split into two halves that run on two streams.

Axes: B responses, P prompts, S segments (prompts and responses), N all response tokens, T tokens of a row, M keys of
all segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stalewise.store import RolloutColumns

# Sizes of padded rows. Padding tokens cost time: at most 5%, except below 640 tokens, where sizes are one step apart.
# Padding keys are only copied; their number per token varies less than their number.
SIZE_STEP, TOKEN_RATIO, KEY_RATIO = 32, 1.05, 1.25
# Two halves may cost this much more than the whole: a prompt may be in both, or they may be unequal.
HALVES_RATIO = 1.02


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row of segments. A segment has its own queries, and keys that end with its own tokens."""

    input_ids_T: np.ndarray
    query_S: np.ndarray  # queries of each segment
    key_S: np.ndarray  # keys of each segment
    key_M: np.ndarray  # token of each key
    source_N: np.ndarray  # token whose output predicts each response token


def pack(part: RolloutColumns, prompt_B: np.ndarray) -> PackedRow:
    """Pack rollouts into one row, without the last token of each response. Rollouts of one prompt must be adjacent."""
    first_B = np.flatnonzero(np.diff(prompt_B, prepend=-1))  # the first response of each prompt
    prompt_P, own_B = part.prompt_lengths[first_B], part.response_lengths - 1

    is_first = np.zeros(len(part), dtype=np.int64)
    is_first[first_B] = prompt_P
    response_start = np.cumsum(own_B + is_first) - own_B
    prompt_start = response_start[first_B] - prompt_P

    row_N, column_N = rows_and_columns(part.response_lengths)
    last_of_prompt_B = (prompt_start + prompt_P - 1)[prompt_B]
    source_N = np.where(column_N == 0, last_of_prompt_B[row_N], response_start[row_N] + column_N - 1)

    input_ids = np.zeros(int(prompt_P.sum() + own_B.sum()), dtype=np.int64)
    input_ids[ranges(prompt_start, prompt_P)] = np.concatenate([part.prompt(int(row)) for row in first_B])
    input_N = column_N < own_B[row_N]
    input_ids[(response_start[row_N] + column_N)[input_N]] = part.response_ids[input_N]

    # Segments in the order of their tokens; a response of one token has no segment.
    start_S = np.concatenate([prompt_start, response_start[own_B > 0]])
    query_S = np.concatenate([prompt_P, own_B[own_B > 0]])
    shared_S = np.concatenate([np.zeros_like(prompt_P), prompt_P[prompt_B][own_B > 0]])  # keys of the prompt
    shared_start_S = np.concatenate([prompt_start, prompt_start[prompt_B][own_B > 0]])
    order = np.argsort(start_S)
    start_S, query_S, shared_S, shared_start_S = (x[order] for x in (start_S, query_S, shared_S, shared_start_S))
    both = np.stack([shared_S, query_S], axis=1).ravel()
    key_M = ranges(np.stack([shared_start_S, start_S], axis=1).ravel(), both)
    return PackedRow(input_ids, query_S, shared_S + query_S, key_M, source_N)


def order_by_prompt(rows: RolloutColumns) -> tuple[np.ndarray, np.ndarray]:
    """An order of the rows in which those of one prompt are adjacent, and the tokens that each row adds."""
    prompt_B = prompt_numbers(rows)
    order = np.argsort(prompt_B, kind="stable")
    return order, _cost(rows.prompt_lengths[order], rows.response_lengths[order], prompt_B[order])


def _cost(prompt_length_B: np.ndarray, response_length_B: np.ndarray, prompt_B: np.ndarray) -> np.ndarray:
    """Tokens that each row adds to those before it."""
    is_first = np.diff(prompt_B, prepend=-1) != 0
    return response_length_B - 1 + np.where(is_first, prompt_length_B, 0)


def prompt_numbers(rows: RolloutColumns) -> np.ndarray:
    """Numbers of the distinct prompts, in order of appearance, [B]."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(rows.prompt(row).tobytes(), len(numbers)) for row in range(len(rows))])


def split_in_halves(part: RolloutColumns) -> list[tuple[RolloutColumns, np.ndarray]]:
    """Two halves with about equally many tokens, or the whole if halves cost too much; each with its prompt numbers."""
    prompt_B = prompt_numbers(part)
    cost_B = _cost(part.prompt_lengths, part.response_lengths, prompt_B)
    left, whole = np.cumsum(cost_B)[:-1], int(cost_B.sum())
    # A prompt with responses in both halves is in both.
    right = whole - left + np.where(np.diff(prompt_B) == 0, part.prompt_lengths[1:], 0)
    larger = np.maximum(left, right)
    if len(part) < 2 or 2 * larger.min() > HALVES_RATIO * whole:
        return [(part, prompt_B)]
    cut = int(larger.argmin()) + 1
    return [
        (part.take(np.arange(start, stop)), prompt_B[start:stop] - prompt_B[start])
        for start, stop in ((0, cut), (cut, len(part)))
    ]


def pad_to_common_size(rows: Sequence[PackedRow]) -> list[PackedRow]:
    """Pad all rows to the same size, which is one of a few."""
    tokens = size_above(max(len(row.input_ids_T) for row in rows), TOKEN_RATIO)
    keys = tokens
    while keys < max(len(row.key_M) + tokens - len(row.input_ids_T) for row in rows):
        keys = SIZE_STEP * math.ceil(keys * KEY_RATIO / SIZE_STEP)
    padded = [_padded(row, tokens, keys) for row in rows]
    segments = 1 << max(len(row.query_S) for row in padded).bit_length()
    extra = [(0, segments - len(row.query_S)) for row in padded]
    return [
        replace(row, query_S=np.pad(row.query_S, more), key_S=np.pad(row.key_S, more))
        for row, more in zip(padded, extra, strict=True)
    ]


def _padded(row: PackedRow, tokens: int, keys: int) -> PackedRow:
    """Add segments for the padding of queries and keys, none longer than the longest real segment.

    Padding queries attend to arbitrary tokens; spreading these keeps any one token from having many copies.
    """
    padding = tokens - len(row.input_ids_T)
    extra_query = _pieces(padding, int(row.query_S.max()))
    unused = _pieces(keys - len(row.key_M) - padding, int(row.key_S.max()))  # keys without a query
    return PackedRow(
        np.pad(row.input_ids_T, (0, padding)),
        np.concatenate([row.query_S, extra_query, np.zeros_like(unused)]),
        np.concatenate([row.key_S, extra_query, unused]),
        np.concatenate([row.key_M, np.arange(keys - len(row.key_M)) % tokens]),
        row.source_N,
    )


def _pieces(total: int, most: int) -> np.ndarray:
    """`total` in pieces of `most`, and a remainder."""
    whole, rest = divmod(total, most)
    return np.array([most] * whole + [rest] * (rest > 0), dtype=np.int64)


def size_above(number: int, ratio: float) -> int:
    """The next of few sizes, all multiples of SIZE_STEP, each at most `ratio` times or one step above the last."""
    size = SIZE_STEP
    while size < number:
        size = max(size + SIZE_STEP, int(size * ratio) // SIZE_STEP * SIZE_STEP)
    return size


def rows_and_columns(length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Response of each response token, and its index within the response, [N] each."""
    row_N = np.repeat(np.arange(len(length_B)), length_B)
    return row_N, np.arange(len(row_N)) - (np.cumsum(length_B) - length_B)[row_N]


def ranges(start_S: np.ndarray, length_S: np.ndarray) -> np.ndarray:
    """Concatenated ranges: start, start + 1, … of each segment."""
    segment, column = rows_and_columns(length_S)
    return start_S[segment] + column
