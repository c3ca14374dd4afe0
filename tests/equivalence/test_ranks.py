"""An update is the same on 1, 2 and 4 ranks to float32 rounding, whatever lies where; so are its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import MambaConfig, MambaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from batches import SETTING_IDS, SETTINGS
from policies import POLICY, moved
from ranks import finish, start
from stalewise.api import generate
from stalewise.config import RunConfig, make_config
from stalewise.distributed import ALONE, Launch, Ranks
from stalewise.models.loading import load_tokenizer
from stalewise.orchestrator.ranks import RankWorker, make_trainer
from stalewise.store import RolloutColumns, batch_directories, open_batch
from stalewise.store.checkpoints import read_state, write_checkpoint
from stalewise.trainer.trainer import NonFiniteUpdate, Trainer
from tiny import tiny_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # one fixture takes the updates of all tests

PROMPTS, GROUP, UPDATES = 6, 4, 2
KINDS = ("replicated", "sharded")
LOW = ("bfloat16", "bfloat16-only")
OTHERS = ("untied", "unpackable")
Case = tuple[str, str, int]
CASES: list[Case] = [(name, kind, world) for name in SETTING_IDS for kind in KINDS for world in (2, 4)]
# A few objectives stand for step control, whole responses, an anchor that is kept and one that is renewed, statistics
# of the batch and a veto. test_splits.py has the gradient of every objective on two ranks, `make nightly` the updates.
FEW = ("grpo", "gspo", "decoupled_ppo", "p3o_two_anchor", "m2po-paper", "mu_grpo-suffix")
ON_FOUR = (FEW[-1], "sharded")
QUICK = [(name, kind, world) for name, kind, world in CASES if name in FEW and (world == 2 or (name, kind) == ON_FOUR)]
FRESH = {"version": 0, "steps": 0, "drift": 0.0}


def config(runs: Path, setting: int, **changes: Any) -> RunConfig:
    name, params = SETTINGS[setting]
    every = 1 if name == "p3o_two_anchor" else 2  # a snapshot that is renewed, and one that is kept
    changes = {"objective": {"name": name, "params": params, "proximal_every": every}, **changes}
    # With a large ε a step is proportional to the gradient: rounding stays as small as it is.
    steps = {"learning_rate": 1e-2, "epsilon": 1e-2, "step_control": "vcpo" if name == "grpo" else "none"}
    changes["optimizer"] = steps | changes.get("optimizer", {})
    changes.setdefault("learner", {"tokens_per_micro_batch": 1000 if name in ("p3o_two_anchor", "dapo") else 60})
    changes["batch"] = {"prompts": PROMPTS, "group_size": GROUP} | changes.get("batch", {})
    return make_config(tiny_record(runs, "made", **changes))


def updates_of(runs: Path) -> list[RolloutColumns]:
    batch = open_batch(batch_directories(runs / "made" / "rollouts")[0])
    rows = [batch.take(chosen) for chosen in batch.column("rollout_id").reshape(UPDATES, -1)]
    random = np.random.default_rng(0)
    for one in rows:  # drifted, with a few tokens that the policy has given up
        one.behaviour_logp[:] += random.normal(0, 0.3, len(one.behaviour_logp)).astype(np.float32)
        one.behaviour_logp[random.random(len(one.behaviour_logp)) < 0.05] += 12.0
    return rows


def learned(trainer: Trainer, rows: list[RolloutColumns], place: Path) -> None:
    """Take all updates, and write down what came of them."""
    place.mkdir(parents=True)
    pending = [trainer.enqueue(one) for one in rows]
    record: dict[str, Any] = {"metrics": [one.metrics() for one in pending], "tokens": []}
    for one in pending:
        seen = one.tokens()
        assert seen is not None
        lengths = seen.rows.response_lengths[seen.order]
        rollout_id = np.repeat(seen.rows.rollout_id[seen.order], lengths)
        order = np.argsort(rollout_id, kind="stable")
        advantage = np.repeat(seen.advantage[seen.order], lengths)
        record["tokens"] += [column[order].tolist() for column in (rollout_id, advantage, seen.logp, seen.flags)]
    trainer.save(place)
    (place / "record.json").write_text(json.dumps(record))


def lead(ranks: Any, runs: Path, out: Path, names: list[str], kind: str) -> None:
    rows, world = updates_of(runs), ranks.world
    for name in names:
        trainer = make_trainer(config(runs, SETTING_IDS.index(name)), runs / "start", FRESH, ranks, kind)
        learned(trainer, rows, out / f"{world}-{kind}-{name}")
    if world == 4:
        grpo = config(runs, SETTING_IDS.index("grpo"))
        trainer = make_trainer(grpo, runs / "start", FRESH, ranks, kind)
        learned(trainer, [few(rows[0])], out / f"few-{kind}")
    else:
        special_cases(ranks, runs, out, kind, rows)


def few(rows: RolloutColumns) -> RolloutColumns:
    """Two rollouts of one prompt whose rewards differ."""
    for group in np.unique(rows.group):
        places = np.flatnonzero(rows.group == group)
        if len(np.unique(rows.reward[places])) == 2:
            return rows.take([places[np.argmin(rows.reward[places])], places[np.argmax(rows.reward[places])]])
    raise AssertionError("no group has rewards that differ")


def special_cases(ranks: Any, runs: Path, out: Path, kind: str, rows: list[RolloutColumns]) -> None:
    """Recomputed activations, half the digits, a checkpoint to go on from, a ratio that is not finite elsewhere."""
    save = {"learner": {"gradient_checkpointing": True, "tokens_per_micro_batch": 60}}
    trainer = make_trainer(config(runs, SETTING_IDS.index("p3o"), **save), runs / "start", FRESH, ranks, kind)
    learned(trainer, rows, out / f"recomputed-{kind}")

    for precision in LOW:
        settings = config(runs, SETTING_IDS.index("p3o"), model={"precision": precision})
        learned(make_trainer(settings, runs / "untied", FRESH, ranks, kind), rows[:1], out / f"{precision}-{kind}")

    for name in OTHERS:
        settings = config(runs, SETTING_IDS.index("p3o"))
        learned(make_trainer(settings, runs / name, FRESH, ranks, kind), rows, out / f"{name}-{kind}")
    regularized(ranks, runs, rows, out / f"regularized-{kind}", kind)

    settings = config(runs, SETTING_IDS.index("p3o"), optimizer={"moments": "int8"})
    trainer = make_trainer(settings, runs / "untied", FRESH, ranks, kind)
    trainer.update(rows[0])
    saved = out / f"int8-{kind}-saved"
    write_checkpoint(out, 1, save=trainer.save, state=trainer.state()).rename(saved)
    learned(trainer, rows[1:], out / f"int8-{kind}-2")
    again = make_trainer(settings, saved, read_state(saved), ranks, kind)
    learned(again, rows[1:], out / f"int8-{kind}-again")

    settings = config(runs, SETTING_IDS.index("decoupled_ppo"))
    gone_on = make_trainer(settings, runs / "one-update", read_state(runs / "one-update"), ranks, kind)
    learned(gone_on, rows[1:], out / f"restored-{kind}")

    trainer = make_trainer(settings, runs / "start", FRESH, ranks, kind)
    last = rows[0].take(np.arange(len(rows[0])))
    last.behaviour_logp[-1] = -np.inf
    with pytest.raises(
        NonFiniteUpdate, match=rf"rollout {last.rollout_id[-1]} token {last.response_lengths[-1] - 1}\)"
    ):
        trainer.update(last)
    unchanged = out / f"unchanged-{kind}"
    unchanged.mkdir()
    trainer.save(unchanged)


def regularized(ranks: Any, runs: Path, rows: list[RolloutColumns], place: Path, kind: str) -> None:
    """All that can be added to an objective, with a reference that differs from the policy."""
    added = {"kl": 0.3, "entropy_bonus": 0.2, "overlong_tokens": 4, "truncated": "mask", "advantage": "batch"}
    settings = config(runs, 0, objective={"name": "grpo", **added}, batch={"without_variance": "drop"})
    referred = [replace(one, reference_logp=one.behaviour_logp - np.float32(0.1)) for one in rows]
    learned(make_trainer(settings, runs / "start", FRESH, ranks, kind), referred, place)


def other_models() -> tuple[Any, Any]:
    """An output layer of its own and sizes that two ranks cannot split evenly; blocks within blocks, one row each."""
    vocabulary = load_tokenizer(str(POLICY)).vocab_size
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "hidden_size": 33, "num_hidden_layers": 2}
    heads: dict[str, Any] = {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 35,
    }
    torch.manual_seed(0)
    untied = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False, max_position_embeddings=64))
    return untied, MambaForCausalLM(MambaConfig(**sizes, state_size=4))


def save_model(model: Any, directory: Path) -> None:
    model.save_pretrained(directory)
    load_tokenizer(str(POLICY)).save_pretrained(directory)


def rank_main(rank: int, runs: Path, out: Path, cases: list[Case]) -> None:
    """Both kinds on all ranks of this launch, and then on the first two of them."""
    for world in (4, 2):
        if rank >= world:
            return
        meet = f"file://{runs}/meet-{world}"  # a second port may be taken
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
        ranks = Ranks(Launch(rank, world, rank, world), dist.group.WORLD)
        if rank == 0:
            for kind in KINDS:
                lead(ranks, runs, out, [name for name, *where in cases if where == [kind, world]], kind)
            ranks.stop_others(exit_code=0)
        else:
            RankWorker(ranks).follow()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Rollouts of another policy, what one process learns from them, and what 2 and 4 ranks do."""
    runs = tmp_path_factory.mktemp("ranks")
    once = {"kind": "staged", "updates": UPDATES, "stages": 1}
    other = moved(POLICY, runs / "other", by=0.2)
    generate(config(runs, 0, model={"path": str(other)}, schedule=once))

    def start_from(directory: Path) -> None:
        for file in POLICY.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())

    write_checkpoint(runs, 0, save=start_from, state=FRESH).rename(runs / "start")
    rows = updates_of(runs)
    before = make_trainer(config(runs, SETTING_IDS.index("decoupled_ppo")), runs / "start", FRESH, ALONE, "alone")
    before.update(rows[0])
    write_checkpoint(runs, 1, save=before.save, state=before.state()).rename(runs / "one-update")
    cases = QUICK if "not nightly" in str(request.config.getoption("markexpr")) else CASES
    for name in sorted({"p3o", *(name for name, _, _ in cases)}):
        trainer = make_trainer(config(runs, SETTING_IDS.index(name)), runs / "start", FRESH, ALONE, "alone")
        learned(trainer, rows, runs / "alone" / name)
    for name, model in zip(OTHERS, other_models(), strict=True):
        write_checkpoint(runs, 0, save=partial(save_model, model), state=FRESH).rename(runs / name)
        settings = config(runs, SETTING_IDS.index("p3o"))
        learned(make_trainer(settings, runs / name, FRESH, ALONE, "alone"), rows, runs / "alone" / name)
    for precision in LOW:  # of the smallest model: bfloat16 takes long on a CPU
        settings = config(runs, SETTING_IDS.index("p3o"), model={"precision": precision})
        learned(make_trainer(settings, runs / "untied", FRESH, ALONE, "alone"), rows[:1], runs / "alone" / precision)
    learned(before, rows[1:], runs / "alone" / "restored")
    regularized(ALONE, runs, rows, runs / "alone" / "regularized", "alone")
    grpo = make_trainer(config(runs, SETTING_IDS.index("grpo")), runs / "start", FRESH, ALONE, "alone")
    learned(grpo, [few(rows[0])], runs / "alone" / "few")
    assert finish(start(4, rank_main, runs, runs / "ranks", cases)) == [0, 0, 0, 0]
    return runs


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return math.sqrt(sum(((tensor - other[name]) ** 2).sum().item() for name, tensor in one.items()))


