"""The rollout store under real crashes and damage, opened by other people's tools, and its pure parts."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalewise import store
from stalewise.errors import StoreError
from stalewise.store.atomic import sha256_file
from stalewise.store.schema import HEAVY_COLUMNS, LIGHT_COLUMNS
from stalewise.types import FinishReason, Rollout, SamplerSettings

SOURCE = str(Path(store.__file__).parents[3])


def make_rollouts(first: int, count: int, tokens: int = 9):
    """Rollouts that are a function of their ids: a resumed batch can be compared with an undisturbed one."""
    from stalewise.types import FinishReason, Rollout, SamplerSettings

    return [
        Rollout(
            rollout_id=i,
            prompt_id=f"task/{i // 4}",
            group=i // 4,
            prompt_ids=tuple(range(i % 5)),
            response_ids=tuple((i * 7919 + k) % 50_000 for k in range(i % (tokens + 1))),
            behaviour_logp=tuple(-((i + k) % 64) / 32 for k in range(i % (tokens + 1))),
            reward=float("nan") if i % 11 == 10 else float(i % 2),
            reward_parts={"correct": float(i % 2), "format": 0.25},
            reward_error="verifier hung" if i % 11 == 10 else "",
            finish_reason=FinishReason.LENGTH if i % 3 == 0 else FinishReason.STOP,
            version_first=64,
            version_last=64,
            sampler=SamplerSettings(name="hf", precision="bfloat16", temperature=0.7, top_p=0.9, top_k=5),
            seed=2**62 + i,
            text=f"µ {i} \x00\t\n 😀",
        )
        for i in range(first, first + count)
    ]


def same(left: Rollout, right: Rollout) -> bool:
    """Equality with NaN equal to itself."""
    both_failed = math.isnan(left.reward) and math.isnan(right.reward)
    return left == (dataclasses.replace(right, reward=left.reward) if both_failed else right)


def make_batch(root: Path, shards: int = 3, rows: int = 600, tokens: int = 9, version: int = 64) -> Path:
    directory = store.batch_directory(root, version=version, generation_batch=3)
    for index in range(shards):
        store.write_shard(directory, index, make_rollouts(1000 + index * rows, rows, tokens), seconds=1.5)
    store.commit_batch(directory, shards=shards, task="arithmetic", extra={"note": "x"})
    return directory


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> store.Batch:
    return store.open_batch(make_batch(tmp_path_factory.mktemp("rollouts")))


# ---------------------------------------------------------------- round trips

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


@settings(max_examples=100, deadline=None)
@given(rollout_lists())
def test_rollouts_survive_arrow_and_parquet(rollouts: list[Rollout]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(store.table_from_rollouts(rollouts), sink, row_group_size=2)
    table = pq.read_table(pa.BufferReader(sink.getvalue()))
    assert table.schema.equals(store.SCHEMA, check_metadata=True)
    back = list(store.rollouts_from_table(table))
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
        (read,) = store.rollouts_from_table(store.table_from_rollouts([changed]))
        assert (read.text, read.reward_error) == (stored, stored)
    with pytest.raises(StoreError, match="column prompt_id"):
        store.table_from_rollouts([dataclasses.replace(one, prompt_id="\ud800")])


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


# ---------------------------------------------------------------- reading


def test_every_way_of_reading_agrees(batch: store.Batch) -> None:
    expected = make_rollouts(1000, 1800)
    assert len(batch) == 1800
    assert all(same(a, b) for a, b in zip(expected, batch.iter_rollouts(), strict=True))
    rows = store.concatenate(list(batch.iter_rows()))
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
        assert all(getattr(part, f.name).flags.writeable for f in dataclasses.fields(part))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1000, 2799), max_size=40))
def test_take_returns_the_ids_asked_for_in_order(batch: store.Batch, ids: list[int]) -> None:
    rows = batch.take(ids)
    assert rows.rollout_id.tolist() == ids
    for place, i in enumerate(ids):
        (expected,) = make_rollouts(i, 1)
        assert rows.response(place).tolist() == list(expected.response_ids)
        assert rows.logp(place).tolist() == list(expected.behaviour_logp)
        assert rows.prompt(place).tolist() == list(expected.prompt_ids)


def test_take_decodes_only_the_row_groups_it_needs(batch: store.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def count(self: pq.ParquetFile, i: int, **options: object) -> pa.Table:
        read.append(i)
        return original(self, i, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", count)
    batch.take([2799, 1000, 1255])  # the third row group of the last shard, and twice the first of the first
    assert read == [0, 2]


def test_asking_for_what_is_not_there(batch: store.Batch) -> None:
    with pytest.raises(StoreError, match="no rollout 3, 999, 2800"):
        batch.take([2800, 1000, 3, 999])
    with pytest.raises(StoreError, match="no column rewards: did you mean reward"):
        list(batch.iter_records(["rewards"]))
    with pytest.raises(StoreError, match="response_ids is not a light column"):
        batch.column("response_ids")
    assert sorted(LIGHT_COLUMNS + HEAVY_COLUMNS) == sorted(store.SCHEMA.names)


def test_streaming_memory_does_not_grow(tmp_path: Path) -> None:
    def peak(shards: int, rows: int) -> tuple[int, int]:
        opened = store.open_batch(make_batch(tmp_path / f"{shards}", shards, rows, tokens=200))
        arrow, start = 0, pa.total_allocated_bytes()
        tracemalloc.start()
        for _ in opened.iter_rows():
            arrow = max(arrow, pa.total_allocated_bytes() - start)
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return arrow, python

    peak(1, 512)  # imports and caches
    shutil.rmtree(tmp_path / "1")
    (arrow_small, python_small), (arrow_large, python_large) = peak(1, 512), peak(4, 2560)  # 20 times as many rows
    assert arrow_large < 1.5 * arrow_small
    assert python_large < 1.5 * python_small


# ---------------------------------------------------------------- crashes and damage

# For each n given: a forked process writes a batch of four shards and kills itself before its n-th fsync, rename, link.
# Forked, because most of such a process's time would go into starting Python.
WRITE = """
import os, sys
from pathlib import Path
from stalewise import store
def deadly(function):
    def call(*arguments):
        global left
        left -= 1
        if left == -1:
            os.kill(os.getpid(), 9)
        return function(*arguments)
    return call
