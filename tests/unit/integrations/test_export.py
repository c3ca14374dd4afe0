"""Exports: directories that others load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hubs import EXPORT_FILES, POLICY_FILES, card_of, file_names
from stalewise.api import evaluate, learn
from stalewise.config import RunConfig, make_config
from stalewise.integrations.hub.export import export_policy
from stalewise.models import EMBEDDED
from stalewise.models.loading import load_model
from stalewise.store import batch_directories, open_batch
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory
from tiny import call, refused, tiny_record


def test_an_export_is_a_directory_that_transformers_loads(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = tmp_path / "out" / "policy"
    assert call("export", tiny_run.directory, target).stdout == f"{target}\n"
    assert file_names(target) == sorted([*POLICY_FILES, *EXPORT_FILES])
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    checkpoint = load_model(str(checkpoint_directory(tiny_run.directory, 4)), device=torch.device("cpu")).state_dict()
    assert all(torch.equal(loaded[name], checkpoint[name]) for name in checkpoint)
    assert AutoTokenizer.from_pretrained(target)("1+2=")["input_ids"]
    record = read_json(target / "stalewise.json")
    assert (record["kind"], record["run"], record["version"]) == ("policy", "tiny", 4)
    assert sorted(record["files"]) == [name for name in file_names(target) if name != "stalewise.json"]
    as_run = evaluate(tiny_run.directory, prompts=8, samples=2)
    as_export = evaluate(target, task="arithmetic", prompts=8, samples=2, max_new_tokens=8)
    assert as_export.accuracy == as_run.accuracy


def test_an_adapter_and_the_merged_policy_are_one(adapted: RunConfig, tmp_path: Path) -> None:
    from peft import PeftModel

    merged = export_policy(adapted.directory, tmp_path / "merged")
    alone = export_policy(adapted.directory, tmp_path / "alone", adapter=True)
    assert file_names(merged) == sorted([*POLICY_FILES, *EXPORT_FILES])
    tokenizer = ["tokenizer.json", "tokenizer_config.json"]
    assert file_names(alone) == sorted(["adapter_config.json", "adapter_model.safetensors", *tokenizer, *EXPORT_FILES])
    assert read_json(alone / "adapter_config.json")["base_model_name_or_path"] == "arithmetic"
    ids = AutoTokenizer.from_pretrained(alone)("1+2=", return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED / "arithmetic")
    before = base(ids).logits
    logits = [model(ids).logits for model in (PeftModel.from_pretrained(base, alone), load_merged(merged))]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    assert (logits[0] - before).abs().max() > 1e-2
    data, text = card_of(alone)
    assert data.library_name == "peft" and "This is the LoRA adapter alone." in text
    assert "merged into these weights" in card_of(merged)[1]
    changed = (
        "It changes down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj. All other weights, also of experts"
    )
    assert changed in text and changed in card_of(merged)[1]


def load_merged(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


def test_all_weights_have_no_adapter(tiny_run: RunConfig, tmp_path: Path) -> None:
    assert "trained all weights and has no adapter" in refused(
        "export", tiny_run.directory, tmp_path / "x", "--adapter"
    )


def test_a_damaged_checkpoint_is_not_handed_on(tiny_run: RunConfig, tmp_path: Path) -> None:
    copied = tmp_path / "tiny"
    shutil.copytree(tiny_run.directory, copied)
    weights = checkpoint_directory(copied, 4) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "model.safetensors is damaged" in refused("export", copied, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "is not a run directory" in refused("export", tmp_path, tmp_path / "out")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_rollouts_are_a_dataset_and_can_be_learned_from(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    target = tmp_path / "rollouts"
    assert call("export", tiny_run.directory, target, "--rollouts").stdout == f"{target}\n"
    loaded = datasets.load_dataset(str(target), split="train", cache_dir=str(tmp_path / "cache"))
    stored = [
        rollout
        for path in batch_directories(tiny_run.directory / "rollouts")
        for rollout in open_batch(path).iter_rollouts()
    ]
    assert loaded["rollout_id"][:] == [rollout.rollout_id for rollout in stored]
    assert [tuple(row) for row in loaded["behaviour_logp"]] == [rollout.behaviour_logp for rollout in stored]
    text = (target / "README.md").read_text()
    assert "64 responses" in text and "| 1 | 2 | 32 |" in text
    config = make_config(tiny_record(tmp_path / "runs", "again"))
    assert learn(config, [target]).updates == 4
    assert "omit --version and --adapter" in refused(
        "export", tiny_run.directory, tmp_path / "x", "--rollouts", "--version", 2
    )
