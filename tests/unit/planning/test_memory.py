"""The estimate of memory: its parts by hand, what autograd really keeps, and that a run says it before it loads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from policies import SIZE
from stalewise.config import RunConfig, make_config
from stalewise.config.sections import SuiteSection
from stalewise.errors import ModelError
from stalewise.models import EMBEDDED, pick_device
from stalewise.models.attention import PACKED, packed_arguments
from stalewise.models.loading import load_model
from stalewise.orchestrator.preflight import examine
from stalewise.planning.memory import (
    GIB,
    MemoryEstimate,
    ModelShape,
    check_memory,
    estimate,
    model_shape,
    offloads,
    ways_out,
)
from stalewise.store.checkpoints import versions
from stalewise.trainer.trainer import Trainer
from tiny import call, refused, tiny_record, write_config

POLICY = str(EMBEDDED / "arithmetic")
CPU = torch.device("cpu")
SHAPE = ModelShape(10**6, 10**6, layers=3, hidden=100, inner=300, keys=50, vocabulary=1000)


def config(**sections: Any) -> RunConfig:
    return make_config({"learner": {"tokens_per_micro_batch": 10}} | sections)


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> ModelShape:
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, model: SHAPE)
    return SHAPE


def test_the_shape_is_that_of_the_model() -> None:
    model = load_model(POLICY, device=CPU)
    shape = model_shape(POLICY, config().model)
    assert shape is not None
    assert shape.parameters == shape.trained == sum(parameter.numel() for parameter in model.parameters())
    described = model.config
    assert (shape.layers, shape.hidden, shape.inner) == (
        described.num_hidden_layers,
        described.hidden_size,
        described.intermediate_size,
    )
    assert shape.keys == model.model.layers[0].self_attn.k_proj.weight.shape[0]
    assert shape.vocabulary == described.vocab_size


def test_adapters_are_counted_as_they_will_be(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from stalewise.trainer.lora import save_first

    settings = config(model={"lora": {"rank": 3, "targets": ["q_proj", "down_proj"]}})
    shape = model_shape(POLICY, settings.model)
    save_first(settings.model, settings.seed, load_model(POLICY, device=CPU), POLICY, tmp_path / "first")
    again = model_shape(POLICY, config(model={"adapter": str(tmp_path / "first" / "adapter")}).model)
    assert shape is not None
    # Each layer: q_proj is H × H, down_proj H × F; an adapter has rank × (rows + columns) numbers.
    assert shape.trained == 3 * shape.layers * (2 * shape.hidden + shape.hidden + shape.inner)
    assert again == shape


def test_adapted_experts_are_held_once_more(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from stalewise.trainer.lora import save_first

    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZE, num_local_experts=4))
    mixture.save_pretrained(tmp_path / "base")
    base, lora = str(tmp_path / "base"), {"lora": {"rank": 3, "targets": ["q_proj", "down_proj"]}}
    save_first(config(model=lora).model, 0, load_model(base, device=CPU), base, tmp_path / "first")
    for model in (lora, {"adapter": str(tmp_path / "first" / "adapter")}):
        # Each layer: down_proj of 4 experts is 32 × 48, q_proj 32 × 32.
        shape = model_shape(base, config(model=model).model)
        assert shape is not None
        assert shape.adapted == 2 * 4 * 32 * 48
        assert shape.trained == 3 * 2 * (4 * (32 + 48) + 32 + 32)
        needed, saving = (
            estimate(config(model=model, learner={"gradient_checkpointing": saves}), base) for saves in (False, True)
        )
        assert needed is not None and saving is not None
        # Float32, of both layers, and the gradient of one.
        assert needed.learning["experts with their adapters"] == 4 * 32 * 48 * 4 * (2 + 1)
        assert saving.learning["experts with their adapters"] == 4 * 32 * 48 * 4 * (1 + 1)


def test_the_parts_by_hand(shape: ModelShape) -> None:
    needed = estimate(config(sampler={"max_new_tokens": 20, "rollouts_per_shard": 8}), "x", longest_prompt=30)
    assert needed is not None
    assert list(needed.certain.values()) == [4e6, 4e6, 8e6, 0, 4e6]
    # 10 tokens × 3 layers × (36·100 + 16·300 + 8·50); logits of 10 × 1000 as float32, four times.
    assert list(needed.learning.values()) == [10 * 3 * 8800, 0, 0, 10 * 1000 * 16, 0]
    # 8 rows × 50 tokens × 3 layers × keys and values of 50 float32 numbers.
    assert list(needed.sampling.values()) == [8 * 50 * 3 * 2 * 50 * 4]
    assert needed.least == 20e6
    assert needed.total == 20e6 + 480_000  # sampling: more than 264,000 + 160,000
    low = estimate(config(model={"precision": "bfloat16"}), "x")
    assert low is not None
    assert low.learning["logits"] == 10 * 1000 * 18  # the product in bfloat16 besides
    saving = estimate(config(learner={"tokens_per_micro_batch": 10, "gradient_checkpointing": True}), "x")
    assert saving is not None
    # The input of each layer, and all of one.
    assert next(iter(saving.learning.values())) == 10 * 3 * 100 * 4 + 10 * 8800


def test_a_reference_is_a_second_policy_between_sampling_and_learning(shape: ModelShape) -> None:
    sampler = {"max_new_tokens": 20, "rollouts_per_shard": 8}
    free, held = (estimate(config(sampler=sampler, objective={"kl": kl}), "x", longest_prompt=30) for kl in (0.0, 0.1))
    assert free is not None and held is not None
    assert not free.reference and held.learning == free.learning and held.least == free.least
    # Its weights in float32; 10 tokens of one layer, of which nothing is kept; logits as the learner's.
    assert list(held.reference.values()) == [4e6, 0, 10 * 8800, 10 * 1000 * 16]
    assert held.largest == "the reference" and free.largest == "sampling"
    assert held.total == 20e6 + 4e6 + 88_000 + 160_000
    assert "the reference's weights" in str(held) and "keys and values" not in str(held)
    low = estimate(config(sampler=sampler, objective={"kl": 0.1}, model={"precision": "bfloat16"}), "x")
    assert low is not None and list(low.reference.values())[:2] == [4e6, 2e6]
    schedule = {"kind": "pipelined", "updates": 4, "updates_per_generation": 2, "lag": 1}
    both = estimate(config(sampler=sampler, objective={"kl": 0.1}, schedule=schedule), "x", longest_prompt=30)
    assert both is not None
    assert both.total == held.total + 4e6 + sum(both.learning.values())  # with the weights that the generator samples


def test_a_reference_that_is_another_model_has_its_own_shape(tmp_path: Path) -> None:
    described = AutoConfig.from_pretrained(POLICY)
    described.num_hidden_layers += 3
    described.save_pretrained(tmp_path)
    needed = estimate(config(objective={"kl": 0.1, "reference": str(tmp_path)}), POLICY)
    other, own = model_shape(str(tmp_path), config().model), model_shape(POLICY, config().model)
    assert needed is not None and other is not None and own is not None
    assert needed.reference["the reference's weights"] == 4 * other.parameters > 4 * own.parameters


def test_a_micro_batch_is_no_larger_than_all_rollouts_of_an_update(shape: ModelShape) -> None:
    sections = {"batch": {"prompts": 2, "group_size": 4}, "sampler": {"max_new_tokens": 20}}
    small = estimate(make_config({"learner": {"tokens_per_micro_batch": 10_000}, **sections}), "x", longest_prompt=30)
    assert small is not None
    assert next(iter(small.learning.values())) == 8 * 50 * 3 * 8800


def test_precision_adapters_and_objectives_change_the_parts(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(**sections: Any) -> list[float]:
        needed = estimate(config(**sections), "x")
        assert needed is not None
        return [*needed.certain.values(), *list(needed.learning.values())[:2]]

    mixed = parts(model={"precision": "bfloat16"})
    assert mixed == [4e6, 4e6, 8e6, 0, 2e6, 10 * 3 * (3200 + 2400 + 200), 2e6]
    with monkeypatch.context() as there:
        there.setattr("stalewise.planning.memory.pick_device", lambda device: torch.device("cuda"))
        there.setattr("stalewise.planning.memory.device_memory", lambda device: 10**9)
        for compile, bytes_each in (("auto", 2), ("graphs", 2), ("layers", 0), ("never", 0)):
            settings = {"tokens_per_micro_batch": 10, "compile": compile}
            recorded = estimate(config(model={"precision": "bfloat16"}, learner=settings), "x")
            assert recorded is not None and recorded.learning["their gradients"] == bytes_each * 1e6
    pure = parts(model={"precision": "bfloat16-only"})
    assert pure == [2e6, 2e6, 4e6, 0, 2e6, 10 * 3 * (2200 + 2400 + 200), 0]
    assert parts(objective={"name": "decoupled_ppo"})[3] == 4e6
    assert [parts(optimizer={"moments": moments})[2] for moments in ("bfloat16", "int8")] == [4e6, 2e6]
    server = {"engine": "server", "server": {"urls": ["http://localhost:1"]}}
    assert parts(sampler=server)[4] == 0
    adapted = ModelShape(10**6, 1000, layers=3, hidden=100, inner=300, keys=50, vocabulary=1000)
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, model: adapted)
    # Adapters are float32 beside weights in bfloat16.
    lora = parts(model={"precision": "bfloat16-only", "lora": {"rank": 1}})
    assert lora[:5] == [2e6 + 4e3, 4e3, 8e3, 0, 2e6]
    assert lora[5] == 10 * 3 * (2200 + 2400 + 200 + 1200 + 600)  # 12·100 + 2·300 for adapters
    on_gpu(monkeypatch, [10**9])
    monkeypatch.setattr("stalewise.planning.memory.can_compile", lambda: True)
    fused = parts(model={"precision": "bfloat16-only", "lora": {"rank": 1}})
    assert fused[5] == 10 * 3.5 * (1200 + 1800 + 300 + 600)  # fused layers, and 6·100 for adapters


def test_keys_and_values_are_those_of_the_rollouts_that_there_are(shape: ModelShape) -> None:
    def cache(**sections: Any) -> int:
        needed = estimate(config(sampler={"max_new_tokens": 20}, **sections), "x", longest_prompt=30)
        assert needed is not None
        return needed.sampling["keys and values"]

    row = 50 * 3 * 2 * 50 * 4
    few = {"prompts": 2, "group_size": 4}
    assert cache(batch=few, schedule={"updates": 8, "stages": 4}) == 8 * 2 * row
    assert cache(batch={"prompts": 512, "group_size": 8}) == 2048 * row  # sampler.rollouts_per_shard


def test_on_a_gpu_logits_are_kept_where_there_is_room(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.planning.memory.pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr("stalewise.planning.memory.can_compile", lambda: True)
    settings = config(model={"precision": "bfloat16"}, learner={"tokens_per_micro_batch": 10, "compile": "never"})

    def learning(memory: int) -> dict[str, int]:
        monkeypatch.setattr("stalewise.planning.memory.device_memory", lambda device: memory)
        needed = estimate(settings, "x")
        assert needed is not None
        return dict(needed.learning)

    # 20 bytes a parameter, twice: 40 MB. Fused layers keep 16·100 + 6·300 + 6·50 bytes a token, and half a layer more.
    roomy, tight = learning(40_000_000), learning(39_000_000)
    assert roomy["activations of 10 tokens"] == tight["activations of 10 tokens"] == 10 * 3.5 * 3700
    assert roomy["logits"] == 256 * 1000 * 2  # memory for at least 256 tokens
    assert roomy["gradient of the output layer"] == 4 * 100 * 1000
    assert tight["gradient of the output layer"] == 6 * 100 * 1000


def test_micro_batches_of_a_gpu_are_packed_and_about_equally_large(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stalewise.planning.memory.pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr("stalewise.planning.memory.device_memory", lambda device: 10**9)
    sections = {"batch": {"prompts": 10, "group_size": 8}, "sampler": {"max_new_tokens": 20}}
    needed = estimate(make_config({"learner": {"tokens_per_micro_batch": 1800}, **sections}), "x", longest_prompt=30)
    assert needed is not None
    # 80 responses of 20 and 10 prompts of 30 tokens: 1900, in two parts of 950, which may be over by one rollout.
    assert "activations of 1000 tokens" in needed.learning
    assert needed.learning["logits"] == 1024 * 1000 * 4  # memory for a power of two
    sections["batch"] = {"prompts": 60, "group_size": 8}
    larger = estimate(make_config({"learner": {"tokens_per_micro_batch": 8192}, **sections}), "x", longest_prompt=30)
    assert larger is not None
    # 11,400 in two parts; kept logits of many tokens have memory for a multiple of 4096 of them.
    assert "activations of 5750 tokens" in larger.learning and larger.learning["logits"] == 8192 * 1000 * 4


def test_on_a_gpu_the_engine_takes_more_rollouts_at_once_where_they_fit(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stalewise.planning.memory.pick_device", lambda device: torch.device("cuda"))
    sections = {
        "batch": {"prompts": 32, "group_size": 8},
        "sampler": {"max_new_tokens": 64},
        "schedule": {"updates": 1},
    }

    def needed(memory: int) -> MemoryEstimate:
        monkeypatch.setattr("stalewise.planning.memory.device_memory", lambda device: memory)
        found = estimate(config(model={"precision": "bfloat16"}, **sections), "x", longest_prompt=64)
        assert found is not None
        return found

    # 256 responses and 32 prompts of one block of 64 tokens each, one block that nobody reads; logits and records.
    token = 3 * 2 * 50 * 2
    slots = (256 + 32 + 1) * 64 * token + 256 * (12 * 1000 + 8 * 64)
    roomy = needed(10**9)
    assert roomy.sampling["keys and values"] == 64 * 128 * token
    assert roomy.spare == slots - 64 * 128 * token
    assert roomy.stays == slots  # less than a tenth of the device
    assert roomy.process == 850 * 2**20  # CUDA's context and libraries
    assert roomy.peak == roomy.least + max(sum(roomy.learning.values()) + slots, slots) + roomy.process
    assert str(roomy).endswith(f"; on a GPU where nothing else runs it takes {roomy.peak / 2**30:.2f}")
    tight = needed(roomy.least + 3 * slots // 2)
    assert tight.sampling == roomy.sampling and 0 < tight.spare < roomy.spare and tight.stays == 0
    assert tight.total == tight.least + 64 * 128 * token  # without the spare ones


def test_a_pipelined_run_on_one_device_needs_both_at_once(shape: ModelShape) -> None:
    pipelined = {"kind": "pipelined", "updates": 8, "updates_per_generation": 2}
    needed, turns = estimate(config(schedule=pipelined), "x"), estimate(config(), "x")
    assert needed is not None and turns is not None
    learning, sampling = sum(needed.learning.values()), sum(needed.sampling.values())
    assert needed.certain["the generator's weights"] == 4e6
    assert needed.least == turns.least + 4e6 and needed.total == needed.least + learning + sampling
    assert "generator's weights 0.00" in str(needed) and "generator" not in str(turns)


def test_a_generator_beside_the_learner_leaves_it_what_it_will_need(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, [10**9])
    pipelined = {"kind": "pipelined", "updates": 8, "updates_per_generation": 2}
    needed = estimate(config(model={"precision": "bfloat16"}, schedule=pipelined), "x")
    turns = estimate(config(model={"precision": "bfloat16"}), "x")
    assert needed is not None and turns is not None and needed.at_once
    learning = sum(needed.learning.values())
    assert needed.left_for_slots(10**9) == 10**9 - needed.least - learning
    assert needed.left_for_slots(needed.least + learning // 2) == 0
    assert turns.left_for_slots(10**9) == 10**9 - turns.least  # they take turns


@pytest.mark.parametrize(
    ("learner", "generator", "at_once"),
    [
        ("auto", None, True),
        ("auto", "cuda:0", True),
        ("cuda:0", "cuda", True),
        ("auto", "cuda:1", False),
        ("cuda:0", "cuda:1", False),
        ("cuda:1", "cpu", False),
    ],
)
def test_the_generators_device_is_looked_at_and_not_taken(
    learner: str, generator: str | None, at_once: bool, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr("stalewise.planning.memory.device_memory", lambda device: 10**9)
    schedule = {"kind": "pipelined", "updates": 8, "updates_per_generation": 2, "generator_device": generator}

    def settings(**changes: Any) -> RunConfig:
        return config(model={"precision": "bfloat16", "device": learner}, schedule={**schedule, **changes})

    needed = estimate(settings(), "x")
    assert needed is not None and needed.at_once is at_once
    assert ("its process" in needed.certain) is at_once
    assert {device.index for device in taken} == {torch.device("cuda" if learner == "auto" else learner).index} - {None}
    with pytest.raises(ModelError, match=r"schedule.generator_device is 'cuda:2': GPUs are counted from 0, and this"):
        estimate(settings(generator_device="cuda:2"), "x")


def test_a_generator_on_a_device_that_is_too_small_is_refused(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights take 2 MB, and a token's keys and values 600 bytes: 6 MB for 10,000."""
    memory = {0: 10**9, 1: 8_000_000}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("stalewise.planning.memory.device_memory", lambda device: memory[device.index or 0])
    monkeypatch.setattr("stalewise.planning.memory.free_bytes", lambda device: memory[device.index or 0])
    schedule = {"kind": "pipelined", "updates": 8, "updates_per_generation": 2, "generator_device": "cuda:1"}
    sampler = {"max_new_tokens": 9872, "rollouts_per_shard": 64}
    settings = config(model={"precision": "bfloat16"}, schedule=schedule, sampler=sampler)
    assert check_memory(settings, "x") == ""
    suites = settings.evaluation.model_copy(update={"suite": [SuiteSection(name="long", max_new_tokens=20_000)]})
    assert (
        check_memory(settings.model_copy(update={"evaluation": suites}), "x") == ""
    )  # the learner's device samples them
    memory[1] -= 1
    with pytest.raises(ModelError, match=r"not fit for sampling on schedule.generator_device = cuda:1: .* or lower"):
        check_memory(settings, "x")
    memory[1] = 10**6
    with pytest.raises(ModelError, match=r"the device has 0.00 GiB: choose another device or a smaller model$"):
        check_memory(settings, "x")


