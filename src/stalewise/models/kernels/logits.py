"""Statistics of logits, their gradient, and drawing a token, as Triton kernels; torch takes a dozen passes for each.

Both read the output layer's product x. Logits are scale · x, or with a cap cap · tanh(scale · x / cap).
Axes: C rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

CHUNK = 4096  # tokens of the vocabulary at a time
ROWS = 256  # random numbers of a program
WIDTH = 64  # tokens of a chunk whose probabilities are summed before one of them is drawn


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
            *(product_CV, lse_C, target_C, gradient_C, entropy_C.contiguous(), its_gradient_C.contiguous()),
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
        _draw[(rows,)](  # pyright: ignore[reportIndexIssue]
            logits_RV.contiguous(),
            uniform_R.double().contiguous(),
            token_R,
            logp_R,
            VOCABULARY=vocabulary,
            SIZE=size,
            CHUNKS=triton.next_power_of_2(triton.cdiv(vocabulary, size)),
            WIDTH=min(WIDTH, size),
            num_warps=4,
        )
    return token_R, logp_R


@triton.jit
def _draw(
    logits,
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
    index, place = tl.arange(0, CHUNKS), tl.arange(0, SIZE)
    highest_of = tl.full([CHUNKS], float("-inf"), tl.float32)
    mass_of = tl.zeros([CHUNKS], tl.float32)  # Σ exp(x − the chunk's own maximum): chunks are independent
    for start in range(0, VOCABULARY, SIZE):
        x = tl.load(logits + start + place, mask=start + place < VOCABULARY, other=float("-inf")).to(tl.float32)
        highest = tl.max(x, axis=0)
        # Non-finite logits give NaN here, even if the maximum ignores them.
        mass = tl.sum(tl.exp(x - _origin(highest)), axis=0)
        highest_of = tl.where(index * SIZE == start, highest, highest_of)
        mass_of = tl.where(index * SIZE == start, mass, mass_of)
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
