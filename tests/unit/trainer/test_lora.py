"""Adapters: what is trained, what is saved, that a run with them goes on exactly, and adapters that others made."""

from __future__ import annotations

import gc
import json
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import trainer_inputs
from callbacks import StopAt
from policies import SIZE
from stalewise import api as verbs
from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.config.sections import LearnerSection, ModelSection
from stalewise.errors import ConfigError, ModelError, StoreError
from stalewise.models import EMBEDDED
from stalewise.models.attention import PACKED
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.models.transfer import SMALL, HostBuffers
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.sampler import Request
from stalewise.store.atomic import sha256_file
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions, write_checkpoint
from stalewise.trainer import lora
from stalewise.trainer.lora import (
    Adapters,
    check_base,
    describe_targets,
    find_targets,
    load_policy,
    new_config,
    save_first,
)
from stalewise.trainer.trainer import Trainer
from stalewise.types import SamplerSettings
from tiny import call, refused, tiny_record, write_config

peft = pytest.importorskip("peft")
LoraConfig = peft.LoraConfig

POLICY = EMBEDDED / "arithmetic"
CPU = torch.device("cpu")
IDS = torch.arange(3, 15).unsqueeze(0)
LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def lora_config(runs: Path, name: str = "lora", **sections: Any) -> RunConfig:
    learning = {"optimizer": {"learning_rate": 5e-3}, "checkpoints": {"every": 1, "keep": 1}}
    return make_config(tiny_record(runs, name, **{"model": LORA, **learning, **sections}))


def policy(directory: Path) -> Any:
    """As anybody would load it."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run of 4 updates that trained adapters of rank 4."""
    config = lora_config(tmp_path_factory.mktemp("runs"))
    run(config)
    return config


@pytest.fixture
def adapter(trained: RunConfig, tmp_path: Path) -> Path:
    """A copy of the trained adapter, to be spoiled."""
    shutil.copytree(checkpoint_directory(trained.directory, 4) / "adapter", tmp_path / "adapter")
    return tmp_path / "adapter"


# ---------------------------------------------------------------- what is trained and saved


