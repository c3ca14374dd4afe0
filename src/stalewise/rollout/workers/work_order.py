"""Work orders: requests to make a generation batch, one small JSON object per batch, placed by the trainer.

`work/orders/g000003-v000064-1f0c….json` holds the plan of the batch, its policy (the SHA-256 of the checkpoint's
manifest) and its config. It is removed, together with its claims, when the batch is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stalewise.config import RunConfig
from stalewise.errors import StoreError
from stalewise.rollout.generate import BatchPlan
from stalewise.store import FORMAT as STORE_FORMAT
from stalewise.store.object_store import ObjectStore

FORMAT = "stalewise.work/1"
ORDERS = "work/orders"
CLAIMS = "work/claims"
COMPLETE = "work/complete.json"
# Settings of `model` that may differ between workers: rollouts do not depend on them.
WORKER_SETTINGS = ("device", "threads")
_JSON_NAMES = {"foreign_rollouts": "foreign_places"}  # fields of a plan that have other names in orders


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """A request to make one generation batch."""

    plan: BatchPlan
    policy: str
    config: str
    format: str = FORMAT
    store: str = STORE_FORMAT

    @property
    def name(self) -> str:
        """Unique to plan and policy, so that no worker continues an order that was replaced."""
        content = json.dumps([plan_record(self.plan), self.policy], sort_keys=True)
        batch = f"g{self.plan.generation_batch:06d}-v{self.plan.version:06d}"
        return f"{batch}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    @property
    def path(self) -> str:
        """The order's name in the object store."""
        return f"{ORDERS}/{self.name}.json"

    @property
    def provenance(self) -> dict[str, Any]:
        """The origin of a shard, for its manifest."""
        return {"policy": self.policy, "seed": self.plan.seed}

    def fits(self, extra: Mapping[str, Any]) -> bool:
        """Whether a shard was made for this order. Shards of earlier releases have no such record and fit any order."""
        return all(extra.get(key, value) == value for key, value in self.provenance.items())


def place_order(object_store: ObjectStore, order: WorkOrder) -> None:
    """Place an order; other orders for the same batch are withdrawn."""
    batch = order.name.rpartition("-")[0]
    for name in object_store.names(ORDERS):
        if name.startswith(f"{batch}-") and name != f"{order.name}.json":
            withdraw_order(object_store, name.removesuffix(".json"))
    record = {**asdict(order), "plan": plan_record(order.plan)}
    object_store.create(order.path, json.dumps(record).encode())


def withdraw_order(object_store: ObjectStore, name: str) -> None:
    """Remove an order first, then its claims, so that no claim is made afterwards."""
    object_store.remove(f"{ORDERS}/{name}.json")
    object_store.remove(f"{CLAIMS}/{name}")


def is_open(object_store: ObjectStore, order: WorkOrder) -> bool:
    """Whether an order has not been completed or withdrawn."""
    return f"{order.name}.json" in object_store.names(ORDERS)


def open_orders(object_store: ObjectStore) -> list[WorkOrder]:
    """All open orders, sorted by generation batch."""
    contents = {path: object_store.read(path) for path in (f"{ORDERS}/{name}" for name in object_store.names(ORDERS))}
    # None: the order was removed meanwhile.
    return [_read(content, f"{object_store.where}/{path}") for path, content in contents.items() if content is not None]


def plan_record(plan: BatchPlan) -> dict[str, Any]:
    """The JSON form of a plan."""
    return {_JSON_NAMES.get(name, name): value for name, value in asdict(plan).items()}


def read_plan(record: Mapping[str, Any]) -> BatchPlan:
    """A plan from its JSON form, which has lists for tuples."""
    names = [field.name for field in fields(BatchPlan)]
    values: dict[str, Any] = {name: record[_JSON_NAMES.get(name, name)] for name in names}
    return BatchPlan(**{**values, "rounds": tuple(values["rounds"])})


def _read(content: bytes, where: str) -> WorkOrder:
    try:
        record = json.loads(content)
        if record["format"] != FORMAT or record["store"] != STORE_FORMAT:
            raise StoreError(
                f"{where} asks for {record['format']} with {record['store']}; this release makes {FORMAT} with "
                f"{STORE_FORMAT}: use the stalewise release of the trainer"
            )
        plan = read_plan(record["plan"])
        return WorkOrder(plan, record["policy"], record["config"], record["format"], record["store"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where} is not a work order: {error}; remove it, the trainer places it again") from error


def config_digest(config: RunConfig) -> str:
    """A digest that is equal for configs whose rollouts belong to one run."""
    identity = config.identity()
    identity["model"] = {key: value for key, value in identity["model"].items() if key not in WORKER_SETTINGS}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
