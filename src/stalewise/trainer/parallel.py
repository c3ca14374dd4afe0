"""How a policy is spread over ranks, and the collectives of one update.

SingleProcess: one rank. Replicated: every rank has all weights and optimizer state; gradients are summed once in an
update. Sharded: every rank has a part of each weight, gradient and moment (FSDP2); the weights of a layer are gathered
when they are needed. In each case a rank's own weights are the plain tensors in `trained`. The loss is a sum over
tokens with one denominator for the whole update, so gradients are summed over ranks and never averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from stalewise.distributed import Ranks
from stalewise.objectives.diagnostics import TokenSums
from stalewise.trainer.batch import RankBatch
from stalewise.trainer.optimizer import buckets
from stalewise.trainer.pending_update import to_host

BUCKET = 1 << 25  # numbers in one all-reduce

TokenReader = Callable[[], tuple[np.ndarray, np.ndarray]]  # waits for log-probabilities and flags, [ranks, tokens] each


Sums = tuple[Tensor, Tensor, TokenSums]  # loss, first non-finite tokens, sums over tokens


class SingleProcess:
    """One process: every collective is the identity."""

    name = "alone"
    lockstep = False  # whether all ranks must run equally many micro-batches
    is_sharded = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.model: Any = None
        self.trained: dict[Tensor, str] = {}

    def place(self, model: Any, device: torch.device) -> None:
        """Distribute a model over the ranks."""
        self.model = model

    def find_trained(self) -> None:
        """Collect the weights that are trained."""
        self.trained = {weight: name for name, weight in self.model.named_parameters() if weight.requires_grad}

    def send_batches(self, batches: Sequence[RankBatch]) -> None:
        """Send the other ranks their parts of an update; no batches mean that there is nothing to learn from."""
        for rank in self.ranks.others:
            self.ranks.send(rank, "update", *(batches[rank].pack() if batches else ({}, {})))

    def as_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function(model, …)` so that the weights it needs are there."""
        return function

    def sum_gradients(self) -> None:
        """Sum the gradients of `trained` over ranks."""

    def global_norm(self, own: Tensor) -> Tensor:
        """The norm over all ranks, given that of this rank's numbers."""
        return own

    def gather_sums(self, loss: Tensor, nonfinite: Tensor, sums: TokenSums, micro_batches: int) -> Sums:
        """Loss and sums of the whole update; `nonfinite` of all micro-batches, rank by rank."""
        return loss, nonfinite, sums

    def gather_tokens(self, logp_N: Tensor, flags_N: Tensor, most_tokens: int) -> TokenReader:
        """Enqueue the copy of token values to the first rank's host."""
        logp, flags = to_host(logp_N), to_host(flags_N)
        return lambda: (logp().numpy()[None], flags().numpy()[None])

    @contextlib.contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The model with other weights."""
        own = self._own_weights()
        try:
            self._set_weights(weights)
            yield
        finally:
            self._set_weights(own)

    def _own_weights(self) -> dict[str, Tensor]:
        return {name: parameter.data for parameter, name in self.trained.items()}

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        for parameter, name in self.trained.items():
            parameter.data = weights[name]

    def full_state(self) -> dict[str, Tensor]:
        """All weights of the model, on the first rank."""
        return self.model.state_dict()

    def full_tensor(self, name: str, own: Tensor) -> Tensor:
        """The whole of a tensor that is split like the weight of this name, on the first rank."""
        return own

    def load(self, path: Path, device: torch.device) -> dict[str, Tensor]:
        """This rank's part of each tensor in a file."""
        return load_file(path, device=str(device))


class Replicated(SingleProcess):
    """All weights on every rank."""

    name = "replicated"

    def sum_gradients(self) -> None:
        """All-reduce in buckets. A weight with a gradient on any rank gets one on every rank."""
        weights = list(self.trained)
        has_gradient = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.uint8)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self.ranks.control)
        gradients: list[Tensor] = []
        for weight, has in zip(weights, has_gradient.tolist(), strict=True):
            if has:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.append(weight.grad)
        for bucket in buckets(gradients, BUCKET):
            flat = torch.cat([gradient.flatten().float() for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))  # in place: CUDA graphs hold the address

    def gather_sums(self, loss: Tensor, nonfinite: Tensor, sums: TokenSums, micro_batches: int) -> Sums:
        """Merge loss and sums of all ranks in one all-gather; the result is the same on every rank."""
        padded = torch.cat([nonfinite, nonfinite.new_full((micro_batches - len(nonfinite),), -1)])
        mine = torch.cat([loss.double().unsqueeze(0), padded.double(), sums.pack()])
        all_ranks = [torch.empty_like(mine) for _ in range(self.ranks.world)]
        dist.all_gather(all_ranks, mine)
        losses, indices, packed = zip(
            *(sums_of_rank.tensor_split([1, 1 + micro_batches]) for sums_of_rank in all_ranks), strict=True
        )
        merged = reduce(lambda left, right: left.merge(right), map(TokenSums.unpack, packed))
        return torch.cat(losses).sum(), torch.cat(indices), merged

    def gather_tokens(self, logp_N: Tensor, flags_N: Tensor, most_tokens: int) -> TokenReader:
        """Gather the token values on the first rank, and enqueue their copy to its host."""
        reads = []
        for mine in (logp_N, flags_N):
            padded = torch.cat([mine, mine.new_zeros(most_tokens - len(mine))])
            gathered = [torch.empty_like(padded) for _ in range(self.ranks.world)] if self.ranks.is_first else None
            dist.gather(padded, gathered, dst=0)
            reads.append(to_host(torch.stack(gathered)) if gathered is not None else None)
        return lambda: tuple(read().numpy() for read in reads if read is not None)  # pyright: ignore[reportReturnType]


