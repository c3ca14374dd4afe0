"""Triton kernels for log-softmax statistics, their gradient, and token sampling.

Also here: the random numbers of a decoding step, and reading and advancing the state of its slots. In torch, each takes
a dozen launches. Statistics and gradient read the product x of the output layer. Logits are scale · x, or with a cap
cap · tanh(scale · x / cap).
Axes: C rows, V vocabulary; R rows of a decoding step, S slots.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from stalewise.models.kernels import SlotState, StepRows

CHUNK = 4096  # tokens of the vocabulary at a time
ROWS = 256  # random numbers per program
SLOTS = 64  # rows per program that reads or advances slots
STOPS = 32  # stop tokens that are compared at a time
WIDTH = 64  # tokens of a block: a chunk's probabilities are summed by block before a token of one block is drawn


def statistics_on_device(
    product_CV: Tensor, target_C: Tensor, *, scale: float = 1.0, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-normaliser, log-probability of the target and entropy, each [C] in float32; `cap` 0: none."""
    rows, vocabulary = product_CV.shape
    lse_C, logp_C, entropy_C = (torch.empty(rows, dtype=torch.float32, device=product_CV.device) for _ in range(3))
    if rows:
        results = lse_C, logp_C, entropy_C
        fixed = {"SCALE": scale, "CAP": cap, "VOCABULARY": vocabulary, "SIZE": CHUNK}
        _statistics[(rows,)](  # pyright: ignore[reportIndexIssue]
            product_CV.contiguous(), target_C, *results, **fixed, num_warps=8
        )
    return lse_C, logp_C, entropy_C


def gradient_on_device(
    product_CV: Tensor,
    lse_C: Tensor,
    target_C: Tensor,
    gradient_C: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float = 1.0,
    cap: float = 0.0,
) -> Tensor:
    """Gradient of the product, in place; that of the logits is (1 at the target − softmax) · gradient of the
    log-probability. `of_entropy`: entropies H and their gradient, which adds −softmax · (log softmax + H) · gradient.
    """
    rows, vocabulary = product_CV.shape
    product_CV = product_CV.contiguous()
    if rows:
        fixed = {"SCALE": scale, "CAP": cap, "VOCABULARY": vocabulary, "SIZE": CHUNK}
        fixed["HAS_ENTROPY"] = of_entropy is not None
        gradient_C = gradient_C.contiguous()
        entropy_C, its_gradient_C = (lse_C, gradient_C) if of_entropy is None else of_entropy
        _gradient[(rows, triton.cdiv(vocabulary, CHUNK))](  # pyright: ignore[reportIndexIssue]
            product_CV,
            lse_C,
            target_C,
            gradient_C,
            entropy_C.contiguous(),
            its_gradient_C.contiguous(),
            **fixed,
            num_warps=8,
        )
    return product_CV


@triton.jit
def _logits(product, SCALE: tl.constexpr, CAP: tl.constexpr):
    x = product.to(tl.float32)
    if SCALE != 1.0:
        x = x * SCALE
    if CAP != 0.0:
        # cap · tanh(x / cap), by an exponential that may be 0 or infinite; off by at most 2e-7 · cap.
        x = CAP - 2 * CAP / (tl.exp(x * (2 / CAP)) + 1)
    return x


@triton.jit
def _statistics(
    product,
    target,
    lse,
    logp,
    entropy,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    highest = -3.0e38  # so far; finite, since excluded tokens are −inf
    total = 0.0  # Σ exp(x − highest)
    moment = 0.0  # Σ (x − highest) · exp(x − highest)
    for start in range(0, VOCABULARY, SIZE):
        is_there = start + place < VOCABULARY
        x = _logits(tl.load(product + row * VOCABULARY + start + place, mask=is_there, other=0.0), SCALE, CAP)
        x = tl.where(is_there, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, axis=0))
        # Rescale the sums so far.
        shift = highest - higher
        moment = (moment + shift * total) * tl.exp(shift)
        total *= tl.exp(shift)
        highest = higher
        below = x - highest
        mass = tl.exp(below)
        total += tl.sum(mass, axis=0)
        moment += tl.sum(tl.where(below > float("-inf"), below * mass, 0.0), axis=0)
    log_total = tl.log(total)
    chosen = _logits(tl.load(product + row * VOCABULARY + tl.load(target + row)), SCALE, CAP)
    tl.store(lse + row, highest + log_total)
    tl.store(logp + row, chosen - (highest + log_total))
    tl.store(entropy + row, log_total - moment / total)


