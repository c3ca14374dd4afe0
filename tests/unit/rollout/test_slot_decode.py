"""Decoding in slots gives what decoding with a growing cache gives."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MambaConfig, MambaForCausalLM

from policies import tokens_of
from sampling import steps_requests as requests
from sampling import steps_sampler as make
from stalewise.errors import ModelError
from stalewise.models import EMBEDDED, resolve_model
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.rollout.engines import paged_cache, slot_decode
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.engines.paged_cache import free_for_slots
from stalewise.rollout.engines.request_queue import LengthHistory, RequestQueue
from stalewise.rollout.engines.slot_decode import SlotDecoder, SlotStatus, StepKernels, slots_problem
from stalewise.rollout.sampler import Request
from stalewise.types import FinishReason, SamplerSettings


class Watch:
    """Looks at the blocks before each run of steps, and counts what was put back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put_back, self.most = 0, 0
        self.queue = RequestQueue([], 1)
        run, put_back = SlotDecoder.run, SlotDecoder._put_back

        def watched_run(decoder: SlotDecoder, rows: int, slots: np.ndarray, steps: int) -> None:
            self.look(decoder)
            assert steps == decoder.steps_per_check
            run(decoder, rows, slots, steps)

        def watched_put_back(decoder: SlotDecoder, queue: RequestQueue, slots: np.ndarray) -> Any:
            self.put_back += len(slots)
            return put_back(decoder, queue, slots)

        fill = SlotDecoder.fill

        def watched_fill(decoder: SlotDecoder, queue: RequestQueue) -> np.ndarray:
            self.queue = queue
            return fill(decoder, queue)

        monkeypatch.setattr(SlotDecoder, "run", watched_run)
        monkeypatch.setattr(SlotDecoder, "_put_back", watched_put_back)
        monkeypatch.setattr(SlotDecoder, "fill", watched_fill)

    def look(self, decoder: SlotDecoder) -> None:
        """A response holds the blocks of its tokens and of the next steps, a prompt those of its own, none twice."""
        board, size = decoder.board, decoder.size.block_size
        needed_S = -(-np.minimum(board.tokens_S + decoder.steps_per_check, decoder.new_tokens) // size)
        held = [board.blocks.own_SB[slot, : needed_S[slot]] for slot in board.living]
        for prompt, blocks in self.queue.blocks_of.items():
            assert len(blocks) == -(-self.queue.prefix_P[prompt] // size)
            held.append(blocks)
        numbers = np.concatenate([*held, np.zeros(0, dtype=np.int32)])
        assert len(numbers) == len(set(numbers.tolist())) == board.blocks.blocks - board.blocks.free
        assert not len(numbers) or 1 <= numbers.min() <= numbers.max() <= board.blocks.blocks
        self.most = max(self.most, len(numbers))
        read = np.bincount(self.queue.prompt_Q[board.request_S[board.living]], minlength=len(self.queue.prompts))
        assert (read == self.queue.live_P).all()


def few_blocks(monkeypatch: pytest.MonkeyPatch, *, block_size: int, blocks: int, slots: int) -> None:
    for name, value in (("BLOCK_SIZE", block_size), ("SMALLEST_BLOCK", 1), ("FEWEST_ROWS", 2)):
        monkeypatch.setattr(paged_cache, name, value)
    monkeypatch.setattr(paged_cache, "MOST_BLOCKS", blocks)
    monkeypatch.setattr(paged_cache, "MOST_SLOTS", slots)


def as_if_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat responses of any length as long ones: more steps between checks, and steps of fewer rows."""
    monkeypatch.setattr(slot_decode, "FINE_ROWS", 1)
    monkeypatch.setattr(slot_decode, "FEWEST_FINE_ROWS", 2)


@pytest.mark.parametrize(
    ("settings", "long"),
    [
        (SamplerSettings(), False),
        (SamplerSettings(), True),
        (SamplerSettings(temperature=0.7, top_k=5), False),
        pytest.param(SamplerSettings(top_p=0.8), False, marks=pytest.mark.nightly),
    ],
)
def test_slots_that_are_refilled_say_what_the_growing_cache_says(
    settings: SamplerSettings, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        as_if_long(monkeypatch)
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.PREFILL_TOKENS", 60)
    plain, slotted = make(settings), make(settings, slots=True)
    wanted = requests(plain, 40)
    counted: list[int] = []
    slotted.on_tokens = counted.append
    expected, found = plain.sample(wanted), slotted.sample(wanted)
    assert slotted._decoder is not None and slotted._decoder.slots == 16
    assert set(slotted._decoder.graphs) > {16}  # fewer rows at the end
    assert (slotted._decoder.steps_per_check, 8 in slotted._decoder.graphs) == ((8, True) if long else (2, False))
    assert tokens_of(found) == tokens_of(expected)
    assert [response.finish_reason for response in found] == [response.finish_reason for response in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logp == pytest.approx(theirs.logp, abs=2e-5)
    assert sum(counted) == sum(len(response.token_ids) for response in found)


def test_the_next_steps_are_under_way_while_the_host_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.FEWEST_ROWS", 4)
    seen: list[str] = []

    def note(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(self: Any, *args: Any) -> Any:
            seen.append(name)
            return real(self, *args)

        monkeypatch.setattr(owner, name, noted)

    note(SlotDecoder, "run")
    note(SlotDecoder, "status")
    note(SlotStatus, "wait")
    sampler = make(slots=True)
    seen.clear()
    sampler.sample(requests(sampler, 40))
    # What is waited for was enqueued before the steps that run meanwhile; only the last has none after it.
    assert len(seen) > 30 and seen[-1] == "wait"
    assert seen[:-1] == ["run", "status", "wait"] * (len(seen) // 3)


def test_slots_that_all_end_at_once_are_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.FEWEST_ROWS", 4)
    sampler = make(max_new_tokens=2, slots=True)
    assert {len(response.token_ids) for response in sampler.sample(requests(sampler, 40))} == {2}


@pytest.mark.parametrize("share", [*(pytest.param(share, marks=pytest.mark.nightly) for share in (0.03, 0.3)), 0.6])
def test_slots_that_are_full_or_wait_leave_the_others_alone(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.REFILL_SHARE", share)
    plain, slotted = make(max_new_tokens=41), make(max_new_tokens=41, slots=True)
    wanted = requests(plain, 60)
    expected, found = plain.sample(wanted), slotted.sample(wanted)
    assert {FinishReason.STOP, FinishReason.LENGTH} == {response.finish_reason for response in expected}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.logp == pytest.approx(theirs.logp, abs=2e-5)


def test_slots_that_were_given_up_half_way_begin_anew() -> None:
    sampler = make(max_new_tokens=16, slots=True)
    wanted = requests(sampler, 70)
    together, expected = sampler.sample(wanted), sampler.sample(wanted[:30])
    decoder = sampler._decoder
    assert decoder is not None
    given_up: Any = decoder.decode(RequestQueue(wanted[::-1], 16))
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
    first = decoders[0]
    # Blocks of 16 tokens: one for each response, two for each of 16 prompts; 96 responses to as many prompts fit.
    assert first is not None and (first.size.slots, first.size.blocks) == (512, 512 + 16 * 2)
    assert all(decoder is first for decoder in decoders)
    assert [len(response.token_ids) for response in sampler.sample(many_responses * 2)] == [3] * 1024
    assert sampler._decoder is not None and sampler._decoder is not first
    assert (sampler._decoder.size.slots, sampler._decoder.size.blocks) == (1024, 1024 + 16 * 2)


@pytest.mark.parametrize("group_size", [3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (1, 40))])
def test_responses_look_back_to_prompts_that_they_share(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.MOST_SLOTS", 16)
    monkeypatch.setattr("stalewise.rollout.engines.paged_cache.FEWEST_ROWS", 4)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.PREFILL_TOKENS", 60)
    plain, slotted = make(), make(slots=True)
    wanted = [Request(request.prompt_ids, 7 * row) for row, request in enumerate(requests(plain, 40))]
    wanted = [Request(wanted[row // group_size].prompt_ids, request.seed) for row, request in enumerate(wanted)]
    found = slotted.sample(wanted)
    assert tokens_of(found) == tokens_of(plain.sample(wanted))
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
    assert "out of shared memory" in slots_problem(model, StepKernels(draw=no_draw))


def test_weights_that_leave_no_memory_are_no_reason_to_do_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "MOST_BLOCKS", 1)
    with pytest.raises(torch.OutOfMemoryError, match="beside the weights no response of 3 tokens fits"):
        make(slots=True)


@pytest.mark.parametrize(
    ("seed", "long"),
    [(0, False), (1, True), *(pytest.param(seed, False, marks=pytest.mark.nightly) for seed in (1, 2, 3))],
)
def test_few_blocks_change_no_response(seed: int, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if long:
        as_if_long(monkeypatch)
    rng = np.random.default_rng(seed)
    block_size, limit, group_size = (1, 3, 8, 16)[seed], int(rng.integers(20, 40)), int(rng.integers(2, 5))
    plain = make(max_new_tokens=limit)
    asked = [list(request.prompt_ids) for request in requests(plain, 5)]
    prompts = [[*chain(*asked[:count])][-int(rng.integers(1, 60)) :] for count in rng.integers(1, 6, 5)]
    wanted = [Request(prompts[row // group_size], 7 * row) for row in range(5 * group_size)]
    longest = -(-max(len(prompt) - 1 for prompt in prompts) // 32) * 32
    least = -(-limit // block_size) + -(-longest // block_size)
    few_blocks(monkeypatch, block_size=block_size, blocks=least + int(rng.integers(0, 1 + least // 3)), slots=16)
    monkeypatch.setattr("stalewise.rollout.engines.request_queue.FIRST_GUESS", 2)  # so too many begin
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.PREFILL_TOKENS", 60)
    watch, slotted, counted = Watch(monkeypatch), make(max_new_tokens=limit, slots=True), list[int]()
    slotted.on_tokens = counted.append
    expected, found = plain.sample(wanted), slotted.sample(wanted)
    assert tokens_of(found) == tokens_of(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logp == pytest.approx(theirs.logp, abs=2e-4)  # such prompts are rare: float32 is 4e-5 from float64
    assert sum(counted) == sum(len(response.token_ids) for response in found)
    assert slotted._decoder is not None and slotted._decoder.board.blocks.free == slotted._decoder.size.blocks
    assert watch.put_back  # otherwise the test shows nothing


@pytest.mark.parametrize(
    ("new_tokens", "expected"), [(1023, [256, 256, 64, 64, 64, 64]), (1024, [256, 128, 64, 32, 8, 8])]
)
def test_rows_of_a_step_follow_the_responses_that_are_alive(new_tokens: int, expected: list[int]) -> None:
    model = load_model(resolve_model("auto", "arithmetic"), device=torch.device("cpu"))
    sizes: dict[str, Any] = {"requests": 256, "prompts": 1, "prompt_room": 8, "new_tokens": new_tokens}
    nothing = torch.empty(0, dtype=torch.long)
    decoder = SlotDecoder(model, **sizes, settings=SamplerSettings(), stop_ids=nothing)
    assert decoder.slots == 256 and decoder.steps_per_check == (8 if new_tokens == 1024 else 2)
    found: list[int] = []
    for alive in (256, 65, 64, 17, 8, 1):
        living = np.arange(256)[-alive:]
        rows, slots = decoder.rows_for(living)
        assert len(set(slots.tolist())) == rows and set(living.tolist()) <= set(slots.tolist())
        found.append(rows)
    assert found == expected


def test_rows_of_a_large_model_are_halved_while_that_saves_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(resolve_model("auto", "arithmetic"), device=torch.device("cpu"))
    sizes: dict[str, Any] = {"requests": 2048, "prompts": 1, "prompt_room": 8, "new_tokens": 16}
    decoder = SlotDecoder(model, **sizes, settings=SamplerSettings(), stop_ids=torch.empty(0, dtype=torch.long))

    def rows() -> list[int]:
        return [decoder.rows_for(np.arange(alive))[0] for alive in (2048, 1025, 1024, 512, 256, 128, 64, 1)]

    assert rows() == [2048, 2048, 2048, 512, 512, 128, 128, 128]
    # As if it were so large that 1,024 rows are worth it: by two down to 512, and from there by four.
    monkeypatch.setattr(slot_decode, "FINE_WORK", 1024 * model.num_parameters())
    assert rows() == [2048, 2048, 1024, 512, 512, 128, 128, 128]
    monkeypatch.setattr(slot_decode, "FINE_WORK", 0)
    assert rows() == [2048, 2048, 1024, 512, 256, 128, 64, 64]


def test_slots_are_at_least_64_however_few_rows_a_step_may_have() -> None:
    model = load_model(resolve_model("auto", "arithmetic"), device=torch.device("cpu"))
    sizes: dict[str, Any] = {"requests": 3, "prompts": 1, "prompt_room": 8, "new_tokens": 1024}
    nothing = torch.empty(0, dtype=torch.long)
    assert SlotDecoder(model, **sizes, settings=SamplerSettings(), stop_ids=nothing).slots == 64


def test_slots_count_with_what_is_free_and_was_not_promised_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    gpu = torch.device("cuda")
    assert [free_for_slots(gpu, share, most) for share, most in ((1.0, math.inf), (0.5, math.inf), (0.5, 600))] == [
        1000,
        500,
        300,
    ]
    assert [free_for_slots(torch.device("cpu"), 0.5, most) for most in (math.inf, 10)] == [None, 5]


def test_one_response_that_fits_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(max_new_tokens=41)
    wanted = requests(plain, 6)
    few_blocks(monkeypatch, block_size=8, blocks=6 + 4, slots=8)  # ⌈41 / 8⌉ and ⌈32 / 8⌉
    watch = Watch(monkeypatch)
    slotted = make(max_new_tokens=41, slots=True)
    assert tokens_of(slotted.sample(wanted)) == tokens_of(plain.sample(wanted))
    assert watch.most <= 10
    few_blocks(monkeypatch, block_size=8, blocks=9, slots=8)
    with pytest.raises(
        ModelError, match=r"max_new_tokens = 41 after a prompt of 32 .* = 40 would fit; lower it"
    ) as told:
        make(max_new_tokens=41, slots=True).sample(wanted)
    assert len(str(told.value).splitlines()) == 1


def test_memory_follows_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that no response reaches costs nothing."""
    most = []
    for limit in (60, 90):
        few_blocks(monkeypatch, block_size=4, blocks=9999, slots=16)
        watch, sampler = Watch(monkeypatch), make(max_new_tokens=limit, slots=True)
        responses = sampler.sample(requests(sampler, 16))
        assert max(len(response.token_ids) for response in responses) < 60
        most.append(watch.most)
    assert most[0] == most[1] < 16 * 60 / 4


def test_out_of_memory_is_tried_again_with_half_and_then_said(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make(max_new_tokens=24, slots=True)
    wanted = requests(sampler, 40)
    expected, failures, run = sampler.sample(wanted), [9, 3], SlotDecoder.run

    def fails(decoder: SlotDecoder, rows: int, slots: np.ndarray, steps: int) -> None:
        if failures:
            failures[0] -= 1
            if failures[0] <= 0:
                failures.pop(0)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nmore")
        run(decoder, rows, slots, steps)

    monkeypatch.setattr(SlotDecoder, "run", fails)
    assert tokens_of(sampler.sample(wanted)) == tokens_of(expected) and not failures
    failures.extend([1] * 9)
    with pytest.raises(
        ModelError, match=r"Tried to allocate 3 GiB.*64 responses at once .* were tried.*max_new_tokens"
    ):
        sampler.sample(wanted)
    failures.clear()
    assert tokens_of(sampler.sample(wanted)) == tokens_of(expected)


@pytest.mark.parametrize("when", ["first", "last"])
def test_memory_that_ends_at_the_first_or_the_last_token_is_one_message(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make(max_new_tokens=24, slots=True)
    wanted, run, done = requests(sampler, 8), SlotDecoder.run, dict[SlotDecoder, int]()
    expected = sampler.sample(wanted)
    last = max(len(tokens) for tokens in tokens_of(expected))

    def fails(decoder: SlotDecoder, rows: int, slots: np.ndarray, steps: int) -> None:
        done[decoder] = done.get(decoder, 0) + steps
        if when == "first" or done[decoder] >= last:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")
        run(decoder, rows, slots, steps)

    monkeypatch.setattr(SlotDecoder, "run", fails)
    with pytest.raises(ModelError, match="out of memory while responses were sampled") as refusal:
        sampler.sample(wanted)
    assert "lower sampler.max_new_tokens = " in str(refusal.value) and "\n" not in str(refusal.value)
    monkeypatch.undo()
    sampler = make(max_new_tokens=24, slots=True)
    assert tokens_of(sampler.sample(wanted)) == tokens_of(expected)


def test_long_responses_do_not_run_alone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    few_blocks(monkeypatch, block_size=8, blocks=999, slots=4)
    model: Any = load_model(resolve_model("auto", "arithmetic"), device=torch.device("cpu"))
    nothing, steps, run = torch.empty(0, dtype=torch.long), [0], SlotDecoder.run

    def counted(self: SlotDecoder, rows: int, slots: np.ndarray, count: int) -> None:
        steps[0] += count
        run(self, rows, slots, count)

    monkeypatch.setattr(SlotDecoder, "run", counted)
    # Two responses to each prompt, of 8 tokens; those to the last prompt have 48.
    prompts, limits = [(3, 1 + row // 2) for row in range(16)], [8] * 14 + [48] * 2
    wanted, history, found = [Request(prompt, row) for row, prompt in enumerate(prompts)], LengthHistory(), list[int]()
    history.note(sorted(set(prompts)), [8.0] * 7 + [48.0])
    sizes: dict[str, Any] = {"requests": 16, "prompts": 8, "prompt_room": 32, "new_tokens": 48}
    for known in (None, history):
        steps[0] = 0
        decoder = SlotDecoder(model, **sizes, settings=SamplerSettings(), stop_ids=nothing)
        ended = list(decoder.decode(RequestQueue(wanted, 48, known, limits)))
        assert sum(len(one.requests) for one in ended) == 16 and sum(one.lengths.sum() for one in ended) == sum(limits)
        found.append(steps[0])
    # In order: 14 × 8 / 4 and then 48 steps. The long ones first: 14 × 8 / 2 beside them. Slots wait for some checks.
    assert found[0] >= 28 + 48 and found[1] < 28 + 48


class Operations(TorchDispatchMode):
    """Names of what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_a_step_asks_for_nothing_that_a_cuda_graph_cannot_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Operations()
    step = SlotDecoder._step

    def watched(decoder: SlotDecoder, slot_R: torch.Tensor) -> None:
        with seen:
            step(decoder, slot_R)

    monkeypatch.setattr(SlotDecoder, "_step", watched)
    sampler = make(SamplerSettings(), slots=True)
    sampler.sample(requests(sampler, 4))
    assert "embedding" in seen.names
    # `isin` waits for the device where there are many stop tokens: it sorts.
    assert not seen.names & {"isin", "nonzero", "masked_select", "_local_scalar_dense", "item", "_unique2"}


def test_a_capture_that_fails_is_said_and_steps_are_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paged_cache, "MOST_SLOTS", 16)
    monkeypatch.setattr(paged_cache, "FEWEST_ROWS", 4)
    plain, made, attempts = make(), SlotDecoder.__init__, list[int]()

    def as_on_a_gpu(decoder: SlotDecoder, *args: Any, **options: Any) -> None:
        made(decoder, *args, **options)
        decoder.captures, decoder.stream = True, "a stream"  # type: ignore[assignment]

    def try_step(decoder: SlotDecoder, slot_R: torch.Tensor) -> None:
        decoder._step(slot_R)

    def fail(graph: Any, stream: Any, pool: Any = None) -> Any:
        attempts.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(SlotDecoder, "__init__", as_on_a_gpu)
    monkeypatch.setattr(SlotDecoder, "_warm_up", try_step)
    monkeypatch.setattr("stalewise.rollout.engines.slot_decode.recording", fail)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    slotted = make(slots=True)
    assert slotted.slots_problem == ""
    attempts.clear()
    caplog.clear()
    wanted = requests(plain, 40)
    assert tokens_of(slotted.sample(wanted)) == tokens_of(plain.sample(wanted))
    assert slotted._decoder is not None and len(slotted._decoder.graphs) > 1 and len(attempts) == 1
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "CUDA graphs are off for sampling, since a step could not be captured: operation not permitted when stream is "
        "capturing"
    ]
