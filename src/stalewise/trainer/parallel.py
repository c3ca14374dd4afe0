"""How a policy lies on the ranks, and what they must do together to take one update.

Alone: one process. Replicated: every rank has all weights and all of the optimizer's state; gradients are summed once
in an update. Sharded: every rank has a part of each weight, of its gradient and of its moments (FSDP2); a layer's
weights are gathered when they are needed and let go again. What a rank holds are plain tensors in each case, `trained`
by name, and whatever is of the whole (norms, statistics, losses) is made of sums that travel: the gradient is a sum
over tokens whose denominator is the whole update's, so ranks add theirs up and divide by nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from stalewise.distributed import Ranks, merge_over_ranks
from stalewise.objectives.batch_statistics import Mergeable
from stalewise.objectives.diagnostics import TokenSums
from stalewise.trainer.pending_update import to_host
from stalewise.trainer.rank_batch import RankBatches

BUCKET = 1 << 25  # numbers that are summed over ranks at once

MergeableT = TypeVar("MergeableT", bound=Mergeable)
SeenTokens = Callable[[], tuple[np.ndarray, np.ndarray]]


class Alone:
    """One process: nothing to do together."""

    name = "alone"
    in_step = False  # whether all ranks must pass the same number of micro-batches
    is_sharded = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.model: Any = None
        self.trained: dict[Tensor, str] = {}

    def put(self, model: Any, device: torch.device) -> None:
        """Put a model where it is trained."""
        self.model = model

    def find_trained(self) -> None:
        """Look up the weights that are trained."""
        found = self.model.named_parameters()
        self.trained = {parameter: name for name, parameter in found if parameter.requires_grad}

    def call(self, what: str, **record: Any) -> None:
        """Have the other ranks take part in what comes next."""
        self.ranks.tell_all(what, **record)

    def hand_out(self, dealt: RankBatches | None) -> None:
        """Give the other ranks their shares of an update; None: there is nothing to learn from."""
        for rank in self.ranks.others:
            self.ranks.tell(rank, "update", *(({}, {}) if dealt is None else dealt.shares[rank].pack()))

    def through(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(model, …)`, which passes something through the model, as it is to be called here."""
        return function

    def sum_gradients(self) -> None:
        """Make each gradient on `trained` that of the whole update."""

    def norm(self, own: Tensor) -> Tensor:
        """The norm over all numbers, given that over those which this rank holds."""
        return own

    def merge(self, statistics: MergeableT) -> MergeableT:
        """Statistics of the whole update."""
        return statistics

    def together(self, loss: Tensor, places: Tensor, sums: TokenSums, passes: int) -> tuple[Tensor, Tensor, TokenSums]:
        """Loss and sums of the whole update, and the places of all micro-batches, rank by rank."""
        return loss, places, sums

    def collect(self, logp_N: Tensor, flags_N: Tensor, longest: int) -> SeenTokens:
        """Bring home what was seen of each token: [ranks, tokens]."""
        logp, flags = to_host(logp_N), to_host(flags_N)
        return lambda: (logp().numpy()[None], flags().numpy()[None])

    @contextlib.contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with other weights for a while; nothing is copied."""
        current = {name: parameter.data for parameter, name in self.trained.items()}
        try:
            for parameter, name in self.trained.items():
                parameter.data = weights[name]
            yield
        finally:
            for parameter, name in self.trained.items():
                parameter.data = current[name]

    def whole_policy(self) -> dict[str, Tensor] | None:
        """All weights of the model on the first rank's host; None where the model itself has them."""
        return None

    def whole(self, name: str, own: Tensor) -> Tensor:
        """A tensor that lies as the weight of this name does, all of it on the first rank."""
        return own

    def load(self, path: Path, device: torch.device) -> dict[str, Tensor]:
        """What this rank holds of the tensors in a file that were made by `whole`."""
        return load_file(path, device=str(device))


