"""Make the policy that runs with SmolLM2 start from: a short supervised training on sums that are worked out.

    python -m experiments.lab.warm_start models/smollm2-sums

As published, SmolLM2-135M samples 1.5% of these sums right, too few for reinforcement learning to begin with. Solutions
are generated, only training questions are used, and training stops as soon as a quarter of the sampled answers are
right, so most is left to be learned. Needs the model `smollm2` (docs/models.md); takes half a minute on an H200.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stalewise.errors import StalewiseError, TaskError
from stalewise.models import pick_device, resolve_model
from stalewise.models.loading import encode_prompts, load_model, load_tokenizer
from stalewise.store.atomic import commit_directory, make_directory, temporary_name
from stalewise.tasks import make_task

TASK, OPTIONS = "arithmetic-chat", {"largest": 99}
BATCH, RATE = 64, 3e-5
CHECK_EVERY = 2  # steps; accuracy rises from 0.25 to 0.75 within 20
CHECKED = 256  # questions, of those that training has seen
MOST_STEPS = 400
NEW_TOKENS = 48
IGNORED = -100  # label of tokens without a loss
SUM = re.compile(r"(\d+)\+(\d+)")


def worked_out(problem: str) -> str:
    """A sum worked out by tens and ones, easy enough for a small model.

    >>> worked_out("What is 37+48?")
    '30 + 40 = 70, 7 + 8 = 15, 70 + 15 = 85'
    """
    found = SUM.search(problem)
    if found is None:
        raise TaskError(f"{problem!r} is not a sum of two numbers: the warm start works out only those")
    left, right = int(found[1]), int(found[2])
    tens, ones = left // 10 * 10 + right // 10 * 10, left % 10 + right % 10
    steps = f"{left // 10 * 10} + {right // 10 * 10} = {tens}, {left % 10} + {right % 10} = {ones}"
    return f"{steps}, {tens} + {ones} = {left + right}"


def warm_start(directory: Path, *, model: str, target: float, steps: int = MOST_STEPS) -> dict[str, Any]:
    """Train until sampled accuracy on training questions reaches the target; the policy is in `directory` then."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    source, device = resolve_model(model), pick_device("auto")
    policy, tokenizer = load_model(source, device=device), load_tokenizer(source)
    task = make_task(TASK, seed=0, **OPTIONS)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    curve: list[tuple[int, float]] = []
    for step in range(steps + 1):
        if step % CHECK_EVERY == 0:
            curve.append((step, _sampled_accuracy(policy, tokenizer, task, device)))
            if curve[-1][1] >= target:
                break
        policy.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = policy(**_examples(tokenizer, task, step * BATCH, device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    else:
        raise TaskError(f"{steps} steps were not enough: {curve[-1][1]:.2f} of the sampled answers are right")
    make_directory(directory.parent)
    temporary = temporary_name(directory)
    policy.eval().save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    commit_directory(temporary, directory)
    return {"curve": curve, "seconds": round(time.perf_counter() - begun, 1)}


def _examples(tokenizer: Any, task: Any, first: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Questions with worked-out answers, padded on the right; only answers have labels."""
    prompts = task.prompts(first, BATCH)
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, prompt_ids in zip(prompts, encode_prompts(prompts, tokenizer), strict=True):
        answer = [*tokenizer(worked_out(prompt.text), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(([*prompt_ids, *answer], [IGNORED] * len(prompt_ids) + answer))
    longest = max(len(ids) for ids, _ in rows)

    def padded(part: Sequence[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in part], device=device)

    ids = padded([ids for ids, _ in rows], tokenizer.eos_token_id)
    mask = padded([[1] * len(ids) for ids, _ in rows], 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": padded([labels for _, labels in rows], IGNORED)}


@torch.no_grad()
def _sampled_accuracy(policy: Any, tokenizer: Any, task: Any, device: torch.device) -> float:
    """Share of right answers, one sample for each question."""
    policy.eval()
    prompts = task.prompts(0, CHECKED)
    prompt_ids = encode_prompts(prompts, tokenizer)
    longest, pad = max(map(len, prompt_ids)), tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompt_ids], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompt_ids], device=device)
    made = policy.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=pad,
    )
    texts = tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)
    return float(sum(reward.value == 1 for reward in task.verifier.score(prompts, texts)) / len(prompts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="smollm2", help="directory, GGUF file or smollm2")
    parser.add_argument("--target", type=float, default=0.25, help="share of right answers to stop at")
    arguments = parser.parse_args()
    if arguments.directory.exists():
        print(f"{arguments.directory} is there")
        return 0
    try:
        print(json.dumps(warm_start(arguments.directory, model=arguments.model, target=arguments.target)))
    except StalewiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
