"""How the policy runs: precision, packing, recomputed activations, compiled layers, graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from policies import SIZE
from stalewise.distributed import ALONE
from stalewise.errors import ModelError
from stalewise.models.attention import supports_packing
from stalewise.models.compilation import compile_layers
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.trainer.cuda_graphs import hidden_states
from stalewise.trainer.execution import Execution, check_trainable
from stalewise.trainer.micro_batch import micro_batches
from stalewise.trainer.parallel import SingleProcess
from stalewise.trainer.trainer import Trainer
from stalewise.trainer.weights import FlatWeights, Weights
from trainer_inputs import (
    CPU,
    POLICY,
    config,
    gradient_after_update,
    rollouts,
)


@pytest.mark.parametrize(
    ("precision", "computed"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("bfloat16-only", torch.bfloat16)],
)
def test_layers_compute_in_the_precision_of_the_config(precision: str, computed: torch.dtype) -> None:
    trainer = Trainer(config(model={"precision": precision}), POLICY)
    made: set[torch.dtype] = set()
    trainer.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *seen: made.add(seen[2].dtype))
    trainer.gradient(rollouts(groups=1, size=2))  # bfloat16 is slow on a CPU
    assert made == {computed}


def test_gradient_checkpointing_changes_nothing() -> None:
    plain = Trainer(config(), POLICY)
    saving = Trainer(config(learner={"gradient_checkpointing": True}), POLICY)
    passed: list[int] = []
    for number, trainer in enumerate((plain, saving)):
        trainer.model.model.layers[0].self_attn.register_forward_pre_hook(
            lambda *_, number=number: passed.append(number)
        )
    assert saving.update(rollouts()) == pytest.approx(plain.update(rollouts()), rel=1e-5, nan_ok=True)
    assert passed == [1, 1, 0]  # but that activations are computed twice


NOISY: dict[str, dict[str, Any]] = {  # in training mode
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5, "layerdrop": 0.5},  # numbers of the layers
    "mixtral": {"router_jitter_noise": 0.9, "num_local_experts": 4},
    "phimoe": {"router_jitter_noise": 0.9, "input_jitter_noise": 0.9, "num_local_experts": 4},
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 4},  # transformers would not
}


@pytest.mark.filterwarnings("ignore")  # of torch, about itself
@pytest.mark.parametrize(
    ("kind", "compiled"), [*((kind, False) for kind in NOISY), pytest.param("mixtral", True, marks=pytest.mark.nightly)]
)
def test_gradient_checkpointing_gives_the_numbers_of_evaluation_mode(
    kind: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZE | NOISY[kind]))
    model.save_pretrained(tmp_path)
    load_tokenizer(str(POLICY)).save_pretrained(tmp_path)
    plain = Trainer(config(), tmp_path)
    if compiled:
        monkeypatch.setattr("stalewise.trainer.execution.optimize_layers", lambda m, *_, **__: compile_eagerly(m))
    saving = Trainer(config(learner={"gradient_checkpointing": True}), tmp_path)
    (part,) = micro_batches(rollouts(), plain._layout(), CPU)
    assert torch.equal(saving.execution.forward(part)[0], plain.execution.forward(part)[0])
    assert torch.equal(saving.gradient(rollouts()), plain.gradient(rollouts()))
    assert not saving.model.training


def compile_eagerly(model: Any) -> bool:
    compile_layers(model, backend="eager")
    return True


def test_models_that_cannot_be_recomputed_are_refused() -> None:
    kind = {"n_embd": 16, "n_layer": 1, "n_head": 2, "dff": 16, "vocab_size": 18}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("ctrl", **kind)).eval()
    check_trainable(model, config().learner)
    with pytest.raises(ModelError, match=r"CTRLLMHeadModel: set learner.gradient_checkpointing = false"):
        check_trainable(model, config(learner={"gradient_checkpointing": True}).learner)


@pytest.mark.parametrize("packed", [True, False])
def test_packed_and_padded_sequences_give_the_same_gradient(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = gradient_after_update("p3o", 100_000)
    monkeypatch.setattr("stalewise.trainer.execution.supports_packing", lambda model, precision: packed)
    found, _ = gradient_after_update("p3o", 60)
    assert (found - whole).norm() <= 2e-4 * whole.norm()


def tiny(kind: str) -> Any:
    size: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 50,
        "pad_token_id": 0,
    }
    size |= {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    if kind == "mistral":  # its window is shorter than the sequences
        return MistralForCausalLM(
            MistralConfig(**size, intermediate_size=32, num_key_value_heads=2, sliding_window=4)
        ).eval()
    if kind == "gemma2":  # attention scores are squashed
        return Gemma2ForCausalLM(Gemma2Config(**size, intermediate_size=32, num_key_value_heads=2, head_dim=8)).eval()
    return MambaForCausalLM(MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=50)).eval()


@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
@pytest.mark.parametrize(("kind", "expected"), [("mistral", True), ("gemma2", False), ("mamba", False)])
def test_only_what_packs_is_packed(kind: str, expected: bool) -> None:
    model = tiny(kind)
    before = model.config._attn_implementation
    assert supports_packing(model) is expected
    assert model.config._attn_implementation == before


def test_attention_in_chunks_is_refused() -> None:
    model = tiny("mistral")
    assert supports_packing(model)
    model.config.attention_chunk_size = 8
    assert not supports_packing(model)


@pytest.mark.filterwarnings("ignore")  # of torch, about itself
def test_compiled_layers_give_the_same_gradient() -> None:
    plain, compiled = Trainer(config(), POLICY), Trainer(config(), POLICY)
    compile_layers(compiled.model, backend="eager")  # traced like any other, without a minute of code generation
    assert plain.update(rollouts())["grad_norm"] == pytest.approx(compiled.update(rollouts())["grad_norm"], rel=1e-5)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())


class WatchedBody:
    """Stands in for the graphs: takes down what the weights were when it was told that they had changed."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.told = trainer, list[torch.Tensor]()

    def __call__(self, part: Any) -> torch.Tensor:
        return hidden_states(self.trainer.model, part.inputs)

    def weights_changed(self) -> None:
        self.told.append(torch.cat([weight.detach().flatten().clone() for weight in self.trainer.names]))


