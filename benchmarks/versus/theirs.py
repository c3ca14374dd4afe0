"""TRL's side: its GRPOTrainer's training step on the same tokens, and whole runs. Imports trl, which takes a while."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from stalewise.models.loading import encode_prompts, load_tokenizer
from stalewise.store import RolloutColumns
from stalewise.tasks import Task, make_task
from stalewise.types import Prompt

from .clock import Stopwatch, highest, peak, reset_peak, set_up, synchronised
from .ours import base_checkpoint, stage_rows, tokens_of
from .settings import Settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what TRL and its dependencies warn of at import is theirs
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer


def trl_arguments(
    settings: Settings, work: Path, *, seed: int, updates: int, mu: int, batch: int, checkpointing: bool
) -> dict[str, Any]:
    """TRL's own settings, but for what both sides share and for what would write or print.

    `steps_per_generation` counts forward passes, so µ updates on one generation batch are µ × accumulation of them.
    """
    accumulation = settings.rollouts // batch
    return {
        "output_dir": str(work / "trl"),
        "seed": seed,
        "max_steps": updates,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": mu * accumulation,
        "num_generations": settings.group_size,
        "num_iterations": 1,
        "max_completion_length": settings.max_new_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": checkpointing,
        "bf16": settings.cuda,
        "use_cpu": not settings.cuda,
        "dataloader_pin_memory": settings.cuda,
        "use_vllm": False,
        "shuffle_dataset": False,  # our tasks give their prompts in random order already: both see the same ones
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def rendered(prompts: Sequence[Prompt], tokenizer: Any) -> list[str]:
    """Prompts as texts that TRL's tokenizer call turns into the token ids that ours gives."""
    texts = [_render(prompt, tokenizer) for prompt in prompts]
    found, expected = tokenizer(text=texts)["input_ids"], encode_prompts(list(prompts), tokenizer)
    if found != expected:
        raise RuntimeError(f"TRL would read {texts[0]!r} as {found[0]}, stalewise as {expected[0]}")
    return texts


