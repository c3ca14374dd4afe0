"""Environments that the package verifiers ships, played and learned from; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.lab import verifiers_environments

from stalewise.config import RunConfig, make_config
from stalewise.models.loading import load_tokenizer
from stalewise.store import batch_directories, open_batch
from stalewise.store.json_lines import read_jsonl
from stalewise.types import FinishReason, Rollout

# datasets and gymnasium warn of themselves
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


def small(name: str, directory: Path, *, updates: int) -> RunConfig:
    policy = verifiers_environments.write_policy(directory / "policy", moves=name == "lake")
    record = verifiers_environments.settings(name, directory, policy, updates=updates).model_dump(mode="json")
    record["evaluation"] |= {"prompts": 64, "samples": 2}
    return make_config(record)


def scored(config: RunConfig) -> list[Rollout]:
    """The rollouts of a run but for the few that were cut, which a rubric cannot score."""
    batches = map(open_batch, batch_directories(config.directory / "rollouts"))
    every = [one for batch in batches for one in batch.iter_rollouts()]
    found = [one for one in every if not one.reward_error]
    assert len(found) > 0.95 * len(every)
    assert all(one.finish_reason is FinishReason.LENGTH for one in every if one.reward_error)
    return found


def test_sums_of_its_reasoning_gym_are_learned(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    pytest.importorskip("reasoning_gym")
    config = small("sums", tmp_path, updates=32)
    found = verifiers_environments.learn(config)
    assert found["after"]["value"] > found["before"]["value"] + 0.08  # .31 and .48 with 256 prompts
    rollouts = scored(config)
    tokenizer = load_tokenizer(config.model.path)
    for one in rollouts:  # its rubric says what the sum says
        terms = tokenizer.decode(list(one.prompt_ids)).removesuffix("=").split("+")
        assert (one.reward == 1) == (one.text == str(sum(map(int, terms))))
        assert one.reward_parts["check_answer_reward_func"] == one.reward
    assert 0 < sum(one.reward == 1 for one in rollouts) < len(rollouts)


def test_its_game_of_gymnasium_is_played_in_turns_and_learned_from(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    pytest.importorskip("gymnasium")
    config = small("lake", tmp_path, updates=24)
    found = verifiers_environments.learn(config)
    assert found["updates"] == 24
    metrics = read_jsonl(config.directory / "metrics.jsonl")
    assert all(one["taken"] and one["grad_norm"] > 0 for one in metrics)
    assert found["stages"][-1]["reward"] > found["stages"][0]["reward"] + 0.1
    rollouts = scored(config)
    tokenizer = load_tokenizer(config.model.path)
    for one in rollouts:
        turns = [segment.by for segment in one.segments[::2]] or ["policy"]
        assert one.reward_parts["num_turns"] == len(turns) and set(turns) == {"policy"}
        assert one.reward_parts["sum_step_rewards"] == one.reward in (0.0, 1.0)
        # Field 5 is the goal: its environment shows it, and says that the game is over.
        shown = tokenizer.decode([token for token, own in zip(one.response_ids, one.mask, strict=True) if not own])
        assert ("5=" in shown) == (one.reward == 1)
