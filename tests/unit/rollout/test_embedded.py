"""Tokens are drawn from the stated distribution, and their log-probabilities are of exactly that one."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.cache_utils import DynamicLayer

from policies import tokens_of
from stalewise.errors import ModelError
from stalewise.models.attention import slot_attention
from stalewise.models.loading import EMBEDDED, encode_prompts, load_model, load_tokenizer, resolve_model
from stalewise.rollout.engines.dynamic_decode import PreallocatedLayer
from stalewise.rollout.engines.embedded import HFSampler, decode_texts
from stalewise.rollout.engines.slot_cache import RequestQueue, SlotCache
from stalewise.rollout.engines.slot_decode import SlotDecoder, SlotStatus, slots_problem
from stalewise.rollout.sampler import Request
from stalewise.rollout.token_sampling import device_uniforms, draw, rollout_seed, sampling_logp, uniforms
from stalewise.tasks import make_task
from stalewise.tasks.arithmetic import Steps
from stalewise.types import FinishReason, SamplerSettings

LOGITS = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])


def probabilities(**settings: float) -> list[float]:
    return sampling_logp(LOGITS, SamplerSettings(**settings)).exp()[0].tolist()  # type: ignore[arg-type]


def test_the_convention_of_temperature_and_truncation() -> None:
    assert probabilities() == pytest.approx([0.5, 0.3, 0.2])
    # Temperature ½ squares the probabilities: .25 : .09 : .04, sum .38.
    assert probabilities(temperature=0.5) == pytest.approx([0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38])
    assert probabilities(top_k=2) == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0.0])
    assert probabilities(top_k=3) == probabilities(top_k=99) == probabilities()
    # The smallest set with probability ≥ .6 is {.5, .3}; a bound that the first token reaches alone leaves it alone.
    assert probabilities(top_p=0.6) == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0.0])
    assert probabilities(top_p=0.5) == pytest.approx([1.0, 0.0, 0.0])
    assert probabilities(top_p=0.01) == pytest.approx([1.0, 0.0, 0.0])
    # Temperature comes first: at ½ the first token has .658 and reaches .6 alone.
    assert probabilities(temperature=0.5, top_p=0.6) == pytest.approx([1.0, 0.0, 0.0])
    # top_k comes before top_p: of {.5, .3} renormalised, .625 reaches .6.
    assert probabilities(top_k=2, top_p=0.6) == pytest.approx([1.0, 0.0, 0.0])


def test_draws_invert_the_distribution_function() -> None:
    logp = sampling_logp(LOGITS, SamplerSettings()).expand(5, 3)
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.799, 0.999999])
    assert draw(logp, uniform)[0].tolist() == [0, 0, 1, 1, 2]


def test_a_token_that_was_cut_away_is_never_drawn() -> None:
    logp = sampling_logp(LOGITS.flip(1), SamplerSettings(top_k=1)).expand(3, 3)
    assert draw(logp, torch.tensor([0.0, 0.5, 1.0 - 1e-12], dtype=torch.float64))[0].tolist() == [2, 2, 2]


def test_draws_have_the_stated_frequencies() -> None:
    count = 50_000
    uniform = torch.from_numpy(uniforms([7], count)[0])
    logp = sampling_logp(LOGITS, SamplerSettings(temperature=0.5))
    drawn, _ = draw(logp.expand(count, 3), uniform)
    frequency = np.bincount(drawn.numpy(), minlength=3) / count
    # Four standard errors of a frequency near ½: 4·√(¼/50,000) = .009.
    assert frequency == pytest.approx(logp.exp()[0].numpy(), abs=0.009)


def test_seeds_differ_by_run_rollout_and_purpose_and_fit_the_store() -> None:
    seeds = {rollout_seed(run, rollout, purpose) for run in range(4) for rollout in range(50) for purpose in (0, 1)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert uniforms([5, 6], 3)[1].tolist() == uniforms([6], 3)[0].tolist()


def make(settings: SamplerSettings | None = None, max_new_tokens: int = 64) -> HFSampler:
    settings = settings or SamplerSettings()
    sampler = HFSampler(settings, max_new_tokens=max_new_tokens, device=torch.device("cpu"), dtype=torch.float32)
    sampler.load(EMBEDDED / "arithmetic-steps")
    return sampler


def requests(sampler: HFSampler, count: int) -> list[Request]:
    prompts = make_task("arithmetic-steps", seed=0).prompts(0, count)
    return [Request(ids, seed) for seed, ids in enumerate(encode_prompts(prompts, sampler.tokenizer))]


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


def test_uniform_numbers_are_the_same_on_the_device() -> None:
    seeds = [rollout_seed(0, i) for i in range(50)]
    expected = uniforms(seeds, 7)
    for position in range(7):
        found = device_uniforms(torch.tensor(seeds), torch.full((50,), position))
        assert found.tolist() == expected[:, position].tolist()


def test_draws_go_through_blocks_of_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 1000)
    uniform = torch.rand(64, dtype=torch.float64)
    token, logp = draw(logits, uniform)
    cumulative = logits.double().softmax(1).cumsum(1)
    assert token.tolist() == torch.searchsorted(cumulative, uniform[:, None], right=True).squeeze(1).tolist()
    assert logp.tolist() == pytest.approx(logits.log_softmax(1).gather(1, token[:, None]).squeeze(1).tolist(), abs=1e-5)


def in_slots(settings: SamplerSettings | None = None, max_new_tokens: int = 64) -> HFSampler:
    cpu = torch.device("cpu")
    sampler = HFSampler(
        settings or SamplerSettings(), max_new_tokens=max_new_tokens, device=cpu, dtype=torch.float32, slots=True
    )
    sampler.load(EMBEDDED / "arithmetic-steps")
    assert sampler.slots_problem == ""
    return sampler


@pytest.mark.parametrize(
    "settings", [SamplerSettings(), SamplerSettings(temperature=0.7, top_k=5), SamplerSettings(top_p=0.8)]
)
def test_slots_that_are_refilled_say_what_the_growing_cache_says(
    settings: SamplerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.PREFILL_TOKENS", 60)
    plain, slotted = make(settings), in_slots(settings)
    wanted = requests(plain, 40)
    counted: list[int] = []
    slotted.on_tokens = counted.append
    expected, found = plain.sample(wanted), slotted.sample(wanted)
    assert slotted._decoder is not None and slotted._decoder.slots == 16
    assert set(slotted._decoder.graphs) > {16}  # fewer rows at the end
    assert tokens_of(found) == tokens_of(expected)
    assert [response.finish_reason for response in found] == [response.finish_reason for response in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logp == pytest.approx(theirs.logp, abs=2e-5)
    assert sum(counted) == sum(len(response.token_ids) for response in found)


def test_the_next_steps_are_under_way_while_the_host_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    seen: list[str] = []

    def note(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(self: Any, *args: Any) -> Any:
            seen.append(name)
            return real(self, *args)

        monkeypatch.setattr(owner, name, noted)

    note(SlotDecoder, "_run")
    note(SlotDecoder, "_status")
    note(SlotStatus, "wait")
    sampler = in_slots()
    seen.clear()
    sampler.sample(requests(sampler, 40))
    # What is waited for was enqueued before the steps that run meanwhile; only the last has none after it.
    assert len(seen) > 30 and seen[-1] == "wait"
    assert seen[:-1] == ["_run", "_status", "wait"] * (len(seen) // 3)


def test_slots_that_all_end_at_once_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    sampler = in_slots(max_new_tokens=2)
    assert {len(response.token_ids) for response in sampler.sample(requests(sampler, 40))} == {2}


def test_what_is_written_to_the_cache_lies_where_it_was_to_lie() -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, 6), (3, 8, 8)]  # heads, and numbers of a head's keys and values, in each layer
    cache = SlotCache(9, [(torch.empty(1, k, 1, d), torch.empty(1, k, 1, e)) for k, d, e in shapes])
    assert cache.nbytes == 9 * 4 * (2 * 4 + 2 * 6 + 2 * 3 * 8)
    for layer, (k, d, e) in enumerate(shapes):
        prompt = torch.randn(1, k, 3, d), torch.randn(1, k, 3, e)
        cache.place_R, cache.reads_prompts = torch.tensor([7, 4, 5]), True
        assert all(x is y for x, y in zip(cache.update(*prompt, layer), prompt, strict=True))
        new = torch.randn(2, k, 1, d), torch.randn(2, k, 1, e)
        cache.place_R, cache.reads_prompts = torch.tensor([8, 0]), False
        for stored, read, written in zip(cache.update(*new, layer), prompt, new, strict=True):
            expected = torch.zeros_like(stored)
            expected[[7, 4, 5]] = read[0].transpose(0, 1)
            expected[[8, 0]] = written[:, :, 0]
            assert torch.equal(stored, expected)


def test_a_place_is_free_when_the_last_response_to_its_prompt_has_ended() -> None:
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [7, 8, 9]]
    waiting = RequestQueue([Request(prompt, seed) for seed, prompt in enumerate(prompts)])
    waiting.set_places(3)
    read, places = waiting.next_prompts(2)  # tokens: the first prompt has them, but for its last
    assert read == [(1, 2)] and len(set(places.tolist())) == 1
    read, more = waiting.next_prompts(100)
    assert read == [(4,), ()] and waiting.free == []  # room for three
    assert waiting.next_prompts(100)[0] == []
    assert waiting.take(3).tolist() == [0, 2, 1]
    waiting.end(np.array([0]))
    assert waiting.free == []  # request 2 has the same prompt
    waiting.end(np.array([1, 2]))
    assert sorted(waiting.free) == sorted([*places.tolist(), more[0]])
    assert waiting.next_prompts(100)[0] == [(7, 8)]
    assert waiting.take(9).tolist() == [3, 4] and not waiting
    assert waiting.last_P[waiting.prompt_Q].tolist() == [prompt[-1] for prompt in prompts]


def test_a_prompt_that_is_longer_than_what_is_read_at_once_is_read_alone() -> None:
    waiting = RequestQueue([Request([1] * 50, 0), Request([2] * 5, 1)])
    waiting.set_places(2)
    assert [len(prompt) for prompt in waiting.next_prompts(10)[0]] == [49]
    assert [len(prompt) for prompt in waiting.next_prompts(10)[0]] == [4]


@pytest.mark.parametrize("share", [0.03, 0.3, 0.6])
def test_slots_that_are_full_or_wait_leave_the_others_alone(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.REFILL_SHARE", share)
    plain, slotted = make(max_new_tokens=41), in_slots(max_new_tokens=41)
    wanted = requests(plain, 60)
    expected, found = plain.sample(wanted), slotted.sample(wanted)
    assert {FinishReason.STOP, FinishReason.LENGTH} == {response.finish_reason for response in expected}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logp == pytest.approx(theirs.logp, abs=2e-5)


def test_slots_that_were_given_up_half_way_begin_anew() -> None:
    sampler = in_slots()
    wanted = requests(sampler, 70)
    expected = sampler.sample(wanted)
    decoder = sampler._decoder
    assert decoder is not None
    given_up: Any = decoder.decode(RequestQueue(wanted[::-1]))
    next(given_up)
    given_up.close()
    assert tokens_of(sampler.sample(wanted[:30])) == tokens_of(expected[:30]) and sampler._decoder is decoder


def test_pools_that_take_turns_share_their_slots() -> None:
    sampler = in_slots(max_new_tokens=3)
    prompts = [request.prompt_ids for request in requests(sampler, 96)]
    many_responses = [Request(prompts[row // 32], row) for row in range(512)]
    many_prompts = [Request(prompt, 3) for prompt in prompts]
    decoders: list[SlotDecoder | None] = []
    for pool in (many_responses, many_prompts, many_responses, many_prompts):
        sampler.sample(pool)
        decoders.append(sampler._decoder)
    first, second = decoders[:2]
    assert first is not None and second is not None
    assert (first.slots, first.places, second.slots, second.places) == (512, 16, 512, 128)
    assert decoders[2] is second and decoders[3] is second
    assert [len(response.token_ids) for response in sampler.sample(many_responses * 2)] == [3] * 1024
    assert sampler._decoder is not None
    assert (sampler._decoder.slots, sampler._decoder.places) == (1024, 128)


def test_what_one_row_has_does_not_reach_another() -> None:
    torch.manual_seed(0)
    query_RH1D, (key_TKD, value_TKD) = torch.randn(2, 2, 1, 4), torch.randn(2, 20, 2, 4)
    arguments: dict[str, Any] = {"prompt_R": [16, 16], "prefix_R": [2, 2], "own_R": [0, 8], "length_R": [3, 5]}
    arguments = {name: torch.tensor(values) for name, values in arguments.items()}
    module = SimpleNamespace(config=SimpleNamespace())
    places = [16, 17, 8, 9, 10]  # of the second row's keys
    for window in (None, 2):
        seen = places[-(window or 5) :]
        key_KLD, value_KLD = key_TKD[seen].transpose(0, 1), value_TKD[seen].transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(query_RH1D[1], key_KLD, value_KLD)
        for value in (1.0, math.nan):
            key_TKD[0] = value_TKD[0] = value
            found, _ = slot_attention(
                module, query_RH1D, key_TKD, value_TKD, None, **arguments, room=8, sliding_window=window
            )
            torch.testing.assert_close(found[1].transpose(0, 1), expected)
            assert found[0].isnan().any() == math.isnan(value)


@pytest.mark.parametrize("group_size", [1, 3, 40])
def test_responses_look_back_to_prompts_that_they_share(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.PREFILL_TOKENS", 60)
    plain, slotted = make(), in_slots()
    wanted = [Request(request.prompt_ids, 7 * row) for row, request in enumerate(requests(plain, 40))]
    wanted = [Request(wanted[row // group_size].prompt_ids, request.seed) for row, request in enumerate(wanted)]
    found = slotted.sample(wanted)
    assert tokens_of(found) == tokens_of(plain.sample(wanted))
    assert slotted._decoder is not None
    assert slotted._decoder.places == {1: 16, 3: 16, 40: 1}[group_size]
    alone = [Request([3], 5)]  # nothing to read
    assert tokens_of(slotted.sample(alone)) == tokens_of(plain.sample(alone))


def test_slots_are_cut_at_the_limit_and_made_anew_for_longer_prompts() -> None:
    sampler = in_slots(max_new_tokens=5)
    short = sampler.sample(requests(sampler, 8))
    assert {len(response.token_ids) for response in short} == {5}
    assert {response.finish_reason for response in short} == {FinishReason.LENGTH}
    before = sampler._decoder
    assert sampler.sample(requests(sampler, 8)) == short and sampler._decoder is before
    long = [Request([*request.prompt_ids] * 6, request.seed) for request in requests(sampler, 2)]
    assert [len(response.token_ids) for response in sampler.sample(long)] == [5, 5]
    assert sampler._decoder is not before


@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
def test_a_cache_that_is_more_than_keys_and_values_is_not_put_into_slots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = MambaForCausalLM(MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=50)).eval()
    assert slots_problem(model)
    model.save_pretrained(tmp_path)
    load_tokenizer(str(EMBEDDED / "arithmetic")).save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    sampler = HFSampler(SamplerSettings(), max_new_tokens=4, device=cpu, dtype=torch.float32, slots=True)
    sampler.load(tmp_path)
    assert f"without slots, which is slower: {sampler.slots_problem}" in caplog.text


def test_a_kernel_that_cannot_be_made_is_a_reason_to_do_without_slots() -> None:
    def no_draw(logits_RV: torch.Tensor, uniform_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyError("out of shared memory")  # errors of Triton are none of Python's usual ones

    model = load_model(resolve_model("auto", "arithmetic"), device=torch.device("cpu"))
    assert slots_problem(model) == ""
    assert "out of shared memory" in slots_problem(model, draw=no_draw)


def test_logits_that_are_not_numbers_draw_a_token_with_no_log_probability() -> None:
    token, logp = draw(torch.full((2, 300), math.nan), torch.tensor([0.1, 0.9]))
    assert (token < 300).all() and not logp.isfinite().any()


def test_texts_are_those_that_the_tokenizer_itself_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(resolve_model("auto", "arithmetic"))
    ids = [[row % len(tokenizer), 1, 3 + row % 9, tokenizer.eos_token_id] for row in range(40)] + [[]]
    expected = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert decode_texts(ids, tokenizer) == expected
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", True)  # which its library knows nothing of
    monkeypatch.setattr(tokenizer, "batch_decode", lambda ids, skip_special_tokens: ["cleaned up"] * len(ids))
    assert decode_texts(ids, tokenizer) == ["cleaned up"] * len(ids)


def test_a_cache_with_room_holds_what_a_growing_one_holds_and_seldom_moves() -> None:
    torch.manual_seed(0)
    grown, plain = PreallocatedLayer(), DynamicLayer()
    moves, last = 0, 0
    for step in range(200):
        rows = 5 if step < 100 else 3
        key, value = torch.randn(rows, 2, 4 if step == 0 else 1, 8), torch.randn(rows, 2, 4 if step == 0 else 1, 6)
        held = grown.update(key, value)
        assert all(map(torch.equal, held, plain.update(key, value)))
        moves, last = moves + (held[0].data_ptr() != last), held[0].data_ptr()
        if step == 99:  # rows that have ended are dropped
            for layer in (grown, plain):
                layer.batch_select_indices(torch.tensor([0, 2, 4]))
        if step == 150:  # and as many rows may be others
            for layer in (grown, plain):
                layer.batch_select_indices(torch.tensor([2, 0, 0]))
    assert grown.get_seq_length() == plain.get_seq_length() == 203
    assert moves <= 15
