"""Tokens are drawn from the stated distribution, and their log-probabilities are of exactly that one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from policies import sampling_logp, tokens_of
from sampling import steps_requests as requests
from sampling import steps_sampler as make
from stalewise.errors import ModelError
from stalewise.models import EMBEDDED, fused_ops, resolve_model, transfer
from stalewise.models.kernels import SlotState, StepRows
from stalewise.models.loading import encode_prompts, load_model, load_tokenizer
from stalewise.rollout.engines.embedded import HFSampler, _same_steps, _same_uniforms, decode_texts
from stalewise.rollout.engines.paged_cache import advance_slots, read_slots
from stalewise.rollout.sampler import Request, Response
from stalewise.rollout.token_sampling import device_uniforms
from stalewise.tasks.arithmetic import Steps
from stalewise.types import FinishReason, SamplerSettings


def half_answered(sampler: HFSampler, count: int) -> list[Request]:
    """Long prompts with short responses: rows without padding leave the batch before rows with it."""
    task = Steps(seed=0)
    texts = [replace(prompt, text=prompt.text + task.solution(prompt)[:24]) for prompt in task.prompts(50, count)]
    return [Request(ids, 100 + seed) for seed, ids in enumerate(encode_prompts(texts, sampler.tokenizer))]


@pytest.mark.parametrize(
    "settings",
    [SamplerSettings(), SamplerSettings(temperature=0.7), SamplerSettings(temperature=1.3, top_p=0.9, top_k=5)],
)
def test_recorded_log_probabilities_are_those_of_a_plain_forward_pass(settings: SamplerSettings) -> None:
    sampler = make(settings)
    asked = [*requests(sampler, 8), *half_answered(sampler, 8)]
    model = load_model(str(EMBEDDED / "arithmetic-steps"), device=torch.device("cpu"))
    for request, response in zip(asked, sampler.sample(asked), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = sampling_logp(logits, settings).gather(1, torch.tensor(response.token_ids).long()[:, None])[:, 0]
        assert torch.tensor(response.logp) == pytest.approx(expected, abs=1e-5)


def test_a_response_does_not_depend_on_what_else_is_in_the_batch() -> None:
    sampler = make()
    asked = requests(sampler, 24)
    together = sampler.sample(asked)
    alone = sampler.sample([asked[17]])[0]
    assert tokens_of([alone]) == tokens_of(together[17:18])
    assert alone.logp == pytest.approx(together[17].logp, abs=1e-5)
    assert sampler.sample(asked) == together  # the same batch again: to the bit
    assert [response.text for response in sampler.sample(asked[::-1])] == [r.text for r in reversed(together)]


def test_finish_reasons_and_end_tokens() -> None:
    sampler = make()
    eos = sampler.tokenizer.eos_token_id
    responses = sampler.sample(requests(sampler, 8))
    assert all(r.finish_reason is FinishReason.STOP and r.token_ids[-1] == eos for r in responses)
    assert all(eos not in r.token_ids[:-1] and "<" not in r.text for r in responses)
    cut = make(max_new_tokens=5).sample(requests(sampler, 8))
    assert all(r.finish_reason is FinishReason.LENGTH and len(r.token_ids) == len(r.logp) == 5 for r in cut)


def test_new_weights_replace_the_old_ones(tmp_path: Path) -> None:
    model = load_model(str(EMBEDDED / "arithmetic-steps"), device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(tmp_path)
    load_tokenizer(str(EMBEDDED / "arithmetic-steps")).save_pretrained(tmp_path)
    sampler = make()
    asked = requests(sampler, 4)
    before = sampler.sample(asked)
    sampler.load(tmp_path)
    after = sampler.sample(asked)
    fresh = HFSampler(SamplerSettings(), max_new_tokens=64, device=torch.device("cpu"), dtype=torch.float32)
    fresh.load(tmp_path)
    assert fresh.sample(asked) == after != before


def test_weights_that_are_there_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EMBEDDED / "arithmetic-steps", tmp_path / "policy")
    sampler, weights = make(), tmp_path / "policy" / "model.safetensors"
    sampler.load(tmp_path / "policy")
    asked, read = requests(sampler, 4), list[Path]()
    before = sampler.sample(asked)
    replace = HFSampler._replace
    monkeypatch.setattr(HFSampler, "_replace", lambda self, file: (read.append(file), replace(self, file)))
    sampler.load(tmp_path / "policy")
    assert not read
    halved = {name: 0.5 * tensor for name, tensor in load_file(weights).items()}
    save_file(halved, tmp_path / "new", metadata={"format": "pt"})  # a run that was taken back comes to v000016 again
    (tmp_path / "new").rename(weights)
    sampler.load(tmp_path / "policy")
    assert read == [weights]
    assert sampler.sample(asked) != before


def test_a_policy_that_could_not_be_taken_over_is_not_taken_for_loaded(tmp_path: Path) -> None:
    sampler, (one, other) = make(), (tmp_path / "one", tmp_path / "other")
    for policy in (one, other):
        shutil.copytree(EMBEDDED / "arithmetic-steps", policy)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:1].clone()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    sampler.load(one)
    with pytest.raises(ModelError):
        sampler.load(other)
    assert sampler._loaded is None  # which of the two it has now, nobody knows


def test_a_checkpoint_without_all_weights_is_refused(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED / "arithmetic-steps", tmp_path / "policy")
    weights = load_file(tmp_path / "policy" / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "policy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="q_proj"):
        make().load(tmp_path / "policy")


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED / "arithmetic-steps", tmp_path / "policy")
    weights = tmp_path / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read \(.*\): copy it again"):
        make().load(tmp_path / "policy")


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED / "arithmetic-steps", tmp_path / "policy")
    weights = load_file(tmp_path / "policy" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:1].clone()  # copied, it would be spread over all
    save_file(weights, tmp_path / "policy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"is for another model: model.norm.weight has shape \[1\]"):
        make().load(tmp_path / "policy")


def test_architectures_stored_under_other_names_are_loaded_anew(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(EMBEDDED / "arithmetic-steps"))
    sampler = HFSampler(SamplerSettings(), max_new_tokens=5, device=torch.device("cpu"), dtype=torch.float32)
    for seed in range(2):
        torch.manual_seed(seed)
        shape: dict[str, Any] = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
        model = MixtralForCausalLM(MixtralConfig(vocab_size=18, **shape, **experts, eos_token_id=1, bos_token_id=None))
        model.save_pretrained(tmp_path / str(seed))
        tokenizer.save_pretrained(tmp_path / str(seed))
        sampler.load(tmp_path / str(seed))
        fresh = HFSampler(SamplerSettings(), max_new_tokens=5, device=torch.device("cpu"), dtype=torch.float32)
        fresh.load(tmp_path / str(seed))
        assert sampler.sample(requests(sampler, 3)) == fresh.sample(requests(fresh, 3))


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    sampler = make(max_new_tokens=120)
    with pytest.raises(ModelError, match=r"longest prompt has \d+ tokens; .* over the model's context of 128"):
        sampler.sample(requests(sampler, 2))


def test_texts_are_those_that_the_tokenizer_itself_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(resolve_model("auto", "arithmetic"))
    ids = [[row % len(tokenizer), 1, 3 + row % 9, tokenizer.eos_token_id] for row in range(40)] + [[]]
    expected = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert decode_texts(ids, tokenizer) == expected
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", True)  # which its library knows nothing of
    monkeypatch.setattr(tokenizer, "batch_decode", lambda ids, skip_special_tokens: ["cleaned up"] * len(ids))
    assert decode_texts(ids, tokenizer) == ["cleaned up"] * len(ids)


def test_random_numbers_of_a_kernel_are_used_if_they_are_the_recorded_ones() -> None:
    def fails(seed_R: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such instruction")

    cpu = torch.device("cpu")
    assert _same_uniforms(device_uniforms, cpu)
    assert not _same_uniforms(lambda seed, position: device_uniforms(seed, position + 1), cpu)
    assert not _same_uniforms(lambda seed, position: device_uniforms(seed, position).float().double(), cpu)
    assert not _same_uniforms(fails, cpu)


def test_kernels_for_slots_are_used_if_they_do_what_torch_does() -> None:
    def fails(*args: Any) -> None:
        raise KeyError("no such instruction")

    def with_rows(**wrong: int) -> Callable[..., None]:
        def advance(slot_R: Tensor, rows: StepRows, *others: Any) -> None:
            changes = {name: torch.full_like(rows.count_R, value) for name, value in wrong.items()}
            advance_slots(slot_R, rows._replace(**changes), *others)

        return advance

    def never_stops(slot_R: Tensor, rows: StepRows, token_R: Tensor, logp_R: Tensor, state: SlotState) -> None:
        advance_slots(slot_R, rows, token_R, logp_R, replace(state, stop_ids=state.stop_ids[:0]))

    cpu = torch.device("cpu")
    assert _same_steps(read_slots, advance_slots, cpu)
    assert not _same_steps(lambda slot_R, state: read_slots(slot_R, replace(state, block_size=3)), advance_slots, cpu)
    for wrong in (fails, never_stops, with_rows(forced_R=0), with_rows(alive_R=1), with_rows(limit_R=99)):
        assert not _same_steps(read_slots, wrong, cpu)


# ---------------------------------------------------------------- weights that wait in host memory

POLICY = EMBEDDED / "arithmetic"


def sums_sampler(*, slots: bool = False, fused: bool = False) -> HFSampler:
    settings, cpu = SamplerSettings(), torch.device("cpu")
    sampler = HFSampler(settings, max_new_tokens=16, device=cpu, dtype=torch.float32, slots=slots, fused=fused)
    sampler.load(POLICY)
    assert bool(sampler.slots_problem) != slots
    return sampler


def sums(sampler: HFSampler) -> list[Request]:
    return [Request(sampler.tokenizer(f"{i}+{i + 7}=")["input_ids"], i) for i in (10, 35, 61, 88)]


def bytes_there(sampler: HFSampler) -> int:
    """Bytes of the model's storages that are not small."""
    tensors = [*sampler._model.parameters(), *sampler._model.buffers()]
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(size for size in storages.values() if size > transfer.SMALL)