def test_merged_weights_are_base_plus_the_scaled_product(trained: RunConfig) -> None:
    final = checkpoint_directory(trained.directory, 4)
    base, merged = load_file(POLICY / "model.safetensors"), load_file(final / "model.safetensors")
    factors = load_file(final / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    adapted = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in factors}
    assert len(adapted) == 7 * policy(POLICY).config.num_hidden_layers
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if layer in adapted:
            first, second = (factors[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
            # alpha / rank = 8 / 4.
            assert torch.equal(merged[name], weight + (second @ first) * 2.0)
            assert not torch.equal(merged[name], weight)
        else:
            assert torch.equal(merged[name], weight), name


def test_version_0_is_the_model_itself_and_stays(trained: RunConfig) -> None:
    assert versions(trained.directory) == [0, 4]  # keep = 1, and the base of the adapters
    first = checkpoint_directory(trained.directory, 0)
    base, found = load_file(POLICY / "model.safetensors"), load_file(first / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in base.items())
    factors = load_file(first / "adapter" / "adapter_model.safetensors")
    assert all(bool(tensor.any()) == ("lora_A" in name) for name, tensor in factors.items())


def test_only_adapters_are_trained_and_have_an_optimizer(trained: RunConfig) -> None:
    final = checkpoint_directory(trained.directory, 4)
    trainer = Trainer(trained, final)
    trainer.restore(final, read_state(final))
    assert all(".lora_" in name for name in trainer.names.values())
    trainable = sum(parameter.numel() for parameter in trainer.names)
    moments = load_file(final / "optimizer_exp_avg.safetensors")
    assert sum(tensor.numel() for tensor in moments.values()) == trainable
    assert trainable == sum(t.numel() for t in load_file(final / "adapter" / "adapter_model.safetensors").values())
    assert trainable < 0.1 * sum(parameter.numel() for parameter in trainer.model.parameters())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert type(trainer.model).__name__ == type(policy(POLICY)).__name__  # and nobody needs to know of adapters


def test_frozen_weights_wait_in_host_memory_once_and_what_is_reserved_is_what_is_copied(trained: RunConfig) -> None:
    final = checkpoint_directory(trained.directory, 4)
    trainer = Trainer(trained, final)
    trainer.restore(final, read_state(final))
    frozen = [weight for weight in trainer.model.parameters() if not weight.requires_grad and weight.nbytes > SMALL]
    trainer.sleep()
    places = [weight.data_ptr() for weight in frozen]
    for _ in range(2):
        trainer.wake()
        trainer.sleep()
    assert frozen and [weight.data_ptr() for weight in frozen] == places
    snapshot = trainer.snapshot(HostBuffers())
    assert snapshot is not None and snapshot.policy.keys() == load_file(final / "model.safetensors").keys()
    files = snapshot.files.items()
    copied = {(file, name): (one.shape, one.dtype) for file, tensors in files for name, one in tensors.items()}
    assert trainer.snapshot_shapes() == copied


def test_saving_leaves_the_weights_in_memory_alone(trained: RunConfig, tmp_path: Path) -> None:
    model, adapters = load_policy(trained.model, checkpoint_directory(trained.directory, 4), CPU)
    assert adapters is not None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters.save(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert sha256_file(tmp_path / "saved" / name) == sha256_file(checkpoint_directory(trained.directory, 4) / name)


@torch.no_grad()
def test_peft_loads_the_adapter_and_finds_the_same_policy(trained: RunConfig) -> None:
    final = checkpoint_directory(trained.directory, 4)
    with_adapter = peft.PeftModel.from_pretrained(policy(POLICY), str(final / "adapter")).eval()
    merged = policy(final)(input_ids=IDS).logits
    # Two products instead of one with their sum: float32 rounding of logits near 10.
    assert torch.allclose(with_adapter(input_ids=IDS).logits, merged, atol=1e-4)
    assert not torch.allclose(policy(POLICY)(input_ids=IDS).logits, merged, atol=1e-2)
    recorded = json.loads((final / "adapter" / "adapter_config.json").read_text())
    assert recorded["base_model_name_or_path"] == str(POLICY)
    assert recorded["target_modules"] == sorted(recorded["target_modules"])
    assert (recorded["r"], recorded["lora_alpha"], recorded["task_type"]) == (4, 8, "CAUSAL_LM")


def test_adapters_start_from_the_seed_alone(tmp_path: Path) -> None:
    def first(name: str, seed: int) -> str:
        torch.manual_seed(seed + 100)
        config = make_config({**tiny_record(tmp_path, name, model=LORA), "seed": seed})
        save_first(config.model, config.seed, load_model(str(POLICY), device=CPU), str(POLICY), tmp_path / name)
        return sha256_file(tmp_path / name / "adapter" / "adapter_model.safetensors")

    torch.manual_seed(7)
    assert first("a", 1) == first("b", 1) != first("c", 2)


def test_targets_choose_layers(tmp_path: Path) -> None:
    model = load_model(str(POLICY), device=CPU)
    settings = make_config({"model": {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}}).model.lora
    adapters = Adapters(model, new_config(settings, model, str(POLICY)))
    assert {name.rpartition(".")[2] for name in adapters.layers} == {"q_proj", "v_proj"}
    config = write_config(tmp_path / "a.toml", tiny_record(tmp_path, model={"lora": {"rank": 2, "targets": ["q_pro"]}}))
    assert "model.lora.targets names 'q_pro', which is not a linear layer" in refused("train", config)
    config = write_config(
        tmp_path / "a.toml", tiny_record(tmp_path, model={"lora": {"rank": 2, "targets": ["lm_head"]}})
    )
    assert "names 'lm_head', which is not a linear layer, expert or router within" in refused("train", config)
    table = {"rank": 2, "targets": ["all-linear"]}
    config = write_config(tmp_path / "a.toml", tiny_record(tmp_path, model={"lora": table}))
    assert "names 'all-linear': leave targets out, which adapts all linear layers" in refused("train", config)
    assert versions(tmp_path / "tiny") == []


def test_architectures_with_transposed_layers_merge_as_well(tmp_path: Path) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=18, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=1))
    gpt2.save_pretrained(tmp_path / "gpt2")
    load_tokenizer(str(POLICY)).save_pretrained(tmp_path / "gpt2")
    model = load_model(str(tmp_path / "gpt2"), device=CPU)
    adapters = Adapters(model, new_config(make_config({"model": LORA}).model.lora, model, "gpt2"))
    adapters.start(0)
    for name, parameter in adapters.weights.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapters.save(tmp_path / "merged")
    with torch.no_grad():
        found, expected = (m(input_ids=IDS).logits for m in (policy(tmp_path / "merged"), model.eval()))
    assert torch.allclose(found, expected, atol=1e-5)


# ---------------------------------------------------------------- experts and routers

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
DEEPSEEK = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"moe_intermediate_size": 24},
    "phimoe": {},  # its router is a linear layer with another output
    "glm4_moe": {"moe_intermediate_size": 24, **DEEPSEEK},  # has a dense layer and shared experts
    "gpt_oss": {},  # its experts are transposed
}


