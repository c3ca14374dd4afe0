"""Whole runs on two ranks: launched by torchrun, killed, gone on with on another number of them, and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks import finish, launch, printed, start
from stalewise.config import make_config
from stalewise.distributed import join
from stalewise.errors import RankError
from stalewise.orchestrator.ranks import RankWorker, compute_reference
from stalewise.store import TokenColumn, batch_directories, open_batch
from stalewise.store.atomic import read_json
from stalewise.store.json_lines import read_jsonl
from stalewise.trainer.reference import Reference
from tiny import call, called_json, tiny_record, write_config

pytestmark = pytest.mark.slow

UPDATES = 6
# With a large ε a step is proportional to the gradient, and what rounding does to one stays small in the other.
CHANGES: dict[str, Any] = {
    "schedule": {"kind": "staged", "updates": UPDATES, "stages": 1},
    "checkpoints": {"every": 2, "keep": 9},
    "objective": {"name": "p3o"},
    "learner": {"tokens_per_micro_batch": 60},
    "optimizer": {"epsilon": 1e-2, "learning_rate": 1e-2},
}


def config_in(directory: Path, name: str, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return write_config(directory / f"{name}.toml", tiny_record(directory, name, **{**CHANGES, **changes}))


def files_of(run: Path, version: int = UPDATES) -> dict[str, bytes]:
    """What a run has come to, byte by byte; records without their times."""
    checkpoint = run / "checkpoints" / f"v{version:06d}"
    found = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    return found | {"metrics": json.dumps(without_times(run / "metrics.jsonl")).encode()}


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in read_jsonl(path)]


def assert_close(run: Path, other: Path, version: int = UPDATES) -> None:
    for file in ("model.safetensors", "optimizer_exp_avg.safetensors"):
        ours, theirs = (load_file(place / "checkpoints" / f"v{version:06d}" / file) for place in (run, other))
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), f"{file}: {name}"
    for mine, other_one in zip(
        without_times(run / "metrics.jsonl"), without_times(other / "metrics.jsonl"), strict=True
    ):
        assert {key: mine[key] for key in ("loss", "ess", "drift", "tokens")} == pytest.approx(
            {key: other_one[key] for key in ("loss", "ess", "drift", "tokens")}, rel=1e-4, abs=1e-6
        )


def killed_while_learning(directory: Path, config: Path, run: Path, victim: int) -> list[str]:
    """Launch two ranks, kill one of them once it learns, and see that both end; what they printed."""
    processes = launch(2, directory, "train", config)
    until = time.monotonic() + 120
    while len(read_jsonl(run / "metrics.jsonl", on_torn=lambda text: None)) < 3:
        assert time.monotonic() < until and all(process.is_alive() for process in processes)
        time.sleep(0.005)
    pid = processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    codes = finish(processes, timeout=30)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 5
    return printed(directory, 2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that know of each other as torchrun's do."""
    directory = tmp_path_factory.mktemp("two")
    assert finish(launch(2, directory, "train", config_in(directory, "two"), "--json")) == [0, 0]
    first, second = printed(directory, 2)
    assert json.loads(first.splitlines()[-1])["updates"] == UPDATES
    assert (first.count("learn: "), "{" in second, "learn: " in second) == (3, False, False)  # printed once
    return directory / "two"


@pytest.mark.nightly
def test_torchrun_starts_the_same_run(undisturbed: Path, tmp_path: Path) -> None:
    """Ranks of the other tests get the variables that torchrun sets; this one starts torchrun itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["stalewise", "train", str(config_in(tmp_path, "two")), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["updates"] == UPDATES  # printed once
    assert done.stderr.count("learn: ") == 3
    assert_close(undisturbed, tmp_path / "two")


def test_a_run_on_two_ranks_is_the_run_of_one(undisturbed: Path, tmp_path: Path) -> None:
    called_json("train", config_in(tmp_path, "one"))
    assert_close(undisturbed, tmp_path / "one")
    ours, theirs = (
        sorted(path.name for path in run.rglob("*") if path.is_file()) for run in (undisturbed, tmp_path / "one")
    )
    assert ours == theirs
    assert [
        record["world_size"] for record in read_jsonl(undisturbed / "journal.jsonl") if record["event"] == "ranks"
    ] == [2]
    assert read_json(undisturbed / "environment.json")["world_size"] == 2
    assert not [record for record in read_jsonl(tmp_path / "one" / "journal.jsonl") if record["event"] == "ranks"]


LOST_ONCE = """
import os, signal, time, torch
from stalewise.distributed import join
is_first_time = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not is_first_time and os.environ["RANK"] == "0":
    time.sleep(2)  # the other one must not take the address that this one had before