class OneAnswer:
    """Two turns of each request."""

    def __init__(self) -> None:
        self.said: dict[int, list[Response]] = {}
        self.open: list[int] = []

    def ended(self, request: int, response: Response) -> None:
        self.said.setdefault(request, []).append(response)
        self.open.append(request)

    def next(self, *, wait: bool) -> list[tuple[int, list[int]]]:
        answered, self.open = self.open, []
        return [(request, [4, 5] if len(self.said[request]) == 1 else []) for request in answered]


def turns(sampler: HFSampler, asked: list[Request]) -> dict[int, list[Response]]:
    source = OneAnswer()
    sampler.sample_turns(asked, sampler.settings, source)
    assert {len(responses) for responses in source.said.values()} == {2}
    return source.said


def halved() -> dict[str, torch.Tensor]:
    return {name: 0.5 * tensor for name, tensor in load_file(POLICY / "model.safetensors").items()}


def taken(sampler: HFSampler, asked: list[Request]) -> list[Response]:
    assert sampler.take(halved(), "half") and bytes_there(sampler)
    return sampler.sample(asked)


def loaded(sampler: HFSampler, asked: list[Request]) -> list[Response]:
    sampler.load(POLICY)
    assert bytes_there(sampler)
    return sampler.sample(asked)


def rounded(sampler: HFSampler, asked: list[Request]) -> list[Response]:
    return sampler.sample(asked, SamplerSettings(weights="fp8"))