def assert_same(found: Path, expected: Path) -> None:
    for file in ("model", "optimizer_exp_avg", "optimizer_exp_avg_sq", "proximal"):
        file = f"{file}.safetensors"
        assert (found / file).exists() == (expected / file).exists()
        if not (found / file).exists():
            continue
        ours, theirs = load_file(found / file), load_file(expected / file)
        assert list(ours) == list(theirs)
        # Weights to the last digits; moments, which are small differences of large numbers in places, to fewer.
        digits = 2e-4 if file.startswith("optimizer") else 1e-6
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() <= digits * tensor.abs().max(), f"{file}: {name}"
        assert distance(ours, theirs) <= 1e-5 * distance(theirs, dict.fromkeys(theirs, 0.0))
    assert (found / "config.json").read_text() == (expected / "config.json").read_text()
    ours, theirs = (json.loads((place / "record.json").read_text()) for place in (found, expected))
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine == pytest.approx(other, rel=2e-4, abs=1e-6, nan_ok=True)
        assert mine["taken"] == 1.0 and mine["grad_norm"] > 0
    for mine, other in zip(ours["tokens"], theirs["tokens"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "world"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.nightly) for case in CASES],
)
def test_ranks_take_the_updates_of_one(made: Path, name: str, kind: str, world: int) -> None:
    assert_same(made / "ranks" / f"{world}-{kind}-{name}", made / "alone" / name)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_without_rollouts_change_nothing(made: Path, kind: str) -> None:
    assert_same(made / "ranks" / f"few-{kind}", made / "alone" / "few")


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations_change_nothing(made: Path, kind: str) -> None:
    assert_same(made / "ranks" / f"recomputed-{kind}", made / "alone" / "p3o")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", LOW)