def on_gpu(monkeypatch: pytest.MonkeyPatch, memory: list[int]) -> None:
    """Whose memory is the only item of `memory`."""
    monkeypatch.setattr("stalewise.planning.memory.pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr("stalewise.planning.memory.device_memory", lambda device: memory[0])
    monkeypatch.setattr("stalewise.planning.memory.free_bytes", lambda device: memory[0])


def offloading(offload: str, *, tokens: int = 10, new_tokens: int = 4000, **sections: Any) -> RunConfig:
    learner = {"tokens_per_micro_batch": tokens, "offload": offload, "compile": "never"}
    long = {"max_new_tokens": new_tokens, "rollouts_per_shard": 64}
    return config(**{"model": {"precision": "bfloat16"}, "sampler": long, "learner": learner, **sections})


def test_trainer_and_sampler_wait_in_host_memory_for_each_other(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [10**6]
    on_gpu(monkeypatch, memory)
    plain, waiting = (estimate(offloading(how), "x", alone=True) for how in ("never", "always"))
    assert plain is not None and waiting is not None
    # 64 rows × (128 + 1024) tokens × 3 layers × keys and values of 50 numbers in bfloat16.
    rows, learning = 64 * 1152 * 3 * 2 * 50 * 2, sum(plain.learning.values())
    assert (plain.sampling["keys and values"], plain.least, plain.waits) == (rows, 18e6, 0)
    assert list(waiting.certain.values()) == [4e6, 4e6, 8e6, 0] and waiting.waits == waiting.least == 16e6
    assert waiting.sampling == {"sampler's weights": 2e6, "keys and values": rows}
    assert waiting.learning == plain.learning and waiting.samplers_weights == plain.samplers_weights == 2e6
    assert plain.largest == "sampling" and plain.total == 18e6 + rows and waiting.total == 2e6 + rows
    # Whichever needs more: 300 tokens to learn from instead of 10.
    plain, waiting = (
        estimate(offloading(how, tokens=300, new_tokens=20), "x", alone=True) for how in ("never", "always")
    )
    assert plain is not None and waiting is not None and waiting.largest == "learning"
    learning = sum(plain.learning.values())
    assert learning > 64 * 148 * 600 and (plain.total, waiting.total) == (18e6 + learning, 16e6 + learning)
    # No other rank waits, and nothing does where both work at once.
    pipelined: dict[str, Any] = {"schedule": {"kind": "pipelined", "updates": 8, "updates_per_generation": 2}}
    for others in (
        estimate(offloading("always"), "x"),
        estimate(offloading("always"), "x", shards=2),
        estimate(offloading("always", **pipelined), "x", alone=True),
    ):
        assert others is not None and others.waits == 0 and others.certain["sampler's weights"] == 2e6


def test_long_responses_of_8b_with_adapters_fit_on_one_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B, 64 rollouts of up to 16,384 tokens: all of full length would need 145 GiB of keys and values."""
    qwen = ModelShape(8_190_735_360, 43_646_976, layers=36, hidden=4096, inner=12_288, keys=1024, vocabulary=151_936)
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, model: qwen)
    memory = [140 * 2**30]
    on_gpu(monkeypatch, memory)
    token = 36 * 2 * 1024 * 2

    def needed(new_tokens: int, rollouts: int = 64) -> MemoryEstimate:
        sections = {
            "model": {"precision": "bfloat16-only", "lora": {"rank": 16}},
            "batch": {"prompts": rollouts // 8, "group_size": 8},
            "schedule": {"updates": 1},
            "sampler": {"max_new_tokens": new_tokens},
            "learner": {"gradient_checkpointing": True, "tokens_per_micro_batch": new_tokens},
        }
        found = estimate(config(**sections), "x", alone=True)
        assert found is not None
        return found

    for new_tokens in (16_384, 32_768):
        found = needed(new_tokens)
        assert found.sampling["keys and values"] == 64 * (128 + 1024) * token  # as expected, not as they may be
        assert found.waits == 0 and found.total < 65 * 2**30
        assert 0.7 * memory[0] < found.peak < 0.97 * memory[0]  # what is free is taken, for those that get long
    assert needed(512).sampling["keys and values"] == 64 * (128 + 512) * token
    assert needed(32_768, rollouts=8).sampling["keys and values"] == (128 + 32_768) * token  # one of full length
    memory[0] = 40 * 2**30
    assert needed(16_384).waits > 0  # what does not fit beside the learner takes turns with it


def test_with_adapters_the_weights_of_both_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = ModelShape(10**6, 1000, layers=3, hidden=100, inner=300, keys=50, vocabulary=1000)
    monkeypatch.setattr("stalewise.planning.memory.model_shape", lambda source, model: adapted)
    memory = [10**9]
    on_gpu(monkeypatch, memory)
    sections = {
        "model": {"precision": "bfloat16-only", "lora": {"rank": 1}},
        "batch": {"prompts": 32, "group_size": 8},
        "schedule": {"updates": 1},
        "sampler": {"max_new_tokens": 64},
    }

    def needed(offload: str) -> MemoryEstimate:
        found = estimate(offloading(offload, **sections), "x", longest_prompt=64, alone=True)
        assert found is not None
        return found

    plain, waiting = needed("never"), needed("always")
    # Two bytes a weight, and 4 + 4 + 8 for each of the adapters: base 2 MB, adapters 16 kB; the sampler's 2 MB.
    assert (plain.least, waiting.least, waiting.waits) == (4_016_000, 2_016_000, 2_016_000)
    learning, rows = sum(plain.learning.values()), 64 * 128 * 600
    assert (plain.total, waiting.total) == (4_016_000 + rows, 2_000_000 + rows) and learning < rows
    # 256 responses and 32 prompts of one block of 64 tokens each, one block that nobody reads; logits and records.
    slots = (256 + 32 + 1) * 64 * 600 + 256 * (12 * 1000 + 8 * 64)
    assert plain.stays == slots and waiting.stays == 0  # their graphs hold addresses of weights
    assert plain.peak == 4_016_000 + learning + slots + plain.process
    assert waiting.peak == 2_000_000 + slots + waiting.process
    # So many slots if they fill half of what the sampler's weights leave; half as many with one byte less.
    memory[0] = 2_000_000 + 2 * (256 * (64 * 600 + 12_512) + 32 * 64 * 600)
    assert needed("always").spare == slots - rows
    memory[0] -= 1
    assert needed("always").spare == (128 + 32 + 1) * 64 * 600 + 128 * 12_512 - rows


def test_auto_lets_them_wait_where_the_device_could_not_hold_both(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [10**6]
    on_gpu(monkeypatch, memory)
    # Sampling is larger with few tokens to learn from, learning with many and short responses.
    for sizes in ({}, {"tokens": 300, "new_tokens": 20}):
        memory[0] = 10**6  # too little to keep logits, as are the 31 MB in all of the second
        plain = estimate(offloading("never", **sizes), "x", alone=True)
        assert plain is not None and plain.largest == ("learning" if sizes else "sampling")
        for total, waits in ((plain.total, False), (plain.total - 1, True)):
            memory[0] = total
            assert offloads(offloading("auto", **sizes), "x") is waits
            found = [estimate(offloading("auto", **sizes), "x", alone=alone) for alone in (True, False)]
            assert [one.waits for one in found if one is not None] == [16e6 if waits else 0, 0]
            assert check_memory(offloading("auto", **sizes), "x") == ""  # nothing runs out that will wait
        assert "memory may run out" in check_memory(offloading("never", **sizes), "x")
    assert [offloads(offloading(how), "x") for how in ("always", "never")] == [True, False]
    # A server has no weights here, so that learning gains nothing.
    engine = {"engine": "server", "server": {"urls": ["http://localhost:1"]}, "max_new_tokens": 20}
    memory[0] = 17_000_000
    assert not offloads(offloading("auto", tokens=300, sampler=engine), "x")
    memory[0] = 15_000_000
    assert offloads(offloading("auto", tokens=300, sampler=engine), "x")


def test_a_run_that_fits_only_in_turns(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [9_500_000]  # 8 MB of the trainer; 2 MB of the sampler are too many besides
    on_gpu(monkeypatch, memory)

    def settings(offload: str, new_tokens: int = 20) -> RunConfig:
        return offloading(offload, new_tokens=new_tokens, model={"precision": "bfloat16-only"})

    with pytest.raises(ModelError, match=r'too large to train; .* or set learner.offload = "always"'):
        check_memory(settings("never"), "x")
    assert check_memory(settings("auto"), "x") == check_memory(settings("always"), "x") == ""
    needed = estimate(settings("auto"), "x", alone=True)
    assert needed is not None and needed.for_one_response == 2e6 + 148 * 600
    assert needed.waits_on_host == 2e6 + 4e6  # weights and moments; neither gradients nor the sampler's
    assert replace(needed, reference={"weights": 1}).waits_on_host == needed.waits_on_host + 2e6
    assert (plain := estimate(settings("never"), "x", alone=True)) is not None and plain.waits_on_host == 0
    monkeypatch.setattr("stalewise.planning.memory.GIB", 10**6)
    assert "; while sampling 6.00 wait in host memory, while learning 2.00 are freed);" in str(needed)
    monkeypatch.setattr("stalewise.planning.memory.GIB", 2**30)
    assert "(weights 0.00, gradients 0.00" in str(needed) and "sampler's" not in str(needed)
    # One response of 12,428 tokens takes 7.457 MB, one of 12,528 takes 7.517; 7.5 are left by the sampler's weights.
    said = check_memory(settings("auto", 12_300), "x")
    assert said.startswith("memory may run out: ") and "(sampler's weights 0.00, keys and values 0.04; while" in said
    with pytest.raises(ModelError, match=r"not for sampling: .*\(at most sampler.max_new_tokens = 12372 would fit"):
        check_memory(settings("auto", 12_400), "x")
    suite = SuiteSection(name="long", max_new_tokens=12_400)
    of_suite = {"evaluation": settings("auto").evaluation.model_copy(update={"suite": [suite]})}
    with pytest.raises(ModelError, match=r"\(at most max_new_tokens of the suite 'long' = 12372 would fit"):
        check_memory(settings("auto").model_copy(update=of_suite), "x")


def test_a_trainer_makes_way_for_the_long_responses_of_a_suite(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 MB of the trainer and 2 MB of the sampler leave 22 of 40; a response of 36,539 tokens takes as much."""
    on_gpu(monkeypatch, [40_000_000])

    def settings(offload: str, new_tokens: int) -> RunConfig:
        suites = {"suite": [{"name": "long", "max_new_tokens": new_tokens}]}
        return offloading(offload, new_tokens=20, evaluation=suites)

    fits, too_long = 36_000, 37_000
    assert [offloads(settings("auto", tokens), "x") for tokens in (fits, too_long)] == [False, True]
    assert check_memory(settings("auto", too_long), "x") == check_memory(settings("never", fits), "x") == ""
    with pytest.raises(ModelError, match="one response of max_new_tokens of the suite 'long' = 37000 takes"):
        check_memory(settings("never", too_long), "x")


def test_several_ranks_are_not_told_to_wait_in_host_memory(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU 16 MB of the trainer and 2 MB of the sampler take turns in 17; on two ranks nothing waits."""
    on_gpu(monkeypatch, [17_000_000])
    told: list[str] = []
    settings = offloading("never", new_tokens=20)
    replicated = {"learner": settings.learner.model_copy(update={"parallel": "replicated"})}
    for world in (1, 2):
        with pytest.raises(ModelError) as error:
            check_memory(settings.model_copy(update=replicated), "x", world, world)
        told.append(str(error.value).partition("or set ")[2])
    assert told == ['learner.offload = "always", or optimizer.moments = "int8"', 'optimizer.moments = "int8"']


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16-only"])
def test_a_checkpoint_has_the_bytes_that_are_foreseen(precision: str, moments: str) -> None:
    settings = config(model={"precision": precision}, optimizer={"moments": moments})
    trainer, needed = Trainer(settings, Path(POLICY)), estimate(settings, POLICY)
    for weight in trainer.names:
        weight.grad = torch.zeros_like(weight)
    trainer.optimizer.make_moments()
    assert needed is not None and trainer.checkpoint_bytes() == pytest.approx(
        needed.checkpoint, rel=0.05
    )  # 8 bits have scales


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_what_autograd_keeps(precision: str) -> None:
    model = load_model(POLICY, device=CPU)
    model.set_attn_implementation(PACKED)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def kept(tokens: int) -> int:
        found: dict[int, torch.Tensor] = {}  # the tensors as well: memory that is free again may be given out again

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        ids = torch.arange(tokens).unsqueeze(0) % 18
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            sixteen = np.full(tokens // 16, 16)
            arguments = packed_arguments(sixteen, sixteen, np.arange(tokens), CPU, grids=True)
            model.base_model(input_ids=ids, use_cache=False, **arguments)
        return sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in own)

    needed = estimate(config(model={"precision": precision}), POLICY)
    assert needed is not None
    per_token = next(iter(needed.learning.values())) / 10
    # Of 128 tokens and of 64, so that what does not grow with them cancels. Beyond the two layers there are the
    # embedding, the last norm and the angles.
    assert (kept(128) - kept(64)) / 64 == pytest.approx(per_token, rel=0.12)


def test_what_a_config_does_not_say_is_unknown(tmp_path: Path) -> None:
    assert model_shape(str(tmp_path), config().model) is None
    assert check_memory(config(), str(tmp_path)) == ""
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    assert estimate(config(), str(tmp_path)) is None


def test_the_gpu_that_is_named_is_the_one_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert pick_device("cuda").index is None and chosen == []
    assert [pick_device("cuda:1")] == chosen
    with pytest.raises(ModelError, match="GPUs are counted from 0, and this machine has 2"):
        pick_device("cuda:2")


def config_without_weights(tmp_path: Path) -> tuple[Path, Path]:
    """A config, and its policy, which has no weights: to load it would be an error of its own."""
    policy = tmp_path / "policy"
    shutil.copytree(EMBEDDED / "arithmetic", policy)
    (policy / "model.safetensors").unlink()
    return write_config(tmp_path / "a.toml", tiny_record(tmp_path, model={"path": str(policy)})), policy


def test_a_model_that_is_too_large_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, policy = config_without_weights(tmp_path)
    monkeypatch.setattr("stalewise.planning.memory.free_bytes", lambda device: 10**6)
    message = refused("train", path)
    assert message.startswith(f"{policy} is too large: 0.4 M parameters: at least 0.01 GiB and up to ")
    assert "(weights 0.00, gradients 0.00, moments 0.00" in message
    assert "on cpu, where 0.00 GiB are free: choose a smaller model or a larger device: adapters alone" in message
    assert versions(tmp_path / "tiny") == []
    # Neither verb needs what a learner needs, nor its objective.
    unknown = tiny_record(tmp_path, model={"path": str(policy)}, objective={"name": "mine"})
    other = write_config(tmp_path / "b.toml", unknown)
    for verb in (["generate", path], ["generate", other], ["eval", policy, "--task", "arithmetic"]):
        message = refused(*verb)
        assert message.startswith(f"{policy} is too large: its weights take 0.00 GiB on cpu, where 0.00 are free")
    doctor = call("doctor", path)
    assert doctor.exit_code == 1
    assert "bad     memory" in doctor.stdout
    assert "model   " not in doctor.stdout.replace("model directory", "")  # it was not loaded either


def test_a_response_that_does_not_fit_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `generate` nor `eval` needs a learner; a token's keys and values and the weights do not change."""
    path, policy = config_without_weights(tmp_path)
    found = model_shape(str(policy), RunConfig().model)
    assert found is not None
    weights, token = 4 * found.parameters, 8 * found.layers * found.keys
    monkeypatch.setattr("stalewise.planning.memory.free_bytes", lambda device: weights + (128 + 7) * token)
    for verb in (["generate", path], ["eval", policy, "--task", "arithmetic", "--max-new-tokens", 8]):
        message = refused(*verb)
        assert message.startswith(
            f"{policy} is too large: its weights take 0.00 GiB, one response of max_new_tokens = "
        )
        assert "at most max_new_tokens = 7 would fit: lower it, or choose a smaller model" in message
    assert versions(tmp_path / "tiny") == []


@pytest.mark.parametrize(
    ("megabytes", "model", "advice"),
    [
        # 7.9 MB with all weights, 5.5 with moments in 8 bits; with adapters of rank 16 4.3, or 2.7 in bfloat16; of rank
        # 4 3.5, or 1.9.
        (6, {}, ', or set optimizer.moments = "int8", or model.lora.rank = 16, which trains adapters alone'),
        (5, {}, ", or set model.lora.rank = 16, which trains adapters alone"),
        (4, {}, ', or set model.lora.rank = 16 with model.precision = "bfloat16-only"'),
        (1, {}, ": adapters alone would not fit either"),
        (3, {"lora": {"rank": 4}}, ', or set model.precision = "bfloat16-only"'),
        (1, {"lora": {"rank": 4}}, ""),
        (1, {"lora": {"rank": 4}, "precision": "bfloat16-only"}, ""),
    ],
)
def test_no_way_out_is_named_that_does_not_fit(megabytes: float, model: dict[str, Any], advice: str) -> None:
    settings = config(model=model)
    needed = estimate(settings, POLICY)
    assert needed is not None and needed.least > megabytes * 10**6
    found = ways_out(settings, POLICY, needed, int(megabytes * 10**6))
    assert found == f"choose a smaller model or a larger device{advice}"


def test_a_run_that_fits_for_learning_or_for_generating_alone(
    shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB hold weights, gradients, moments and the sampler's weights; a token's keys and values take 1,200 bytes."""
    free = [0]
    monkeypatch.setattr("stalewise.planning.memory.free_bytes", lambda device: free[0])
    long = config(sampler={"max_new_tokens": 9872, "rollouts_per_shard": 8})  # with a prompt of 128: 10,000 tokens
    free[0] = 26_000_000
    with pytest.raises(ModelError, match="x fits for training but not for sampling: one response of") as refusal:
        check_memory(long, "x")
    # 6 MB are left: 5,000 tokens, 128 of them the prompt's.
    assert "takes 0.01 GiB of keys and values, and 0.01 are there for them (at most" in str(refusal.value)
    assert "at most sampler.max_new_tokens = 4872 would fit" in str(refusal.value)
    assert "at least 0.02 GiB and up to" in str(refusal.value) and "keys and values 0.09" in str(refusal.value)
    # One length is named, and not also the one at which eight fit at once. Moments in 8 bits leave 6 MB more.
    ways = str(refusal.value).partition("GiB are free: ")[2].split(", or ")
    assert ways[:2] == ["lower it", 'set optimizer.moments = "int8"'] and len(ways) == 4
    assert ways[2].startswith("set model.lora.rank = 16") and ways[3] == "choose a smaller model or a larger device"
    free[0] = 20_000_000
    with pytest.raises(ModelError, match=r"\(no token would fit\).* are free: (set .*, or )?choose a smaller model"):
        check_memory(long, "x")
    reported = list(examine(make_config({**long.model_dump(mode="json"), "runs": str(tmp_path)})))
    assert next(check.status for check in reported if check.name == "memory") == "bad"  # as `train` refuses it
    free[0] = 33_000_000  # one response fits, and eight at once may not: their shards need not be so large
    assert "memory may run out" in (said := check_memory(long, "x"))
    assert "lower sampler.rollouts_per_shard or sampler.max_new_tokens, or choose a smaller model" in said
    assert "sampler.max_new_tokens = 617" in said and "2468" not in said
    free[0] = 17_000_000
    with pytest.raises(ModelError, match="x is too large to train; generating alone would fit: 1"):
        check_memory(long, "x")
    free[0] = 10_000_000
    with pytest.raises(ModelError, match="x is too large: 1"):
        check_memory(long, "x")


@pytest.mark.parametrize(
    ("sections", "advice"),
    [
        ({}, "if it runs out, set learner.gradient_checkpointing, or lower learner.tokens_per_micro_batch"),
        ({"learner": {"gradient_checkpointing": True}}, "if it runs out, lower learner.tokens_per_micro_batch"),
        (
            {"sampler": {"rollouts_per_shard": 2**20}, "learner": {"tokens_per_micro_batch": 64}},
            "if it runs out, lower sampler.rollouts_per_shard",
        ),
    ],
)
def test_what_may_run_out_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], advice: str
) -> None:
    batch = {"prompts": 64, "group_size": 4}
    once = {"updates": 1, "stages": 1}
    record = tiny_record(tmp_path, learner={"tokens_per_micro_batch": 2**16}, batch=batch, schedule=once)
    for section, settings in sections.items():
        record[section] = {**record.get(section, {}), **settings}
    monkeypatch.setattr("stalewise.planning.memory.free_bytes", lambda device: int(0.02 * GIB))
    path = write_config(tmp_path / "a.toml", record)
    result = call("train", path)
    assert result.exit_code == 0
    said = next(line for line in result.stderr.splitlines() if line.startswith("memory"))
    assert said.startswith("memory may run out: 0.4 M parameters: at least 0.01 GiB and up to ")
    assert advice in said
    again = call("train", path)  # a run that is complete loads nothing
    assert "memory" not in again.stderr