ranks = join(torch.device("cpu"))
if is_first_time:
    os.kill(os.getpid(), signal.SIGKILL) if ranks.rank else signal.pause()
ranks.send_to_all("met") if ranks.is_first else print(ranks.receive().what)
"""


@pytest.mark.nightly
def test_ranks_that_torchrun_starts_again_find_each_other(tmp_path: Path) -> None:
    (tmp_path / "lost_once.py").write_text(LOST_ONCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--monitor-interval", "0.1", "--nproc-per-node", "2", str(tmp_path / "lost_once.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stdout) == (0, "met\n"), done.stderr[-3000:]


def test_ranks_that_cannot_meet_say_where_they_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"rank 1 of 2 did not find the others at 127\.0\.0\.1:99999: port must have"):
        join(torch.device("cpu"))


@pytest.mark.parametrize(
    ("victim", "parallel"), [pytest.param(0, "replicated", marks=pytest.mark.nightly), (1, "sharded")]
)
def test_a_rank_that_is_killed_ends_all_and_the_run_goes_on_to_the_same_weights(
    undisturbed: Path, tmp_path: Path, victim: int, parallel: str
) -> None:
    trainer = {"learner": {"parallel": parallel, "tokens_per_micro_batch": 60}}
    if parallel == "sharded":
        assert finish(launch(2, tmp_path, "train", config_in(tmp_path, "whole", **trainer))) == [0, 0]
        undisturbed = tmp_path / "whole"
    config = config_in(tmp_path, "two", **trainer)
    said = killed_while_learning(tmp_path, config, tmp_path / "two", victim)
    assert "lost its connection to another rank" in said[1 - victim] and "Traceback" not in said[1 - victim]
    assert finish(launch(2, tmp_path, "train", config)) == [0, 0]
    assert files_of(tmp_path / "two") == files_of(undisturbed)


def test_a_run_goes_on_with_another_number_of_ranks(undisturbed: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path, "two", learner={"parallel": "sharded", "tokens_per_micro_batch": 60})
    killed_while_learning(tmp_path, config, tmp_path / "two", victim=1)
    result = call("train", config)
    assert result.exit_code == 0, result.stderr
    assert "world size 2 → 1" in result.stderr
    assert_close(tmp_path / "two", undisturbed)
    noted = [record for record in read_jsonl(tmp_path / "two" / "journal.jsonl") if record["event"] == "ranks"]
    assert [(record["world_size"], record["parallel"], record.get("change")) for record in noted] == [
        (2, "sharded", None),
        (1, "alone", "world size 2 → 1"),
    ]


def test_two_ranks_learn_from_rollouts_that_exist(undisturbed: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"objective": {"name": "decoupled_ppo"}, "schedule": {"updates": 3}}
    changes["learner"] = {"parallel": "sharded", "tokens_per_micro_batch": 60}
    two, one = (config_in(tmp_path, name, **changes) for name in ("two", "one"))
    words = ("--rollouts", undisturbed)
    processes = launch(2, tmp_path, "learn", two, *words)
    called_json("learn", one, *words)
    assert finish(processes) == [0, 0], printed(tmp_path, 2)
    assert_close(tmp_path / "two", tmp_path / "one", version=3)


def test_adapters_are_trained_on_two_ranks(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"lora": {"rank": 4}}}
    changes["schedule"] = {"kind": "staged", "updates": 2, "stages": 1}
    two, one = (config_in(tmp_path, name, **changes) for name in ("two", "one"))
    processes = launch(2, tmp_path, "train", two)
    called_json("train", one)
    assert finish(processes) == [0, 0], printed(tmp_path, 2)
    assert_close(tmp_path / "two", tmp_path / "one", version=2)


def test_a_run_that_collapses_is_taken_back_on_all_ranks(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "optimizer": {"learning_rate": 1e9},
        "guard": {"action": "halve", "rollbacks": 1},
        "schedule": {"kind": "staged", "updates": 2, "stages": 1},
    }
    config = config_in(tmp_path, "two", **changes)
    assert finish(launch(2, tmp_path, "train", config)) == [4, 4]
    first, second = printed(tmp_path, 2)
    assert "collapsed: an update was not finite" in first and "back to version 0" in first
    assert first.splitlines()[-1].startswith("error: the run collapsed once more after 1 rollbacks")
    assert second == ""


def test_a_rank_that_sees_other_files_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path / "two.toml", tiny_record(Path("here"), "two", **CHANGES))
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    limits = {"stalewise.orchestrator.ranks.VISIBLE_S": 0.3}
    assert finish(launch(2, tmp_path, "train", config, places=places, limits=limits)) == [2, 2]
    first, second = printed(tmp_path, 2)
    assert "rank 1 does not see what rank 0 writes to here/two: all ranks need the same file system" in first
    assert second == ""


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    config = config_in(tmp_path, "two")
    other = ["--set", "optimizer.learning_rate=0.5", "--set", "seed=3"]
    assert finish(launch(2, tmp_path, "train", config, each=[[], other])) == [2, 2]
    first, second = printed(tmp_path, 2)
    assert first == (
        "error: rank 1 has another run: seed is 3 there and 0 on rank 0; optimizer.learning_rate is 0.5 there and "
        "0.01 on rank 0: start all ranks with the same config and packages\n"
    )
    assert second == ""
    assert not (tmp_path / "two").exists()


def test_an_error_on_the_first_rank_is_said_once(tmp_path: Path) -> None:
    config = config_in(tmp_path, "two", objective={"name": "grpoo"})
    assert finish(launch(2, tmp_path, "train", config)) == [2, 2]
    first, second = printed(tmp_path, 2)
    assert first.splitlines()[-1].startswith("error: objective: no objective is called 'grpoo'")
    assert second == ""
    assert not (tmp_path / "two").exists()


def reference_part(rank: int, run: str, column: str, where: str) -> None:
    """One rank of those that compute a reference column."""
    ranks = join(torch.device("cpu"))
    if not ranks.is_first:
        RankWorker(ranks).follow()
        return
    record = read_json(Path(run) / "config.resolved.json")
    config = make_config({key: value for key, value in record.items() if key != "format"})
    reference = Reference(config.objective, config.model, config.task.name, Path(run))
    batch = open_batch(batch_directories(Path(run) / "rollouts")[0])
    shards, compute = [], reference.compute

    def counted(*given: Any) -> int:
        shards.extend(shard.index for shard in given[2])
        return compute(*given)

    reference.compute = counted  # pyright: ignore[reportAttributeAccessIssue]
    tokens = compute_reference(reference, batch, TokenColumn(Path(column), reference.key), 60, ranks)
    Path(where).write_text(json.dumps([shards, tokens, batch.manifest.tokens]))
    ranks.stop_others(exit_code=0)


def test_ranks_compute_parts_of_a_reference_column_to_the_same_bits(tmp_path: Path) -> None:
    objective = {"kl": 0.1, "policy_temperature": 1.3}
    changes = {"objective": objective, "sampler": {"rollouts_per_shard": 16}, "schedule": {"updates": 2, "stages": 1}}
    called_json("train", config_in(tmp_path, "one", **changes, checkpoints={"every": 9}))
    run, column, where = tmp_path / "one", tmp_path / "column", tmp_path / "shards.json"
    assert finish(start(2, reference_part, str(run), str(column), str(where))) == [0, 0]
    shards, tokens, all_tokens = json.loads(where.read_text())
    alone = sorted((run / "columns" / "reference").rglob("*.parquet"))
    assert len(alone) == 2 and shards == [0]  # the other rank computed the other
    assert tokens == all_tokens
    assert [path.read_bytes() for path in sorted(column.glob("*.parquet"))] == [path.read_bytes() for path in alone]
    alone[1].unlink()
    (run / "rollouts" / alone[1].parent.name / alone[1].name).write_bytes(b"")
    column.joinpath(alone[1].name).unlink()
    assert finish(start(2, reference_part, str(run), str(column), str(where)))[0] not in (0, None)
