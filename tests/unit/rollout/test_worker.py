"""Many processes at one generation batch: who makes what, who is lost, and who must not take part."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from stalewise.api import generate, run
from stalewise.config import RunConfig, make_config
from stalewise.rollout.workers.coordinator import Coordinator
from stalewise.rollout.workers.shard_queue import SESSIONS
from stalewise.rollout.workers.sync import policy_digest
from stalewise.rollout.workers.worker import work
from stalewise.store import (
    committed_shards,
    is_committed,
    read_batch_manifest,
)
from stalewise.store.checkpoints import checkpoint_directory
from tiny import call, refused, tiny_record, write_config
from working import judged, ordered

SOURCE = str(Path(__file__).parents[3] / "src")


BATCH = "g000000-v000000"


def checksums(run: Path, batch: str = BATCH) -> list[str]:
    return [shard.sha256 for shard in read_batch_manifest(run / "rollouts" / batch).shards]


def start(run: Path, name: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stalewise", "generate", str(run), "--worker", name, "--once", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{run.parent}", "OMP_NUM_THREADS": "1", **environment},
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)


@pytest.mark.nightly
def test_processes_share_a_batch_and_take_over_from_one_that_was_killed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = judged(runs, "shared", workers={"lost_after_s": 1.0})
    monkeypatch.syspath_prepend(str(runs))
    ordered(config)
    victim = start(config.directory, "victim", STALL=str(runs / "stalled"))
    wait_for(runs / "stalled", victim)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert len(list((config.directory / "work" / "claims").glob("*/shard-*"))) >= 1
    other = start(config.directory, "second")
    until = time.monotonic() + 60
    while not list((config.directory / SESSIONS).glob("worker.second-*")):
        assert other.poll() is None and time.monotonic() < until, other.communicate()
        time.sleep(0.02)
    third = work(config.directory, worker="third", once=True)
    out, error = other.communicate(timeout=100)
    assert other.returncode == 0, error
    done = [asdict(third), *json.loads(out)]
    shards = committed_shards(config.directory / "rollouts" / BATCH)
    assert sum(one["shards"] for one in done) == len(shards) == 8
    assert sum(one["taken_over"] for one in done) >= 1
    assert sum(one["too_late"] for one in done) == 0  # nothing was made twice
    assert {shard.extra["worker"] for shard in shards} == {"second", "third"}
    assert not list((config.directory / "work").glob("*/*/*")) and not list((config.directory / "work").glob("*/g*"))

    alone = judged(runs, "alone")
    (made,) = generate(alone)
    assert checksums(config.directory) == checksums(alone.directory) == [shard.sha256 for shard in made.shards]


def test_a_learner_that_waits_learns_the_same_from_what_workers_made(tiny_run: RunConfig, runs: Path) -> None:
    config = make_config(tiny_record(runs, checkpoints={"keep": 8}, workers={"learner": "waits", "lost_after_s": 5.0}))
    # One thread alone: transformers does not load two models at a time. Many workers are processes, as above.
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(work, config.directory, worker="a")  # before there is anything to do
        run(config)
        done = asked.result(60)
    assert (done.shards, done.rollouts, done.batches) == (4, 64, [BATCH, "g000001-v000002"])
    assert policy_digest(checkpoint_directory(config.directory, 4)) == policy_digest(
        checkpoint_directory(tiny_run.directory, 4)
    )
    assert work(config.directory).shards == 0  # the run is complete: nothing to wait for
    assert list((config.directory / "work" / "sessions").iterdir()) == []


def test_a_worker_with_another_policy_is_refused(runs: Path, tmp_path: Path) -> None:
    config = make_config(tiny_record(runs))
    order = ordered(config)
    copy = tmp_path / "copy"
    shutil.copytree(config.directory, copy)
    manifest = checkpoint_directory(copy, 0) / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    message = refused("generate", copy, "--worker", "a", "--once")
    assert f"v000000 is another policy than {order.path} asks for" in message
    shutil.rmtree(checkpoint_directory(copy, 0))
    assert "v000000 is missing, though" in refused("generate", copy, "--worker", "a", "--once")
    weights = checkpoint_directory(config.directory, 0) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert "model.safetensors is damaged" in refused("generate", config.directory, "--worker", "a", "--once")
    assert committed_shards(config.directory / "rollouts" / BATCH) == []


def test_a_worker_with_another_config_or_release_is_refused(runs: Path, tmp_path: Path) -> None:
    config = make_config(tiny_record(runs))
    order = ordered(config)
    other = write_config(tmp_path / "other.toml", {**tiny_record(runs), "seed": 5})
    message = refused("generate", other, "--worker", "a", "--once")
    assert "belongs to another config (seed was 0 and is 5): a worker uses the run's own" in message
    words = ("--worker", "a", "--once", "--set", "sampler.temperature=0.5")
    assert "sampler.temperature was 1.0 and is 0.5" in refused("generate", config.directory, *words)
    placed = config.directory / order.path
    record = json.loads(placed.read_text())
    for change, message in (
        ({"store": "stalewise.rollouts/9"}, "asks for stalewise.work/1 with stalewise.rollouts/9; this rel"),
        ({"config": "0" * 64}, "is for another config than this worker's"),
        ({"plan": {}}, "is not a work order: 'generation_batch'; remove it, the trainer places it again"),
    ):
        placed.write_text(json.dumps({**record, **change}))
        assert message in refused("generate", config.directory, "--worker", "a", "--once")
    assert "holds no run: start" in refused("generate", tmp_path / "nowhere", "--worker", "a", "--once")
    assert "exclude each other" in refused("generate", config.directory, "--worker", "a", "--ray", "2")


def test_a_worker_may_have_its_own_device_and_engine(runs: Path, tmp_path: Path) -> None:
    config = make_config(tiny_record(runs))
    ordered(config)
    result = call(
        *("generate", config.directory, "--worker", "a", "--once"),
        *("--set", "model.device=cpu", "--set", "model.threads=1"),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "a: 2 shards with 32 rollouts\n"
    assert is_committed(config.directory / "rollouts" / BATCH)  # the learner need not be there for that


def test_a_worker_takes_the_rate_that_the_learner_settled_on(runs: Path, tmp_path: Path) -> None:
    settled = make_config(tiny_record(runs, optimizer={"learning_rate": 7e-4}))
    ordered(settled)
    planned = {**tiny_record(runs), "plan": {"learning_rate": "planned"}}
    assert work(write_config(tmp_path / "planned.toml", planned), worker="a", once=True).shards == 2


def test_an_order_whose_policy_is_gone_is_passed_over_once_it_was_taken_back(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tiny_record(runs))
    order = ordered(config)
    shutil.rmtree(checkpoint_directory(config.directory, 0))
    seen = iter([[order], []])  # it was open when the worker looked
    monkeypatch.setattr("stalewise.rollout.workers.work_order.open_orders", lambda object_store: next(seen))
    Coordinator(config, "journal", print).withdraw()
    assert work(config.directory, once=True).shards == 0


@pytest.mark.parametrize("script", sorted((Path(__file__).parents[3] / "examples" / "slurm").glob("*.sbatch")), ids=str)
def test_the_examples_for_slurm_are_shell_scripts_that_name_real_options(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    words = [line for line in script.read_text().splitlines() if "stalewise generate" in line and "--worker" in line]
    assert len(words) == 1
    help_text = call("generate", "--help").stdout
    assert "--worker" in help_text and "--ray" in help_text and "--once" in help_text
