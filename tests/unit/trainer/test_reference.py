"""Log-probabilities under a reference: a column that is computed once, and training that reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from callbacks import StopAt
from policies import POLICY, moved
from stalewise.api import learn, run
from stalewise.config import RunConfig, make_config
from stalewise.config.sections import ModelSection, ObjectiveSection
from stalewise.errors import ConfigError, ModelError, StalewiseError, StoreError
from stalewise.models.loading import load_model
from stalewise.models.plain_forward import plain_logits
from stalewise.orchestrator.ranks import help_with_reference
from stalewise.rollout.workers.worker import RunLocation, work
from stalewise.store import batch_directories, open_batch
from stalewise.store.columns import TokenColumn
from stalewise.store.json_lines import read_jsonl
from stalewise.trainer.reference import LoadedReference, Reference, check_reference
from stalewise.trainer.trainer import Trainer
from tiny import tiny_record
from trainer_inputs import POLICY as STEPS
from trainer_inputs import plain_logp, rollouts
from working import ordered

PIPELINED = {"kind": "pipelined", "updates": 4, "stages": None, "updates_per_generation": 2, "lag": 1}


def made(runs: Path, name: str = "run", **changes: Any) -> RunConfig:
    changes = {"objective": {"kl": 0.3}, "optimizer": {"learning_rate": 3e-3}, **changes}
    return make_config(tiny_record(runs, name, **changes))


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run without a reference."""
    config = made(tmp_path_factory.mktemp("runs"), "free", objective={})
    run(config)
    return config


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The same, but held near its initial policy."""
    config = made(tmp_path_factory.mktemp("runs"), "held")
    run(config)
    return config


def weights(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(config.directory / f"checkpoints/v{config.schedule.updates:06d}/model.safetensors")


def same(one: RunConfig, other: RunConfig) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def metric(config: RunConfig, name: str) -> list[float]:
    return [record[name] for record in read_jsonl(config.directory / "metrics.jsonl")]


@pytest.mark.parametrize("token_budget", [30, 10_000])
def test_the_column_is_that_of_plain_forward_passes(token_budget: int) -> None:
    rows = rollouts()
    found = LoadedReference(STEPS, ModelSection(device="cpu"), token_budget).logp(rows)
    assert found == pytest.approx(plain_logp(rows), abs=1e-5, rel=5e-6)


def test_training_begins_at_its_reference_and_is_held_near_it(free: RunConfig, held: RunConfig) -> None:
    divergence = metric(held, "kl_reference")
    assert divergence[0] == 0.0 < divergence[1] < divergence[3]
    assert "kl_reference" not in (free.directory / "metrics.jsonl").read_text()  # there is none, which is not 0
    assert not (free.directory / "columns").exists()
    # Rollouts are the same, with or without a reference.
    shards = [sorted(one.directory.rglob("rollouts/g000000*/*.parquet")) for one in (free, held)]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]
    assert not same(free, held)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"kl": 0.3, "kl_in": "reward"}},
        pytest.param({"schedule": PIPELINED}, marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_was_stopped_goes_on_exactly(runs: Path, changes: dict[str, Any]) -> None:
    whole, stopped = made(runs, "whole", **changes), made(runs, "stopped", **changes)
    run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, StopAt(1))
    columns = sorted((stopped.directory / "columns").rglob("*.parquet"))
    columns[0].write_bytes(b"damaged")
    for column in columns[1:]:
        column.unlink()
    run(stopped)
    assert same(whole, stopped)
    assert metric(whole, "kl_reference") == metric(stopped, "kl_reference")


def test_learning_from_rollouts_of_another_run_computes_its_own_column(free: RunConfig, runs: Path) -> None:
    reference = str(moved(POLICY, runs / "other", by=0.05))
    before = {path: path.read_bytes() for path in free.directory.rglob("*") if path.is_file()}
    config = made(runs, "offline", objective={"kl": 0.3, "kl_estimator": "k2", "reference": reference})
    learn(config, [free.directory])
    assert {path: path.read_bytes() for path in free.directory.rglob("*") if path.is_file()} == before
    assert metric(config, "kl_reference")[0] > 1e-4
    names = {path.parent.name for path in (config.directory / "columns").rglob("*.parquet")}
    assert names == {"000-g000000-v000000", "001-g000001-v000002"}


def test_values_at_another_temperature_count_as_missing(held: RunConfig, runs: Path) -> None:
    reference, hot = (
        Reference(section, held.model, held.task.name, held.directory)
        for section in (held.objective, held.objective.model_copy(update={"policy_temperature": 1.3}))
    )
    batch = open_batch(held.directory / "rollouts" / "g000000-v000000")
    shard = batch.manifest.shards[0]
    there = reference.column("g000000-v000000")
    assert there.has(shard) and not TokenColumn(there.directory, hot.key).has(shard)
    column = TokenColumn(runs / "column", hot.key)
    hot.compute(batch, column, [shard], 10_000)
    values = [one.read(shard, 0, shard.response_tokens) for one in (there, column)]
    rows, model = batch.rows_of(shard), load_model(str(reference.path), device=torch.device("cpu"))
    for row in range(len(rows)):
        of_prompt = slice(*rows.prompt_offsets[row : row + 2])
        own = slice(*rows.response_offsets[row : row + 2])
        response = rows.response_ids[own].tolist()
        logits_NV = plain_logits(model, rows.prompt_ids[of_prompt].tolist(), response)
        for temperature, found in zip((1.0, 1.3), values, strict=True):
            logp_N = (logits_NV / temperature).log_softmax(1)[range(len(response)), response]
            assert found[own] == pytest.approx(logp_N.numpy(), abs=1e-5)


def test_a_worker_computes_columns_of_what_it_made(held: RunConfig, runs: Path) -> None:
    config = made(runs)
    ordered(config)
    done = work(config.directory, worker="a", once=True, afterwards=help_with_reference)
    columns = [sorted((one.directory / "columns/reference/g000000-v000000").iterdir()) for one in (config, held)]
    assert done.shards == len(columns[0]) == len(columns[1]) == 2
    assert [path.read_bytes() for path in columns[0]] == [path.read_bytes() for path in columns[1]]
    run(config)
    assert same(config, held)
    events = [event for event in read_jsonl(config.directory / "journal.jsonl") if event.get("reason") == "reference"]
    assert len(events) == 1  # of the second stage, which no worker made
    batch = batch_directories(config.directory / "rollouts")[0]
    shutil.rmtree(config.directory / "columns")
    shutil.rmtree(batch)  # as a rollback does
    help_with_reference(RunLocation.of_config(config), batch)
    assert not (config.directory / "columns").exists()


def test_the_divergence_in_the_reward_moves_advantages_and_not_the_reported_reward(runs: Path) -> None:
    free, config = (
        made(runs, name, sampler={"temperature": 1.5}, objective=objective)
        for name, objective in (("free", {}), ("run", {"kl": 5.0, "kl_in": "reward", "kl_estimator": "k1"}))
    )
    for one in (free, config):
        run(one)
    assert metric(free, "reward")[0] == metric(config, "reward")[0]
    assert metric(free, "degenerate_fraction")[0] == metric(config, "degenerate_fraction")[0]
    assert metric(free, "grad_norm")[0] != pytest.approx(metric(config, "grad_norm")[0], rel=1e-3)


def test_adapters_have_their_base_as_reference(runs: Path) -> None:
    pytest.importorskip("peft")
    lora = {"lora": {"rank": 2}}
    configs = [made(runs, name, model=lora, objective={"kl": 0.3, "reference": name}) for name in ("initial", "base")]
    for config in configs:
        run(config)
    assert same(*configs)  # new adapters change nothing, so the initial policy is the base
    assert metric(configs[1], "kl_reference")[0] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ConfigError, match="no adapter is trained"):
        made(runs, objective={"kl": 0.3, "reference": "base"})


def test_micro_batches_do_not_change_the_gradient_of_regularizers() -> None:
    rows = rollouts(groups=4)
    rows = type(rows)(**{**{f: getattr(rows, f) for f in rows.__slots__}, "reference_logp": rows.behaviour_logp - 0.2})
    objective = {"name": "grpo", "kl": 0.3, "entropy_bonus": 0.2, "overlong_tokens": 8, "truncated": "mask"}
    found = []
    for tokens in (40, 10_000):
        settings: dict[str, Any] = {"objective": objective, "learner": {"tokens_per_micro_batch": tokens}}
        trainer = Trainer(make_config({**settings, "sampler": {"max_new_tokens": 20}}), STEPS)
        found.append(trainer.gradient(rows))
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()
    plain = {"objective": {"name": "grpo", "truncated": "mask"}, "sampler": {"max_new_tokens": 20}}
    assert (Trainer(make_config(plain), STEPS).gradient(rows) - found[1]).norm() > 1e-2 * found[1].norm()


def test_an_entropy_bonus_raises_the_entropy(free: RunConfig, runs: Path) -> None:
    curious = made(runs, "curious", objective={"entropy_bonus": 0.5})
    run(curious)
    assert metric(curious, "entropy")[0] == pytest.approx(metric(free, "entropy")[0])
    assert metric(curious, "entropy")[1] > metric(free, "entropy")[1] + 0.01


def test_weights_of_parts_are_the_reward(runs: Path) -> None:
    config = made(runs, objective={"reward_weights": {"correct": 0.25, "format": 0.5}})
    run(config)
    batch = open_batch(batch_directories(config.directory / "rollouts")[0])
    plain = batch.column("reward")
    batch = batch.with_columns(reward_weights=config.objective.reward_weights)
    parts = [{p["name"]: p["value"] for p in row["reward_parts"]} for row in batch.iter_records(["reward_parts"])]
    expected = np.array([0.25 * one["correct"] + 0.5 * one["format"] for one in parts])
    assert batch.column("reward").tolist() == expected.tolist() != plain.tolist()
    assert batch.take([3, 1]).reward.tolist() == expected[[3, 1]].tolist()
    with pytest.raises(StoreError, match=r"a reward has no part 'style', which objective\.reward_weights names"):
        batch.with_columns(reward_weights={"style": 1.0}).take([1])
    assert metric(config, "reward")[0] == pytest.approx(expected[:16].mean())


def test_bad_references_are_one_message(runs: Path) -> None:
    with pytest.raises(StalewiseError, match=r"objective\.reference: .*nowhere"):
        run(made(runs, objective={"kl": 0.3, "reference": str(runs / "nowhere")}))
    other = runs / "other"
    shutil.copytree(POLICY, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="another vocabulary than the policy"):
        check_reference(ObjectiveSection(kl=0.1, reference=str(other)), ModelSection(), "arithmetic", str(POLICY))
    with pytest.raises(StalewiseError, match=r"objective\.reward_weights names 'style', which no reward has as a part"):
        run(made(runs, "parts", objective={"reward_weights": {"style": 1.0}}))


def test_other_weights_in_the_same_place_are_refused(runs: Path) -> None:
    reference = moved(POLICY, runs / "other", by=0.05)
    config = made(runs, objective={"kl": 0.3, "reference": str(reference)})
    with pytest.raises(KeyboardInterrupt):
        run(config, StopAt(1))
    shutil.copy(POLICY / "model.safetensors", reference / "model.safetensors")
    with pytest.raises(StalewiseError, match=r"has other weights than the reference with which .* began"):
        run(config)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"kl_in": "reward"}, "have no meaning without kl"),
        ({"overlong_penalty": 2.0}, "no meaning without overlong_tokens"),
        ({"overlong_tokens": 99}, "every response would be penalised"),
        ({"reward_weights": {"correct": 0.0}}, "every reward would be 0"),
        ({"kl": 0.1, "reference": " "}, "reference is empty"),
        ({"kl": -0.1}, "greater than or equal to 0"),
    ],
)
def test_contradictions_are_one_message(runs: Path, objective: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(runs, objective=objective)