def write(root):
    directory = store.batch_directory(root, version=64, generation_batch=3)
    root.mkdir()
    with open(root / "said", "w") as said:
        for index in range(store.next_shard(directory), 4):
            store.write_shard(directory, index, make_rollouts(index * 150, 150))
            print(index, file=said, flush=True)
        store.commit_batch(directory, shards=4, task="arithmetic")
        print("done", file=said, flush=True)
store.table_from_rollouts(make_rollouts(0, 1))  # pyarrow imports pandas at first use: not once per fork
os.fsync, os.replace, os.link = deadly(os.fsync), deadly(os.replace), deadly(os.link)
for word in sys.argv[2:]:
    left, root = int(word), Path(sys.argv[1], word)
    if (child := os.fork()) == 0:
        try:
            write(root)
        finally:
            os._exit(0)
    print(word, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def start_writer(root: Path, *kill_at: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", inspect.getsource(make_rollouts) + WRITE, str(root), *map(str, kill_at)]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def check_after_kill(root: Path, reference: dict[int, str]) -> None:
    directory, said = root / "g000003-v000064", (root / "said").read_text().split()
    present = store.committed_shards(directory)
    indices = [shard.index for shard in present]
    claimed = [int(word) for word in said if word != "done"]
    assert indices[: len(claimed)] == claimed  # what was reported committed is there
    assert len(indices) <= len(claimed) + 1 and indices == list(range(len(indices)))
    for shard in present:
        store.verify_shard(directory, shard)
        assert shard.sha256 == reference[shard.index]
    if "done" in said:
        assert store.is_committed(directory)
    if not store.is_committed(directory):
        with pytest.raises(StoreError, match=r"no committed generation batch: manifest\.json is missing"):
            store.open_batch(directory)
        for index in range(store.next_shard(directory), 4):
            store.write_shard(directory, index, make_rollouts(index * 150, 150))
        store.commit_batch(directory, shards=4, task="arithmetic")
    resumed = store.open_batch(directory)
    assert {shard.index: shard.sha256 for shard in resumed.manifest.shards} == reference


NEVER = 10**6


def test_kill_at_every_step_and_at_random_times(tmp_path: Path) -> None:
    # 1 new directory; 6 steps for each of 4 shards, 3 for the batch.
    steps = range(1 + 4 * 6 + 3)
    out, _ = start_writer(tmp_path, NEVER, *steps).communicate(timeout=60)
    codes = dict(zip(out.split()[::2], out.split()[1::2], strict=True))
    assert codes == {str(NEVER): "0", **{str(step): str(-signal.SIGKILL) for step in steps}}
    complete = store.open_batch(tmp_path / str(NEVER) / "g000003-v000064").manifest
    reference = {shard.index: shard.sha256 for shard in complete.shards}
    for step in steps:
        check_after_kill(tmp_path / str(step), reference)
    chance = random.Random(0)
    for attempt in range(3):
        root = tmp_path / f"random{attempt}"
        root.mkdir()
        process = start_writer(root, NEVER)
        first = root / str(NEVER) / "g000003-v000064" / "shard-00000.json"
        while not first.exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        check_after_kill(root / str(NEVER), reference)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.999])
