from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification, TrainerCallback

from policies import POLICY, moved
from stalewise.api import generate
from stalewise.config import make_config
from stalewise.errors import StalewiseError, TaskError
from stalewise.integrations.trl import StaleGRPOTrainer
from stalewise.integrations.trl_store import StoredRollouts
from stalewise.models.loading import load_tokenizer
from stalewise.objectives import OBJECTIVES
from stalewise.store import batch_directories, open_batch
from stalewise.trainer.trainer import NonFiniteUpdate, Trainer
from tiny import tiny_record
from trl_trainers import GROUP, PROMPTS, QUESTIONS, correct, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")

METRICS = ("ess", "clip_fraction", "veto_fraction", "kl_behaviour_policy", "entropy", "tokens", "age_max")


def weights_of(trainer: StaleGRPOTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


class Gradients(TrainerCallback):
    """The gradient of each update, before its step."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found.append({name: value.grad.clone() for name, value in model.named_parameters()})


# ---------------------------------------------------------------- training


@pytest.mark.parametrize(
    "objective", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("grpo", "mu_grpo")), "p3o"]
)
def test_it_trains_and_logs(tmp_path: Path, objective: str) -> None:
    """Three generation batches of three updates, each in two micro-batches; the reward rises from first to last."""
    trainer = make_trainer(
        tmp_path,
        objective=objective,
        max_steps=9,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        steps_per_generation=6,
        max_grad_norm=1.0,
        learning_rate=2e-3,
    )
    before = weights_of(trainer)
    trainer.train()
    logs = [record for record in trainer.state.log_history if "loss" in record]
    assert len(logs) == 9
    assert all(math.isfinite(record["loss"]) for record in logs)
    assert [record["stalewise/age_max"] for record in logs] == [0, 1, 2] * 3
    assert all(record[f"stalewise/{name}"] is not None for record in logs for name in METRICS)
    assert [record["stalewise/responses"] for record in logs] == [64] * 9
    assert logs[0]["stalewise/ess"] == pytest.approx(1, abs=1e-6)
    assert logs[2]["stalewise/ess"] < 0.9999
    rewards = [record["reward"] for record in logs if "reward" in record]
    assert rewards[-1] > rewards[0] + 0.1
    assert all(not torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_evaluation_has_a_loss_and_diagnostics_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objective="p3o", per_device_eval_batch_size=8, eval_dataset=None)
    trainer.eval_dataset = Dataset.from_dict({"prompt": list(QUESTIONS)[:4]})
    found = trainer.evaluate()
    assert found["eval_stalewise/ess"] == pytest.approx(1, abs=1e-6)
    assert trainer._window is None


# ---------------------------------------------------------------- the same update as ours


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a generation batch of a policy that is not the one to be trained."""
    directory = tmp_path_factory.mktemp("stale")
    other = moved(POLICY, directory / "other", by=0.2)
    record = tiny_record(
        directory,
        "made",
        model={"path": str(other)},
        batch={"prompts": PROMPTS, "group_size": GROUP},
        schedule={"kind": "staged", "updates": 1, "stages": 1},
    )
    generate(make_config(record))
    return directory / "made"


def ours(stale: Path, objective: str, params: dict[str, Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
    record = tiny_record(
        stale.parent,
        "learner",
        model={"path": str(POLICY), "device": "cpu"},
        batch={"prompts": PROMPTS, "group_size": GROUP},
        objective={"name": objective, "params": params},
        optimizer={"max_grad_norm": 1e9},
    )
    trainer = Trainer(make_config(record), POLICY)
    batch = open_batch(batch_directories(stale / "rollouts")[0])
    metrics = trainer.update(batch.take(batch.column("rollout_id")))
    return metrics, {name: parameter.grad for parameter, name in trainer.names.items() if parameter.grad is not None}


def theirs(
    directory: Path, stale: Path, objective: str, params: dict[str, Any], passes: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    stored, gradients = StoredRollouts(stale), Gradients()
    trainer = make_trainer(
        directory,
        objective=objective,
        objective_params=params,
        reward_funcs=stored.reward,
        rollout_func=stored.rollouts,
        train_dataset=stored.dataset,
        callbacks=[gradients],
        per_device_train_batch_size=PROMPTS * GROUP // passes,
        gradient_accumulation_steps=passes,
        gradient_checkpointing=passes > 1,
    )
    trainer.train()
    return trainer.state.log_history[0], gradients.found[0]


CASES: list[tuple[str, dict[str, Any], int]] = [
    *((name, {}, 4) for name in OBJECTIVES),
    ("p3o", {}, 1),
    ("m2po", {"variant": "released", "threshold": 0.01}, 4),
    ("mu_grpo", {"kappa": 0.5, "scope": "sequence", "clip_high": 1.1}, 4),
]


@pytest.mark.parametrize(("objective", "params", "passes"), CASES)
def test_loss_and_gradient_are_those_of_our_learner(
    tmp_path: Path, stale: Path, objective: str, params: dict[str, Any], passes: int
) -> None:
    metrics, gradient = ours(stale, objective, params)
    logged, found = theirs(tmp_path, stale, objective, params, passes)
    assert metrics["ess"] < 0.99  # stale for real
    assert logged["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
    assert found.keys() == gradient.keys()
    largest = max(float(value.abs().max()) for value in gradient.values())
    assert largest > 1e-3
    for name, value in found.items():
        assert torch.allclose(value, gradient[name], rtol=0, atol=1e-5), name
    for name in ("ess", "ess_sequence", "clip_fraction", "veto_fraction", "m2_harmful", "entropy", "tokens"):
        assert logged[f"stalewise/{name}"] == pytest.approx(metrics[name], rel=1e-4), name


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "p4o"}, "no objective is called 'p4o'"),
        ({"objective": None}, "^objective is None: name one"),
        ({"objective": correct}, "^objective is <function correct .*: name one"),
        ({"store": __file__}, r"^store=.*: .*test_trl\.py is a file: name a directory"),
        ({"store": f"{__file__}/below"}, r"test_trl\.py is a file: name a directory"),
        ({"store": 5}, "^store=5 is not a path: name a directory"),
        ({"objective": "grpo", "objective_params": {"cap": 2.0}}, "has no parameter 'cap'"),
        ({"beta": 0.04}, r"GRPOConfig.beta is 0.04.*: leave it at 0.0; a KL .* not available here, .*train\(kl=…\)$"),
        ({"scale_rewards": "none"}, "leave it at 'group'; the objective says how advantages are scaled"),
        ({"epsilon": 0.3}, "set bounds in objective_params"),
        ({"top_p": 0.9}, "generation with top_p=0.9"),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation with temperature=0.5"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
            "not a multiple of gradient_accumulation",
        ),
        ({"store": "kept", "mask_truncated_completions": True}, "objective.truncated"),
    ],
)
def test_what_would_be_passed_over_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StalewiseError, match=message):
        make_trainer(tmp_path, **changes)


