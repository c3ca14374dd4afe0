"""Whether a small policy learns to use a calculator: µ-GRPO in two stages on the task arithmetic-steps, on a CPU.

    python -m experiments.lab.calculator --output experiments/calculator/results.json --seeds 3

The embedded policy works out chains such as "7+8-5+6-2+3=" step by step, and most of its samples are wrong. It has
never made a call, so a short supervised start shows it the form of one: the policy says ";7+8-5+6-2+3=", the
calculator "17;", the policy "#17". The other examples are responses of the kind that the policy was made from.
Reinforcement learning has to find that calls pay: the reward is that of the last turn alone, and nothing is given for a
call.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from stalewise import run
from stalewise.config import RunConfig, make_config
from stalewise.models import EMBEDDED
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.reporting.inspection import numbered_batches
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.generate import sample_and_score
from stalewise.store import open_batch
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.tasks import make_task
from stalewise.tasks.arithmetic import MARKER, Steps
from stalewise.tasks.environments.builtin import calculate
from stalewise.types import Prompt, SamplerSettings

IGNORED = -100  # label of tokens without a loss
SHOWN = 0.6  # of the examples are calls
DECIDED = 0.12  # of these calls have a label on their first token: the others teach the form of a call, not to make one
SPOILED = 0.6  # of the other examples are wrong, as when the embedded policy was made
HELD_OUT = 256  # chains
CPU = torch.device("cpu")
TERMS = {"fewest_terms": 4, "most_terms": 5}


def show_calls(directory: Path, *, steps: int = 60, batch: int = 48, seed: int = 0) -> Path:
    """Write a copy of the embedded policy that was shown calls of the calculator."""
    torch.manual_seed(seed)
    source = str(EMBEDDED / "arithmetic-steps")
    model, tokenizer = load_model(source, device=CPU), load_tokenizer(source)
    task, rng = Steps(seed=seed, **TERMS), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    for step in range(steps):
        rows = [example(task, prompt, tokenizer, rng) for prompt in task.prompts(step * batch, batch)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def example(task: Steps, prompt: Prompt, tokenizer: Any, rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids and labels of one episode: a call with its answer, or steps that are often wrong."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    end, asked = [tokenizer.eos_token_id], encode(prompt.text)
    if rng.random() < SHOWN:
        call, said = [*encode(f";{prompt.text}"), *end], encode(f"{calculate(prompt.text[:-1])};")
        answer = [*encode(MARKER + prompt.answer), *end]
        labels = [*call, *[IGNORED] * len(said), *answer]
        if rng.random() >= DECIDED:
            labels[0] = IGNORED
        return [*asked, *call, *said, *answer], [IGNORED] * len(asked) + labels
    is_wrong = rng.random() < SPOILED
    steps = [*encode(task.spoiled_solution(prompt, rng) if is_wrong else task.solution(prompt)), *end]
    return [*asked, *steps], [IGNORED] * len(asked) + steps


def settings(runs: Path, policy: Path, *, seed: int = 0, updates: int = 16, prompts: int = 16) -> RunConfig:
    """Two stages of µ-GRPO with the calculator."""
    return make_config(
        {
            "name": f"calculator-{seed}",
            "runs": str(runs),
            "seed": seed,
            "task": {
                "name": "arithmetic-steps",
                "options": {**TERMS, "environment": "calculator", "environment_options": {"max_turns": 3}},
            },
            "model": {"path": str(policy), "device": "cpu"},
            "sampler": {"max_new_tokens": 48},
            "batch": {"prompts": prompts, "group_size": 8},
            "schedule": {"updates": updates, "stages": 2},
            "optimizer": {"learning_rate": 5e-4, "schedule": "cosine"},
            "evaluation": {"prompts": 128},
        }
    )


def learn(config: RunConfig) -> dict[str, Any]:
    """Accuracy and share of calls on held-out chains before and after, and what each stage's episodes were."""
    start = time.perf_counter()
    result = run(config)
    return {
        "seed": config.seed,
        "updates": config.schedule.updates,
        "seconds": round(time.perf_counter() - start, 1),
        "before": held_out(config, config.model.path),
        "after": held_out(config, checkpoint_directory(config.directory, result.updates)),
        "stages": [calls_in(path) for _, path in numbered_batches(config.directory)],
    }


def held_out(config: RunConfig, policy: str | Path) -> dict[str, float]:
    """What sampled episodes of held-out chains are with this policy."""
    sampler = HFSampler(
        SamplerSettings(), max_new_tokens=config.sampler.max_new_tokens, device=CPU, dtype=torch.float32
    )
    sampler.load(Path(policy))
    task = make_task(config.task.name, **config.task.options)
    options = {"samples": 2, "seed": 1, "sampler": sampler, "rows_at_once": 512}
    _, _, rewards = sample_and_score(task, task.evaluation_prompts(HELD_OUT), **options)
    return shares((reward.value, reward.parts) for reward in rewards)


def calls_in(batch: Path) -> dict[str, float]:
    """What the episodes of a batch are."""
    return shares((rollout.reward, rollout.reward_parts) for rollout in open_batch(batch).iter_rollouts())


def shares(episodes: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Accuracy, the share of episodes with a call, and the accuracy of those with a call and of the others."""
    both = [(reward, parts.get("calls", 0.0) > 0) for reward, parts in episodes]
    rewards = [[reward for reward, is_call in both if is_call is which] for which in (True, False)]
    accuracy = [sum(some) / len(some) if some else math.nan for some in ([reward for reward, _ in both], *rewards)]
    return {
        "accuracy": round(accuracy[0], 4),
        "calls": round(len(rewards[0]) / len(both), 4),
        "accuracy_with_call": round(accuracy[1], 4),
        "accuracy_without": round(accuracy[2], 4),
    }


def main() -> None:
    """Run some seeds, print and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("calculator.json"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--updates", type=int, default=16)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(arguments.seeds):
            start = time.perf_counter()
            policy = show_calls(Path(scratch) / f"policy-{seed}", seed=seed)
            shown = round(time.perf_counter() - start, 1)
            found = learn(settings(Path(scratch) / "runs", policy, seed=seed, updates=arguments.updates))
            results.append(found | {"seconds_of_supervision": shown})
            print(json.dumps(results[-1]), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"command": "experiments.lab.calculator", "runs": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