def test_flipped_byte_is_found_and_the_shard_can_be_made_again(tmp_path: Path, place: float) -> None:
    directory = make_batch(tmp_path)
    path = store.shard_path(directory, 1)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-00001\.parquet is damaged: .* move the shard away and run the same"):
        store.open_batch(directory)
    path.rename(tmp_path / "moved away")
    with pytest.raises(StoreError, match=r"shard-00001\.parquet is missing"):
        store.open_batch(directory, verify=False)
    assert not store.is_committed(directory) and store.next_shard(directory) == 1
    store.write_shard(directory, 1, make_rollouts(1600, 600))
    assert store.is_committed(directory)  # the same bytes again: the manifest still holds
    assert len(list(store.open_batch(directory).iter_rollouts())) == 1800


@pytest.mark.parametrize("leftover", ["parquet", "json"])
@pytest.mark.parametrize("failing_link", [0, 1])
def test_no_leftover_is_vouched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover: str, failing_link: int
) -> None:
    # Left by an earlier crash: a shard without manifest; left by a user: the manifest of a shard that was moved away.
    directory = make_batch(tmp_path, shards=1, rows=8)
    (directory / "manifest.json").unlink()
    for suffix in {"parquet", "json"} - {leftover}:
        (directory / f"shard-00000.{suffix}").unlink()
    links, link = iter(range(9)), os.link

    def fail(source: Path, target: Path) -> None:
        if next(links) == failing_link:
            raise KeyboardInterrupt
        link(source, target)

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(KeyboardInterrupt):
        store.write_shard(directory, 0, make_rollouts(0, 8))
    assert store.committed_shards(directory) == []


def test_shard_that_comes_out_different_has_to_be_committed_anew(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, rows=8)
    store.shard_path(directory, 1).unlink()
    store.write_shard(directory, 1, make_rollouts(1008, 8, tokens=3))
    assert not store.is_committed(directory)
    manifest = store.commit_batch(directory, shards=3, task="arithmetic")
    assert store.open_batch(directory).manifest == manifest


def test_damage_that_was_not_looked_for_is_still_named(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, shards=1)
    path = store.shard_path(directory, 0)
    data = bytearray(path.read_bytes())
    data[4:-8] = bytes(len(data) - 12)
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-00000\.parquet is damaged"):
        list(store.open_batch(directory, verify=False).iter_rollouts())
    path.write_bytes(data[:-1])
    with pytest.raises(StoreError, match=r"shard-00000\.parquet is damaged"):
        store.open_batch(directory, verify=False)


