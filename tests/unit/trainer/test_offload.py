"""State that waits in host memory: the data moves, the tensors and all that is computed with them stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stalewise.trainer import snapshot as offload
from stalewise.trainer.snapshot import Offload
from stalewise.trainer.trainer import Trainer
from stalewise.trainer.weights import FlatWeights, Weights
from trainer_inputs import POLICY, config, rollouts

CPU = torch.device("cpu")


def test_data_moves_and_comes_back() -> None:
    large, small, turned = torch.randn(2000), torch.randn(3), torch.randn(50, 60).T
    before = [tensor.clone() for tensor in (large, small, turned)]
    places = [tensor.data_ptr() for tensor in (large, small, turned)]
    moved = Offload(CPU)
    moved.offload([large, small, turned, large])
    assert [one is large for one in moved.away] == [True]  # once; small ones and views of others stay
    assert large.data_ptr() != places[0] and [small.data_ptr(), turned.data_ptr()] == places[1:]
    moved.reload()
    assert not moved.away
    assert all(torch.equal(a, b) for a, b in zip((large, small, turned), before, strict=True))


def test_what_is_frozen_is_copied_once_and_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, frozen = torch.zeros(2000), torch.ones(3000)
    moved = Offload(CPU)
    moved.offload([weight], [frozen])
    places = weight.data_ptr(), frozen.data_ptr()
    moved.reload()
    assert {weight.data_ptr(), frozen.data_ptr()}.isdisjoint(places)
    weight += 1
    frozen += 1  # it is not: so this is lost
    moved.offload([weight], [frozen])
    assert (weight.data_ptr(), frozen.data_ptr()) == places
    assert (weight.unique().item(), frozen.unique().item()) == (1.0, 1.0)
    moved.reload()
    moved.offload([frozen[:2000], weight])  # others, of other sizes
    moved.reload()
    assert weight.unique().item() == 1.0 and moved._buffers.nbytes == 2 * weight.nbytes
    monkeypatch.setattr(offload, "PLENTY", 0.0)
    moved.offload([weight], [frozen])
    moved.reload()
    assert not moved._buffers.nbytes and (weight.unique().item(), frozen.unique().item()) == (1.0, 1.0)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_updates_are_the_same_after_waiting(moments: str, tmp_path: Path) -> None:
    settings = config(optimizer={"learning_rate": 1e-3, "moments": moments}, objective={"name": "decoupled_ppo"})
    plain, waiting = Trainer(settings, POLICY), Trainer(settings, POLICY)
    for seed in range(3):
        assert waiting.update(rollouts(seed=seed)) == plain.update(rollouts(seed=seed))
        waiting.sleep()
        waiting.sleep()  # it sleeps already
        assert waiting.is_asleep and all(weight.grad is None for weight in waiting.names)
        for name in ("a", "b"):
            (tmp_path / f"{name}{seed}").mkdir()
        waiting.save(tmp_path / f"a{seed}")  # from host memory
        plain.save(tmp_path / f"b{seed}")
        for file in sorted((tmp_path / f"b{seed}").glob("*.safetensors")):
            assert file.read_bytes() == (tmp_path / f"a{seed}" / file.name).read_bytes()
    # Weights, both moments and the proximal policy, without the smallest.
    per_weight = 4 + 4 + (8 if moments == "float32" else 2)
    count = sum(weight.numel() for weight in waiting.names)
    assert waiting.execution.offload._buffers.nbytes == pytest.approx(per_weight * count, rel=0.05)
    assert torch.equal(waiting.gradient(rollouts(seed=9)), plain.gradient(rollouts(seed=9)))


def test_flat_gradients_are_dropped_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config(), POLICY)
    execution = trainer.execution
    made: list[FlatWeights] = []

    def use_graphs() -> None:
        execution.weights = FlatWeights(list(trainer.names), execution.side_stream)
        made.append(execution.weights)

    monkeypatch.setattr(execution, "_use_graphs", use_graphs)
    trainer.sleep()
    assert type(execution.weights) is Weights
    execution.had_graphs = True
    plain = Trainer(config(), POLICY)
    expected = plain.update(rollouts())
    assert trainer.update(rollouts()) == pytest.approx(expected, rel=1e-3, nan_ok=True)
    assert execution.weights is made[0]