def _render(prompt: Prompt, tokenizer: Any) -> str:
    if prompt.metadata.get("format") != "chat":
        return prompt.text
    system = [{"role": "system", "content": prompt.metadata["system"]}] if "system" in prompt.metadata else []
    messages = [*system, {"role": "user", "content": prompt.text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# ---------------------------------------------------------------- the training step alone


class TimedTrainer(GRPOTrainer):
    """TRL's trainer; how long it generates and scores is noted once per generation batch, and nothing is changed."""

    generating_seconds = 0.0
    scoring_seconds = 0.0  # log-probabilities of the behaviour policy by a forward pass, rewards, advantages

    def _generate_single_turn(self, *arguments: Any, **more: Any) -> Any:
        start = synchronised()
        made = self.complete(*arguments, **more)
        self.generating_seconds += synchronised() - start
        return made

    def complete(self, *arguments: Any, **more: Any) -> Any:
        """What makes the completions."""
        return super()._generate_single_turn(*arguments, **more)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start, before = synchronised(), self.generating_seconds
        scored = super()._generate_and_score_completions(inputs)
        self.scoring_seconds += synchronised() - start - (self.generating_seconds - before)
        return scored


class ReplayTrainer(TimedTrainer):
    """TRL's trainer with completions that exist already: everything but the generating is its own."""

    stored: list[list[int]]
    stored_prompts: list[list[int]]
    stored_rewards: list[float | None]
    cursor = 0

    def complete(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        """Hand over the next stored completions."""
        rows = slice(self.cursor, self.cursor + len(prompt_ids))
        if [list(ids) for ids in prompt_ids] != self.stored_prompts[rows]:
            raise RuntimeError(f"TRL asks for other prompts than those of rollouts {rows.start} to {rows.stop - 1}")
        self.cursor = rows.stop
        return self.stored[rows], None

    def stored_reward(self, completions: Any, **_: Any) -> list[float | None]:
        """The rewards of the rollouts that were replayed last."""
        return self.stored_rewards[self.cursor - len(completions) : self.cursor]


class ChunkClock(TrainerCallback):
    """Marks the time after the warm-up and after every chunk of updates."""

    def __init__(self, warmup: int, every: int) -> None:
        self.warmup, self.every = warmup, every
        self.trainer: Any = None
        self.marks: list[tuple[float, float, float, float]] = []
        self.warm: dict[str, int | None] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimizer's step."""
        if state.global_step >= self.warmup and (state.global_step - self.warmup) % self.every == 0:
            if state.global_step == self.warmup:
                self.warm = peak()
                reset_peak()
            trainer = self.trainer
            now = synchronised(), time.process_time(), trainer.generating_seconds, trainer.scoring_seconds
            self.marks.append(now)


def trainer(settings: Settings, work: Path, batch: int, checkpointing: bool) -> dict[str, Any]:
    """Time TRL's updates on the stored rollouts; the time of handing them over is taken out."""
    set_up(settings.device, settings.threads)
    rows = stage_rows(settings, work)
    arguments = trl_arguments(
        settings, work, seed=0, updates=len(rows), mu=settings.trl_mu, batch=batch, checkpointing=checkpointing
    )
    clock = ChunkClock(settings.learner_warmup, settings.trl_mu)
    trainer = _replay_trainer(settings, work, rows, arguments, clock)
    trainer.train()
    timed = rows[settings.learner_warmup :]
    tokens = sum(map(tokens_of, timed))
    columns = list(zip(*clock.marks, strict=True))
    wall, working, replay, scoring = (column[-1] - column[0] for column in columns)
    return {
        "arguments": arguments,
        "gradient_checkpointing": checkpointing,
        "whole_update_at_once": batch == settings.rollouts,
        "chunk_updates": settings.trl_mu,
        "chunk_seconds": [after - before for before, after in itertools.pairwise(columns[0])],
        "wall_seconds": wall,
        "replay_seconds": replay,
        "scoring_seconds": scoring,
        "seconds": wall - replay,
        "cpu_seconds": working,
        "updates": len(timed),
        "rollouts_per_update": len(timed[0]),
        "tokens": tokens,
        "tokens_per_second": tokens / (wall - replay),
        "tokens_per_second_update_only": tokens / (wall - replay - scoring),
        **highest(clock.warm, peak()),
    }


def _replay_trainer(
    settings: Settings, work: Path, rows: list[RolloutColumns], arguments: dict[str, Any], clock: ChunkClock
) -> ReplayTrainer:
    base = base_checkpoint(work)
    tokenizer = load_tokenizer(str(base))
    task = make_task(settings.task, seed=0)
    prompts = task.prompts(0, len(rows) * settings.prompts)

    def reward(completions: Any, **more: Any) -> list[float | None]:
        return trainer.stored_reward(completions, **more)

    trainer = ReplayTrainer(
        model=str(base),
        reward_funcs=reward,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": rendered(prompts, tokenizer)}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.stored = [part.response(row).tolist() for part in rows for row in range(len(part))]
    trainer.stored_prompts = [part.prompt(row).tolist() for part in rows for row in range(len(part))]
    trainer.stored_rewards = [float(value) for part in rows for value in part.reward]
    clock.trainer = trainer
    return trainer


# ---------------------------------------------------------------- whole runs


class SavingClock(TrainerCallback):
    """Reads the clock at the updates at which accuracy is to be measured, and saves the weights with it stopped."""

    def __init__(self, base: Path, directory: Path, every: int) -> None:
        self.base, self.directory, self.every = base, directory, every
        with safe_open(base / "model.safetensors", framework="pt") as file:
            self.names = list(file.keys())
        self.trainer: Any = None
        self.watch: Stopwatch | None = None
        self.metrics: dict[str, list[float]] = {}
        self.times: dict[int, float] = {}
        self.spent: dict[int, dict[str, float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """After the optimizer's step."""
        if state.global_step % self.every or self.watch is None:
            return
        seconds = self.times[state.global_step] = self.watch.read()
        self.watch.pause()
        generating, scoring = self.trainer.generating_seconds, self.trainer.scoring_seconds
        rest = seconds - generating - scoring
        self.spent[state.global_step] = {"generate": generating, "score": scoring, "learn": rest}
        # TRL empties its metrics when the training ends.
        self.metrics = {key: list(values) for key, values in self.trainer._metrics["train"].items()}
        self.save(model, self.directory / f"v{state.global_step:06d}")
        self.watch.resume()

    def save(self, model: Any, directory: Path) -> None:
        """The base policy's directory with other weights: TRL's settings of generation must not come along."""
        directory.mkdir(parents=True)
        state = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
        weights = {name: state[name].detach().float().cpu().contiguous() for name in self.names}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        for path in self.base.iterdir():
            if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in (
                "manifest.json",
                "state.json",
            ):
                (directory / path.name).write_bytes(path.read_bytes())


def train(settings: Settings, work: Path, seed: int, name: str, method: str) -> dict[str, Any]:
    """One run of TRL's trainer, which is made within the clock, as ours is; the saving of weights is not in it."""
    set_up(settings.device, settings.threads)
    base = base_checkpoint(work)
    tokenizer = load_tokenizer(str(base))
    task = make_task(settings.task, seed=seed)
    total = settings.updates_of(method)
    prompts = task.prompts(0, total * settings.prompts)
    mu = settings.trl_mu if method == "trl" else settings.mu
    arguments = trl_arguments(
        settings, work, seed=seed, updates=total, mu=mu, batch=settings.rollouts, checkpointing=False
    )
    clock = SavingClock(base, work / "runs" / name, settings.evaluate_every)
    texts = rendered(prompts, tokenizer)
    clock.watch = Stopwatch()
    trainer = TimedTrainer(
        model=str(base),
        reward_funcs=reward_function(task, prompts),
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": texts, "index": list(range(len(texts)))}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    clock.trainer, constructing = trainer, clock.watch.read()
    trainer.train()
    updates = settings.evaluated(method)
    seconds = clock.times[settings.updates]
    return {
        "arguments": arguments,
        "stop_token_ids": list(trainer.eos_token_ids),
        "seconds": seconds,
        "construct_seconds": constructing,
        "saving_seconds": clock.watch.paused,
        "run_seconds": clock.watch.read(),
        "by_event": clock.spent[settings.updates],
        "rewards": clock.metrics.get("reward", []),
        "mean_lengths": clock.metrics.get("completions/mean_length", []),
        "updates": updates,
        "times": [0.0, *(clock.times[update] for update in updates[1:])],
    }


def reward_function(task: Task, prompts: Sequence[Prompt]) -> Any:
    """Our task's verifier as TRL calls reward functions; None where the verifier failed."""

    def correct(completions: list[str], index: list[int], **_: Any) -> list[float | None]:
        rewards = task.verifier.score([prompts[i] for i in index], completions)
        return [None if reward.error else reward.value for reward in rewards]

    return correct
