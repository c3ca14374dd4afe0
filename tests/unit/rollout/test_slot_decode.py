"""Decoding in slots gives what decoding with a growing cache gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from policies import tokens_of
from sampling import steps_requests as requests
from sampling import steps_sampler as make
from stalewise.models.loading import EMBEDDED, load_model, load_tokenizer, resolve_model
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.engines.slot_decode import RequestQueue, SlotCache, SlotDecoder, SlotStatus, slots_problem
from stalewise.rollout.sampler import Request
from stalewise.types import FinishReason, SamplerSettings


@pytest.mark.parametrize(
    "settings", [SamplerSettings(), SamplerSettings(temperature=0.7, top_k=5), SamplerSettings(top_p=0.8)]
)
def test_slots_that_are_refilled_say_what_the_growing_cache_says(
    settings: SamplerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.PREFILL_TOKENS", 60)
    plain, slotted = make(settings), make(settings, slots=True)
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
    sampler = make(slots=True)
    seen.clear()
    sampler.sample(requests(sampler, 40))
    # What is waited for was enqueued before the steps that run meanwhile; only the last has none after it.
    assert len(seen) > 30 and seen[-1] == "wait"
    assert seen[:-1] == ["_run", "_status", "wait"] * (len(seen) // 3)


def test_slots_that_all_end_at_once_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    sampler = make(max_new_tokens=2, slots=True)
    assert {len(response.token_ids) for response in sampler.sample(requests(sampler, 40))} == {2}


@pytest.mark.parametrize("share", [0.03, 0.3, 0.6])
def test_slots_that_are_full_or_wait_leave_the_others_alone(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.REFILL_SHARE", share)
    plain, slotted = make(max_new_tokens=41), make(max_new_tokens=41, slots=True)
    wanted = requests(plain, 60)
    expected, found = plain.sample(wanted), slotted.sample(wanted)
    assert {FinishReason.STOP, FinishReason.LENGTH} == {response.finish_reason for response in expected}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logp == pytest.approx(theirs.logp, abs=2e-5)


def test_slots_that_were_given_up_half_way_begin_anew() -> None:
    sampler = make(slots=True)
    wanted = requests(sampler, 70)
    together, expected = sampler.sample(wanted), sampler.sample(wanted[:30])
    decoder = sampler._decoder
    assert decoder is not None
    given_up: Any = decoder.decode(RequestQueue(wanted[::-1]))
    next(given_up)
    given_up.close()
    # The same requests fill the same slots and the same shapes: nothing may differ, to the last bit.
    found = sampler.sample(wanted[:30])
    assert found == expected and sampler._decoder is decoder
    # 30 prompts are another matrix than 70, whose products are summed in another order: the same but for rounding.
    assert tokens_of(found) == tokens_of(together[:30])
    for ours, theirs in zip(found, together, strict=False):
        assert ours.logp == pytest.approx(theirs.logp, abs=2e-5)


def test_pools_that_take_turns_share_their_slots() -> None:
    sampler = make(max_new_tokens=3, slots=True)
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


@pytest.mark.parametrize("group_size", [1, 3, 40])
def test_responses_look_back_to_prompts_that_they_share(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.PREFILL_TOKENS", 60)
    plain, slotted = make(), make(slots=True)
    wanted = [Request(request.prompt_ids, 7 * row) for row, request in enumerate(requests(plain, 40))]
    wanted = [Request(wanted[row // group_size].prompt_ids, request.seed) for row, request in enumerate(wanted)]
    found = slotted.sample(wanted)
    assert tokens_of(found) == tokens_of(plain.sample(wanted))
    assert slotted._decoder is not None
    assert slotted._decoder.places == {1: 16, 3: 16, 40: 1}[group_size]
    alone = [Request([3], 5)]  # nothing to read
    assert tokens_of(slotted.sample(alone)) == tokens_of(plain.sample(alone))


def test_slots_are_cut_at_the_limit_and_made_anew_for_longer_prompts() -> None:
    sampler = make(max_new_tokens=5, slots=True)
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
