"""Statistics of the whole optimizer batch, as sums that merge exactly over micro-batches and ranks.

Phase one of an objective computes them on every micro-batch; they are merged in any order, also over ranks, as flat
float64 tensors; phase two reads the merged statistics as constants. So the gradient does not depend on the split of a
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from stalewise.objectives.tokens import Tokens


class Mergeable(Protocol):
    """Sums of a part of a batch; merging the parts gives the sums of the whole."""

    def merge(self, other: Self) -> Self:
        """Sums of both parts together."""
        ...

    def pack(self) -> Tensor:
        """One flat float64 tensor, to be gathered over ranks."""
        ...

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        """The inverse of `pack`."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSums:
    """Σw, Σw² and n of importance weights, kept relative to the largest weight so that nothing overflows.

    All fields are float64 scalars on the device: computing them needs no synchronisation.
    """

    log_scale: Tensor  # log of the largest weight; −inf if there is none
    total: Tensor  # Σ w / scale
    total_squares: Tensor  # Σ (w / scale)²
    count: Tensor
    nonfinite: Tensor  # number of non-finite weights; they are in no sum

    @classmethod
    def of(cls, log_weight: Tensor, where: Tensor) -> WeightSums:
        """Sums of exp(log_weight) where `where` is True."""
        log_weight = log_weight.detach()
        finite = torch.isfinite(log_weight)
        usable = where & finite
        masked = torch.where(usable, log_weight, -torch.inf)
        log_scale = masked.max()
        weight = torch.where(usable, masked - log_scale, -torch.inf).exp()
        return cls(
            log_scale=log_scale.double(),
            total=weight.sum(dtype=torch.float64),
            total_squares=weight.square().sum(dtype=torch.float64),
            count=usable.sum(dtype=torch.float64),
            nonfinite=(where & ~finite).sum(dtype=torch.float64),
        )

    def merge(self, other: WeightSums) -> WeightSums:
        """Sums of both parts together."""
        log_scale = torch.maximum(self.log_scale, other.log_scale)
        # An empty part has log_scale −inf and total 0: its factor must be 0, not exp(−inf + inf).
        mine = torch.where(self.count > 0, (self.log_scale - log_scale).exp(), 0.0)
        theirs = torch.where(other.count > 0, (other.log_scale - log_scale).exp(), 0.0)
        return WeightSums(
            log_scale=log_scale,
            total=self.total * mine + other.total * theirs,
            total_squares=self.total_squares * mine**2 + other.total_squares * theirs**2,
            count=self.count + other.count,
            nonfinite=self.nonfinite + other.nonfinite,
        )

    def effective_sample_size(self) -> Tensor:
        """ESS = (Σw)² / (n Σw²), between 1/n and 1.

        NaN if a weight was not finite or there was none: unknown is never 1.

        >>> weights = WeightSums.of(torch.tensor([1.0, 2.0, 0.5]).log(), torch.tensor([True, True, True]))
        >>> round(weights.effective_sample_size().item(), 6)  # (3.5)² / (3 · 5.25) = 7/9
        0.777778
        """
        ess = (self.total.square() / (self.count * self.total_squares)).clamp(max=1.0)
        return torch.where(self.nonfinite > 0, torch.nan, ess)

    def pack(self) -> Tensor:
        """One flat float64 tensor, to be gathered over ranks."""
        return torch.stack([self.log_scale, self.total, self.total_squares, self.count, self.nonfinite])

    @classmethod
    def unpack(cls, packed: Tensor) -> WeightSums:
        """The inverse of `pack`."""
        return cls(*packed.unbind())


@dataclass(frozen=True, slots=True)
class AnchorSums:
    """Weights of the policy against two anchors: the behaviour policy and the proximal one."""

    behaviour: WeightSums
    proximal: WeightSums

    def merge(self, other: AnchorSums) -> AnchorSums:
        """Sums of both parts together."""
        return AnchorSums(self.behaviour.merge(other.behaviour), self.proximal.merge(other.proximal))

    def pack(self) -> Tensor:
        """One flat float64 tensor, to be gathered over ranks."""
        return torch.cat([self.behaviour.pack(), self.proximal.pack()])

    @classmethod
    def unpack(cls, packed: Tensor) -> AnchorSums:
        """The inverse of `pack`."""
        behaviour, proximal = packed.chunk(2)
        return cls(WeightSums.unpack(behaviour), WeightSums.unpack(proximal))


