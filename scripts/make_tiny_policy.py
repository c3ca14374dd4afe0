"""Make the embedded policy of a built-in task: a small Llama with one token per character, as a Hugging Face directory.

    python scripts/make_tiny_policy.py arithmetic --output src/stalewise/policies/arithmetic
    python scripts/make_tiny_policy.py arithmetic-steps --output src/stalewise/policies/arithmetic-steps

Supervised training on responses of which a share is spoiled: the policy learns to be right where it is surest
(greedy) and to be wrong as often as its data (sampled). Reinforcement learning then has something to sharpen. With
these defaults it takes two to five minutes on a GPU; on a CPU, take fewer steps.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stalewise.tasks.arithmetic import CHARACTERS, Addition, Steps

TASKS = {"arithmetic": Addition, "arithmetic-steps": Steps}
IGNORED = -100  # label of tokens without a loss


def make_tokenizer() -> Any:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: 3 + i for i, c in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, *, layers: int, width: int, context: int) -> Any:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_pool(
    task: Addition | Steps, tokenizer: Any, *, examples: int, spoiled: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Token ids and labels [examples, longest], padded on the right; only response tokens have a label."""
    rng = random.Random(seed)
    ids, labels = [], []
    for prompt in task.prompts(0, examples):
        wrong = rng.random() < spoiled
        response = task.spoiled_solution(prompt, rng) if wrong else task.solution(prompt)
        prompt_ids, response_ids = tokenizer([prompt.text, response])["input_ids"]
        ids.append(prompt_ids + response_ids + [tokenizer.eos_token_id])
        labels.append([IGNORED] * len(prompt_ids) + response_ids + [tokenizer.eos_token_id])

    def padded(rows: list[list[int]], value: int) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    return padded(ids, tokenizer.pad_token_id), padded(labels, IGNORED)


def train(model: Any, ids: Tensor, labels: Tensor, *, steps: int, batch: int, peak_lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=steps, pct_start=0.05)
    start = time.time()
    for step in range(steps):
        rows = torch.randint(len(ids), (batch,), device=ids.device)
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 0:
            print(f"step {step:6d}  loss {loss.item():.4f}  {time.time() - start:6.1f} s", flush=True)


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, task: Addition | Steps, *, sample: bool, count: int) -> float:
    prompts = task.evaluation_prompts(count)
    encoded = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True, return_token_type_ids=False)
    encoded = encoded.to(model.device)
    width = encoded["input_ids"].shape[1]
    output = model.generate(**encoded, do_sample=sample, top_k=0, max_new_tokens=64)
    responses = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return sum(reward.value for reward in task.verifier.score(prompts, responses)) / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--spoiled", type=float, default=0.6)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    task = TASKS[arguments.task](seed=arguments.seed)
    tokenizer = make_tokenizer()
    ids, labels = make_pool(
        task, tokenizer, examples=arguments.examples, spoiled=arguments.spoiled, seed=arguments.seed
    )
    model = make_model(tokenizer, layers=arguments.layers, width=arguments.width, context=128).to(arguments.device)
    train(
        model,
        ids.to(arguments.device),
        labels.to(arguments.device),
        steps=arguments.steps,
        batch=arguments.batch,
        peak_lr=arguments.lr,
    )
    model.eval()
    made = {
        "task": arguments.task,
        "parameters": model.num_parameters(),
        "greedy_accuracy": accuracy(model, tokenizer, task, sample=False, count=512),
        "sampled_accuracy": accuracy(model, tokenizer, task, sample=True, count=512),
        "recipe": {k: v for k, v in vars(arguments).items() if k not in ("output", "task")},
    }
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    (arguments.output / "made.json").write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