def test_graphs_are_told_of_every_change_of_the_weights() -> None:
    plain, trainer = Trainer(config(), POLICY), Trainer(config(), POLICY)
    body = WatchedBody(trainer)
    trainer.execution.graphs = body  # pyright: ignore[reportAttributeAccessIssue]
    trainer.execution.weights = FlatWeights(list(trainer.names), trainer.execution.side_stream)
    for seed in (1, 2):
        expected, found = plain.update(rollouts(seed=seed)), trainer.update(rollouts(seed=seed))
        for name in ("grad_norm", "update_norm", "drift"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    after = torch.cat([weight.detach().flatten() for weight in trainer.names])
    assert len(body.told) == 2 and torch.equal(body.told[-1], after)
    expected = torch.cat([weight.detach().flatten() for weight in plain.names])
    start = torch.cat([weight.detach().flatten() for weight in Trainer(config(), POLICY).names])
    # By length, not one by one: Adam makes a step of nearly η of any gradient, and of its rounding, too.
    assert (after - expected).norm() < 1e-3 * (expected - start).norm()


def test_keeping_fewer_activations_without_compiling_is_said_to_change_nothing() -> None:
    said: list[str] = []
    Trainer(config(learner={"keep_activations": 0.5}), POLICY, said.append)
    assert any("keep_activations has no effect" in text for text in said)


def test_weights_of_several_precisions_are_in_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(config(learner={"compile": "graphs"}), POLICY)
    monkeypatch.setattr(trainer.execution, "device", torch.device("cuda"))
    monkeypatch.setattr(trainer.execution, "precision", torch.bfloat16)
    assert trainer.execution._can_use_graphs()
    monkeypatch.setattr(trainer.execution, "config", config(learner={"compile": "never"}))
    assert not trainer.execution._can_use_graphs()
    monkeypatch.setattr(trainer.execution, "config", config(learner={"compile": "graphs"}))
    weight = next(iter(trainer.names))
    weight.data = weight.data.bfloat16()
    assert not trainer.execution._can_use_graphs()


def test_memory_of_kept_logits_is_dropped_when_the_policy_rests_or_sleeps_and_when_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Trainer(config(), POLICY)
    monkeypatch.setattr("stalewise.trainer.execution.kept_logits", lambda *_: 1 << 30)
    trainer = Trainer(config(), POLICY)
    kept = trainer.execution.kept
    for seed in range(2):
        assert trainer.update(rollouts(seed=seed)) == plain.update(rollouts(seed=seed))
        assert kept.memory is not None
        trainer.sleep()
        assert kept.memory is None and kept.most_bytes == 1 << 30
    trainer.update(rollouts())
    trainer.release_logits()
    assert kept.memory is None and not trainer.execution.offload.away
    trainer.sleep()
    assert trainer.execution.offload.away
    trainer.update(rollouts())
    assert kept.memory is not None
    trainer.execution.free_memory()
    assert kept.memory is None
    trainer.update(rollouts())  # with logits that are computed again
    assert kept.memory is None


def test_freed_memory_leaves_plain_weights_and_no_gradients() -> None:
    model = load_model(str(POLICY), device=CPU)
    execution = Execution(model, config(), SingleProcess(ALONE), CPU, torch.float32, lambda text: None)
    weights = list(execution.parallel.trained)
    execution.weights = FlatWeights(weights, execution.side_stream)
    execution.graphs = WatchedBody(Trainer(config(), POLICY))  # pyright: ignore[reportAttributeAccessIssue]
    assert execution.layout(100, pad_id=0).common_sizes
    execution.optimizer.state[weights[0]] = {"step": torch.zeros(())}
    execution.free_memory()
    assert type(execution.weights) is Weights and all(weight.grad is None for weight in weights)
    assert not execution.optimizer.state and not execution.layout(100, pad_id=0).common_sizes