@triton.jit
def _gradient(
    product,
    lse,
    target,
    gradient,
    entropy,
    entropy_gradient,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_there = place < VOCABULARY
    x = _logits(tl.load(product + row * VOCABULARY + place, mask=is_there, other=0.0), SCALE, CAP)
    is_target = (place == tl.load(target + row)).to(tl.float32)
    value = (is_target - tl.exp(x - tl.load(lse + row))) * tl.load(gradient + row)
    if HAS_ENTROPY:
        logp = x - tl.load(lse + row)
        above = tl.where(logp > float("-inf"), logp + tl.load(entropy + row), 0.0)
        value -= tl.exp(logp) * above * tl.load(entropy_gradient + row)
    if CAP != 0.0:
        value *= SCALE * (1 - (x / CAP) * (x / CAP))
    elif SCALE != 1.0:
        value *= SCALE
    tl.store(product + row * VOCABULARY + place, value.to(product.dtype.element_ty), mask=is_there)


def draw_on_device(logits_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Token of each row by inversion, [R] in int64, and its log-probability, [R] in float32, as `token_sampling.draw`.

    Rows that are not finite, or without any token left, give some token and NaN.
    """
    rows, vocabulary = logits_RV.shape
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    logp_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    if rows:
        size = min(CHUNK, triton.next_power_of_2(vocabulary))
        chunks = triton.cdiv(vocabulary, size)
        logits_RV, sizes = logits_RV.contiguous(), {"VOCABULARY": vocabulary, "SIZE": size}
        highest, mass = (torch.empty(rows, chunks, dtype=torch.float32, device=logits_RV.device) for _ in range(2))
        _masses[(rows, chunks)](logits_RV, highest, mass, **sizes, num_warps=4)  # pyright: ignore[reportIndexIssue]
        _draw[(rows,)](  # pyright: ignore[reportIndexIssue]
            logits_RV,
            highest,
            mass,
            uniform_R.double().contiguous(),
            token_R,
            logp_R,
            **sizes,
            CHUNKS=triton.next_power_of_2(chunks),
            WIDTH=min(WIDTH, size),
            num_warps=4,
        )
    return token_R, logp_R


@triton.jit
def _masses(logits, highest, mass, VOCABULARY: tl.constexpr, SIZE: tl.constexpr):
    """The largest logit of each chunk, and Σ exp(x − it). Each has a program: a step may have few rows."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * VOCABULARY + place, mask=place < VOCABULARY, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(highest + at, top)
    # Non-finite logits give NaN here, even if the maximum ignores them.
    tl.store(mass + at, tl.sum(tl.exp(x - _origin(top)), axis=0))


@triton.jit
def _draw(
    logits,
    highest,
    mass,
    uniform,
    token,
    logp,
    VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    index, count = tl.arange(0, CHUNKS), tl.cdiv(VOCABULARY, SIZE)
    is_there = index < count
    highest_of = tl.load(highest + row * count + index, mask=is_there, other=float("-inf"))
    mass_of = tl.load(mass + row * count + index, mask=is_there, other=0.0)
    largest = _origin(tl.max(highest_of, axis=0))
    scaled_of = mass_of.to(tl.float64) * tl.exp(highest_of - largest).to(tl.float64)
    chunk, share = _invert(scaled_of, tl.load(uniform + row), CHUNKS)
    # Relative to the chunk's own maximum: its mass must not underflow.
    origin = _origin(tl.sum(tl.where(index == chunk, highest_of, 0.0), axis=0))

    column = tl.arange(0, WIDTH)
    nearby = chunk * SIZE + tl.arange(0, SIZE // WIDTH)[:, None] * WIDTH + column[None, :]
    x = tl.load(logits + nearby, mask=nearby < VOCABULARY, other=float("-inf")).to(tl.float32)
    block, share = _invert(tl.sum(tl.exp(x - origin), axis=1).to(tl.float64), share, SIZE // WIDTH)
    within = chunk * SIZE + block * WIDTH + column
    x = tl.load(logits + within, mask=within < VOCABULARY, other=float("-inf")).to(tl.float32)
    offset, _ = _invert(tl.exp(x - origin).to(tl.float64), share, WIDTH)

    drawn = chunk * SIZE + block * WIDTH + offset
    below = tl.load(logits + drawn).to(tl.float64) - largest.to(tl.float64)
    tl.store(token + row, drawn.to(tl.int64))
    tl.store(logp + row, (below - tl.log(tl.sum(scaled_of, axis=0))).to(tl.float32))


@triton.jit
def _origin(highest):
    """The offset of exponents: the maximum, or 0 if there is none, since −inf − −inf is NaN."""
    return tl.where(highest > float("-inf"), highest, 0.0)


@triton.jit
def _invert(mass, share, PLACES: tl.constexpr):
    """First place whose cumulative mass exceeds that share of the total, and the remainder of the share there.

    A parallel scan may round so that sums fall from one place to the next. So only places with mass are chosen: the
    last of them if rounding leaves none above the target, the first place of all if none has mass or one is NaN. The
    remainder may be slightly below 0 or above 1.
    """
    place = tl.arange(0, PLACES)
    target = share * tl.sum(mass, axis=0)
    last = tl.max(tl.where(mass > 0.0, place, 0), axis=0)
    is_above = (tl.cumsum(mass, axis=0) > target) & (mass > 0.0)
    chosen = tl.min(tl.where(is_above, place, last), axis=0)
    before = tl.sum(tl.where(place < chosen, mass, 0.0), axis=0)
    return chosen, (target - before) / tl.sum(tl.where(place == chosen, mass, 0.0), axis=0)


def uniforms_on_device(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Random numbers in [0, 1) by SplitMix64 in float64, as `token_sampling.device_uniforms` makes in 20 launches."""
    uniform_R = torch.empty(len(seed_R), dtype=torch.float64, device=seed_R.device)
    if len(seed_R):
        _uniforms[(triton.cdiv(len(seed_R), ROWS),)](  # pyright: ignore[reportIndexIssue]
            seed_R.contiguous(), position_R.contiguous(), uniform_R, len(seed_R), SIZE=ROWS, num_warps=4
        )
    return uniform_R


@triton.jit(do_not_specialize=["rows"])
def _uniforms(seed, position, uniform, rows, SIZE: tl.constexpr):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_there = row < rows
    z = tl.load(seed + row, mask=is_there, other=0).to(tl.uint64)
    z += (tl.load(position + row, mask=is_there, other=0) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) >> 11
    tl.store(uniform + row, z.to(tl.float64) * 1.1102230246251565e-16, mask=is_there)  # 2⁻⁵³


def read_slots_on_device(slot_R: Tensor, state: SlotState) -> StepRows:
    """The inputs of a step for its rows, as `paged_cache.read_slots` returns them."""
    count = len(slot_R)
    rows = torch.empty(len(StepRows._fields), count, dtype=torch.int64, device=slot_R.device)
    if count:
        _read_slots[(triton.cdiv(count, SLOTS),)](  # pyright: ignore[reportIndexIssue]
            slot_R,
            state.numbers,
            state.alive_S.view(torch.uint8),
            state.block_SB,
            rows,
            count,
            state.block_SB.shape[0],
            state.block_SB.shape[1],
            state.block_size,
            state.prompt_blocks,
            state.new_tokens,
            SIZE=SLOTS,
            num_warps=2,
        )
    return StepRows(*rows)


# The code does not depend on these numbers.
@triton.jit(do_not_specialize=["count", "slots", "columns", "block_size", "prompt_blocks", "new_tokens"])
def _read_slots(
    slot,
    numbers,
    alive,
    block,
    rows,
    count,
    slots,
    columns,
    block_size,
    prompt_blocks,
    new_tokens,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_there = row < count
    at = tl.load(slot + row, mask=is_there, other=0)
    is_alive = tl.load(alive + at, mask=is_there, other=0) != 0
    made = tl.load(numbers + slots + at, mask=is_there, other=0)
    prefix = tl.load(numbers + 3 * slots + at, mask=is_there, other=0)
    own = tl.minimum(made, new_tokens - 1)
    # In the order of `StepRows`.
    here = tl.load(block + at * columns + prompt_blocks + own // block_size, mask=is_there, other=0).to(tl.int64)
    tl.store(rows + row, tl.load(numbers + at, mask=is_there, other=0), mask=is_there)
    tl.store(rows + count + row, prefix + made, mask=is_there)
    tl.store(rows + 2 * count + row, made, mask=is_there)
    tl.store(rows + 3 * count + row, tl.load(numbers + 2 * slots + at, mask=is_there, other=0), mask=is_there)
    tl.store(rows + 4 * count + row, prefix, mask=is_there)
    tl.store(rows + 5 * count + row, tl.where(is_alive, prefix + made + 1, 1), mask=is_there)
    place = tl.where(is_alive, here, 0) * block_size + own % block_size
    tl.store(rows + 6 * count + row, place, mask=is_there)
    tl.store(rows + 7 * count + row, tl.load(numbers + 4 * slots + at, mask=is_there, other=0), mask=is_there)
    tl.store(rows + 8 * count + row, tl.load(numbers + 5 * slots + at, mask=is_there, other=0), mask=is_there)
    tl.store(rows + 9 * count + row, is_alive.to(tl.int64), mask=is_there)


def advance_slots_on_device(slot_R: Tensor, rows: StepRows, token_R: Tensor, logp_R: Tensor, state: SlotState) -> None:
    """Write the tokens of a step, and which rows go on, as `paged_cache.advance_slots`; slots are distinct."""
    if len(slot_R):
        _advance_slots[(triton.cdiv(len(slot_R), SLOTS),)](  # pyright: ignore[reportIndexIssue]
            slot_R,
            rows.count_R,
            rows.limit_R,
            rows.forced_R,
            rows.alive_R,
            token_R,
            logp_R,
            state.numbers,
            state.alive_S.view(torch.uint8),
            state.all_ids,
            state.all_logp,
            state.stop_ids,
            len(slot_R),
            state.numbers.shape[1],
            state.new_tokens,
            len(state.stop_ids),
            SIZE=SLOTS,
            STOPS=STOPS,
            num_warps=2,
        )


@triton.jit(do_not_specialize=["count", "slots", "new_tokens", "stops"])
def _advance_slots(
    slot,
    tokens_made,
    limit,
    forced,
    lives,
    token,
    logp,
    numbers,
    alive,
    all_ids,
    all_logp,
    stop_ids,
    count,
    slots,
    new_tokens,
    stops,
    SIZE: tl.constexpr,
    STOPS: tl.constexpr,
):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_there = row < count
    at = tl.load(slot + row, mask=is_there, other=0)
    made = tl.load(tokens_made + row, mask=is_there, other=0)
    is_given = made < tl.load(forced + row, mask=is_there, other=0)
    is_alive = tl.load(lives + row, mask=is_there, other=0) != 0
    own = tl.minimum(made, new_tokens - 1)
    first = at * (new_tokens + 1)
    given = tl.load(all_ids + first + own, mask=is_there, other=0).to(tl.int64)
    chosen = tl.where(is_given, given, tl.load(token + row, mask=is_there, other=0))
    value = tl.where(is_given, 0.0, tl.load(logp + row, mask=is_there, other=0.0))
    place = first + tl.where(is_alive, own, new_tokens)
    tl.store(all_ids + place, chosen.to(tl.int32), mask=is_there)
    tl.store(all_logp + place, value, mask=is_there)
    tl.store(numbers + at, chosen, mask=is_there)
    tl.store(numbers + slots + at, made + is_alive.to(tl.int64), mask=is_there)
    matches = tl.zeros([SIZE], tl.int32)
    for start in range(0, stops, STOPS):
        nearby = start + tl.arange(0, STOPS)
        stop = tl.load(stop_ids + nearby, mask=nearby < stops, other=-1)
        matches += tl.sum((chosen[:, None] == stop[None, :]).to(tl.int32), axis=1)
    goes_on = is_alive & (is_given | (matches == 0)) & (made + 1 < tl.load(limit + row, mask=is_there, other=0))
    tl.store(alive + at, goes_on.to(tl.uint8), mask=is_there)
