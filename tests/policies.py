"""Policies with other weights, prompts for them, and how far an engine's log-probabilities are from a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stalewise.models import EMBEDDED
from stalewise.models.loading import encode_prompts, load_model, load_tokenizer
from stalewise.rollout.sampler import Request, Response
from stalewise.rollout.token_sampling import tempered
from stalewise.tasks import make_task
from stalewise.types import SamplerSettings

POLICY = EMBEDDED / "arithmetic"
# Of a model that is made up, in the names of most of transformers' configs.
SIZE: dict[str, Any] = {
    "vocab_size": 18,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def sampling_logp(logits_RV: torch.Tensor, settings: SamplerSettings) -> torch.Tensor:
    """Log-probabilities of the sampling distribution, [R, V]; −inf for truncated tokens."""
    return tempered(logits_RV, settings).log_softmax(dim=1, dtype=torch.float32)


def moved(checkpoint: Path, path: Path, *, by: float) -> Path:
    """A copy whose weights are off by a share of their mean size."""
    path.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(0)
    weights = load_file(checkpoint / "model.safetensors")
    other = {name: w + by * w.abs().mean() * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(other, path / "model.safetensors", metadata={"format": "pt"})
    return path


def loaded(checkpoint: Path) -> Any:
    """The model of a checkpoint, to be read and not to be changed: loading takes longer than a few responses of it."""
    return _loaded(checkpoint, (checkpoint / "model.safetensors").stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _loaded(checkpoint: Path, written: int) -> Any:
    return load_model(str(checkpoint), device=torch.device("cpu"))


def requests(count: int) -> list[Request]:
    prompts = make_task("arithmetic", seed=0).prompts(0, count)
    return [Request(ids, 7 + seed) for seed, ids in enumerate(encode_prompts(prompts, load_tokenizer(str(POLICY))))]


def long_requests(count: int) -> list[Request]:
    """Prompts that begin with the same 64 tokens, two blocks of a prefix cache, and leave open what comes next."""
    begin = torch.randint(3, 18, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    return [Request([*begin, 3 + place % 10], 100 + place) for place in range(count)]


def tokens_of(responses: Sequence[Response]) -> list[list[int]]:
    return [response.token_ids.tolist() for response in responses]


@torch.no_grad()
def furthest(
    asked: Sequence[Request], responses: Sequence[Response], checkpoint: Path, settings: SamplerSettings
) -> float:
    """Largest difference of recorded log-probabilities from those of a plain forward pass."""
    model = loaded(checkpoint)
    worst = 0.0
    for request, response in zip(asked, responses, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = sampling_logp(logits, settings).gather(1, torch.tensor(response.token_ids).long()[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(response.logp)).abs().max()))
    return worst
