"""One vLLM replica in its own process, controlled through a pipe.

    python -m stalewise.rollout.engines.vllm_process DESCRIPTOR

The process sees its own GPUs, keeps vLLM's settings and signal handlers away from the trainer, and frees all memory
when it ends. It ends with its parent, even if that is killed.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from stalewise.types import SamplerSettings

PARENT_POLL_S = 1.0
Sampled = tuple[list[int], list[float], str]  # token ids, log-probabilities and finish reason of one response


class VllmEngine:
    """vLLM's offline engine. The pipe calls its methods by name."""

    def __init__(self) -> None:
        self.vllm: Any = importlib.import_module("vllm")
        self.llm: Any = None
        self.asleep = False

    def start(self, model: str, arguments: Mapping[str, Any], sleep_level: int) -> None:
        """Load the first policy; 0: it never sleeps."""
        platform = importlib.import_module("vllm.platforms").current_platform
        self.sleep_level = sleep_level if platform.is_cuda_alike() else 0  # others have no sleep mode
        self.llm = self.vllm.LLM(
            model=model,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            generation_config="vllm",  # not the model's own sampling settings
            enable_sleep_mode=self.sleep_level > 0,
            **{"enable_prefix_caching": True, "disable_log_stats": True, **arguments},
        )

    def reload(self, model: str) -> None:
        """Replace the weights in place by others of the same architecture."""
        self.wake()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def sleep(self) -> None:
        """Free GPU memory. At level 1 the weights move to host memory; at level 2 they are gone until `reload`.

        In some architectures `reload` does not restore all of them: the check of the policy then restarts vLLM.
        """
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True

    def wake(self) -> None:
        """Take GPU memory again."""
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        settings: SamplerSettings,
        limits: Sequence[int],
        stop_ids: Sequence[int],
    ) -> list[Sampled]:
        """Responses of at most so many tokens, in the order of the prompts."""
        parameters = [
            self.vllm.SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                seed=seed,
                max_tokens=limit,
                stop_token_ids=list(stop_ids),
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        outputs = self.llm.generate(_token_prompts(prompts), parameters, use_tqdm=False)
        firsts = [output.outputs[0] for output in outputs]
        return [
            (ids := list(output.token_ids), _logps(ids, output.logprobs), output.finish_reason) for output in firsts
        ]

    def probe_logps(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of the probe's tokens, and of the most probable token after them."""
        # Two requests: vLLM does not use its prefix cache if log-probabilities of the prompt are requested.
        parameters = [self._one_token(prompt_logprobs=0), self._one_token(logprobs=1)]
        scored, continued = self.llm.generate(_token_prompts([token_ids] * 2), parameters, use_tqdm=False)
        own = _logps(token_ids[1:], scored.prompt_logprobs[1:])
        return [*own, max(entry.logprob for entry in continued.outputs[0].logprobs[0].values())]

    def _one_token(self, **extra: Any) -> Any:
        return self.vllm.SamplingParams(temperature=1.0, seed=0, max_tokens=1, detokenize=False, **extra)


def _token_prompts(prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def _logps(token_ids: list[int], entries: Any) -> list[float]:
    return [entry[token].logprob for token, entry in zip(token_ids, entries, strict=True)]


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # vLLM's own processes, too

    threading.Thread(target=watch, daemon=True).start()


def serve(pipe: Connection, make_engine: Callable[[], Any]) -> None:
    """Execute calls from the pipe until it closes: (method, arguments) in; ("ok", result) or ("error", text) out."""
    engine: Any = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            engine = engine or make_engine()
            pipe.send(("ok", getattr(engine, method)(*arguments)))
        except Exception as error:  # anything that vLLM raises; the other side reports it
            first = next(iter(str(error).strip().splitlines()), "")
            pipe.send(("error", f"{type(error).__name__}: {first}"))


if __name__ == "__main__":
    _end_with_parent()
    serve(Connection(int(sys.argv[1])), VllmEngine)
    sys.stdout.flush()
    os._exit(0)  # threads of vLLM could delay an orderly exit