def mixture(kind: str, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZE | EXPERTS | MIXTURES[kind])).save_pretrained(
        directory
    )
    load_tokenizer(str(POLICY)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_and_routers_are_adapted_and_merged(kind: str, tmp_path: Path) -> None:
    base, said = mixture(kind, tmp_path / "base"), list[str]()
    config = make_config({"model": LORA})
    model = load_model(str(base), device=CPU)
    save_first(config.model, 0, model, str(base), tmp_path / "first", said.append)
    router = "router" if kind in ("phimoe", "gpt_oss") else "gate"
    assert f"matrices of experts and routers ({', '.join(sorted(['down_proj', 'gate_up_proj', router]))})" in said[0]
    assert "not trained" not in said[0]
    adapters = Adapters(load_model(str(base), device=CPU), LoraConfig.from_pretrained(str(tmp_path / "first/adapter")))
    adapters.load(tmp_path / "first" / "adapter")
    count = sum(weight.numel() for weight in adapters.weights.values())
    assert count == find_targets(load_model(str(base), device=CPU), []).factors(4)
    adapters.model(input_ids=IDS).logits.log_softmax(dim=-1)[..., 3].sum().backward()
    unmoved = {name for name, weight in adapters.weights.items() if "lora_B" in name and not weight.grad.any()}
    assert all(kind == "phimoe" and ".router." in name for name in unmoved)  # whose best expert may win by far
    for weight in adapters.weights.values():
        weight.data += 0.1 * torch.randn_like(weight)
    adapters.save(tmp_path / "merged")
    with torch.no_grad():
        found, expected, before = (
            m(input_ids=IDS).logits for m in (policy(tmp_path / "merged"), adapters.model, policy(base))
        )
    assert torch.allclose(found, expected, atol=1e-5)
    assert (found - before).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_adapted_experts_learn_and_are_sampled(kind: str, tmp_path: Path) -> None:
    config = trainer_inputs.config(model={"path": str(mixture(kind, tmp_path / "base")), **LORA})

    def save(directory: Path) -> None:
        save_first(config.model, 0, load_model(config.model.path, device=CPU), config.model.path, directory)
        load_tokenizer(config.model.path).save_pretrained(directory)

    first = write_checkpoint(tmp_path / "run", 0, save=save, state={"steps": 0, "drift": 0.0})
    trainer, rows = Trainer(config, first), trainer_inputs.rollouts()
    saving = Trainer(config.model_copy(update={"learner": LearnerSection(gradient_checkpointing=True)}), first)
    assert torch.allclose(saving.gradient(rows), trainer.gradient(rows), atol=1e-6)
    assert trainer.adapters is not None
    before = {name: weight.clone() for name, weight in trainer.adapters.weights.items()}
    for _ in range(3):
        trainer.update(rows)
    moved = {name for name, weight in trainer.adapters.weights.items() if not torch.equal(weight, before[name])}
    assert moved == before.keys()
    last = write_checkpoint(tmp_path / "run", 3, save=trainer.save, state=trainer.state())
    sampler = HFSampler(SamplerSettings(), max_new_tokens=8, device=CPU, dtype=torch.float32)
    sampler.load(last)
    responses = sampler.sample([Request(rows.prompt(row).tolist(), seed=row) for row in range(0, len(rows), 4)])
    for row, response in zip(range(0, len(rows), 4), responses, strict=True):
        ids = torch.tensor([*rows.prompt(row), *response.token_ids.tolist()])
        with torch.no_grad():  # the learner's model, whose adapters are not merged
            logits_TV = policy_logits(trainer.model, ids)[len(rows.prompt(row)) - 1 : -1]
        logp_T = logits_TV.log_softmax(dim=1).gather(1, torch.tensor(response.token_ids)[:, None].long()).squeeze(1)
        assert torch.allclose(logp_T, torch.tensor(response.logp), atol=1e-5)
    again = Trainer(config, last)
    again.restore(last, read_state(last))
    assert again.update(rows) == trainer.update(rows)


def policy_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("sdpa")  # for a row by itself; the learner's is for packed rows
    try:
        return model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(PACKED)


def test_experts_that_are_left_out_are_named(tmp_path: Path) -> None:
    base, said = mixture("mixtral", tmp_path / "base"), list[str]()
    settings = make_config({"model": {"lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}}).model
    save_first(settings, 0, load_model(str(base), device=CPU), str(base), tmp_path / "first", said.append)
    assert said == [
        "adapters of rank 2 on 2 linear layers (q_proj) and 2 matrices of experts and routers (down_proj); "
        "not trained: gate, gate_up_proj, k_proj, o_proj, v_proj"
    ]
    assert describe_targets(settings.lora, str(base)) in said[0]
    # An adapter of experts can be trained on.
    again = ModelSection(path=str(base), adapter=str(tmp_path / "first" / "adapter"))
    save_first(again, 0, load_model(str(base), device=CPU), str(base), tmp_path / "again")
    names = "adapter/adapter_model.safetensors"
    assert sha256_file(tmp_path / "again" / names) == sha256_file(tmp_path / "first" / names)


def test_names_that_would_find_other_matrices_are_written_in_full() -> None:
    names = ["a.gate.weight", "b.gate.weight", "b.up.weight"]
    assert lora._endings(["a.gate.weight", "b.gate.weight"], names, segments=2) == ["gate.weight"]
    assert lora._endings(["a.gate.weight"], names, segments=2) == ["a.gate.weight"]


# ---------------------------------------------------------------- runs


def final_files(config: RunConfig) -> list[str]:
    names = ("model.safetensors", "optimizer_exp_avg.safetensors", "adapter/adapter_model.safetensors")
    return [sha256_file(checkpoint_directory(config.directory, 4) / name) for name in names]


@pytest.mark.parametrize("objective", ["mu_grpo", pytest.param("decoupled_ppo", marks=pytest.mark.nightly)])
def test_a_run_in_several_sittings_ends_in_the_same_bits(trained: RunConfig, tmp_path: Path, objective: str) -> None:
    whole, parts = (lora_config(tmp_path, name, objective={"name": objective}) for name in ("whole", "parts"))
    if whole.identity() == trained.identity():
        whole = trained
    else:
        run(whole)
    for update in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run(parts, StopAt(update))
    run(parts)
    assert final_files(parts) == final_files(whole)


def test_a_run_without_its_base_says_so(trained: RunConfig, tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(config, StopAt(1))
    shutil.move(checkpoint_directory(config.directory, 0), tmp_path / "gone")
    with pytest.raises(StoreError, match=r"v000000 holds the weights beneath the adapters of .*v000001 and is missing"):
        run(config)


def test_rollouts_are_learned_from_again_with_adapters(trained: RunConfig, tmp_path: Path) -> None:
    again = lora_config(tmp_path, "again", objective={"name": "p3o"})
    assert verbs.learn(again, [trained.directory]).updates == 4
    assert versions(again.directory) == [0, 4]
    assert (checkpoint_directory(again.directory, 4) / "adapter" / "adapter_model.safetensors").is_file()
    # From the merged policy of another run, which is then what lies beneath the new adapters.
    later = lora_config(tmp_path, "later", objective={"name": "p3o"})
    start = checkpoint_directory(trained.directory, 4)
    verbs.learn(later, [trained.directory], checkpoint=start)
    first = checkpoint_directory(later.directory, 0) / "model.safetensors"
    assert sha256_file(first) == sha256_file(start / "model.safetensors")
    wrong = lora_config(tmp_path, "wrong", model={"adapter": str(start / "adapter")})
    with pytest.raises(ConfigError, match=r"model.adapter belongs to model.path, but training starts at"):
        verbs.learn(wrong, [trained.directory], checkpoint=start)


def test_gradients_reach_the_adapters_through_recomputed_layers(trained: RunConfig, tmp_path: Path) -> None:
    saving = lora_config(tmp_path, "saving", learner={"gradient_checkpointing": True})
    run(saving)
    found, expected = (
        load_file(checkpoint_directory(c.directory, 4) / "adapter" / "adapter_model.safetensors")
        for c in (saving, trained)
    )
    assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)


@pytest.mark.nightly
def test_the_embedded_policy_learns_with_adapters(tmp_path: Path) -> None:
    config = make_config(
        {
            "name": "learns",
            "runs": str(tmp_path),
            "model": {"lora": {"rank": 8}},
            "schedule": {"kind": "staged", "updates": 24, "stages": 2},
            "batch": {"prompts": 16, "group_size": 8},
            "sampler": {"max_new_tokens": 6},
            "optimizer": {"learning_rate": 5e-3},
            "evaluation": {"prompts": 128, "samples": 4},
        }
    )
    before, after = run(config).evaluations
    assert after["accuracy"]["low"] > before["accuracy"]["high"] + 0.1


# ---------------------------------------------------------------- adapters that exist


def test_a_run_starts_from_an_adapter_and_goes_on_with_it(trained: RunConfig, adapter: Path, tmp_path: Path) -> None:
    sections = {"model": {"path": "arithmetic", "adapter": str(adapter)}}
    config, parts = (lora_config(tmp_path, name, **sections) for name in ("on", "parts"))
    run(config)
    first, final = (checkpoint_directory(config.directory, version) for version in (0, 4))
    start = checkpoint_directory(trained.directory, 4) / "model.safetensors"
    assert sha256_file(first / "model.safetensors") == sha256_file(start)
    base = load_file(first / "base" / "model.safetensors")
    assert all(torch.equal(base[name], weight) for name, weight in load_file(POLICY / "model.safetensors").items())
    with pytest.raises(KeyboardInterrupt):
        run(parts, StopAt(2))
    run(parts)
    assert final_files(parts) == final_files(config)
    with_adapter = peft.PeftModel.from_pretrained(policy(POLICY), str(final / "adapter")).eval()
    with torch.no_grad():
        assert torch.allclose(with_adapter(input_ids=IDS).logits, policy(final)(input_ids=IDS).logits, atol=1e-4)
    (first / "base" / "model.safetensors").write_bytes(b"spoiled")
    with pytest.raises(StoreError, match=r"base/model\.safetensors is damaged or missing"):
        read_state(first)


def adapter_config(tmp_path: Path, adapter: Path, path: str = "arithmetic") -> Path:
    record = tiny_record(tmp_path / "runs", model={"path": path, "adapter": str(adapter)})
    return write_config(tmp_path / "config.toml", record)


def change(adapter: Path, **settings: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_an_adapter_for_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    change(adapter, base_model_name_or_path="Qwen/Qwen2.5-0.5B")
    message = refused("train", adapter_config(tmp_path, adapter))
    assert "was made for Qwen/Qwen2.5-0.5B, and model.path is " in message
    assert f"correct base_model_name_or_path in {adapter}/adapter_config.json" in message


def trained_on(base: Path, adapter: Path, tmp_path: Path, *, spoiled: bool = False) -> Path:
    """A copy of the embedded policy at `base`, which the adapter is said to be for; a config for the policy beside."""
    for directory in (base, tmp_path / "used" / base.name):
        shutil.copytree(POLICY, directory)
    if spoiled:
        path = base / "model.safetensors"
        weights = load_file(path)
        weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1e-3
        save_file(weights, path, metadata={"format": "pt"})
    change(adapter, base_model_name_or_path=str(base))
    return adapter_config(tmp_path, adapter, str(tmp_path / "used" / base.name))


def test_two_directories_of_one_name_are_told_apart_by_their_weights(adapter: Path, tmp_path: Path) -> None:
    base = tmp_path / "made" / "v000016"
    config = trained_on(base, adapter, tmp_path, spoiled=True)
    message = refused("train", config)
    assert f"was made for {base}, and model.path is {tmp_path}/used/v000016, which has other weights: name " in message
    assert versions(tmp_path / "runs" / "tiny") == []
    assert "bad     adapters" in call("doctor", config).stdout


def test_a_copy_of_the_base_is_the_base(adapter: Path, tmp_path: Path) -> None:
    config = trained_on(tmp_path / "made" / "v000016", adapter, tmp_path)
    (tmp_path / "made" / "v000016").rename(tmp_path / "made" / "renamed")
    change(adapter, base_model_name_or_path=str(tmp_path / "made" / "renamed"))
    (tmp_path / "made" / "renamed" / "optimizer_exp_avg.safetensors").write_bytes(b"the learner's")
    result = call("generate", config)
    assert result.exit_code == 0, result.stderr
    assert "the adapter" not in result.stderr


def test_a_base_that_was_moved_is_known_by_its_last_name_and_that_is_said(adapter: Path, tmp_path: Path) -> None:
    config = trained_on(tmp_path / "made" / "llama", adapter, tmp_path)
    shutil.rmtree(tmp_path / "made")
    change(adapter, base_model_name_or_path=f"{tmp_path}/made/alpaca")
    assert f"was made for {tmp_path}/made/alpaca, and model.path is " in refused("train", config)
    change(adapter, base_model_name_or_path=f"{tmp_path}/made/llama")
    said = f"was made for {tmp_path}/made/llama, which is not here to be compared: by its last name alone "
    assert said in call("doctor", config).stdout.replace("\n", " ")
    result = call("generate", config)
    assert result.exit_code == 0, result.stderr
    assert said in result.stderr


def test_names_on_a_hub_are_whole_names(tmp_path: Path) -> None:
    said: list[str] = []

    def check(name: str, source: str) -> None:
        check_base(name, tmp_path, source, said.append)

    check("", "a/final")
    check("a/final", "a/final")
    check("a/Final", "a/final")
    assert said == []
    with pytest.raises(ModelError, match=r"was made for b/final, and model.path is a/final: name that model"):
        check("b/final", "a/final")
    (tmp_path / "final").mkdir()
    check("b/final", str(tmp_path / "final"))  # which may have been downloaded from there
    assert len(said) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "is of the kind IA3: only LORA can be trained on"),
        ({"use_dora": True}, "has use_dora = True, which is more than low-rank products of linear layers: merge it"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save = ['lm_head'], which is more"),
        ({"bias": "all"}, "has bias = 'all', which is more"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa', which is more"),
        ({"target_modules": ["nothing"]}, "does not fit"),
        ({"target_modules": ["q_proj"]}, "of its weights do not match, the first "),
        ({"r": 3}, "has shape [4, 128] and should have [3, 128]: name the model it was made for in model.path"),
    ],
)
def test_an_adapter_that_does_not_fit(adapter: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    change(adapter, **settings)
    assert message in refused("train", adapter_config(tmp_path, adapter))
    assert versions(tmp_path / "runs" / "tiny") == []


@pytest.mark.parametrize(
    ("target", "kind", "tied"),
    [("embed_tokens", "model.embed_tokens, an embedding", True), ("lm_head", "lm_head, the output layer", False)],
)
def test_an_adapter_of_the_first_or_the_last_layer(tmp_path: Path, target: str, kind: str, tied: bool) -> None:
    model = policy(POLICY)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(str(POLICY)).save_pretrained(tmp_path / "model")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", target], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, of weights that are tied
        peft.get_peft_model(policy(tmp_path / "model"), settings).save_pretrained(str(tmp_path / "adapter"))
    config = adapter_config(tmp_path, tmp_path / "adapter", str(tmp_path / "model"))
    message = refused("train", config)
    assert f"has a product for {kind}, and only those of linear layers within the model are trained: " in message
    assert ("merge_and_unload" in message) == (not tied)
    assert message.endswith("make an adapter without that target")
    assert versions(tmp_path / "runs" / "tiny") == []
    doctor = call("doctor", config).stdout
    assert "bad     adapters" in doctor and kind in doctor


def test_an_adapter_of_the_same_architecture_and_another_size(adapter: Path, tmp_path: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    narrow = {name: tensor[:, :-1].contiguous() for name, tensor in load_file(path).items()}
    save_file(narrow, path)
    message = refused("train", adapter_config(tmp_path, adapter))
    assert "is for another model than " in message
    assert "has shape [4, 127] and should have [4, 128]: name the model it was made for in model.path" in message
    assert "bad     adapters" in call("doctor", adapter_config(tmp_path, adapter)).stdout


def test_a_directory_that_holds_no_adapter(adapter: Path, tmp_path: Path) -> None:
    assert "which has no adapter_config.json" in refused("train", adapter_config(tmp_path, tmp_path))
    (adapter / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors cannot be read" in refused("train", adapter_config(tmp_path, adapter))
    (adapter / "adapter_config.json").write_text("{")
    assert "is not a config of a PEFT adapter" in refused("train", adapter_config(tmp_path, adapter))


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.trainer.lora.find_spec", lambda name: None)
    message = refused("train", write_config(tmp_path / "a.toml", tiny_record(tmp_path, model=LORA)))
    assert message == "adapters need the package peft: pip install 'stalewise[lora]'"


def test_settings_that_contradict_each_other() -> None:
    for settings, message in (
        ({"lora": {"alpha": 8.0}}, r"model.lora: alpha and targets have no meaning without a rank"),
        ({"lora": {"targets": ["q_proj"]}}, r"model.lora: alpha and targets have no meaning without a rank"),
        ({"lora": {"rank": 2}, "adapter": "a"}, r"model: adapter brings its own rank, alpha and targets"),
        ({"lora": {"rnak": 2}}, r"model.lora.rnak is not a setting; did you mean rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config({"model": settings})
    assert not make_config({}).model.trains_adapters


def test_a_policy_that_was_dropped_is_gone_before_the_next_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped:
        own: Dropped

    dropped, found = Dropped(), list[object]()
    dropped.own = dropped
    seen, load = weakref.ref(dropped), lora.load_model
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        lora, "load_model", lambda *given, **options: (found.append(seen()), load(*given, **options))[1]
    )
    gc.disable()
    try:
        del dropped
        lora.load_policy(make_config({}).model, POLICY, CPU)
    finally:
        gc.enable()
    assert found == [None]
