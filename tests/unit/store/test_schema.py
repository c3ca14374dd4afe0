"""The schema: rollouts survive it, other tools read it, and unusable rollouts are refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise import store
from stalewise.errors import StoreError
from stalewise.store import schema
from stalewise.types import POLICY, FinishReason, Rollout, SamplerSettings, Segment
from stored_rollouts import make_rollouts, same

surrogates_too = st.text(alphabet=st.characters(exclude_categories=()), max_size=6)


token = st.integers(0, 2**31 - 1)


response = st.lists(st.tuples(token, st.floats(width=32, allow_nan=False, allow_infinity=False)), max_size=5)


@st.composite
def rollout_lists(draw: st.DrawFn) -> list[Rollout]:
    ids = draw(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=5))
    return [
        dataclasses.replace(
            make_rollouts(0, 1)[0],
            rollout_id=rollout_id,
            prompt_id=draw(st.text(max_size=5)),
            prompt_ids=tuple(draw(st.lists(token, max_size=5))),
            response_ids=tuple(t for t, _ in pairs),
            behaviour_logp=tuple(logp for _, logp in pairs),
            reward=draw(st.floats(allow_infinity=False)),
            reward_parts=draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=2)),
            finish_reason=draw(st.sampled_from(FinishReason)),
            sampler=draw(
                st.builds(
                    SamplerSettings,
                    name=st.text(max_size=3),
                    temperature=st.floats(0, 2),
                    weights=st.sampled_from(("exact", "fp8", "int8")),
                    policy=st.text(max_size=3),
                )
            ),
            text=draw(surrogates_too),
        )
        for rollout_id, pairs in zip(sorted(ids), (draw(response) for _ in ids), strict=True)
    ]


@given(rollout_lists())
def test_rollouts_survive_arrow_and_parquet(rollouts: list[Rollout]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.table_from_rollouts(rollouts), sink, row_group_size=2)
    table = pq.read_table(pa.BufferReader(sink.getvalue()))
    assert table.schema.equals(schema.SCHEMA, check_metadata=True)
    back = list(schema.rollouts_from_table(table))
    for rollout, read in zip(rollouts, back, strict=True):
        if not any("\ud800" <= c <= "\udfff" for c in rollout.text):
            assert same(rollout, read)
        else:
            assert same(dataclasses.replace(rollout, text=read.text), read)
            read.text.encode()


def test_surrogates_become_replacement_characters_except_in_identities() -> None:
    one = make_rollouts(0, 1)[0]
    for text, stored in [("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "😀"), ("\udc00", "\ufffd")]:
        changed = dataclasses.replace(one, text=text, reward_error=text)
        (read,) = schema.rollouts_from_table(schema.table_from_rollouts([changed]))
        assert (read.text, read.reward_error) == (stored, stored)
    with pytest.raises(StoreError, match="column prompt_id"):
        schema.table_from_rollouts([dataclasses.replace(one, prompt_id="\ud800")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behaviour_logp": (-1.0,)}, "rollout 5 has 5 response tokens but 1 behaviour log-prob"),
        ({"behaviour_logp": (-1.0, -1.0, math.nan, 0.0, 0.0)}, "rollout 5: .* response token 2 is not finite"),
        ({"behaviour_logp": (-1.0, -1.0, 0.0, -1e300, 0.0)}, "rollout 5: .* response token 3 is not finite"),
        ({"reward": math.inf}, "rollout 5 has reward inf"),
        ({"rollout_id": 4}, "rollout 4 comes after rollout 4"),
        ({"response_ids": (0, 1, 2, 3, 2**31)}, "column response_ids cannot hold"),
        ({"seed": 2**63}, r"column sampler\.seed cannot hold"),
        ({"version_first": 2**31}, "column version_first cannot hold"),
    ],
)
def test_useless_rollouts_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    rollouts = make_rollouts(4, 3)
    rollouts[1] = dataclasses.replace(rollouts[1], **change)  # pyright: ignore[reportArgumentType]
    with pytest.raises(StoreError, match=message):
        store.write_shard(tmp_path / "g000000-v000000", 0, rollouts)
    assert not (tmp_path / "g000000-v000000").exists()


def test_other_tools_open_a_shard_as_it_is(batch: store.Batch, tmp_path: Path) -> None:
    files = [str(store.shard_path(batch.directory, shard.index)) for shard in batch.manifest.shards]
    expected = make_rollouts(1000, 1800)
    frame = pd.read_parquet(files[0])
    assert frame["behaviour_logp"].iloc[7].dtype == np.float32
    assert frame["response_ids"].iloc[7].tolist() == list(expected[7].response_ids)
    assert frame["reward"].isna().tolist() == [math.isnan(r.reward) for r in expected[:600]]
    assert frame["sampler"].iloc[0]["temperature"] == 0.7 and frame["sampler"].iloc[5]["seed"] == expected[5].seed
    assert {p["name"]: p["value"] for p in frame["reward_parts"].iloc[1]} == {"correct": 1.0, "format": 0.25}

    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    assert len(loaded) == 1800
    row = loaded[1234]
    assert row["text"] == expected[1234].text
    assert row["behaviour_logp"] == list(expected[1234].behaviour_logp)
    assert row["reward_parts"] == [{"name": "correct", "value": 0.0}, {"name": "format", "value": 0.25}]


def make_episodes(first: int, count: int) -> list[Rollout]:
    """Rollouts of which every other one has a tool's answer between two turns."""
    return [
        dataclasses.replace(
            one,
            response_ids=(1, 2, 3, 4, 5),
            behaviour_logp=(-1.0, -0.5, 0.0, 0.0, -2.0),
            segments=(Segment(POLICY, 2), Segment("tool", 2), Segment(POLICY, 1)) if one.rollout_id % 2 else (),
        )
        for one in make_rollouts(first, count)
    ]