class Replicated(Alone):
    """All weights on every rank."""

    name = "replicated"

    def sum_gradients(self) -> None:
        """Sum over ranks; the weights that got a gradient somewhere have one everywhere."""
        weights = list(self.trained)
        reached = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.uint8)
        dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.ranks.control)
        gradients: list[Tensor] = []
        for weight, is_reached in zip(weights, reached.tolist(), strict=True):
            if is_reached:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.append(weight.grad)
        for bucket in _buckets(gradients):
            # Kept where they are: a captured graph knows their addresses.
            flat = torch.cat([gradient.flatten().float() for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, total in zip(bucket, flat.split([len(g.flatten()) for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def merge(self, statistics: MergeableT) -> MergeableT:
        """Of all ranks."""
        return merge_over_ranks(statistics)

    def together(self, loss: Tensor, places: Tensor, sums: TokenSums, passes: int) -> tuple[Tensor, Tensor, TokenSums]:
        """One exchange, whose result is the same on every rank."""
        padded = torch.cat([places, places.new_full((passes - len(places),), -1)])
        mine = torch.cat([loss.double().unsqueeze(0), padded.double(), sums.pack()])
        all_ranks = [torch.empty_like(mine) for _ in range(self.ranks.world)]
        dist.all_gather(all_ranks, mine)
        packed = [numbers[1 + passes :] for numbers in all_ranks]
        merged = reduce(lambda one, other: one.merge(other), map(TokenSums.unpack, packed))
        loss = torch.stack([numbers[0] for numbers in all_ranks]).sum()
        return loss, torch.cat([numbers[1 : 1 + passes] for numbers in all_ranks]), merged

    def collect(self, logp_N: Tensor, flags_N: Tensor, longest: int) -> SeenTokens:
        """To the first rank."""
        reads = []
        for mine in (logp_N, flags_N):
            padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
            found = [torch.empty_like(padded) for _ in range(self.ranks.world)] if self.ranks.is_first else None
            dist.gather(padded, found, dst=0)
            reads.append(to_host(torch.stack(found)) if found is not None else None)
        return lambda: tuple(read().numpy() for read in reads if read is not None)  # pyright: ignore[reportReturnType]


class Sharded(Replicated):
    """A part of every weight on each rank: FSDP2 over the decoder layers and what is around them."""

    name = "sharded"
    in_step = True  # every pass gathers weights from all ranks
    is_sharded = True

    def put(self, model: Any, device: torch.device) -> None:
        """Split a model, layer by layer, so that no device ever holds all of it."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self.model, self.device = model, device
        self.mesh = init_device_mesh(device.type, (self.ranks.world,))
        # Weights are gathered as they are, and autocast rounds them where it would on one device: the same numbers.
        # All are let go after the forward pass, the outermost, too: other weights may be put in before the next one.
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        names = set(getattr(model, "_no_split_modules", None) or ())
        for module in reversed([module for module in model.modules() if type(module).__name__ in names]):
            fully_shard(module, **options)  # from the inside out: some architectures name blocks within blocks
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def find_trained(self) -> None:
        """Look up the parts of the weights; after a first pass, in which FSDP settles where they lie."""
        with torch.no_grad():
            self.split = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            self.trained = {parameter.to_local().detach(): name for name, parameter in self.split.items()}

    def through(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """By a method of the model that FSDP gathers the outermost weights for."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        name = f"stalewise_{function.__name__}"
        if not hasattr(self.model, name):
            setattr(self.model, name, MethodType(function, self.model))
            register_fsdp_forward_method(self.model, name)
        return lambda model, *arguments, **options: getattr(model, name)(*arguments, **options)

    def sum_gradients(self) -> None:
        """FSDP has summed them in the backward passes; hand this rank's parts over to the optimizer."""
        for own, name in self.trained.items():
            gradient = self.split[name].grad
            own.grad = None if gradient is None else gradient.to_local()
            self.split[name].grad = None

    def norm(self, own: Tensor) -> Tensor:
        """Squares add."""
        square = own.double().square()
        dist.all_reduce(square)
        return square.sqrt()

    @contextlib.contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """By copying: FSDP gathers from where the parts lie."""
        current = {name: own.clone() for own, name in self.trained.items()}
        try:
            for own, name in self.trained.items():
                own.copy_(weights[name])
            yield
        finally:
            for own, name in self.trained.items():
                own.copy_(current[name])

    def whole_policy(self) -> dict[str, Tensor] | None:
        """Gathered one by one; a weight that has two names is one tensor."""
        found: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name in self.model.state_dict():
            weight = parameters.get(name)
            if weight is None:
                state[name] = self.model.get_buffer(name)
                continue
            if id(weight) not in found:
                found[id(weight)] = self._home(weight.detach())
            state[name] = found[id(weight)]
        return state

    def whole(self, name: str, own: Tensor) -> Tensor:
        """Gathered from all ranks."""
        from torch.distributed.tensor import DTensor, Shard

        like = self.split[name]
        return self._home(
            DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())
        )

    def load(self, path: Path, device: torch.device) -> dict[str, Tensor]:
        """This rank's part of each tensor."""
        with safe_open(path, framework="pt") as file:
            return {name: self._part(file.get_tensor(name)).to(device) for name in file.keys()}  # noqa: SIM118

    def _part(self, whole: Tensor) -> Tensor:
        parts = whole.chunk(self.ranks.world)  # as FSDP splits: later ranks may have less, or nothing
        return (parts[self.ranks.rank] if self.ranks.rank < len(parts) else whole[:0]).clone()

    def _home(self, split: Any) -> Tensor:
        whole = split.full_tensor()
        return whole.cpu() if self.ranks.is_first else whole.new_empty(0)


KINDS: dict[str, type[Alone]] = {kind.name: kind for kind in (Alone, Replicated, Sharded)}


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(map(Tensor.numel, bucket)) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
