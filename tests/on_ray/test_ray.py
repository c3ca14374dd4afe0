"""Workers on a real Ray, on this machine; `make test-ray`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray  # pyright: ignore[reportMissingImports]

from stalewise.api import generate
from stalewise.errors import EngineError
from stalewise.rollout.workers.rank_workers import work_on_ray
from stalewise.rollout.workers.shard_queue import SESSIONS
from stalewise.store import committed_shards, open_batch, read_batch_manifest
from working import judged, ordered

# Ray warns about itself: settings that change in its next release, files that it leaves to be closed.
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = "g000000-v000000"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray on this machine; where runs may lie."""
    runs = tmp_path_factory.mktemp("runs")  # before Ray's processes look there: they remember that there is nothing
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))  # of this cluster; else Ray puts one into the user's home
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{Path(__file__).parents[2] / 'src'}:{runs}")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.syspath_prepend(str(runs))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield runs
        ray.shutdown()


def test_two_workers_of_which_one_is_killed_in_the_middle(cluster: Path) -> None:
    config = judged(cluster, "shared", workers={"lost_after_s": 2.0}, pause_s=0.2)
    ordered(config)
    directory = config.directory / "rollouts" / BATCH
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(work_on_ray, str(config.directory.absolute()), workers=2, once=True)
        while len(committed_shards(directory)) < 2:  # in the middle of the stage, and of some shard
            assert not asked.done(), asked.result()
            time.sleep(0.02)
        sessions = sorted((config.directory / SESSIONS).glob("worker.ray-*"))
        os.kill(json.loads(sessions[0].read_text())["pid"], signal.SIGKILL)
        killed_at = len(committed_shards(directory))
        done = asked.result(180)
    assert killed_at < 8 and len(done) == 2
    shards = read_batch_manifest(directory).shards
    assert len(shards) == 8 and len(open_batch(directory)) == 32
    assert sum(one.too_late for one in done) == 0  # nothing was made twice
    assert sum(one.taken_over for one in done) >= 1  # what the victim had begun
    alone = judged(cluster, "alone")
    (made,) = generate(alone)
    assert [shard.sha256 for shard in made.shards] == [shard.sha256 for shard in shards]


def test_what_is_the_inputs_fault_is_not_tried_again(cluster: Path) -> None:
    with pytest.raises(EngineError, match=r"a worker on Ray ended: .* holds no run: start"):
        work_on_ray(str(cluster / "nothing"), workers=1, once=True)
