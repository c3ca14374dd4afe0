"""The schema of rollouts on disk, and conversion between `Rollout` records, columns and Arrow tables.

Token columns are flat arrays plus offsets: no Python object is made per token, except for `Rollout` records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from stalewise.errors import StoreError
from stalewise.types import POLICY, FinishReason, Rollout, SamplerSettings, Segment

FORMAT = "stalewise.rollouts/1"
EPISODES = "stalewise.rollouts/2"  # has segments: a reader that does not know them would train on what tools said
FORMATS = (FORMAT, EPISODES)
FORMAT_KEY = b"stalewise.format"


def _list_of(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item, nullable=False))


SAMPLER = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("precision", pa.string(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        # Older shards lack the next two: their rollouts have exact weights and the run's own policy.
        pa.field("weights", pa.string(), nullable=False),
        pa.field("policy", pa.string(), nullable=False),
    ]
)
# A list of pairs: `datasets` cannot open an Arrow map, and the fields of a struct would differ by task.
REWARD_PARTS = _list_of(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.float64())]))

SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("prompt_ids", _list_of(pa.int32()), nullable=False),
        pa.field("response_ids", _list_of(pa.int32()), nullable=False),
        pa.field("behaviour_logp", _list_of(pa.float32()), nullable=False),
        # The lengths are redundant; with them packing is planned without decoding any token.
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("response_length", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),  # null where the verifier failed
        pa.field("reward_parts", REWARD_PARTS, nullable=False),
        pa.field("reward_error", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("version_first", pa.int32(), nullable=False),
        pa.field("version_last", pa.int32(), nullable=False),
        pa.field("sampler", SAMPLER, nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ],
    metadata={FORMAT_KEY: FORMAT.encode()},
)
# Shards with episodes have one more column. Shards of one-turn rollouts keep the schema above.
SEGMENTS = _list_of(pa.struct([pa.field("by", pa.string(), nullable=False), pa.field("tokens", pa.int32(), False)]))
EPISODE_SCHEMA = SCHEMA.append(pa.field("segments", SEGMENTS, nullable=False)).with_metadata(
    {FORMAT_KEY: EPISODES.encode()}
)
HEAVY_COLUMNS = ("prompt_ids", "response_ids", "behaviour_logp", "reward_parts", "sampler", "text")
LIGHT_COLUMNS = tuple(name for name in SCHEMA.names if name not in HEAVY_COLUMNS)


def table_from_rollouts(rollouts: Sequence[Rollout]) -> pa.Table:
    """Make an Arrow table of the store's schema from `Rollout` records, with the checks of `table_from_columns`."""
    return table_from_columns({f.name: [getattr(r, f.name) for r in rollouts] for f in fields(Rollout)})