@dataclass(frozen=True, slots=True)
class SecondMomentSums:
    """Squared log-ratios v of harmful tokens, for M2PO's threshold.

    Tokens with v below the threshold are always kept, so their sum, count and maximum suffice; only the values at or
    above it are gathered one by one.
    """

    threshold: float
    small_total: Tensor
    small_count: Tensor
    small_max: Tensor  # 0 if there is none
    large_N: Tensor  # float64, in no order

    @classmethod
    def of(cls, square: Tensor, harmful: Tensor, threshold: float) -> SecondMomentSums:
        """Sums where `harmful` is True. A NaN square counts as large, so that it is not missed."""
        square = square.detach()
        small = harmful & (square < threshold)
        small_square = torch.where(small, square, 0.0)
        return cls(
            threshold=threshold,
            small_total=small_square.sum(dtype=torch.float64),
            small_count=small.sum(dtype=torch.float64),
            small_max=small_square.max().double(),
            large_N=square[harmful & ~small].double(),
        )

    def merge(self, other: SecondMomentSums) -> SecondMomentSums:
        """Sums of both parts together."""
        return SecondMomentSums(
            threshold=self.threshold,
            small_total=self.small_total + other.small_total,
            small_count=self.small_count + other.small_count,
            small_max=torch.maximum(self.small_max, other.small_max),
            large_N=torch.cat([self.large_N, other.large_N]),
        )

    def drop_from(self) -> Tensor:
        """M2PO as in the paper: the v from which on harmful tokens are dropped, inf if none is.

        Drops the largest v until the mean of the rest is at most the threshold. Equal values are dropped together, so
        that the order of the batch does not matter.
        """
        large_N = self.large_N.sort().values
        kept_total_N = self.small_total + large_N.cumsum(0)
        kept_count_N = self.small_count + torch.arange(1, len(large_N) + 1, device=large_N.device)
        # Ascending values above the threshold only raise the mean: the kept tokens are a prefix.
        too_many_N = ~(kept_total_N <= self.threshold * kept_count_N)
        return torch.where(too_many_N, large_N, torch.inf).min() if len(large_N) else large_N.new_tensor(torch.inf)

    def clip_above(self) -> Tensor:
        """M2PO as released: τ², the v above which harmful tokens are clipped, inf if none is.

        With v ascending, k is the first index with Σ_i min(v_i, v_k) ≥ n·threshold; τ² = v_{k−1}, or 0 if k = 0. Such a
        v_k is never below the threshold, so only the large values are searched.
        """
        large_N = self.large_N.sort().values
        count = self.small_count + len(large_N)
        within_budget = self.small_total + large_N.sum() <= self.threshold * count
        if len(large_N) == 0:
            return large_N.new_tensor(torch.inf)
        before_N = torch.cat([self.small_max[None], large_N[:-1]])
        above_N = torch.arange(len(large_N), 0, -1, device=large_N.device)
        capped_total_N = self.small_total + (large_N.cumsum(0) - large_N) + large_N * above_N
        first = (capped_total_N >= self.threshold * count).int().argmax()
        return torch.where(within_budget, torch.inf, before_N[first])

    def pack(self) -> Tensor:
        """One flat float64 tensor, to be gathered over ranks."""
        threshold = self.small_total.new_tensor(self.threshold)
        return torch.cat([torch.stack([threshold, self.small_total, self.small_count, self.small_max]), self.large_N])

    @classmethod
    def unpack(cls, packed: Tensor) -> SecondMomentSums:
        """The inverse of `pack`."""
        threshold, small_total, small_count, small_max = packed[:4].unbind()
        return cls(threshold.item(), small_total, small_count, small_max, packed[4:])


def behaviour_weights(tokens: Tokens) -> WeightSums:
    """Token weights r = policy / behaviour."""
    return WeightSums.of(tokens.log_ratio_BT, tokens.mask_BT)


def sequence_weights(tokens: Tokens) -> WeightSums:
    """Sequence weights Π_t r, one per response that has tokens."""
    return WeightSums.of(tokens.sequence_log_ratio_B(), tokens.mask_BT.any(dim=1))


def anchor_weights(tokens: Tokens) -> AnchorSums:
    """Token weights against the behaviour and against the proximal policy."""
    assert tokens.proximal_logp_BT is not None  # checked by the registry
    proximal = WeightSums.of(tokens.logp_BT - tokens.proximal_logp_BT, tokens.mask_BT)
    return AnchorSums(behaviour_weights(tokens), proximal)


def harmful(tokens: Tokens) -> Tensor:
    """Tokens whose ratio has already moved in the direction of their advantage: (A > 0, r > 1) or (A < 0, r < 1)."""
    return tokens.mask_BT & (tokens.advantage_BT * tokens.log_ratio_BT.detach() > 0)


def vcpo_factor(sequence_weights: WeightSums) -> Tensor:
    """VCPO's factor on one step's learning rate: min(1, ρ)^½ with ρ = (Σw)² / (B Σw²) of the sequence weights.

    w = exp(Σ_t(ℓ − b)), not truncated, over the whole optimizer batch. Usable with any objective. Huang et al. 2026.

    >>> weights = WeightSums.of(torch.tensor([1.0, 1.0, 1.0, 5.0]).log(), torch.ones(4, dtype=torch.bool))
    >>> round(vcpo_factor(weights).item(), 4)  # ρ = 64 / (4 · 28) = 0.5714
    0.7559
    """
    return sequence_weights.effective_sample_size().sqrt()
