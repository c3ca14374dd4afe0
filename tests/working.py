"""Runs for workers: one whose first batch was asked for, a task whose judge takes its time; a worker that is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stalewise.api import generate
from stalewise.config import RunConfig, make_config
from stalewise.rollout.workers.shard_queue import WorkerSession
from stalewise.rollout.workers.work_order import WorkOrder, open_orders
from stalewise.store.object_store import open_object_store
from tiny import tiny_record

JUDGE = """
import os, time
def judge(prompt, response):
    if stall := os.environ.get("STALL"):
        parent = os.getppid()
        open(stall, "w").close()
        while os.getppid() == parent:  # hangs until the process that asked was killed, and is then no longer needed
            time.sleep(0.02)
        os._exit(0)
    time.sleep(PAUSE_S)
    return float(len(response) % 2)
"""


def judged(runs: Path, name: str, pause_s: float = 0.004, **changes: Any) -> RunConfig:
    """A task with a judge of one's own, which takes its time and can be made to hang."""
    return make_config(judged_record(runs, name, f"PAUSE_S = {pause_s}\n{JUDGE}", **changes))


def judged_record(runs: Path, name: str, judge: str, **changes: Any) -> dict[str, Any]:
    """Likewise, as settings; `judge` is the text of the module."""
    runs.mkdir(exist_ok=True)
    (runs / "judges_of_workers.py").write_text(judge)
    rows = "".join(json.dumps({"problem": f"{i % 9}+{i // 9}=", "answer": "1"}) + "\n" for i in range(60))
    (runs / "data.jsonl").write_text(rows)
    options = {"path": str(runs / "data.jsonl"), "held_out": 0.2, "verifier": "python"}
    options["verifier_options"] = {"function": "judges_of_workers:judge", "workers": 1, "limit_s": 600}
    options["verifier_options"] |= {"environment": ["RANK", "STALL"]}
    sampler = {"max_new_tokens": 6, "rollouts_per_shard": 4}
    section = {"name": "jsonl", "options": options}
    return tiny_record(runs, name, task=section, model={"path": "arithmetic"}, sampler=sampler, **changes)


def ordered(config: RunConfig) -> WorkOrder:
    """Prepare a run directory and ask for a batch, as a learner does before it is killed."""

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stalewise.orchestrator.rollout_source.generate_batch", stop)
        with pytest.raises(InterruptedError):
            generate(config, batch=0)
    (order,) = open_orders(open_object_store(config.storage.url or str(config.directory), config.storage.options))
    return order


def freeze(session: WorkerSession) -> None:
    """As SIGSTOP or a long pause of a virtual machine does."""
    session._has_ended.set()
    assert session._thread is not None
    session._thread.join()
