"""Stands in for vLLM in the worker processes of tests/unit/test_vllm_engine.py: same calls, a small policy, and faults
that the environment asks for. What happened is written to a file of JSON lines. Without torch, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from stalewise.statistics import uniform

FAULTS = os.environ.get("FAKE_VLLM_FAULTS", "").split()
Array = npt.NDArray[np.float64]


def note(event: str, **more: Any) -> None:
    with Path(os.environ["FAKE_VLLM_NOTES"]).open("a") as file:
        record = {"event": event, "pid": os.getpid(), "devices": os.environ.get("CUDA_VISIBLE_DEVICES"), **more}
        file.write(json.dumps(record) + "\n")


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True


class Llama:
    """A Llama's forward pass, for the embedded policies."""

    def __init__(self, directory: str) -> None:
        self.config = json.loads((Path(directory) / "config.json").read_text())
        self.weights = {
            name.removeprefix("model."): tensor.astype(np.float64)
            for name, tensor in load_file(Path(directory) / "model.safetensors").items()
        }

    def logits(self, ids: list[int]) -> Array:
        """[T, V] for T tokens."""
        x = self.weights["embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(self._norm(x, f"layers.{layer}.input_layernorm"), f"layers.{layer}.self_attn")
            x = x + self._mlp(self._norm(x, f"layers.{layer}.post_attention_layernorm"), f"layers.{layer}.mlp")
        return self._norm(x, "norm") @ self.weights["embed_tokens.weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * self.weights[f"{name}.weight"]

    def _mlp(self, x: Array, name: str) -> Array:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        opened = x @ gate.T
        return (opened / (1 + np.exp(-opened)) * (x @ up.T)) @ down.T

    def _attention(self, x: Array, name: str) -> Array:
        heads, size, length = self.config["num_attention_heads"], self.config["head_dim"], len(x)
        q, k, v = (
            (x @ self.weights[f"{name}.{part}_proj.weight"].T).reshape(length, heads, size).swapaxes(0, 1)
            for part in "qkv"
        )
        angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, size, 2) / size))
        q, k = (_turned(one, angles) for one in (q, k))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(size) + np.triu(np.full((length, length), -np.inf), 1)
        mixed = np.exp(_log_softmax(scores)) @ v
        return mixed.swapaxes(0, 1).reshape(length, heads * size) @ self.weights[f"{name}.o_proj.weight"].T


def _turned(x: Array, angles: Array) -> Array:
    first, second = np.split(x, 2, axis=2)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=2)


def _log_softmax(x: Array) -> Array:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _processed(logits: Array, parameters: SamplingParams) -> Array:
    """Log-probabilities of the distribution that is sampled from."""
    logp = _log_softmax(logits / parameters.temperature)
    order = np.argsort(-logp)
    if parameters.top_k:
        logp[order[parameters.top_k :]] = -np.inf
        logp = _log_softmax(logp)
    if parameters.top_p < 1:
        before = np.concatenate([[0.0], np.exp(logp[order]).cumsum()[:-1]])
        logp[order[before >= parameters.top_p]] = -np.inf
    return _log_softmax(logp)


class LLM:
    def __init__(self, model: str, **arguments: Any) -> None:
        note("start", model=model, arguments=arguments)
        if "refuse" in FAULTS:
            raise ValueError("no kernel for this\nand a long story")
        self.model = Llama(model)

    def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        note(method, **kwargs)
        if "deaf" not in FAULTS:
            self.model = Llama(kwargs["weights_path"])

    def reset_prefix_cache(self) -> bool:
        return "held" not in FAULTS

    def sleep(self, level: int) -> None:
        note("sleep", level=level)
        if level == 2:
            del self.model  # until it is loaded again

    def wake_up(self) -> None:
        note("wake")

    def generate(self, prompts: list[dict[str, list[int]]], parameters: list[SamplingParams], use_tqdm: bool) -> Any:
        note("generate", count=len(prompts))
        if "die" in FAULTS and any(one.max_tokens > 1 for one in parameters):
            print("RuntimeError: out of everything", flush=True)
            os._exit(3)
        if "slow" in FAULTS and any(one.max_tokens > 1 for one in parameters):
            note("slow")
            time.sleep(600)  # longer than a test may take
        return [self._one(p["prompt_token_ids"], one) for p, one in zip(prompts, parameters, strict=True)]

    def _one(self, prompt: list[int], parameters: SamplingParams) -> Any:
        drawn = uniform(np.array([parameters.seed], np.uint64), np.arange(parameters.max_tokens, dtype=np.uint64))
        ids = list(prompt)
        places: list[dict[int, Any]] = []
        reason = "length"
        for number in drawn:
            logp = _processed(self.model.logits(ids)[-1], parameters)
            token = int(np.searchsorted(np.exp(logp).cumsum() / np.exp(logp).sum(), number, side="right"))
            ids.append(token)
            shown = {token, int(logp.argmax())} if parameters.logprobs else {token}
            places.append({one: SimpleNamespace(logprob=float(logp[one])) for one in shown})
            if token in parameters.stop_token_ids:
                reason = "stop"
                break
        own = _log_softmax(self.model.logits(prompt))
        scores = [
            None if place == 0 else {token: SimpleNamespace(logprob=float(own[place - 1, token]))}
            for place, token in enumerate(prompt)
        ]
        told = None if parameters.logprobs is None else places
        output = SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=told, finish_reason=reason)
        return SimpleNamespace(outputs=[output], prompt_logprobs=None if parameters.prompt_logprobs is None else scores)
