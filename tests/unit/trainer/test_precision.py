"""What weights are held in, and what is computed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import families  # noqa: F401 - its task pays random policies
from callbacks import StopAt
from policies import POLICY, SIZE
from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.models import EMBEDDED, pick_precision
from stalewise.models.loading import load_tokenizer, pick_weights_dtype
from stalewise.store.atomic import sha256_file
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.trainer.trainer import Trainer
from tiny import called_json, tiny_record, write_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "computed", "held"),
    [
        ("auto", torch.float32, torch.float32),
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.float32),
        ("bfloat16-only", torch.bfloat16, torch.bfloat16),
    ],
)
def test_each_choice(precision: str, computed: torch.dtype, held: torch.dtype, tmp_path: Path) -> None:
    assert pick_precision(precision, CPU) is computed
    assert pick_weights_dtype(precision) is held
    trainer = Trainer(make_config(tiny_record(tmp_path, model={"precision": precision})), EMBEDDED / "arithmetic")
    assert {parameter.dtype for parameter in trainer.names} == {held}


def config(runs: Path, name: str, **model: Any) -> RunConfig:
    small = {
        "batch": {"prompts": 2},
        "evaluation": {"prompts": 2},
        "checkpoints": {"every": 1},
        "sampler": {"max_new_tokens": 4},
    }
    model = {"path": str(runs / "model"), "precision": "bfloat16-only", **model}
    return make_config(tiny_record(runs, name, model=model, task={"name": "coins"}, **small))


def save_small_model(directory: Path) -> None:
    """bfloat16 takes long on a CPU, and the embedded policies are larger than this."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=True)).save_pretrained(directory)
    load_tokenizer(str(POLICY)).save_pretrained(directory)


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=["weights", "adapters"])
def test_a_run_in_bfloat16_alone_goes_on_exactly(tmp_path: Path, model: dict[str, Any]) -> None:
    save_small_model(tmp_path / "model")
    whole, parts = (config(tmp_path, name, **model) for name in ("whole", "parts"))
    run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(parts, StopAt(2))
    run(parts)
    final, other = (checkpoint_directory(c.directory, 4) for c in (whole, parts))
    for name in ("model.safetensors", "optimizer_exp_avg.safetensors"):
        assert sha256_file(final / name) == sha256_file(other / name)
    assert {tensor.dtype for tensor in load_file(final / "model.safetensors").values()} == {torch.bfloat16}
    # Adapters are small: they stay float32 whatever lies beneath them.
    moments = {tensor.dtype for tensor in load_file(final / "optimizer_exp_avg_sq.safetensors").values()}
    assert moments == {torch.float32 if model else torch.bfloat16}


def test_doctor_warns_that_small_updates_are_lost(tmp_path: Path) -> None:
    def device(**model: Any) -> dict[str, str]:
        path = write_config(tmp_path / "a.toml", tiny_record(tmp_path, model=model))
        return next(check for check in called_json("doctor", path)["checks"] if check["name"] == "device")

    found = device(precision="bfloat16-only")
    assert found["status"] == "warning"
    assert "small updates are lost to rounding" in found["detail"]
    assert "on a CPU is slower by orders of magnitude" in device(precision="bfloat16")["detail"]
    assert device(precision="float32")["status"] == "ok"