def test_nothing_committed_is_written_again(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, rows=8)
    with pytest.raises(StoreError, match=r"shard-00001\.parquet is committed already"):
        store.write_shard(directory, 1, make_rollouts(0, 1))
    with pytest.raises(StoreError, match="committed already"):
        store.commit_batch(directory, shards=3, task="arithmetic")
    with pytest.raises(StoreError, match="no rollouts"):
        store.write_shard(directory, 3, [])


def test_incomplete_or_overlapping_batches_are_not_committed(tmp_path: Path) -> None:
    directory = store.batch_directory(tmp_path, version=1, generation_batch=0)
    store.write_shard(directory, 0, make_rollouts(0, 8))
    store.write_shard(directory, 2, make_rollouts(15, 8))
    assert store.next_shard(directory) == 1
    with pytest.raises(StoreError, match=r"3 shards expected, missing \[1\]"):
        store.commit_batch(directory, shards=3, task="t")
    store.write_shard(directory, 1, make_rollouts(8, 8))
    with pytest.raises(StoreError, match=r"2 shards expected, not expected \[2\]"):
        store.commit_batch(directory, shards=2, task="t")
    with pytest.raises(StoreError, match=r"shard-00002.parquet starts at rollout 15, but .* ends at 15"):
        store.commit_batch(directory, shards=3, task="t")
    assert not store.is_committed(directory)


def test_batch_manifest_adds_up(batch: store.Batch) -> None:
    expected, manifest = make_rollouts(1000, 1800), batch.manifest
    scored = [r.reward for r in expected if not math.isnan(r.reward)]
    assert (manifest.generation_batch, manifest.version, manifest.task) == (3, 64, "arithmetic")
    assert manifest.rows == 1800 and manifest.seconds == 4.5 and manifest.extra == {"note": "x"}
    assert manifest.tokens == sum(len(r.response_ids) for r in expected)
    assert manifest.prompt_tokens == sum(len(r.prompt_ids) for r in expected)
    assert manifest.reward_mean == pytest.approx(sum(scored) / len(scored), rel=1e-12)
    assert manifest.truncated == sum(r.truncated for r in expected)
    assert manifest.verifier_errors == 1800 - len(scored) > 0
    assert manifest.samplers == (expected[0].sampler,)


def test_shards_from_before_weights_and_policy_were_recorded_are_of_exact_weights_and_the_runs_own(
    tmp_path: Path,
) -> None:
    directory = make_batch(tmp_path, shards=2, rows=8)
    expected = make_rollouts(1000, 16)
    path = store.shard_path(directory, 0)
    new = pq.read_table(path)
    fields = [field for field in new.schema.field("sampler").type if field.name not in ("weights", "policy")]
    column = new.column("sampler").combine_chunks()
    old = pa.StructArray.from_arrays([column.field(field.name) for field in fields], fields=fields)
    place = new.schema.get_field_index("sampler")
    table = new.set_column(place, pa.field("sampler", old.type, nullable=False), old)
    pq.write_table(table.replace_schema_metadata(new.schema.metadata), path)

    def aged(name: str) -> dict[str, Any]:
        record = json.loads((directory / name).read_text())
        return record | {"samplers": [{field.name: record["samplers"][0][field.name] for field in fields[:-1]}]}

    shard = aged("shard-00000.json") | {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest = aged("manifest.json")
    manifest["shards"][0] = shard
    (directory / "shard-00000.json").write_text(json.dumps(shard))
    (directory / "manifest.json").write_text(json.dumps(manifest))
    batch = store.open_batch(directory)
    assert batch.manifest.samplers == (expected[0].sampler,)
    assert expected[0].sampler.weights == "exact" and expected[0].sampler.policy == ""
    assert all(same(read, made) for read, made in zip(batch.iter_rollouts(), expected, strict=True))
    assert len(batch.take([1000, 1015])) == 2


def test_other_formats_and_broken_manifests_are_refused(tmp_path: Path) -> None:
    directory = make_batch(tmp_path, shards=1, rows=8)
    path = directory / "manifest.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "a later key": 1}))
    store.open_batch(directory)
    path.write_text(json.dumps({**record, "format": "stalewise.rollouts/2"}))
    with pytest.raises(
        StoreError, match=r"has format stalewise\.rollouts/2, this stalewise reads stalewise\.rollouts/1"
    ):
        store.open_batch(directory)
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "rows"}))
    with pytest.raises(StoreError, match=r"manifest\.json is corrupt: rows missing"):
        store.open_batch(directory)
    path.write_text(json.dumps({**record, "samplers": [{"colour": "red"}]}))
    with pytest.raises(StoreError, match=r"manifest\.json is corrupt: samplers"):
        store.open_batch(directory)
    path.write_text(json.dumps(record))
    renamed = directory.rename(directory.with_name("g000003-v000065"))
    with pytest.raises(StoreError, match="generation batch 3 of version 64: the directory was renamed"):
        store.open_batch(renamed)