def test_episodes_survive_the_store_with_their_masks(tmp_path: Path) -> None:
    directory = tmp_path / "g000003-v000064"
    episodes = [*make_episodes(0, 300), *make_rollouts(300, 100)]
    store.write_shard(directory, 0, episodes[:300])
    store.write_shard(directory, 1, episodes[300:])  # one turn each: a shard of the first format
    manifest = store.commit_batch(directory, shards=2, task="x")
    assert [shard.format for shard in manifest.shards] == [store.EPISODES, store.FORMAT]
    assert manifest.format == store.EPISODES
    batch = store.open_batch(directory)
    assert all(same(a, b) for a, b in zip(episodes, batch.iter_rollouts(), strict=True))
    rows = batch.take([7, 2, 299, 301])
    masks = [rows.is_trained(row).tolist() for row in range(4)]
    assert masks[:3] == [[True, True, False, False, True], [True] * 5, [True, True, False, False, True]]
    assert masks[3] == [True] * len(episodes[301].response_ids)
    assert rows.trained_lengths.tolist() == [3, 5, 3, len(episodes[301].response_ids)]
    # 150 episodes with 3 own tokens of 5 in 2 turns, 150 of one turn.
    assert manifest.shards[0].tokens == 150 * 3 + 150 * 5
    assert (manifest.shards[0].extra["outside_tokens"], manifest.shards[0].extra["turns"]) == (300, 450)
    assert manifest.tokens == 1200 + sum(len(one.response_ids) for one in episodes[300:])


def test_one_turn_costs_no_byte_more(tmp_path: Path) -> None:
    plain = make_rollouts(0, 50)
    said = [
        dataclasses.replace(one, segments=(Segment(POLICY, len(one.response_ids)),) if one.response_ids else ())
        for one in plain
    ]
    tables = [schema.table_from_rollouts(rollouts) for rollouts in (plain, said)]
    assert all(table.schema.equals(schema.SCHEMA, check_metadata=True) for table in tables)
    files = [tmp_path / f"g00000{number}-v000000" for number in range(2)]
    for directory, rollouts in zip(files, (plain, said), strict=True):
        store.write_shard(directory, 0, rollouts)
    assert len({store.shard_path(directory, 0).read_bytes() for directory in files}) == 1
    # The segments of an episode take about a byte each, since they repeat.
    rows = make_episodes(0, 256)
    with_segments, without = tmp_path / "g000002-v000000", tmp_path / "g000003-v000000"
    store.write_shard(with_segments, 0, rows)
    store.write_shard(without, 0, [dataclasses.replace(one, segments=()) for one in rows])
    sizes = [store.shard_path(directory, 0).stat().st_size for directory in (with_segments, without)]
    assert sizes[0] - sizes[1] < 256 * 8


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((Segment(POLICY, 2), Segment("tool", 2)), "rollout 1 has 5 response tokens but segments of .2, 2."),
        ((Segment(POLICY, 5), Segment("tool", 0)), "but segments of .5, 0."),
        ((Segment("tool", 5),), "rollout 1 has no token of the policy"),
        ((Segment(POLICY, 1), Segment("tool", 4)), "log-probabilities of tokens from outside"),
    ],
)
def test_segments_that_do_not_describe_the_tokens_are_refused(segments: tuple[Segment, ...], message: str) -> None:
    rollouts = make_episodes(0, 2)
    with pytest.raises(StoreError, match=message):
        schema.table_from_rollouts([rollouts[0], dataclasses.replace(rollouts[1], segments=segments)])