def test_half_the_digits_are_the_same_half(made: Path, precision: str, kind: str) -> None:
    places = (made / "ranks" / f"{precision}-{kind}", made / "alone" / precision)
    ((mine,), (other,)) = (json.loads((place / "record.json").read_text())["metrics"] for place in places)
    for name in ("loss", "ess", "grad_norm", "update_norm"):
        assert mine[name] == pytest.approx(other[name], rel=1e-2, abs=1e-3), name
    ours, theirs = (load_file(place / "model.safetensors") for place in places)
    assert {tensor.dtype for tensor in ours.values()} == {tensor.dtype for tensor in theirs.values()}
    assert distance(ours, theirs) <= 0.1 * distance(theirs, load_file(made / "untied" / "model.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_moments_in_8_bits_go_through_files_exactly(made: Path, kind: str) -> None:
    """Sizes that two ranks cannot split evenly; scales are split like the rows that they belong to."""
    whole, again = (made / "ranks" / f"int8-{kind}-{name}" for name in ("2", "again"))
    for file in ("model", "optimizer_exp_avg", "optimizer_exp_avg_sq"):
        ours, theirs = (load_file(place / f"{file}.safetensors") for place in (again, whole))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    moments, weights = load_file(whole / "optimizer_exp_avg.safetensors"), load_file(whole / "model.safetensors")
    for name in (name for name in weights if weights[name].ndim > 1):
        codes, scale = moments[f"exp_avg.{name}"], moments[f"exp_avg_scale.{name}"]
        assert codes.dtype is torch.int8 and codes.shape == weights[name].shape
        assert scale.shape == (len(codes), 1)
        largest = (codes.float() / 127).square().flatten(1).amax(dim=1) * scale[:, 0]
        torch.testing.assert_close(largest, scale[:, 0])  # every row has a number of the size of its scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_split_as_well(made: Path, name: str, kind: str) -> None:
    assert_same(made / "ranks" / f"{name}-{kind}", made / "alone" / name)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_add_the_same_regularizers(made: Path, kind: str) -> None:
    assert_same(made / "ranks" / f"regularized-{kind}", made / "alone" / "regularized")
    metrics = json.loads((made / "alone" / "regularized" / "record.json").read_text())["metrics"]
    assert all(one["kl_reference"] > 1e-3 for one in metrics)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_from_the_checkpoint_of_one_process(made: Path, kind: str) -> None:
    assert_same(made / "ranks" / f"restored-{kind}", made / "alone" / "restored")


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_not_finite_changes_nothing_on_any_rank(made: Path, kind: str) -> None:
    found, before = (load_file(made / place / "model.safetensors") for place in (f"ranks/unchanged-{kind}", "start"))
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_the_updates_are_worth_comparing(made: Path) -> None:
    """They move weights by far more than the tolerance; and what the objectives do differs."""
    before = load_file(made / "start" / "model.safetensors")
    files = {name: made / "alone" / name / "model.safetensors" for name in SETTING_IDS}
    found = {name: load_file(path) for name, path in files.items() if path.exists()}
    assert found.keys() >= {*FEW}
    assert all(
        distance(after, before) > 1e-4 * distance(before, dict.fromkeys(before, 0.0)) for after in found.values()
    )
    assert {(a, b) for a in found for b in found if a < b and distance(found[a], found[b]) == 0} == set()
