"""Several ranks of one run, as far as one process can show it; tests/equivalence/test_ranks.py has the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from stalewise.config import make_config
from stalewise.config.run_directory import RunResult
from stalewise.distributed import ALONE, Message, Ranks
from stalewise.errors import RankError, StoppedByFirst
from stalewise.orchestrator.ranks import RankWorker, _difference, _facts, join_ranks, run_on_all_ranks


class Orders:
    """Ranks whose first one sends these orders."""

    rank = 1

    def __init__(self, *orders: Message) -> None:
        self.orders = iter(orders)

    def receive(self) -> Message:
        return next(self.orders)


def test_one_process_leads_itself(tmp_path: Path) -> None:
    assert join_ranks("cpu") is ALONE
    result, led = RunResult(tmp_path, 3, [], {}), []

    def lead(ranks: Ranks) -> RunResult:
        led.append(ranks)
        return result

    assert run_on_all_ranks(make_config({}), lead) is result and led == [ALONE]


def test_a_worker_carries_out_orders_until_it_is_stopped() -> None:
    done: list[str] = []
    ranks = Orders(Message("generate", {"batch": 1}, {}), Message("stop", {"exit_code": 0, "updates": 4}, {}))
    worker = RankWorker(cast(Any, ranks))
    worker.orders["generate"] = lambda order: done.append(order.what)
    assert worker.follow()["updates"] == 4 and done == ["generate"]
    with pytest.raises(StoppedByFirst):
        RankWorker(cast(Any, Orders(Message("stop", {"exit_code": 2}, {})))).follow()


def test_a_worker_refuses_a_checkpoint_that_it_does_not_see(tmp_path: Path) -> None:
    record = {"config": make_config({}).model_dump(mode="json"), "checkpoint": str(tmp_path), "manifest": "0"}
    with pytest.raises(RankError, match=r"rank 1 sees another .* than rank 0, or none: mount the same file system"):
        RankWorker(cast(Any, Orders(Message("learner", record, {})))).follow()


def test_what_differs_between_ranks_is_named(tmp_path: Path) -> None:
    ours = _facts({"seed": 0, "model": {"path": "auto"}}, tmp_path)
    assert ours["model.path"] == "auto" and "the release of torch" in ours
    assert _difference(1, ours, {"facts": ours, "sees": True}, tmp_path) == ""
    theirs = {**ours, "seed": 3}
    assert _difference(1, ours, {"facts": theirs, "sees": True}, tmp_path) == (
        "rank 1 has another run: seed is 3 there and 0 on rank 0: start all ranks with the same config and packages"
    )
    assert "does not see what rank 0 writes" in _difference(2, ours, {"facts": ours, "sees": False}, tmp_path)