def tried(sampler: HFSampler, asked: list[Request]) -> list[Response]:
    return sampler.trial(asked, 5)


def closed(sampler: HFSampler, asked: list[Request]) -> list[Response]:
    sampler.close()
    return loaded(sampler, asked)


CALLS: list[Callable[[HFSampler, list[Request]], object]] = [
    HFSampler.sample,
    turns,
    tried,
    rounded,
    taken,
    taken,  # what is there already
    loaded,
    loaded,
    closed,
    HFSampler.sample,
]


@pytest.mark.parametrize("slots", [False, True], ids=["growing", "slots"])
def test_weights_that_waited_sample_the_same_after_every_call(slots: bool) -> None:
    plain, waiting = (sums_sampler(slots=slots) for _ in range(2))
    asked, whole = sums(plain), bytes_there(plain)
    assert whole > 1e6
    for call in CALLS:
        waiting.sleep(weights=True)
        waiting.sleep(weights=True)
        waiting.sleep()
        assert bytes_there(waiting) == 0 and waiting._decoder is None
        assert call(waiting, asked) == call(plain, asked)
        assert bytes_there(waiting) == whole
    waiting.sleep(weights=True)
    assert bytes_there(waiting) == 0 and waiting.model is waiting._model and bytes_there(waiting) == whole


def test_rounded_weights_that_waited_become_exact_again() -> None:
    sampler = sums_sampler()
    asked = sums(sampler)
    exact, rough = sampler.sample(asked), rounded(sampler, asked)
    assert rough != exact
    sampler.sleep(weights=True)
    assert rounded(sampler, asked) == rough
    sampler.sleep(weights=True)
    assert sampler.sample(asked) == exact


