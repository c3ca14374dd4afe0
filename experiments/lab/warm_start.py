"""Warm start: short supervised training on worked-out sums, for a task the model cannot do at all.

Solutions are generated, only training prompts are used, and training stops at a target accuracy, so that much is left
for reinforcement learning.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch

from stalewise.errors import TaskError
from stalewise.models.loading import encode_prompts, load_model, load_tokenizer, pick_device, resolve_model
from stalewise.store.atomic import commit_directory, make_directory, temporary_name
from stalewise.tasks import make_task

IGNORED = -100  # label of tokens excluded from the loss
OPERATION = re.compile(r"(\d+)\+(\d+)")


def worked_out(problem: str) -> str:
    """A sum worked out by tens and ones, easy enough for a small model.

    >>> worked_out("What is 37+48?")
    '30 + 40 = 70, 7 + 8 = 15, 70 + 15 = 85'
    """
    found = OPERATION.search(problem)
    if found is None:
        raise TaskError(f"{problem!r} is not a sum of two numbers: warm starts support only those")
    left, right = int(found[1]), int(found[2])
    tens, ones = left // 10 * 10 + right // 10 * 10, left % 10 + right % 10
    steps = f"{left // 10 * 10} + {right // 10 * 10} = {tens}, {left % 10} + {right % 10} = {ones}"
    return f"{steps}, {tens} + {ones} = {left + right}"


def warm_start(
    directory: Path,
    *,
    model: str,
    task: str,
    task_options: dict[str, Any],
    steps: int,
    batch: int,
    learning_rate: float,
    target: float,
    check_every: int = 20,
    checked: int = 128,
    seed: int = 0,
) -> dict[str, Any]:
    """Train until sampled accuracy on `checked` training prompts reaches the target, for at most `steps` steps.

    Accuracy can rise quickly within `check_every` steps, so it may end well above the target.
    """
    start = time.perf_counter()
    torch.manual_seed(seed)
    source, device = resolve_model(model), pick_device("auto")
    policy, tokenizer = load_model(source, device=device), load_tokenizer(source)
    asked = make_task(task, seed=seed, **task_options)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    curve: list[list[float]] = []
    try:
        for step in range(steps + 1):
            if step % check_every == 0:
                accuracy = _sampled_accuracy(policy, tokenizer, asked, checked, device)
                curve.append([step, round(accuracy, 4)])
                if accuracy >= target:
                    break
            policy.train()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = policy(**_examples(tokenizer, asked, step * batch, batch, device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    finally:
        asked.verifier.close()
    if not directory.is_dir():
        make_directory(directory.parent)
        temporary = temporary_name(directory)
        policy.eval().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        commit_directory(temporary, directory)
    return {"curve": curve, "steps": curve[-1][0], "seconds": round(time.perf_counter() - start, 2)}


def _examples(tokenizer: Any, task: Any, first: int, count: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts with worked-out answers, padded on the right; only answers have labels."""
    prompts = task.prompts(first, count)
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, prompt_ids in zip(prompts, encode_prompts(prompts, tokenizer), strict=True):
        answer = [*tokenizer(worked_out(prompt.text), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(([*prompt_ids, *answer], [IGNORED] * len(prompt_ids) + answer))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def padded(which: int, value: int) -> torch.Tensor:
        return torch.tensor([row[which] + [value] * (longest - len(row[which])) for row in rows], device=device)

    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows], device=device)
    return {"input_ids": padded(0, pad), "attention_mask": mask, "labels": padded(1, IGNORED)}


@torch.no_grad()
def _sampled_accuracy(policy: Any, tokenizer: Any, task: Any, count: int, device: torch.device) -> float:
    """Share of right answers, one sample per training prompt."""
    policy.eval()
    prompts = task.prompts(0, count)
    prompt_ids = encode_prompts(prompts, tokenizer)
    longest = max(map(len, prompt_ids))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompt_ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompt_ids], device=device)
    made = policy.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=48,
        pad_token_id=pad,
    )
    texts = tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)
    rewards = task.verifier.score(prompts, texts)
    return sum(reward.value == 1 for reward in rewards) / len(rewards)
