"""The embedded engine: transformers' forward pass with a key-value cache, decoded in large batches.

Requests are sorted by prompt length and padded on the left; a row leaves the batch when its response ends, so the last
long responses do not drag the finished ones along. Every row draws with its own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from stalewise.errors import ModelError
from stalewise.generate.sampler import Request, Response
from stalewise.generate.sampling import draw, sampling_logp, uniforms
from stalewise.models import context_length, load_model, load_tokenizer, stop_token_ids
from stalewise.types import FinishReason, SamplerSettings

# Rows that have ended are dropped once they are this share of the batch: dropping copies the cache.
DROP_SHARE = 0.25


def tensor_names(weights: Path) -> frozenset[str]:
    """Names of the tensors in a safetensors file; only its header is read."""
    with safe_open(weights, framework="pt") as file:
        return frozenset(file.keys())


class HFSampler:
    """Samples from a Hugging Face model in this process."""

    def __init__(
        self,
        settings: SamplerSettings,
        *,
        max_new_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        on_tokens: Callable[[int], object] = lambda count: None,
    ) -> None:
        """`on_tokens` is told the number of tokens after every decoding step."""
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        self.on_tokens = on_tokens
        self._device = device
        self._dtype = dtype
        self._model: Any = None
        self._replaceable: frozenset[str] = frozenset()  # names of the tensors that a later checkpoint must have
        self._tokenizer: Any = None
        self._stop_ids = torch.empty(0, dtype=torch.long, device=device)

    def load(self, checkpoint: Path) -> None:
        """Sample from this checkpoint. The first loads a model; later ones only replace its weights."""
        weights = checkpoint / "model.safetensors"
        names = tensor_names(weights) if weights.is_file() else frozenset()
        if self._model is None or not names or names != self._replaceable:
            self._model = None  # two models at once may not fit
            self._model = load_model(str(checkpoint), device=self._device, dtype=self._dtype)
            self._tokenizer = load_tokenizer(str(checkpoint))
            stop_ids = stop_token_ids(self._model.config, self._model.generation_config, self._tokenizer)
            self._stop_ids = torch.tensor(stop_ids, device=self._device)
            # Some architectures are stored under other names than they have in memory: those are loaded anew each time.
            self._replaceable = names if names <= self._model.state_dict().keys() else frozenset()
            return
        # Not strict, since tied weights are stored once; the names are those of a file that was found complete.
        self._model.load_state_dict(load_file(weights), strict=False)

    def close(self) -> None:
        """Let go of the model."""
        self._model = None

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the loaded policy."""
        return self._tokenizer

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        limit = context_length(self._model.config)
        longest = max(map(len, prompt_ids))
        if limit is not None and longest + self.max_new_tokens > limit:
            raise ModelError(
                f"the longest prompt has {longest} tokens; with sampler.max_new_tokens = {self.max_new_tokens} that is "
                f"over the model's context of {limit}: shorten prompts or lower max_new_tokens"
            )

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        self.check_lengths([request.prompt_ids for request in requests])
        # Longest first, ties in order: rows of one length lie together and the padding is small.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        ids_RT, logp_RT, length_R = self._decode([requests[i] for i in order], settings or self.settings)
        ids = [row[:length].tolist() for row, length in zip(ids_RT, length_R, strict=True)]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        responses: list[Response | None] = [None] * len(requests)
        stop_ids = set(self._stop_ids.tolist())
        for place, row in enumerate(order):
            ended = ids[place][-1] in stop_ids
            responses[row] = Response(
                token_ids=tuple(ids[place]),
                logp=tuple(logp_RT[place, : len(ids[place])].tolist()),
                text=texts[place],
                finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            )
        return [response for response in responses if response is not None]

    def _decode(self, requests: list[Request], settings: SamplerSettings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids and log-probabilities [R, T] and lengths [R] of all responses, in the order of `requests`."""
        rows, steps = len(requests), self.max_new_tokens
        uniform_RT = torch.from_numpy(uniforms([request.seed for request in requests], steps)).to(self._device)
        ids_RT = torch.zeros(rows, steps, dtype=torch.long, device=self._device)
        logp_RT = torch.zeros(rows, steps, device=self._device)
        length_R = torch.zeros(rows, dtype=torch.long, device=self._device)
        active_R = torch.arange(rows, device=self._device)  # rows still in the batch
        alive_R = torch.ones(rows, dtype=torch.bool, device=self._device)

        logits_RV, cache, attention, positions = self._prefill(requests)
        for step in range(steps):
            logp_RV = sampling_logp(logits_RV, settings)
            token_R = draw(logp_RV, uniform_RT[active_R, step])
            ids_RT[active_R, step] = token_R
            logp_RT[active_R, step] = logp_RV.gather(1, token_R.unsqueeze(1)).squeeze(1)
            length_R[active_R] += alive_R.long()
            self.on_tokens(int(alive_R.sum()))
            alive_R = alive_R & ~torch.isin(token_R, self._stop_ids)
            ended = 1 - alive_R.float().mean().item()
            if ended == 1:
                break
            if ended > DROP_SHARE:
                keep = alive_R.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                active_R, token_R, attention = active_R[keep], token_R[keep], attention[keep]
                positions, alive_R = positions[keep], alive_R[keep]
            attention = torch.cat([attention, attention.new_ones(len(attention), 1)], dim=1)
            positions = positions[:, -1:] + 1
            if step + 1 < steps:
                logits_RV = self._forward(token_R.unsqueeze(1), cache, attention, positions)
        return ids_RT.cpu().numpy(), logp_RT.cpu().numpy(), length_R.cpu().numpy()

    def _forward(self, input_ids: Tensor, cache: DynamicCache, attention: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, V] after the last of these tokens; the cache grows by them."""
        output = self._model(
            input_ids=input_ids,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _prefill(self, requests: list[Request]) -> tuple[Tensor, DynamicCache, Tensor, Tensor]:
        """Logits, cache, attention mask and positions after the prompts. Each distinct prompt is read only once."""
        places: dict[tuple[int, ...], int] = {}
        distinct_R = [places.setdefault(tuple(request.prompt_ids), len(places)) for request in requests]
        input_ids, attention = self._padded(list(places))
        cache = DynamicCache(config=self._model.config)
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._forward(input_ids, cache, attention, positions)
        spread = torch.tensor(distinct_R, device=self._device)
        cache.batch_select_indices(spread)
        return logits[spread], cache, attention[spread], positions[spread]

    def _padded(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), self._tokenizer.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(mask).to(self._device)
