"""Whether a small policy learns to use a calculator: µ-GRPO in two stages on the task arithmetic, on a CPU.

    python -m experiments.lab.calculator --output calculator.json --seeds 3

The embedded policy of two-digit addition adds in its head and is often wrong. A short supervised start shows it the
form of a call in some of its responses, not when to call. Reinforcement learning then has to find that calls pay: the
reward is that of the last turn alone.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from stalewise import run
from stalewise.config import make_config
from stalewise.models.loading import EMBEDDED, load_model, load_tokenizer
from stalewise.reporting.inspection import numbered_batches
from stalewise.store import open_batch
from stalewise.tasks.arithmetic import Addition

IGNORED = -100  # label of tokens without a loss
UNLABELLED = 0.7  # of the calls that are shown: they teach the form of a call, and not to make one


def show_calls(directory: Path, *, share: float = 0.6, steps: int = 400, seed: int = 0) -> Path:
    """Write a copy of the embedded policy that was shown calls of the calculator in a `share` of the examples."""
    source = str(EMBEDDED / "arithmetic")
    model, tokenizer, task = load_model(source, device=torch.device("cpu")), load_tokenizer(source), Addition(seed=seed)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=1e-3), random.Random(seed)
    for step in range(steps):
        rows = [_example(task, prompt, tokenizer, rng, share) for prompt in task.prompts(step * 64, 64)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _example(
    task: Addition, prompt: Any, tokenizer: Any, rng: random.Random, share: float
) -> tuple[list[int], list[int]]:
    """Token ids and labels of one response: a call and its answer, or an answer that is wrong in half of the cases."""
    stop = [tokenizer.eos_token_id]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if rng.random() < share:
        parts = [(encode(prompt.text) + stop, True), (encode(f"{prompt.answer};"), False)]
        parts.append((encode(prompt.answer) + stop, True))
    else:
        answer = task.spoiled_solution(prompt, rng) if rng.random() < 0.5 else prompt.answer
        parts = [(encode(answer) + stop, True)]
    ids = labels = encode(prompt.text)
    labels = [IGNORED] * len(labels)
    for tokens, is_own in parts:
        ids = ids + tokens
        labels = labels + (tokens if is_own else [IGNORED] * len(tokens))
    if len(parts) > 1 and rng.random() < UNLABELLED:
        labels[len(encode(prompt.text))] = IGNORED
    return ids, labels


def learn(directory: Path, policy: Path, *, seed: int = 0, updates: int = 24, prompts: int = 32) -> dict[str, Any]:
    """Two stages of µ-GRPO; accuracy before and after, and the share of episodes with a call in each stage."""
    start = time.perf_counter()
    config = make_config(
        {
            "name": f"calculator-{seed}",
            "runs": str(directory),
            "seed": seed,
            "task": {"name": "arithmetic", "options": {"environment": "calculator"}},
            "model": {"path": str(policy), "device": "cpu"},
            "sampler": {"max_new_tokens": 24},
            "batch": {"prompts": prompts, "group_size": 8},
            "schedule": {"updates": updates, "stages": 2},
            "optimizer": {"learning_rate": 5e-4},
            "evaluation": {"prompts": 128},
        }
    )
    result = run(config)
    accuracy = [evaluation["accuracy"]["value"] for evaluation in result.evaluations]
    return {
        "seed": seed,
        "updates": updates,
        "accuracy_from": accuracy[0],
        "accuracy_to": accuracy[-1],
        "share_of_calls": [calls_in(path) for _, path in numbered_batches(config.directory)],
        "seconds": round(time.perf_counter() - start, 1),
    }


def calls_in(batch: Path) -> float:
    """The share of a batch's episodes that called the calculator."""
    rollouts = list(open_batch(batch).iter_rollouts())
    return sum(rollout.reward_parts.get("calls", 0.0) > 0 for rollout in rollouts) / len(rollouts)


def main() -> None:
    """Run some seeds, print and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("calculator.json"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--updates", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = []
        for seed in range(arguments.seeds):
            policy = show_calls(Path(scratch) / f"policy-{seed}", seed=seed)
            results.append(learn(Path(scratch), policy, seed=seed, updates=arguments.updates))
            print(json.dumps(results[-1]))
    arguments.output.write_text(json.dumps({"command": "experiments.lab.calculator", "runs": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
