"""TRL's rollouts in the store, and stored rollouts in TRL."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from policies import POLICY, sampling_logp
from stalewise.errors import ConfigError, StoreError
from stalewise.integrations.trl_store import StoredRollouts
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.store import batch_directories, open_batch
from stalewise.types import SamplerSettings
from tiny import call, called_json, tiny_record, write_config
from trl_trainers import GROUP, PROMPTS, QUESTIONS, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generation batches of one update each, at another temperature, by two trainers; the second one resumes."""
    directory = tmp_path_factory.mktemp("written")
    common = {"objective": "grpo", "store": directory / "kept", "temperature": 1.5, "save_strategy": "steps"}
    make_trainer(directory, **common, save_steps=1).train()
    make_trainer(directory, **common, save_steps=1, max_steps=2).train(resume_from_checkpoint=True)
    return directory / "kept"


def test_a_new_training_does_not_append_to_the_batches_of_another(written: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, store=written)
    with pytest.raises(StoreError, match="holds batches of another training: name another directory, or resume"):
        trainer.train()
    assert len(batch_directories(written / "rollouts")) == 2


def test_the_store_holds_what_was_sampled(written: Path) -> None:
    """TRL keeps no log-probabilities where a generation batch serves one update: they are there all the same."""
    first, second = map(open_batch, batch_directories(written / "rollouts"))
    assert (first.manifest.generation_batch, second.manifest.generation_batch) == (0, 1)
    assert second.column("rollout_id").tolist() == list(range(PROMPTS * GROUP, 2 * PROMPTS * GROUP))
    assert second.column("group").tolist() == np.repeat(np.arange(PROMPTS, 2 * PROMPTS), GROUP).tolist()
    settings = SamplerSettings(name="trl", temperature=1.5)
    model, tokenizer = load_model(str(POLICY), device=torch.device("cpu")), load_tokenizer(str(POLICY))
    for rollout in first.iter_rollouts():
        assert rollout.sampler == settings
        prompt = tokenizer.decode(list(rollout.prompt_ids))
        assert rollout.reward == float(QUESTIONS[prompt].answer == rollout.text) == rollout.reward_parts["correct"]
        assert rollout.truncated == (rollout.response_ids[-1] != tokenizer.eos_token_id)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])).logits[0]
        logp = sampling_logp(logits[len(rollout.prompt_ids) - 1 : -1], settings)
        expected = logp.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(rollout.behaviour_logp), expected, atol=1e-5)
    assert 0 < np.nanmean(first.column("reward")) < 1


def test_learn_and_inspect_read_it(written: Path, tmp_path: Path) -> None:
    record = tiny_record(
        tmp_path, "again", model={"path": str(POLICY)}, batch={"prompts": PROMPTS, "group_size": GROUP}
    )
    config = write_config(tmp_path / "again.toml", record)
    result = call("learn", config, "--rollouts", written)
    assert result.exit_code == 0, result.stderr
    assert called_json("inspect", tmp_path / "again")["updates_done"] == 2
    assert len(called_json("inspect", written, "--group", PROMPTS)) == GROUP
    assert called_json("inspect", written, "--rollout", 3)["sampler"]["temperature"] == 1.5


def test_every_stored_rollout_is_read_once_also_where_ranks_share_a_group(written: Path) -> None:
    stored = StoredRollouts(written)
    assert (stored.group_size, len(stored.dataset)) == (GROUP, 2 * PROMPTS)
    keys = [key for key in stored.dataset["prompt"] for _ in range(GROUP)][: 3 * GROUP]
    halves = (keys[: len(keys) // 2], keys[len(keys) // 2 :])
    found = [
        stored.rollouts(half, SimpleNamespace(num_generations=GROUP, accelerator=SimpleNamespace(process_index=rank)))
        for rank, half in enumerate(halves)
    ]
    for name, one in (("completion_ids", stored.rows.response), ("logprobs", stored.rows.logp)):
        assert [value for half in found for value in half[name]] == [one(row).tolist() for row in range(len(keys))]
    with pytest.raises(ConfigError, match="num_generations is 2, but stored groups have 4"):
        stored.rollouts(keys, SimpleNamespace(num_generations=2))
