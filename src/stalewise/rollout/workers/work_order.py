"""Orders: what the learner asks workers for. All that a worker must know of a batch stands in one small object.

`work/orders/g000003-v000064-1f0c….json` names the plan of a generation batch, the policy that makes it (by the SHA-256
of its checkpoint's manifest) and the config that it is for. A worker that has another policy or another config refuses.
An order is open until its batch is complete; then it is removed, with its claims.
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
# Of a config: what a worker may have otherwise, since it says nothing about the rollouts but which machine made them.
ITS_OWN = ("device", "threads")


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """One generation batch that is to be made."""

    plan: BatchPlan
    policy: str
    config: str
    format: str = FORMAT
    store: str = STORE_FORMAT

    @property
    def name(self) -> str:
        """Another one for another plan or another policy: nobody works by an order that was replaced."""
        made = json.dumps([asdict(self.plan), self.policy], sort_keys=True)
        batch = f"g{self.plan.generation_batch:06d}-v{self.plan.version:06d}"
        return f"{batch}-{hashlib.sha256(made.encode()).hexdigest()[:12]}"

    @property
    def path(self) -> str:
        """Where it lies in the depot."""
        return f"{ORDERS}/{self.name}.json"

    @property
    def provenance(self) -> dict[str, Any]:
        """What the manifest of a shard says of where it comes from."""
        return {"policy": self.policy, "seed": self.plan.seed}

    def fits(self, extra: Mapping[str, Any]) -> bool:
        """Whether a shard was made by this order; one that does not say (of an earlier release) was."""
        return all(extra.get(key, value) == value for key, value in self.provenance.items())


def place(object_store: ObjectStore, order: WorkOrder) -> None:
    """Ask for a batch; an order for the same batch that asks for something else is withdrawn."""
    batch = order.name.rpartition("-")[0]
    for name in object_store.names(ORDERS):
        if name.startswith(f"{batch}-") and name != f"{order.name}.json":
            withdraw(object_store, name.removesuffix(".json"))
    object_store.create(order.path, json.dumps(asdict(order)).encode())


def withdraw(object_store: ObjectStore, name: str) -> None:
    """Take an order back, or away when it is fulfilled; claims go after it, so that nobody makes new ones."""
    object_store.remove(f"{ORDERS}/{name}.json")
    object_store.remove(f"{CLAIMS}/{name}")


def is_open(object_store: ObjectStore, order: WorkOrder) -> bool:
    """Whether an order still stands."""
    return f"{order.name}.json" in object_store.names(ORDERS)


def open_orders(object_store: ObjectStore) -> list[WorkOrder]:
    """The orders that stand, in order of generation batch."""
    found: list[WorkOrder] = []
    for name in object_store.names(ORDERS):
        content = object_store.read(f"{ORDERS}/{name}")
        if content is not None:  # else it was fulfilled since
            found.append(_read(content, f"{object_store.where}/{ORDERS}/{name}"))
    return found


def _read(content: bytes, where: str) -> WorkOrder:
    try:
        record = json.loads(content)
        if record["format"] != FORMAT or record["store"] != STORE_FORMAT:
            raise StoreError(
                f"{where} asks for {record['format']} with {record['store']}, this stalewise makes {FORMAT} with "
                f"{STORE_FORMAT}: use the stalewise release that the learner has"
            )
        plan = BatchPlan(**{field.name: record["plan"][field.name] for field in fields(BatchPlan)})
        return WorkOrder(plan, record["policy"], record["config"], record["format"], record["store"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{where} is no order: {error}; remove it, the learner places it again") from error


def config_digest(config: RunConfig) -> str:
    """Equal for configs whose rollouts are of one run."""
    identity = config.identity()
    identity["model"] = {key: value for key, value in identity["model"].items() if key not in ITS_OWN}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