def test_batches_are_listed_in_order_of_generation(tmp_path: Path) -> None:
    names = ["g000002-v000064", "g1000000-v000001", "g000010-v000064", ".g000001-v000000.tmp-00", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    assert [d.name for d in store.batch_directories(tmp_path)] == [names[0], names[2], names[1]]
    assert store.batch_directories(tmp_path / "none") == []
    with pytest.raises(StoreError, match="other is not a generation batch"):
        store.parse_batch_name(tmp_path / "other")


# ---------------------------------------------------------------- ledger and selection


def test_ledger_round_trip_and_truncation(tmp_path: Path) -> None:
    path = store.ledger_path(tmp_path)
    assert store.read_ledger(path) == [] and store.consumed([]) == ()
    entries = [
        store.LedgerEntry(u, u // 2, u // 2 * 2, u % 2, store.to_ranges([4 * u, 4 * u + 1, 100 + u]), {"ess": 0.5})
        for u in range(6)
    ]
    for entry in entries:
        store.append_entry(path, entry)
    assert store.read_ledger(path) == entries
    assert store.consumed(entries, generation_batch=1) == ((8, 9), (12, 13), (102, 103))
    assert store.consumed([*entries[:1], *entries[:2]]) == ((0, 1), (4, 5), (100, 101))
    assert store.truncate_ledger(path, before=4) == 2
    assert store.read_ledger(path) == entries[:4]
    with pytest.raises(StoreError, match="extra may not hold age"):
        store.append_entry(path, dataclasses.replace(entries[4], extra={"age": 3}))
    store.append_entry(path, entries[2])
    with pytest.raises(StoreError, match="line 5: update 2 follows update 3"):
        store.read_ledger(path)
    path.write_text('{"update": 1}\n')
    with pytest.raises(StoreError, match="line 1 is not a ledger entry"):
        store.read_ledger(path)


@given(st.sets(st.integers(-(10**6), 10**6)) | st.sets(st.integers(0, 30)))
def test_ranges_hold_exactly_the_ids(ids: set[int]) -> None:
    ranges = store.to_ranges(list(ids))
    assert store.from_ranges(ranges).tolist() == sorted(ids)
    assert all(b[0] - a[1] > 1 for a, b in itertools.pairwise(ranges))


group_ids = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 50), max_size=60)


@given(group_ids, st.integers(1, 9))
def test_every_group_is_dealt_whole_and_once_in_order(groups: list[int], per_update: int) -> None:
    dealt = [rows.tolist() for rows in store.deal(groups, per_update)]
    order = [list(dict.fromkeys(groups[row] for row in rows)) for rows in dealt]
    assert [group for update in order for group in update] == sorted(set(groups))
    assert all(len(update) == per_update for update in order[:-1])
    assert sorted(row for rows in dealt for row in rows) == list(range(len(groups)))
    for rows in dealt:
        assert rows == sorted(rows, key=lambda row: (groups[row], row))


def test_an_update_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="per_update is 0"):
        store.deal([1], 0)


def test_store_imports_without_torch() -> None:
    code = "import sys, stalewise.store, stalewise.store.atomic; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": SOURCE})