class Sharded(Replicated):
    """A part of every weight on each rank: FSDP2 over the decoder layers and the model around them."""

    name = "sharded"
    lockstep = True  # every forward pass gathers weights from all ranks
    is_sharded = True

    def place(self, model: Any, device: torch.device) -> None:
        """Shard layer by layer, so that no device ever holds the whole model."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self.model, self.device = model, device
        self.mesh = init_device_mesh(device.type, (self.ranks.world,))
        # Weights are gathered in their own precision, and autocast rounds them as on one device: the same numbers.
        # All are freed after the forward pass, since other weights may be swapped in before the next one.
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        }
        names = set(getattr(model, "_no_split_modules", None) or ())
        for module in reversed([module for module in model.modules() if type(module).__name__ in names]):
            fully_shard(module, **options)  # innermost first: some architectures nest these blocks
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def find_trained(self) -> None:
        """Collect this rank's parts; after a first forward pass, in which FSDP allocates them."""
        with torch.no_grad():
            self.split = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            self.trained = {parameter.to_local().detach(): name for name, parameter in self.split.items()}

    def as_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function as a forward method, for which FSDP gathers the outermost weights."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        name = f"stalewise_{function.__name__}"
        if not hasattr(self.model, name):
            setattr(self.model, name, MethodType(function, self.model))
            register_fsdp_forward_method(self.model, name)
        return lambda model, *arguments, **options: getattr(model, name)(*arguments, **options)

    def sum_gradients(self) -> None:
        """Move this rank's gradients to `trained`: FSDP has summed them in the backward passes."""
        for own, name in self.trained.items():
            gradient = self.split[name].grad
            own.grad = None if gradient is None else gradient.to_local()
            self.split[name].grad = None

    def global_norm(self, own: Tensor) -> Tensor:
        """The norm over all ranks, the root of the summed squares."""
        square = own.double().square()
        dist.all_reduce(square)
        return square.sqrt()

    def _own_weights(self) -> dict[str, Tensor]:
        return {name: own.clone() for own, name in self.trained.items()}

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        for own, name in self.trained.items():  # copied, since FSDP gathers from fixed addresses
            own.copy_(weights[name])

    def full_state(self) -> dict[str, Tensor]:
        """All weights of the model, gathered one by one; a weight with two names stays one tensor."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        gathered = {weight: self._on_first_rank(weight.detach()) for weight in dict.fromkeys(parameters.values())}
        names = self.model.state_dict()
        return {name: gathered[parameters[name]] if name in parameters else names[name] for name in names}

    def full_tensor(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor, gathered from all ranks."""
        from torch.distributed.tensor import DTensor, Shard

        whole = torch.empty(len(self.split[name]), *own.shape[1:], device="meta")  # scales have fewer columns
        return self._on_first_rank(
            DTensor.from_local(own, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        )

    def load(self, path: Path, device: torch.device) -> dict[str, Tensor]:
        """This rank's part of each tensor."""
        with safe_open(path, framework="pt") as file:
            return {name: self._part(file.get_tensor(name)).to(device) for name in file.keys()}  # noqa: SIM118

    def _part(self, whole: Tensor) -> Tensor:
        parts = whole.chunk(self.ranks.world)  # as FSDP splits: later ranks may have less, or nothing
        return (parts[self.ranks.rank] if self.ranks.rank < len(parts) else whole[:0]).clone()

    def _on_first_rank(self, split: Any) -> Tensor:
        whole = split.full_tensor()
        return whole.cpu() if self.ranks.is_first else whole.new_empty(0)


KINDS: dict[str, type[SingleProcess]] = {kind.name: kind for kind in (SingleProcess, Replicated, Sharded)}
