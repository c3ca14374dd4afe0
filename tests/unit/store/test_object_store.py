"""Object stores: the same commit protocol where there is no rename, against a real S3-compatible server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stalewise.api import generate, run
from stalewise.config import RunConfig, make_config
from stalewise.errors import ConfigError, StoreError
from stalewise.rollout.workers.coordinator import Coordinator
from stalewise.rollout.workers.sync import PolicySync, policy_digest
from stalewise.rollout.workers.worker import work
from stalewise.store import committed_shards, is_committed, read_ledger
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.object_store import ObjectStore, open_object_store
from stalewise.tasks.difficulty import DifficultyTable, PassCounts
from stalewise.types import NullCallback
from tiny import refused, tiny_record
from working import ordered

pytest.importorskip("moto")
SERVER = Path(__file__).parents[2] / "s3_server.py"
BATCH = "g000000-v000000"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        s3fs.S3FileSystem(endpoint_url=url).mkdir("bucket")
        yield url
    process.kill()
    process.communicate()


@pytest.fixture(params=["s3", "file", "memory"])
def object_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return open_object_store(f"file://{tmp_path}/depot")
    if request.param == "memory":
        return open_object_store(f"memory://{tmp_path.name}")
    return open_object_store(f"s3://bucket/{tmp_path.name}", {"endpoint_url": request.getfixturevalue("endpoint")})


def stored(runs: Path, endpoint: str, name: str = "tiny", **changes: Any) -> RunConfig:
    """The tiny run with a copy in the bucket, which has the name of the test's own directory."""
    storage = {"url": f"s3://bucket/{runs.parent.name}", "options": {"endpoint_url": endpoint}}
    return make_config(tiny_record(runs, name, checkpoints={"keep": 8}, storage=storage, **changes))


def depot_of(config: RunConfig) -> ObjectStore:
    return open_object_store(config.storage.url, config.storage.options)


# ---------------------------------------------------------------- what a depot can do


