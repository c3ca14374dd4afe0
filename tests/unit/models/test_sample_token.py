"""The draw as one Triton kernel against the draw in torch: on a GPU, or anywhere with Triton and TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stalewise.models.kernels import SlotState, StepRows
from stalewise.rollout.engines.paged_cache import advance_slots, read_slots
from stalewise.rollout.token_sampling import device_uniforms, draw, rollout_seed, uniforms

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels.logits import (
    CHUNK,
    ROWS,
    SLOTS,
    STOPS,
    advance_slots_on_device,
    draw_on_device,
    read_slots_on_device,
    uniforms_on_device,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = 1 - 2**-53  # of the uniform numbers
THREE_CHUNKS = 2 * CHUNK + 808


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def drawn_from(logits_RV: Tensor, uniform_R: Tensor) -> list[int]:
    """Tokens of the kernel, with the log-probabilities that came with them held against those in float64."""
    token_R, logp_R = draw_on_device(logits_RV, uniform_R)
    assert (token_R.dtype, logp_R.dtype) == (torch.int64, torch.float32)
    expected_R = logits_RV.double().log_softmax(dim=1).gather(1, token_R[:, None]).squeeze(1)
    torch.testing.assert_close(logp_R.double(), expected_R, rtol=1e-6, atol=1e-5)
    return token_R.tolist()


def assert_same_tokens(logits_RV: Tensor, uniform_R: Tensor) -> None:
    """Same as in torch, but for rows whose number lies where one token ends and the next begins."""
    cumulative_RV = logits_RV.double().softmax(dim=1).cumsum(dim=1)
    exact_R = torch.searchsorted(cumulative_RV, uniform_R[:, None].contiguous(), right=True).squeeze(1)
    is_near_R = (cumulative_RV - uniform_R[:, None]).abs().amin(dim=1) < 1e-6
    assert is_near_R.double().mean() < 0.25
    found_R = torch.tensor(drawn_from(logits_RV, uniform_R), device=DEVICE)
    for expected_R in (exact_R, draw(logits_RV, uniform_R)[0]):
        assert ((found_R == expected_R) | is_near_R).all()


@pytest.mark.parametrize("vocabulary", [2, 5, 100, 128, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_those_of_the_draw_in_torch(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 16 if DEVICE == "cuda" else 8  # the interpreter takes 35 ms for each
    logits_RV = (3 * torch.randn(rows, vocabulary, device=DEVICE)).to(dtype)
    logits_RV[0, : vocabulary // 2] = -torch.inf  # tokens that were cut away: with 9000 the whole first chunk
    logits_RV[1, vocabulary // 3] = 12.0
    logits_RV[2] = 0.5
    logits_RV[3] -= 300  # what is common to all logits is no matter
    assert_same_tokens(logits_RV, torch.rand(rows, dtype=torch.float64).to(DEVICE))


def test_vocabularies_may_be_large() -> None:
    torch.manual_seed(0)
    assert_same_tokens(3 * torch.randn(4, 300_000, device=DEVICE), numbers(0.1, 0.45, 0.7, 0.95))


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_tokens_are_drawn_as_often_as_they_are_probable(vocabulary: int) -> None:
    torch.manual_seed(0)
    logits_V = 4 * torch.randn(vocabulary, device=DEVICE)
    count = 2000 if DEVICE == "cuda" else 40  # the interpreter takes 35 ms for each
    uniform_R = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(DEVICE)
    token_R, _ = draw_on_device(logits_V.expand(count, -1), uniform_R)
    frequency_V = token_R.bincount(minlength=vocabulary).double() / count
    assert (frequency_V - logits_V.double().softmax(dim=0)).abs().max() <= 1 / count + 1e-6


@pytest.mark.parametrize("count", [1, 70, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 500])
def test_tokens_that_are_cut_away_are_never_drawn(count: int) -> None:
    """The smallest number leads to the first token that is left, the largest to the last."""
    torch.manual_seed(0)
    logits_RV = torch.rand(4, THREE_CHUNKS, device=DEVICE)
    logits_RV[:2, :count] = -torch.inf
    logits_RV[2:, -count:] = -torch.inf
    tokens = drawn_from(logits_RV, numbers(0.0, LARGEST, 0.0, LARGEST))
    assert tokens == [count, THREE_CHUNKS - 1, 0, THREE_CHUNKS - count - 1]


def test_between_tokens_that_are_cut_away_only_the_others_are_drawn() -> None:
    torch.manual_seed(0)
    count = 64 if DEVICE == "cuda" else 24
    logits_RV = torch.randn(1, THREE_CHUNKS, device=DEVICE)
    is_cut_V = torch.rand(THREE_CHUNKS) < 0.99
    is_cut_V[CHUNK : 2 * CHUNK] = True
    logits_RV[:, is_cut_V.to(DEVICE)] = -torch.inf
    # On the edges between tokens, where rounding decides.
    edge_V = logits_RV[0].double().softmax(dim=0).cumsum(dim=0)[(~is_cut_V).to(DEVICE)]
    tokens = drawn_from(logits_RV.expand(count, -1), torch.cat([numbers(0.0), edge_V[: count - 2], numbers(LARGEST)]))
    assert not is_cut_V[tokens].any()


@pytest.mark.parametrize("low", [slice(0, CHUNK), slice(2 * CHUNK, None)])
def test_a_chunk_far_below_the_others_is_passed_over(low: slice) -> None:
    logits_RV = torch.zeros(2, THREE_CHUNKS, device=DEVICE)
    logits_RV[:, low] = -200.0
    logits_RV[:, [0, -1]] = -torch.inf
    first, last = (CHUNK, THREE_CHUNKS - 2) if low.start == 0 else (1, 2 * CHUNK - 1)
    assert drawn_from(logits_RV, numbers(0.0, LARGEST)) == [first, last]


def test_within_a_low_chunk_the_least_probable_token_still_counts() -> None:
    """e^−110 is not a number of float32 as seen from the row's maximum, but it is one as seen from the chunk's."""
    logits_RV = torch.zeros(1, THREE_CHUNKS, device=DEVICE)
    logits_RV[:, :CHUNK] = -80.0
    logits_RV[:, :3], logits_RV[:, 3] = -torch.inf, -110.0
    assert drawn_from(logits_RV, numbers(0.0)) == [3]


@pytest.mark.parametrize("uniform", [0.0, 0.6, LARGEST])
@pytest.mark.parametrize("vocabulary", [70, THREE_CHUNKS])
def test_what_is_not_finite_stays_so(vocabulary: int, uniform: float) -> None:
    torch.manual_seed(0)
    logits_RV = torch.randn(9, vocabulary, device=DEVICE)
    last = vocabulary - 1
    for row, (place, value) in enumerate([(3, torch.nan), (last, torch.nan), (3, torch.inf), (last, torch.inf)]):
        logits_RV[row, place] = value
    logits_RV[4:7] = torch.tensor([[-torch.inf], [torch.nan], [torch.inf]], device=DEVICE)
    logits_RV[7, : vocabulary // 2], logits_RV[7, 5] = -torch.inf, torch.nan  # all else of its chunk is cut away
    token_R, logp_R = draw_on_device(logits_RV, numbers(uniform).expand(9))
    assert logp_R.isnan().tolist() == [True] * 8 + [False]
    assert ((token_R >= 0) & (token_R < vocabulary)).all()


@pytest.mark.parametrize("vocabulary", [5, 70, CHUNK + 1, 9000])
def test_the_row_that_follows_in_memory_is_not_read(vocabulary: int) -> None:
    logits_RV = torch.zeros(3, vocabulary, device=DEVICE)
    logits_RV[1] = 50.0
    assert drawn_from(logits_RV, numbers(LARGEST, 0.0, LARGEST)) == [vocabulary - 1, 0, vocabulary - 1]


def test_logits_and_numbers_may_lie_apart_in_memory() -> None:
    torch.manual_seed(0)
    assert_same_tokens(torch.randn(300, 8, device=DEVICE).T, torch.rand(16, dtype=torch.float64).to(DEVICE)[::2])


def test_no_rows_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stalewise.models.kernels.logits._draw", None)
    token_R, logp_R = draw_on_device(torch.empty(0, 300, device=DEVICE), numbers())
    assert (token_R.shape, token_R.dtype) == (logp_R.shape, torch.int64) == ((0,), torch.int64)


@pytest.mark.parametrize("rows", [0, 1, ROWS + 3])
def test_uniform_numbers_are_the_recorded_ones_to_the_last_bit(rows: int) -> None:
    seeds = [rollout_seed(0, row) for row in range(rows)]
    given = torch.tensor([seeds, [7 * row % 5 for row in range(rows)]], dtype=torch.long, device=DEVICE)
    found = uniforms_on_device(*given)
    assert found.dtype is torch.float64 and torch.equal(found, device_uniforms(*given))
    expected = uniforms(seeds, 5)
    assert found.tolist() == [expected[row, 7 * row % 5] for row in range(rows)]


@pytest.mark.parametrize("stops", [0, 1, STOPS + 3])
@pytest.mark.parametrize("rows", [1, 5, SLOTS, 2 * SLOTS + 3])
def test_slots_are_read_and_advanced_as_in_torch(rows: int, stops: int) -> None:
    torch.manual_seed(rows)
    slots, new_tokens = rows + 9, 37
    slot_R, drawn = torch.randperm(slots)[:rows].to(DEVICE), (torch.randint(0, 60, (rows,)), torch.rand(rows))
    numbers = torch.randint(0, new_tokens + 1, (6, slots))
    numbers[2] = torch.randint(0, 2**63 - 1, (slots,))
    block_SB = torch.randint(0, 2**31 - 1, (slots, 5), dtype=torch.int32)
    record = torch.randint(0, 60, (slots, new_tokens + 1), dtype=torch.int32), torch.rand(slots, new_tokens + 1)
    before = numbers, torch.rand(slots) < 0.7, block_SB, *record, torch.arange(stops) * 3

    def after(read: Callable[..., StepRows], advance: Callable[..., None]) -> list[Tensor]:
        state = SlotState(*(x.clone().to(DEVICE) for x in before), block_size=16, prompt_blocks=2)
        known = read(slot_R, state)
        advance(slot_R, known, *(x.to(DEVICE) for x in drawn), state)
        return [*known, state.numbers, state.alive_S, state.all_ids, state.all_logp]

    found = after(read_slots_on_device, advance_slots_on_device)
    for one, other in zip(found, after(read_slots, advance_slots), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert not torch.equal(found[-4], numbers.to(DEVICE))  # something has changed


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stalewise.models.kernels import logits as kernels

kinds = {name: "*fp32" for name in ("highest", "mass", "logp", "all_logp")}
kinds |= {name: "*i64" for name in ("slot", "numbers", "rows", "token", "stop_ids")}
kinds |= {name: "*i64" for name in ("tokens_made", "limit", "forced", "lives")}
kinds |= {"logits": "*bf16", "uniform": "*fp64", "alive": "*u8", "block": "*i32", "all_ids": "*i32"}
sizes = {"VOCABULARY": 151936, "SIZE": 4096, "CHUNKS": 64, "WIDTH": 64, "STOPS": 32}
for kernel in (kernels._masses, kernels._draw, kernels._read_slots, kernels._advance_slots):
    fixed = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    if "slot" in kernel.arg_names:
        fixed["SIZE"] = 64
    given = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in sizes}
    source = ASTSource(kernel, given | dict.fromkeys(fixed, "constexpr"), fixed)
    print(len(triton.compile(source, GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""


def test_kernels_of_a_step_can_be_compiled_for_a_gpu(compiled: Callable[[str], str]) -> None:
    """The interpreter accepts more than the compiler does."""
    assert len(compiled(COMPILE).split()) == 4