def test_a_ratio_that_is_not_finite_stops_the_run(tmp_path: Path, stale: Path) -> None:
    stored = StoredRollouts(stale)
    stored.rows.behaviour_logp[5] = -200.0
    trainer = make_trainer(
        tmp_path,
        objective="p3o",
        reward_funcs=stored.reward,
        rollout_func=stored.rollouts,
        train_dataset=stored.dataset,
    )
    before = weights_of(trainer)
    with pytest.raises(NonFiniteUpdate, match="update 0: 1 tokens with a non-finite ratio"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


def test_a_token_whose_log_probability_is_unknown_counts_as_fresh(tmp_path: Path, stale: Path) -> None:
    """vLLM says NaN for a token now and then, which TRL hands on."""
    stored = StoredRollouts(stale)
    stored.rows.behaviour_logp[:] = np.nan
    trainer = make_trainer(
        tmp_path,
        objective="grpo",
        reward_funcs=stored.reward,
        rollout_func=stored.rollouts,
        train_dataset=stored.dataset,
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["stalewise/log_ratio_max_abs"] == pytest.approx(0, abs=1e-6)
    assert logged["grad_norm"] > 0


def test_a_rollout_without_a_reward_is_left_out(tmp_path: Path) -> None:
    def sometimes(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        found: list[float | None] = [*correct(prompts, completions)]
        return [None, None, *found[2:]]

    trainer = make_trainer(tmp_path, objective="grpo", reward_funcs=sometimes, store=tmp_path / "kept")
    trainer.train()
    assert trainer.state.log_history[0]["stalewise/responses"] == PROMPTS * GROUP - 2
    (batch,) = map(open_batch, batch_directories(tmp_path / "kept" / "rollouts"))
    assert batch.manifest.verifier_errors == 2


def reward_of(value: Any, rows: slice) -> Any:
    """A reward function that gives `value` instead of the reward for these rows."""

    def broken(prompts: list[str], completions: list[str], **_: Any) -> list[Any]:
        found: list[Any] = [*correct(prompts, completions)]
        found[rows] = [value] * len(found[rows])
        return found

    return broken


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_rewards_that_are_all_missing_stop_the_run(tmp_path: Path, value: Any) -> None:
    trainer = make_trainer(tmp_path, objective="grpo", reward_funcs=[reward_of(value, slice(None))])
    before = weights_of(trainer)
    with pytest.raises(TaskError, match=r"^update 0: none of the 32 completions has a reward \(broken\): .* a number"):
        trainer.train()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(trainer).items())


@pytest.mark.parametrize("value", [math.nan, -math.inf, torch.tensor(math.nan)])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_is_not_finite_is_named_and_never_counts_as_not_applicable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any, is_async: bool
) -> None:
    broken = reward_of(value, slice(0, 3))

    async def later(**given: Any) -> list[Any]:
        return broken(**given)

    functions = [correct, reward_of(None, slice(3, 8)), later if is_async else broken]
    trainer = make_trainer(tmp_path, objective="grpo", reward_funcs=functions)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["stalewise/responses"] == PROMPTS * GROUP - 3  # None of one function of several leaves nothing out
    name = "later" if is_async else "broken"
    (told,) = [record.getMessage() for record in caplog.records if "finite" in record.getMessage()]
    assert told == (
        f"the reward function {name} returned {float(value)} for 3 of 32 completions, which are left out: return "
        "a finite number, or None where it does not apply"
    )


def test_a_reward_model_that_gives_nan_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    judge = AutoModelForSequenceClassification.from_pretrained(str(POLICY), num_labels=1)
    judge.config.pad_token_id = judge.config.eos_token_id
    with torch.no_grad():
        judge.score.weight.fill_(math.nan)
    trainer = make_trainer(
        tmp_path,
        objective="grpo",
        reward_funcs=[correct, judge],
        reward_processing_classes=[None, load_tokenizer(str(POLICY))],
    )
    with pytest.raises(TaskError, match="none of the 32 completions has a reward"):
        trainer.train()
    assert "returned nan for 32 of 32 completions" in caplog.text


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / "docs" / "integrations.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        if ">>> " not in block:
            exec(block, names)
    assert {"trainer", "again"} <= names.keys()
    assert names["trainer"].state.global_step == 4
    assert names["again"].state.global_step == 2