def test_weights_that_are_parts_of_one_tensor_are_so_after_waiting() -> None:
    sampler = sums_sampler()
    asked = sums(sampler)
    expected = sampler.sample(asked)
    joined: list[tuple[torch.Tensor, list[Any]]] = []
    for layer in sampler.model.model.layers:
        parts = [getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"]
        whole = torch.cat([part.data for part in parts])
        for part, data in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = data
        joined.append((whole, parts))
    for again in (lambda: None, lambda: sampler.take(halved(), "half"), lambda: sampler.load(POLICY)):
        sampler.sleep(weights=True)
        assert all(whole.untyped_storage().nbytes() == 0 for whole, _ in joined)  # though it is held here, too
        again()
        found = sampler.sample(asked)
        for whole, parts in joined:
            assert {part.untyped_storage().data_ptr() for part in parts} == {whole.data_ptr()}
            assert torch.equal(torch.cat([part.data for part in parts]), whole)
    assert found == expected


def test_joined_products_are_joined_after_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, rows, linear = sums_sampler(slots=True, fused=True), set[int](), fused_ops.linear
    assert "linears" in sampler.fused
    monkeypatch.setattr(
        fused_ops, "linear", lambda x, weight, *bias: (rows.add(len(weight)), linear(x, weight, *bias))[1]
    )
    asked = sums(sampler)
    before, joined = sampler.sample(asked), set(rows)
    for _ in range(2):
        sampler.sleep(weights=True)
        assert bytes_there(sampler) == 0
        rows.clear()
        assert sampler.sample(asked) == before and rows == joined
    attention = sampler.model.model.layers[0].self_attn
    heads = [len(getattr(attention, f"{name}_proj").weight) for name in "qkv"]
    assert sum(heads) in joined and heads[1] not in joined


def test_weights_that_are_replaced_do_not_come_from_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(POLICY, tmp_path / "half")
    save_file(halved(), tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    sampler, copied, restore = sums_sampler(), list[int](), transfer.restore
    sampler._model.register_buffer("table", torch.arange(5000.0), persistent=False)  # which no checkpoint has
    monkeypatch.setattr(
        transfer,
        "restore",
        lambda pairs, device: (copied.append(sum(here.nbytes for here, _ in pairs)), restore(pairs, device)),
    )
    for replaced in (lambda: sampler.take(halved(), "half"), lambda: sampler.load(tmp_path / "half")):
        sampler.sleep(weights=True)
        replaced()
        assert torch.equal(sampler._model.table, torch.arange(5000.0))
    assert copied == [20_000, 20_000]
    sampler.sleep(weights=True)
    sampler.load(tmp_path / "half")  # the same again
    assert copied[2:] == [bytes_there(sampler)]


def test_weights_that_are_dropped_must_be_replaced(tmp_path: Path) -> None:
    shutil.copytree(POLICY, tmp_path / "half")
    save_file(halved(), tmp_path / "half" / "model.safetensors", metadata={"format": "pt"})
    sampler, plain = sums_sampler(), sums_sampler()
    table = torch.arange(5000.0)  # which no checkpoint has
    sampler._model.register_buffer("table", table.clone(), persistent=False)
    asked, whole = sums(plain), bytes_there(sampler)
    expected = {"own": plain.sample(asked), "half": taken(plain, asked)}
    ways: dict[str, list[Callable[[], object]]] = {
        "own": [lambda: sampler.load(POLICY), lambda: sampler.take(load_file(POLICY / "model.safetensors"), "own")],
        "half": [lambda: sampler.load(tmp_path / "half"), lambda: sampler.take(halved(), "half")],
    }
    for policy, replace_by in ways.items():
        for replaced in (*replace_by, *replace_by):  # the second time it is what was dropped
            sampler.sleep(weights=True, drop=True)
            sampler.sleep(weights=True, drop=True)
            assert bytes_there(sampler) == 0 and sampler._offload._buffers.nbytes == table.nbytes
            with pytest.raises(RuntimeError, match="load a checkpoint first"):
                sampler.sample(asked)
            assert bytes_there(sampler) == 0
            replaced()
            assert sampler.sample(asked) == expected[policy] and bytes_there(sampler) == whole
            assert torch.equal(sampler._model.table, table)


def test_host_memory_is_free_after_closing() -> None:
    sampler = sums_sampler()
    sampler.close()
    sampler.sleep(weights=True)  # nothing is loaded
    sampler.load(POLICY)
    sampler.sleep(weights=True)
    assert sampler._offload.is_away
    sampler.close()
    assert not sampler._offload.is_away


@pytest.mark.parametrize(("slots", "unused", "kept", "emptied"), [(5, 2, True, 0), (5, 4, True, 1), (11, 0, False, 1)])
def test_a_sampler_that_sleeps_frees_what_is_much(
    slots: int, unused: int, kept: bool, emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sums_sampler(slots=True)
    sampler.sample(sums(sampler))
    calls: list[int] = []
    sampler._device = torch.device("cuda")
    assert sampler._decoder is not None
    monkeypatch.setattr(type(sampler._decoder.cache), "nbytes", slots)
    sizes = {"mem_get_info": (0, 100), "memory_reserved": 50, "memory_allocated": 50 - unused}
    for name, value in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    sampler.sleep()
    assert (sampler._decoder is not None, len(calls)) == (kept, emptied)
