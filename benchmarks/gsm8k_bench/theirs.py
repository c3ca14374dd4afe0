"""TRL's side: its GRPOTrainer with vLLM in the same process, or with `generate`. Imports trl, which takes a while."""

from __future__ import annotations

import functools
import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from .library import encoded, model_directory, task_of, tokenizer_of
from .ours import first_excess
from .settings import Settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what TRL and its dependencies warn of at import is theirs
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer


def trl_arguments(
    settings: Settings, work: Path, *, seed: int, rate: float, vllm: bool, model_length: int
) -> dict[str, Any]:
    """TRL's own settings, but for what all arms share and for what would write or print.

    `steps_per_generation` counts forward passes, so µ updates on one generation batch are µ × accumulation of them.
    """
    cuda = torch.cuda.is_available() and settings.device != "cpu"
    accumulation = settings.rollouts // settings.trl_batch
    arguments: dict[str, Any] = {
        "output_dir": str(work / "trl"),
        "seed": seed,
        "max_steps": settings.updates,
        "per_device_train_batch_size": settings.trl_batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": settings.mu * accumulation,
        "num_generations": settings.group_size,
        "num_iterations": 1,
        "max_completion_length": settings.max_new_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": settings.warmup,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": settings.trl_checkpointing,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": cuda,
        "use_cpu": not cuda,
        "dataloader_pin_memory": cuda,
        "use_vllm": vllm,
        "shuffle_dataset": False,  # our tasks give their prompts in random order already: all arms see the same ones
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    if vllm:
        arguments |= {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": settings.vllm_memory,
            "vllm_max_model_length": model_length,
            "vllm_enable_sleep_mode": settings.vllm_sleep,
            # TRL reads token ids and decodes them itself. vLLM's own text, and that of each log-probability's token, is
            # made on the thread that drives the GPU.
            "generation_kwargs": {"detokenize": False},
        }
    return arguments


def fix_vllm_cache(gigabytes: float) -> None:
    """Give vLLM's cache this size. Otherwise vLLM measures what is free, and fails if another process frees memory."""
    from trl.generation import vllm_generation

    engine: Any = vllm_generation
    engine.LLM = functools.partial(engine.LLM, kv_cache_memory_bytes=int(gigabytes * 1e9))


def rendered(prompts: Sequence[Any], tokenizer: Any) -> tuple[list[str], int]:
    """Prompts as texts that TRL's tokenizer turns into the token ids that ours gives; and the longest in tokens."""
    texts = [_render(prompt, tokenizer) for prompt in prompts]
    found, expected = tokenizer(text=texts)["input_ids"], encoded(prompts, tokenizer)
    if found != expected:
        raise RuntimeError(f"TRL would read {texts[0]!r} as {found[0]}, stalewise as {expected[0]}")
    return texts, max(map(len, expected))


def _render(prompt: Any, tokenizer: Any) -> str:
    if prompt.metadata.get("format") != "chat":
        return prompt.text
    system = [{"role": "system", "content": prompt.metadata["system"]}] if "system" in prompt.metadata else []
    messages = [*system, {"role": "user", "content": prompt.text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def synchronised() -> float:
    """The time when everything enqueued so far is done."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Seconds since `start`, without those in which it was paused."""

    def __init__(self) -> None:
        self.begin: float | None = None
        self.paused = self._since = 0.0

    def start(self) -> None:
        if self.begin is None:
            self.begin = synchronised()

    def read(self) -> float:
        return 0.0 if self.begin is None else synchronised() - self.begin - self.paused

    def pause(self) -> None:
        self._since = synchronised()

    def resume(self) -> None:
        self.paused += synchronised() - self._since


class TimedTrainer(GRPOTrainer):
    """TRL's trainer; when it first generates and how long its parts take is noted, and nothing is changed."""

    watch: Stopwatch
    generating = syncing = scoring = 0.0
    engine = old_logprobs = 0.0  # parts of `generating` and `scoring`
    completion_tokens = completions = 0
    is_scoring = False

    def _generate_single_turn(self, *arguments: Any, **more: Any) -> Any:
        self.watch.start()
        start, before = synchronised(), self.syncing
        made = super()._generate_single_turn(*arguments, **more)
        self.generating += synchronised() - start - (self.syncing - before)
        ids = made[0]
        self.completions += len(ids)
        self.completion_tokens += sum(len(one) for one in ids)
        return made

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.watch.start()
        self.is_scoring = True
        start, before = synchronised(), self.generating + self.syncing
        scored = super()._generate_and_score_completions(inputs)
        self.scoring += synchronised() - start - (self.generating + self.syncing - before)
        self.is_scoring = False
        return scored

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **more: Any) -> Any:
        if not self.is_scoring:
            return super()._get_per_token_logps_and_entropies(*arguments, **more)
        start = synchronised()
        found = super()._get_per_token_logps_and_entropies(*arguments, **more)
        self.old_logprobs += synchronised() - start
        return found

    def time_vllm(self) -> None:
        """Note how long the weights take to vLLM and how long it samples, where there is one."""
        generation = getattr(self, "vllm_generation", None)
        if generation is None:
            return
        sync, sample = generation.sync_weights, generation.llm.generate

        def timed_sync() -> None:
            start = synchronised()
            sync()
            self.syncing += synchronised() - start

        def timed_sample(*arguments: Any, **more: Any) -> Any:
            start = synchronised()
            made = sample(*arguments, **more)
            self.engine += synchronised() - start
            return made

        generation.sync_weights, generation.llm.generate = timed_sync, timed_sample


class SavingClock(TrainerCallback):
    """Reads the clock after each update; saves the weights with it stopped where accuracy is to be measured."""

    def __init__(self, base: Path, directory: Path, settings: Settings, watch: Stopwatch) -> None:
        self.base, self.directory, self.watch = base, directory, watch
        self.evaluated = set(settings.evaluated)
        files = sorted(base.glob("*.safetensors"))
        self.names: list[str] = []
        for file in files:
            with safe_open(file, framework="pt") as opened:
                self.names += list(opened.keys())
        self.trainer: Any = None
        self.rewarding: Any = None
        self.log = directory.parent / "events.jsonl"  # a run that is cut leaves its times there
        self.at: dict[int, float] = {}
        self.learning: list[float] = []  # seconds of each update without sampling and scoring
        self.spent: dict[str, float] = {}
        self.within: dict[str, float] = {}  # parts of the parts
        self.metrics: dict[str, list[float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """After the optimizer's step."""
        step, trainer = int(state.global_step), self.trainer
        self.at[step] = self.watch.read()
        parts = {"generate": trainer.generating, "switch": trainer.syncing, "score": trainer.scoring}
        self.spent = {**parts, "learn": self.at[step] - sum(parts.values())}
        self.learning.append(self.spent["learn"] - sum(self.learning))
        self.within = {
            "engine": trainer.engine,
            "old_logprobs": trainer.old_logprobs,
            "verify": self.rewarding.seconds,
        }
        line = {"update": step, "at": self.at[step], "tokens": trainer.completion_tokens, **self.spent, **self.within}
        with open(self.log, "a") as file:
            file.write(json.dumps(line) + "\n")
        if step not in self.evaluated:
            return
        self.watch.pause()
        # TRL empties its metrics when the training ends.
        self.metrics = {key: list(values) for key, values in trainer._metrics["train"].items()}
        self.save(model, self.directory / f"v{step:06d}")
        self.watch.resume()

    def save(self, model: Any, directory: Path) -> None:
        """The base policy's directory with other weights: TRL's settings of generation must not come along."""
        directory.mkdir(parents=True, exist_ok=True)
        state = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
        weights = {name: _as_saved(state[name]) for name in self.names}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        left = ("manifest.json", "state.json", "model.safetensors.index.json")
        for path in self.base.iterdir():
            if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in left:
                (directory / path.name).write_bytes(path.read_bytes())


def _as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16 from a GPU, which is what it computes in; as it is from a CPU."""
    plain = tensor.detach()
    return (plain.to(torch.bfloat16) if plain.is_cuda else plain).cpu().contiguous().clone()


def train(settings: Settings, seed: int, rate: float, work: Path, *, vllm: bool) -> dict[str, Any]:
    """One run of TRL's trainer. Its clock begins with its first generation."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    opening = time.perf_counter()
    base = model_directory(settings.model)
    tokenizer = tokenizer_of(base)
    task = task_of(settings, seed)
    prompts = task.prompts(0, settings.updates * settings.prompts)
    warm = prompts[:64]  # all the verifier's processes start before the clock does
    task.verifier.score(warm, ["\\boxed{1}"] * len(warm))
    texts, longest = rendered(prompts, tokenizer)
    model_length = -(-(longest + settings.max_new_tokens + 1) // 64) * 64
    arguments = trl_arguments(settings, work, seed=seed, rate=rate, vllm=vllm, model_length=model_length)
    if vllm and settings.vllm_cache_gb:
        fix_vllm_cache(settings.vllm_cache_gb)
    watch = Stopwatch()
    clock = SavingClock(base, work / "weights", settings, watch)
    rewarding = Rewards(task, prompts)
    trainer = TimedTrainer(
        model=str(base),
        reward_funcs=rewarding.correct,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": texts, "index": list(range(len(texts)))}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.watch, clock.trainer, clock.rewarding = watch, trainer, rewarding
    trainer.time_vllm()
    startup = time.perf_counter() - opening
    trainer.train()
    task.verifier.close()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    aside = first_excess(clock.learning)  # left out of our clock as well
    at = {step: seconds - aside for step, seconds in clock.at.items()}
    spent = {**clock.spent, "learn": clock.spent["learn"] - aside}
    sampling = trainer.generating + rewarding.seconds
    return {
        "resumed": False,
        "arguments": {key: value for key, value in arguments.items() if key != "output_dir"},
        "stop_token_ids": list(getattr(trainer, "eos_token_ids", None) or []),
        "at": at,
        "seconds": at.get(settings.updates),
        "startup_seconds": {"before_first_generation": startup, "first_update": aside},
        "excluded_seconds": {"saving": watch.paused},
        "by_event": spent,
        "within_events": clock.within,  # sampling by the engine is in `generate`, the others are in `score`
        "response_tokens": trainer.completion_tokens,
        "rollouts": trainer.completions,
        "learned_updates": len(clock.at),
        "generate_seconds": sampling,
        "learn_seconds": at[max(at)] - sampling - trainer.syncing,
        "verifier_failures": rewarding.failures,
        "peak_bytes": peak,
        "metrics": {
            key: clock.metrics[key]
            for key in ("reward", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "entropy")
            if key in clock.metrics
        },
    }


class Rewards:
    """Our task's verifier as TRL calls reward functions; None where the verifier failed."""

    def __init__(self, task: Any, prompts: Sequence[Any]) -> None:
        self.task, self.prompts, self.seconds, self.failures = task, prompts, 0.0, 0

    @property
    def correct(self) -> Any:
        def correct(completions: list[str], index: list[int], **_: Any) -> list[float | None]:
            start = time.perf_counter()
            rewards = self.task.verifier.score([self.prompts[i] for i in index], completions)
            self.seconds += time.perf_counter() - start
            self.failures += sum(bool(reward.error) for reward in rewards)
            return [None if reward.error else reward.value for reward in rewards]

        return correct
