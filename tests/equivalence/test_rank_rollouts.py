"""A generation batch made by two ranks: the one that a single process makes, whichever of them is killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import finish, launch, printed, start
from stalewise import distributed
from stalewise.api import generate
from stalewise.config import make_config
from stalewise.distributed import Launch, Ranks, join
from stalewise.rollout.workers.coordinator import Coordinator
from stalewise.rollout.workers.rank_workers import coordinator_of
from stalewise.store import read_batch_manifest
from stalewise.store.json_lines import read_jsonl
from tiny import call, tiny_record, write_config
from working import judged_record

pytestmark = pytest.mark.slow

SCHEDULE = {"kind": "staged", "updates": 2, "stages": 1}
SHARDS = 8
PATIENT = {"lost_after_s": 600.0}  # longer than any test may take
BATCH = Path("rollouts") / "g000000-v000000"
# While ranks generate, a judge waits until those of both have something to judge; the victim's hangs, which lets the
# other one go on.
JUDGE = """
import os, time
from pathlib import Path
HERE = Path(__file__).parent
def judge(prompt, response):
    rank = os.environ.get("RANK")
    if rank is not None and list(HERE.rglob("orders/*.json")):
        (HERE / f"judges-{rank}").touch()
        if (HERE / f"hang-{rank}").exists():
            parent = os.getppid()
            while os.getppid() == parent:
                time.sleep(0.02)
            os._exit(0)
        while not (HERE / f"judges-{1 - int(rank)}").exists():
            time.sleep(0.02)
        time.sleep(0.04)
    return float(len(response) % 2)
"""


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


def manifests(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / BATCH).glob("shard-*.json")}


@pytest.mark.parametrize(
    ("victim", "object_store"), [pytest.param(0, "", marks=pytest.mark.nightly), (1, "file://{}/depot")]
)
def test_two_ranks_make_the_batch_of_one_though_one_of_them_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, object_store: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "two"
    storage = {"url": object_store.format(tmp_path)}
    changes: dict[str, Any] = {"schedule": SCHEDULE, "storage": storage, "workers": PATIENT}
    config = write_config(tmp_path / "two.toml", judged_record(tmp_path, "two", JUDGE, **changes))
    (tmp_path / f"hang-{victim}").touch()
    processes = launch(2, tmp_path, "train", config)
    wait_until(lambda: (tmp_path / f"judges-{victim}").exists() and manifests(run))
    pid = processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    codes = finish(processes, timeout=30)
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, 5)
    said = printed(tmp_path, 2)[1 - victim]
    assert said.count("lost its connection to another rank") == said.count("error") == 1 and "Traceback" not in said
    kept = manifests(run)
    assert 1 <= len(kept) <= SHARDS - 3  # what is left is enough for both

    for file in [*tmp_path.glob("judges-*"), *tmp_path.glob("hang-*")]:
        file.unlink()
    # A rank that was killed is not waited for: that would take ten minutes.
    assert finish(launch(2, tmp_path, "train", config)) == [0, 0], printed(tmp_path, 2)
    assert manifests(run).items() > kept.items()  # nothing was made again
    (event,) = [record for record in read_jsonl(run / "journal.jsonl") if record["event"] == "generate"]
    assert min(event["shards"]) >= 1 and sum(event["shards"]) == SHARDS - len(kept)
    shards = read_batch_manifest(run / BATCH).shards
    assert {shard.extra["worker"].split(" on ")[0] for shard in shards} == {"journal", "rank 1"}
    left = [path for work in tmp_path.glob("*/work") for path in work.rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["complete.json"]

    (alone,) = generate(make_config(judged_record(tmp_path, "alone", JUDGE, schedule=SCHEDULE)))
    assert [shard.sha256 for shard in shards] == [shard.sha256 for shard in alone.shards]


def test_a_process_alone_need_not_watch_what_its_killed_ranks_had_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    record = judged_record(tmp_path, "two", JUDGE, schedule=SCHEDULE, workers=PATIENT)
    config = write_config(tmp_path / "two.toml", record)
    for rank in (0, 1):
        (tmp_path / f"hang-{rank}").touch()
    processes = launch(2, tmp_path, "train", config)
    wait_until(lambda: len(list(tmp_path.glob("judges-*"))) == 2)
    for process in processes:
        process.kill()
    finish(processes)
    assert call("train", config).exit_code == 0  # and does not wait for ten minutes


def test_what_keeps_a_rank_from_generating_is_said_once(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    record = judged_record(here, "two", JUDGE, schedule=SCHEDULE)
    record["task"]["options"] |= {"path": "data.jsonl", "verifier": "exact", "verifier_options": {}}
    record["sampler"]["rollouts_per_shard"] = 64
    elsewhere.mkdir()
    config = write_config(tmp_path / "two.toml", record)
    assert finish(launch(3, tmp_path, "train", config, places=[here, elsewhere, here])) == [5, 5, 5]
    first, *others = printed(tmp_path, 3)
    assert others == ["", ""]
    assert "only 1 of 3 ranks generate" in first and "sampler.rollouts_per_shard = 8 or less" in first
    assert first.count("error") == 1
    assert first.splitlines()[-1].startswith("error: rank 1 cannot generate: ")
    assert "data.jsonl" in first.splitlines()[-1]


def part(rank: int, directory: Path) -> None:
    ranks = join(torch.device("cpu"))
    distributed.STOP_LIMIT_S = 600.0  # longer than a test may take: it is the answer that ends the waiting
    if ranks.is_first:
        ranks.listen(1)
        ranks.stop_others(exit_code=0)
        assert (directory / "read").exists()
    else:
        ranks.listen()
        ranks.send(0, "generated", {"shards": 1})  # crosses the word that it is over
        time.sleep(0.5)
        (directory / "read").touch()
        assert ranks.receive().what == "stop"
    dist.barrier()  # in taking groups of GPUs apart all ranks take part: nobody may wait for another to be gone
    assert ranks.stop_listening()


def test_the_first_rank_leaves_when_its_last_word_was_read(tmp_path: Path) -> None:
    """If it left before, another would say that touch was lost."""
    assert finish(start(2, part, tmp_path)) == [0, 0]


def part_beside_one_that_is_stuck(rank: int, directory: Path) -> None:
    ranks = join(torch.device("cpu"))
    if ranks.is_first:
        distributed.STOP_LIMIT_S = 0.5
        ranks.stop_others(exit_code=3)
        assert not ranks.stop_listening()
        wait_until((directory / "heard").exists)  # on a busy machine later than the limit
        (directory / "over").touch()
    elif rank == 2:
        assert ranks.receive().record == {"exit_code": 3}
        (directory / "heard").touch()
    else:
        wait_until((directory / "over").exists)
    os._exit(0)


def test_one_that_is_stuck_does_not_keep_the_last_word_from_others(tmp_path: Path) -> None:
    assert finish(start(3, part_beside_one_that_is_stuck, tmp_path)) == [0, 0, 0]


def test_engines_that_are_on_many_devices_by_themselves_stay_with_the_first_rank(tmp_path: Path) -> None:
    def is_of_all(**changes: Any) -> bool:
        coordinator = Coordinator(make_config(tiny_record(tmp_path, **changes)), "journal", print)
        return coordinator_of(coordinator, Ranks(Launch(world=2))) is not coordinator

    assert is_of_all()
    assert not is_of_all(sampler={"engine": "vllm"})
    assert not is_of_all(workers={"learner": "waits"})