def table_from_columns(columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Make an Arrow table from columns named after the fields of `Rollout`; unusable values are a StoreError.

    Token columns hold one sequence per row; int32 and float32 arrays are not converted. Behaviour log-probabilities are
    stored as float32. Lone surrogates, which UTF-8 cannot hold, become U+FFFD in `text` and `reward_error` (the exact
    response is in `response_ids`); in a `prompt_id`, which must not change, they are refused. The column `segments`
    may be missing; a table has it only if one of its rollouts has tokens from outside.
    """
    _check(columns)
    prompt_ids, response_ids = columns["prompt_ids"], columns["response_ids"]
    behaviour_logp = _lists("behaviour_logp", columns["behaviour_logp"], np.float32)
    _check_finite(columns["rollout_id"], behaviour_logp)
    parts = ([{"name": k, "value": v} for k, v in row.items()] for row in columns["reward_parts"])
    arrays: dict[str, pa.Array] = {
        "prompt_ids": _lists("prompt_ids", prompt_ids, np.int32),
        "response_ids": _lists("response_ids", response_ids, np.int32),
        "behaviour_logp": behaviour_logp,
        "prompt_length": _plain("prompt_length", map(len, prompt_ids)),
        "response_length": _plain("response_length", map(len, response_ids)),
        "reward": _plain("reward", (None if math.isnan(value) else value for value in columns["reward"])),
        "reward_parts": _plain("reward_parts", parts),
        "reward_error": _plain("reward_error", map(_storable, columns["reward_error"])),
        "finish_reason": _plain("finish_reason", map(str, columns["finish_reason"])),
        "sampler": _samplers(columns["sampler"], columns["seed"]),
        "text": _plain("text", map(_storable, columns["text"])),
    }
    for name in ("rollout_id", "prompt_id", "group", "version_first", "version_last"):
        arrays[name] = _plain(name, columns[name])
    segments = _segments(columns)
    if not any(segments):
        return pa.Table.from_arrays([arrays[name] for name in SCHEMA.names], schema=SCHEMA)
    records = [[{"by": _storable(segment.by), "tokens": segment.tokens} for segment in row] for row in segments]
    arrays["segments"] = _convert("segments", lambda: pa.array(records, SEGMENTS))
    return pa.Table.from_arrays([arrays[name] for name in EPISODE_SCHEMA.names], schema=EPISODE_SCHEMA)


def rollouts_from_table(table: pa.Table) -> Iterator[Rollout]:
    """Make `Rollout` records of a table that has all columns of the schema."""
    samplers: dict[tuple[Any, ...], SamplerSettings] = {}
    names = [name for name in SCHEMA.names if name not in ("prompt_length", "response_length")]
    names += ["segments"] if "segments" in table.column_names else []
    for values in zip(*(table.column(name).to_pylist() for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        settings = row.pop("sampler")
        seed = settings.pop("seed")
        key = tuple(settings.values())
        if key not in samplers:  # thousands of rows share one object
            samplers[key] = SamplerSettings(**settings)
        for name in ("prompt_ids", "response_ids", "behaviour_logp"):
            row[name] = tuple(row[name])
        row["reward"] = math.nan if row["reward"] is None else row["reward"]
        row["reward_parts"] = {part["name"]: part["value"] for part in row["reward_parts"]}
        row["finish_reason"] = FinishReason(row["finish_reason"])
        row["segments"] = tuple(Segment(segment["by"], segment["tokens"]) for segment in row.get("segments", ()))
        yield Rollout(**row, sampler=samplers[key], seed=seed)


def _check(columns: Mapping[str, Sequence[Any]]) -> None:
    previous = None
    names = ("rollout_id", "response_ids", "behaviour_logp", "reward")
    for rollout_id, response_ids, logp, reward in zip(*(columns[name] for name in names), strict=True):
        name = f"rollout {rollout_id}"
        if len(logp) != len(response_ids):
            tokens, values = len(response_ids), len(logp)
            raise StoreError(f"{name} has {tokens} response tokens but {values} behaviour log-probabilities")
        if math.isinf(reward):
            raise StoreError(f"{name} has reward {reward}: give a finite number, or NaN and a reward_error")
        if previous is not None and rollout_id <= previous:
            raise StoreError(f"{name} comes after rollout {previous}: rollout ids must rise within a shard")
        previous = rollout_id


def _segments(columns: Mapping[str, Sequence[Any]]) -> list[tuple[Segment, ...]]:
    """The segments of each rollout, none for one turn; StoreError where they do not describe its tokens."""
    checked: list[tuple[Segment, ...]] = []
    names = ("rollout_id", "response_ids", "behaviour_logp")
    rows = zip(columns.get("segments", [()] * len(columns["rollout_id"])), *(columns[n] for n in names), strict=True)
    for segments, rollout_id, response_ids, logp in rows:
        checked.append(() if all(segment.by == POLICY for segment in segments) else tuple(segments))
        if not segments:
            continue
        if min(segment.tokens for segment in segments) < 1 or sum(segment.tokens for segment in segments) != len(
            response_ids
        ):
            sizes = [segment.tokens for segment in segments]
            raise StoreError(f"rollout {rollout_id} has {len(response_ids)} response tokens but segments of {sizes}")
        if not any(segment.by == POLICY for segment in segments):
            raise StoreError(f"rollout {rollout_id} has no token of the policy: give at least one segment by policy")
        trained = np.repeat([segment.by == POLICY for segment in segments], [segment.tokens for segment in segments])
        if np.any(np.asarray(logp)[~trained]):
            raise StoreError(
                f"rollout {rollout_id} has behaviour log-probabilities of tokens from outside: give 0 there"
            )
    return checked


def _check_finite(rollout_ids: Sequence[int], behaviour_logp: pa.ListArray) -> None:
    finite = np.isfinite(behaviour_logp.values.to_numpy())
    if not finite.all():
        token = int(np.argmin(finite))
        row = int(np.searchsorted(behaviour_logp.offsets.to_numpy(), token, side="right")) - 1
        position = token - int(behaviour_logp.offsets[row].as_py())
        name = f"rollout {rollout_ids[row]}"
        raise StoreError(f"{name}: the behaviour log-probability of response token {position} is not finite")


def _convert(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (OverflowError, TypeError, ValueError) as error:  # pa.ArrowInvalid and UnicodeEncodeError are ValueErrors
        raise StoreError(f"column {name} cannot hold a value of these rollouts: {error}") from error


def _plain(name: str, values: Iterable[Any]) -> pa.Array:
    return _convert(name, lambda: pa.array(list(values), SCHEMA.field(name).type))


def _lists(name: str, lists: Sequence[Sequence[Any]], dtype: type) -> pa.ListArray:
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, lists), dtype=np.int64, count=len(lists)), out=offsets[1:])
    if offsets[-1] >= 2**31:
        raise StoreError(f"column {name} would hold {offsets[-1]:,} tokens in one shard: use smaller shards")
    if lists and all(isinstance(values, np.ndarray) and values.dtype == dtype for values in lists):
        flat = np.concatenate(lists)
    else:
        with np.errstate(over="ignore"):  # a value that float32 cannot hold becomes infinite, and is refused as such
            flat = _convert(name, lambda: np.fromiter(chain.from_iterable(lists), dtype=dtype, count=int(offsets[-1])))
    values = pa.array(flat)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=SCHEMA.field(name).type)


def _samplers(settings: Sequence[SamplerSettings], seeds: Sequence[int]) -> pa.StructArray:
    sampler_fields = list(SAMPLER)
    values = [seeds if f.name == "seed" else [getattr(sampler, f.name) for sampler in settings] for f in sampler_fields]
    arrays = [
        _convert(f"sampler.{f.name}", lambda v=v, f=f: pa.array(v, f.type))
        for v, f in zip(values, sampler_fields, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=sampler_fields)


def _storable(text: str) -> str:
    """Replace characters that UTF-8 cannot hold; a surrogate pair becomes its character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
