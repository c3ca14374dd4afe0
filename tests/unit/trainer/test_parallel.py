"""How a policy is spread over ranks, and how many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stalewise.config import make_config
from stalewise.distributed import ALONE, VARIABLES, Launch, child_environment, launched
from stalewise.errors import ConfigError
from stalewise.planning.memory import GIB, ModelShape, check_memory, estimate, pick_parallel
from stalewise.trainer import parallel


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_environment_says_how_many_there_are(environment: pytest.MonkeyPatch) -> None:
    assert launched() == Launch() and launched().is_first
    place = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "here", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    for name, value in place.items():
        environment.setenv(name, value)
    assert launched() == Launch(3, 4, 1, 4) and not launched().is_first
    assert not set(VARIABLES) & child_environment().keys()
    environment.setenv("RANK", "three")
    with pytest.raises(ConfigError, match=r"the environment names no ranks .*RANK=three"):
        launched()
    environment.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4 but MASTER_PORT is not set: start several processes with"):
        launched()


def test_a_policy_is_sharded_where_a_device_does_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(2**28, 2**28, layers=2, hidden=8, inner=8, keys=8, vocabulary=10)
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, config: shape)
    needed = estimate(make_config({}), "model")
    assert needed is not None and 5 * GIB == needed.least < needed.total < 7 * GIB

    def on(gib: float, world: int, **sections: Any) -> str:
        memory = SimpleNamespace(total=int(gib * GIB), available=int(gib * GIB))
        monkeypatch.setattr("stalewise.planning.memory.psutil.virtual_memory", lambda: memory)
        return pick_parallel(make_config(sections), "model", world, local_world=1)

    assert on(16, world=1) == "alone"
    assert on(16, world=2) == "replicated"
    assert on(5.5, world=2) == "sharded"
    assert on(5.5, world=2, model={"lora": {"rank": 4}}) == "replicated"
    assert on(5.5, world=2, learner={"parallel": "replicated"}) == "replicated"
    assert on(16, world=2, learner={"parallel": "sharded"}) == "sharded"
    on(4, world=2)
    assert "memory may run out" not in check_memory(make_config({}), "model", world=16, local_world=1)
    half = estimate(make_config({}), "model", shards=2)
    assert half is not None
    assert half.certain["moments"] * 2 == needed.certain["moments"]
    assert half.certain["sampler's weights"] == needed.certain["sampler's weights"]


def test_adapters_are_not_sharded_and_the_setting_may_change_on_the_way() -> None:
    with pytest.raises(ConfigError, match=r'learner\.parallel is "sharded", but adapters'):
        make_config({"learner": {"parallel": "sharded"}, "model": {"lora": {"rank": 4}}})
    one, other = (make_config({"learner": {"parallel": kind}}) for kind in ("replicated", "sharded"))
    assert one.identity() == other.identity()


def test_other_weights_are_there_for_a_while() -> None:
    alone, model = parallel.SingleProcess(ALONE), torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    alone.place(model, torch.device("cpu"))
    alone.find_trained()
    assert alone.trained == {model.weight: "weight"}
    before, others = model.weight.detach().clone(), torch.ones(2, 2)
    with pytest.raises(ZeroDivisionError), alone.swapped({"weight": others}):
        assert model.weight.data_ptr() == others.data_ptr()
        raise ZeroDivisionError
    assert torch.equal(model.weight, before)