def test_objects_come_back_as_they_were_put(object_store: ObjectStore, tmp_path: Path) -> None:
    assert object_store.names("a") == [] and object_store.read("a/x") is None
    object_store.remove("a")
    object_store.write("a/x", b"1")
    object_store.write("a/x", b"2")
    (tmp_path / "large").write_bytes(bytes(100_000))
    object_store.upload(tmp_path / "large", "a/b/large")
    assert object_store.names("a") == ["b", "x"] and object_store.read("a/x") == b"2"
    object_store.download("a/b/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == bytes(100_000)
    with pytest.raises(StoreError, match="a/nothing is missing, though a manifest names it"):
        object_store.download("a/nothing", tmp_path / "nothing")
    object_store.remove("a/x")
    assert object_store.names("a") == ["b"]
    object_store.remove("a")
    assert object_store.names("a") == [] and object_store.read("a/b/large") is None


def test_of_many_who_create_an_object_one_does(object_store: ObjectStore) -> None:
    first: list[bytes] = []
    gate = threading.Barrier(6)

    def create(content: bytes) -> None:
        gate.wait()
        if object_store.create("claims/shard-00000-0", content):
            first.append(content)

    threads = [threading.Thread(target=create, args=(bytes([i]),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(first) == 1 and object_store.read("claims/shard-00000-0") == first[0]


def test_an_answer_that_was_lost_on_the_way_is_no_defeat(endpoint: str, tmp_path: Path) -> None:
    object_store = open_object_store(f"s3://bucket/{tmp_path.name}", {"endpoint_url": endpoint})
    assert object_store.create("claim", b"ours")
    assert object_store.create("claim", b"ours")  # the client sends it again where it got no answer
    assert not object_store.create("claim", b"theirs")


def test_what_cannot_be_reached_is_one_message(endpoint: str, runs: Path) -> None:
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    gone = open_object_store("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:1", **once})
    with pytest.raises(StoreError, match=r"s3://bucket/x/y cannot be reached: .*; check the network, the bucket and"):
        gone.write("y", b"")
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/x/y cannot be reached: .*bucket"):
        open_object_store("s3://no-such-bucket/x", {"endpoint_url": endpoint}).write("y", b"")
    with pytest.raises(ConfigError, match=r"storage\.url nothing://x: Protocol not known: nothing"):
        open_object_store("nothing://x")
    for storage, message in (
        ({"url": "bucket/run"}, "no URL: write file:///absolute/path"),
        ({"options": {"anon": True}}, "options have no meaning without a url"),
        ({"url": "s3://b/r", "options": {"secret": "x"}}, "options.secret would be written to the run directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(tiny_record(runs, storage=storage))


# ---------------------------------------------------------------- a run in a bucket


@pytest.mark.nightly
def test_a_learner_and_a_worker_with_nothing_in_common_but_a_bucket(
    tiny_run: RunConfig, runs: Path, endpoint: str
) -> None:
    config = stored(runs, endpoint, workers={"learner": "waits", "lost_after_s": 30.0})
    source = Path(__file__).parents[3] / "src"
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "stalewise", "generate", config.storage.url, "--worker", "far away", "--json"),
            *("--set", f"storage.options.endpoint_url={endpoint}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=runs.parent,
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
    )
    try:
        run(config)
        out, error = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert worker.returncode == 0, error
    (done,) = json.loads(out)
    assert (done["worker"], done["shards"], done["rollouts"], done["too_late"]) == ("far away", 4, 64, 0)
    assert policy_digest(checkpoint_directory(config.directory, 4)) == policy_digest(
        checkpoint_directory(tiny_run.directory, 4)
    )
    object_store = depot_of(config)
    assert object_store.names("rollouts") == ["g000000-v000000", "g000001-v000002"]
    assert [name[:7] for name in object_store.names("checkpoints")] == ["v000000", "v000002", "v000004"]
    manifest = json.loads(object_store.read(f"rollouts/{BATCH}/manifest.json") or b"")
    named = {shard["file"] for shard in manifest["shards"]}
    assert named == {name for name in object_store.names(f"rollouts/{BATCH}") if name.endswith(".parquet")}
    assert (
        object_store.names("work/orders")
        == object_store.names("work/claims")
        == object_store.names("work/sessions")
        == []
    )
    assert sorted(path.name for path in runs.parent.iterdir()) == ["runs"]  # the worker left nothing behind


class Interrupt(NullCallback):
    """Ctrl-C when the learner says what it is about to do for the n-th time."""

    def __init__(self, at: int) -> None:
        self.left = at

    def begin(self, what: str, total: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


# before the first stage is learned; before the second is
@pytest.mark.parametrize("at", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_run_goes_on_on_another_machine(tiny_run: RunConfig, runs: Path, endpoint: str, at: int) -> None:
    config = stored(runs, endpoint)
    with pytest.raises(KeyboardInterrupt):
        run(config, Interrupt(at))
    shutil.rmtree(runs)  # all that is left is in the bucket
    result = run(config)
    assert len(result.evaluations) == 2
    assert policy_digest(checkpoint_directory(config.directory, 4)) == policy_digest(
        checkpoint_directory(tiny_run.directory, 4)
    )
    updates = [entry.update for entry in read_ledger(config.directory / "ledger" / "updates.jsonl")]
    assert updates == [0, 1, 2, 3]


def test_what_a_run_came_to_elsewhere_is_not_replaced(runs: Path, tmp_path: Path) -> None:
    storage = {"url": f"file://{tmp_path}/depot"}
    config = make_config(tiny_record(runs, storage=storage))
    run(config)
    there, kept = PolicySync(depot_of(config)), PolicySync(depot_of(config)).published()
    config.directory.rename(tmp_path / "first")
    assert generate(config) == [] and there.published() == kept  # it goes on from there, and there is nothing to make
    shutil.rmtree(checkpoint_directory(config.directory, 4))
    with pytest.raises(StoreError, match=r"depot is at version 4, and .* at 2: the run has gone on elsewhere; remove"):
        run(config)
    (config.directory / "rollbacks" / "r000").mkdir(parents=True)  # unless it was taken back since then
    (config.directory / "rollbacks" / "r000" / "rollback.json").write_text("{}")
    Coordinator(config, "learner", print).publish()
    assert list(there.published()) == [2]
    with pytest.raises(StoreError, match=r"holds the run of another config \(seed was 0 and is 5\): choose another"):
        run(make_config({**tiny_record(runs, "other", storage=storage), "seed": 5}))


def test_half_written_objects_are_passed_over_or_named(runs: Path, endpoint: str) -> None:
    config = stored(runs, endpoint)
    object_store = depot_of(config)
    folder = f"rollouts/{BATCH}"
    object_store.write(f"{folder}/shard-00000-0123456789ab.parquet", b"half")  # no manifest: it does not exist
    (made,) = generate(config)
    assert made.rows == 32
    names = object_store.names(folder)
    assert "shard-00000-0123456789ab.parquet" not in names and len(names) == 5
    whole = next(name for name in names if name.startswith("shard-00001-"))
    object_store.write(f"{folder}/{whole}", b"half")
    shutil.rmtree(config.directory / "rollouts")
    with pytest.raises(StoreError, match=rf"{folder}/{whole} is half written or damaged: 4 bytes that are not the \d+"):
        generate(config, batch=0)
    assert not is_committed(config.directory / "rollouts" / BATCH)
    manifest = object_store.read(f"{folder}/shard-00001.json") or b""
    object_store.write(f"{folder}/shard-00001.json", manifest[:100])
    with pytest.raises(StoreError, match=r"shard-00001\.json is half written or no manifest: remove it, and the shard"):
        generate(config, batch=0)
    object_store.remove(f"{folder}/shard-00001.json")  # as the message says
    (again,) = generate(config, batch=0)
    assert [shard.sha256 for shard in again.shards] == [shard.sha256 for shard in made.shards]


def test_a_checkpoint_that_is_not_what_it_should_be_is_not_used(runs: Path, endpoint: str, tmp_path: Path) -> None:
    config = stored(runs, endpoint)
    generate(config)
    object_store, digest = depot_of(config), policy_digest(checkpoint_directory(config.directory, 0))
    sync = PolicySync(object_store)
    policy = sync.fetch_policy(0, digest, tmp_path / "cache")
    assert (policy / "model.safetensors").exists()
    (folder,) = sync.published().values()
    with pytest.raises(StoreError, match="another manifest than the order names: another policy is there"):
        sync.fetch_policy(0, digest[:-1] + ("0" if digest[-1] != "0" else "1"), tmp_path / "other")
    with pytest.raises(StoreError, match=r"is not a checkpoint: its manifest\.json is missing"):
        sync.fetch_policy(7, digest, tmp_path / "other")
    object_store.write(f"{folder}/model.safetensors", b"half")
    with pytest.raises(StoreError, match=r"model\.safetensors is half written or damaged: 4 bytes"):
        sync.fetch_policy(0, digest, tmp_path / "other")
    object_store.write(f"{folder}/manifest.json", b'{"format": "stale')
    with pytest.raises(StoreError, match="half written or no manifest"):
        sync.fetch_checkpoint(folder, tmp_path / "whole")
    assert not (tmp_path / "whole").exists() and list((tmp_path / "other" / "checkpoints").iterdir()) == []


def test_a_worker_fetches_nothing_that_only_a_learner_needs(tiny_run: RunConfig, tmp_path: Path) -> None:
    learned = shutil.copytree(tiny_run.directory, tmp_path / "run")
    version = versions(learned)[-1]
    checkpoint = checkpoint_directory(learned, version)
    record = read_json(checkpoint / "manifest.json")
    record["files"]["proximal.safetensors"] = record["files"]["optimizer_exp_avg.safetensors"]  # as of a two-anchor run
    shutil.copy(checkpoint / "optimizer_exp_avg.safetensors", checkpoint / "proximal.safetensors")
    (checkpoint / "manifest.json").write_text(json.dumps(record))
    sync = PolicySync(open_object_store(f"memory://{tmp_path.name}"))
    sync.publish_checkpoints(learned)
    policy = sync.fetch_policy(version, policy_digest(checkpoint), tmp_path / "cache")
    sync.fetch_checkpoint(sync.published()[version], tmp_path / "whole")
    left_out = {path.name for path in (tmp_path / "whole").iterdir()} - {path.name for path in policy.iterdir()}
    moments = {"optimizer_exp_avg.safetensors", "optimizer_exp_avg_sq.safetensors"}
    assert left_out == {"proximal.safetensors", *moments}


def test_a_worker_that_is_given_the_learners_directory_finds_the_bucket(runs: Path, endpoint: str) -> None:
    config = stored(runs, endpoint)
    ordered(config)
    assert work(config.directory, worker="a", once=True).shards == 2
    assert PolicySync(depot_of(config)).shards(BATCH) == {0, 1}


def test_a_worker_elsewhere_chooses_prompts_by_the_runs_own_table(runs: Path, endpoint: str, tmp_path: Path) -> None:
    plain = make_config(tiny_record(runs, "plain"))
    ids = [prompt.prompt_id for prompt in plain.make_task().prompts(0, 40)]
    table = tmp_path / "table.json"
    table.write_text(json.dumps(DifficultyTable({one: PassCounts(0, 4) for one in ids[::2]}).record()))
    config = stored(runs, endpoint, task={"difficulty": str(table), "pass_rates": [0.1, 0.9]})
    ordered(config)
    (mine,) = generate(
        make_config(tiny_record(runs, "mine", task={"difficulty": str(table), "pass_rates": [0.1, 0.9]}))
    )
    shutil.rmtree(config.directory)
    table.unlink()
    url, options = config.storage.url, {"storage.options.endpoint_url": endpoint}
    assert work(url, worker="a", once=True, overrides=options).shards == 2
    made = [json.loads(depot_of(config).read(f"rollouts/{BATCH}/shard-0000{i}.json") or b"") for i in range(2)]
    assert [one["sha256"] for one in made] == [shard.sha256 for shard in mine.shards]
    depot_of(config).remove("difficulty.json")
    with pytest.raises(StoreError, match=r"difficulty\.json is missing, the run's table of pass rates"):
        work(url, worker="b", once=True, overrides=options)


def test_of_two_who_made_a_shard_the_first_in_the_bucket_counts(runs: Path, endpoint: str) -> None:
    config = stored(runs, endpoint)
    (made,) = generate(config)
    directory, sync = config.directory / "rollouts" / BATCH, PolicySync(depot_of(config))
    before = depot_of(config).read(f"rollouts/{BATCH}/shard-00000.json")
    assert sync.publish_shard(directory, 0)  # the same bytes
    (directory / "shard-00000.parquet").write_bytes(b"as another machine rounds it")
    manifest = read_json(directory / "shard-00000.json")
    (directory / "shard-00000.json").write_text(json.dumps({**manifest, "sha256": "f" * 64}))
    assert not sync.publish_shard(directory, 0)
    assert depot_of(config).read(f"rollouts/{BATCH}/shard-00000.json") == before
    assert not any("f" * 12 in name for name in depot_of(config).names(f"rollouts/{BATCH}"))
    assert len(committed_shards(directory)) == made.rows // 16


def test_a_worker_refuses_a_bucket_without_a_run(endpoint: str) -> None:
    options = ("--set", f"storage.options.endpoint_url={endpoint}")
    message = refused("generate", "s3://bucket/nothing", "--worker", "a", "--once", *options)
    assert message == "s3://bucket/nothing holds no run: start `stalewise train` or `stalewise generate` first"
