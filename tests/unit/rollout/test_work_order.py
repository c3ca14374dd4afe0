"""Orders in an object store: one per batch, and none that cannot be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stalewise.errors import StoreError
from stalewise.rollout.generate import BatchPlan
from stalewise.rollout.workers.work_order import (
    CLAIMS,
    WorkOrder,
    is_open,
    open_orders,
    place_order,
    plan_record,
    read_plan,
    withdraw_order,
)
from stalewise.store.object_store import DirectoryStore

PLAN = BatchPlan(generation_batch=3, version=64, first_prompt=0, prompts=4, group_size=2, prompts_per_shard=2, seed=7)
ORDER = WorkOrder(PLAN, "policy", "config")


def test_an_order_comes_back_as_it_was_placed_and_goes_with_its_claims(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    place_order(store, ORDER)
    assert open_orders(store) == [ORDER] and is_open(store, ORDER)
    assert json.loads((tmp_path / ORDER.path).read_bytes())["format"] == "stalewise.work/1"
    store.create(f"{CLAIMS}/{ORDER.name}/shard-00000-0", b"a session")
    withdraw_order(store, ORDER.name)
    assert open_orders(store) == [] and store.names(CLAIMS) == []


def test_a_batch_has_one_order(tmp_path: Path) -> None:
    store, again, other = DirectoryStore(tmp_path), replace(ORDER, policy="newer"), replace(PLAN, generation_batch=4)
    for order in (ORDER, WorkOrder(other, "policy", "config"), again):
        place_order(store, order)
    assert [order.plan.generation_batch for order in open_orders(store)] == [3, 4]
    assert open_orders(store)[0] == again and again.name != ORDER.name


def test_a_shard_fits_the_order_that_it_was_made_for() -> None:
    assert ORDER.fits(ORDER.provenance) and ORDER.fits({})  # a shard of an earlier release does not say
    assert not ORDER.fits({**ORDER.provenance, "seed": 8}) and not ORDER.fits({"policy": "another"})


def test_the_json_form_of_a_plan_has_the_names_of_earlier_releases() -> None:
    plan = replace(PLAN, foreign="other", foreign_rollouts=1, rounds=(2, 2))
    record = json.loads(json.dumps(plan_record(plan)))
    assert read_plan(record) == plan
    assert record["foreign_places"] == 1 and "foreign_rollouts" not in record
    assert ORDER.name == "g000003-v000064-ccbea352e045"  # as before the field had its present name


@pytest.mark.parametrize("content", [b"half", b"{}", b"[]"])
def test_what_is_no_order_is_refused(tmp_path: Path, content: bytes) -> None:
    store = DirectoryStore(tmp_path)
    store.write(ORDER.path, content)
    with pytest.raises(StoreError, match=r"work/orders/.* is not a work order"):
        open_orders(store)
