"""What single pieces of the learner cost on a GPU, each beside what it stands in for. Prints JSON.

    python benchmarks/pieces.py [--out FILE]

Logits of one chunk of SmolLM2, one of its norms over 13,824 tokens forward and backward (both in ms), and the way of
1.9 GB from the device to the machine's memory (in seconds).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from stalewise.learn.host_copies import host_copies
from stalewise.learn.logp import PLAIN_KERNELS, Kernels, chunk_statistics, kernels_for
from stalewise.norms import fuse_norms

CUDA = torch.device("cuda")


def milliseconds(work: Callable[[], object], times: int) -> float:
    """Of one call, after two to warm up."""
    for _ in range(2):
        work()
    return 1e3 * seconds(lambda: [work() for _ in range(times)]) / times


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def compilable_gradient(logits_CV: Tensor, lse_C: Tensor, target_C: Tensor, gradient_C: Tensor) -> Tensor:
    """Without a scatter, which a compiler could not fuse."""
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == target_C.unsqueeze(1)
    probability_CV = (logits_CV.float() - lse_C.unsqueeze(1)).exp()
    return ((is_target_CV.float() - probability_CV) * gradient_C.unsqueeze(1)).to(logits_CV.dtype)


def logits() -> dict[str, dict[str, float]]:
    logits_CV = 3 * torch.randn(2730, 49152, device=CUDA, dtype=torch.bfloat16)
    target_C, gradient_C = torch.randint(49152, (2730,), device=CUDA), torch.randn(2730, device=CUDA)
    lse_C = chunk_statistics(logits_CV, target_C)[0]
    compiled = Kernels(torch.compile(chunk_statistics, dynamic=True), torch.compile(compilable_gradient, dynamic=True))
    return {
        name: {
            "statistics": milliseconds(lambda kernels=kernels: kernels.statistics(logits_CV, target_C), 10),
            "gradient": milliseconds(
                lambda kernels=kernels: kernels.gradient(logits_CV, lse_C, target_C, gradient_C), 10
            ),
        }
        for name, kernels in (("triton", kernels_for(CUDA)), ("torch", PLAIN_KERNELS), ("compiled", compiled))
    }


def norm() -> dict[str, float]:
    hidden = torch.randn(1, 13824, 576, device=CUDA, requires_grad=True)
    gradient, found = torch.randn_like(hidden), dict[str, float]()
    for name in ("transformers", "fused"):
        module: Any = LlamaRMSNorm(576, 1e-5).to(CUDA)
        if name == "fused":
            assert fuse_norms(module) == 1

        def pass_through(module: Any = module) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                output = module(hidden)
            torch.autograd.grad(output, (hidden, module.weight), gradient)

        found[name] = milliseconds(pass_through, 50)
    return found


def copies() -> dict[str, float]:
    tensors = [torch.randn(1536, 576, device=CUDA) for _ in range(450)]
    tensors += [torch.randn(49152, 576, device=CUDA) for _ in range(3)]
    named = {str(place): tensor for place, tensor in enumerate(tensors)}

    def locked() -> list[Tensor]:
        return [torch.empty(one.shape, pin_memory=True).copy_(one, non_blocking=True) for one in tensors]

    return {
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "pieces_first": seconds(lambda: host_copies(named)),
        "pieces": seconds(lambda: host_copies(named)),
        "cpu": seconds(lambda: [tensor.cpu() for tensor in tensors]),
        "locked_first": seconds(locked),
        "locked": seconds(locked),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = {"device": torch.cuda.get_device_name(), "logits_ms": logits(), "norm_ms": norm(), "copies_s": copies()}
    print(text := json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
