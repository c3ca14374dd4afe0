"""What CPU tests cannot see: the GPU paths against plain ones. Prints JSON; exit 1 where a check fails.

    python benchmarks/check_gpu.py [--model DIRECTORY] [--out FILE]

Without a model it makes one of SmolLM2's shape with random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from stalewise.config import RunConfig, make_config
from stalewise.generate.hf import HFSampler
from stalewise.generate.sampler import Request
from stalewise.learn.batching import micro_batches
from stalewise.learn.learner import Learner
from stalewise.learn.update_batch import make_update_batch
from stalewise.models import EMBEDDED
from stalewise.store import Rows
from stalewise.types import SamplerSettings

CUDA = torch.device("cuda")


def random_model(directory: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(str(EMBEDDED / "arithmetic")).save_pretrained(directory)
    return str(directory)


def made_up_rows(vocabulary: int, count: int = 64, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    prompt, response = rng.integers(20, 44, count), np.clip(rng.geometric(1 / 40, count), 4, 64)
    return Rows(
        rollout_id=np.arange(count),
        group=np.repeat(np.arange(count // 8), 8),
        reward=np.tile([1.0, 0.0], count // 2),
        truncated=response >= 64,
        version_first=np.zeros(count, dtype=np.int32),
        version_last=np.zeros(count, dtype=np.int32),
        prompt_ids=rng.integers(3, vocabulary, prompt.sum()).astype(np.int32),
        prompt_offsets=np.r_[0, prompt.cumsum()],
        response_ids=rng.integers(3, vocabulary, response.sum()).astype(np.int32),
        behaviour_logp=np.full(response.sum(), -float(np.log(vocabulary)), dtype=np.float32),
        response_offsets=np.r_[0, response.cumsum()],
    )


def settings(model: str, **learner: Any) -> RunConfig:
    precision = learner.pop("precision", "bfloat16")
    return make_config(
        {
            "model": {"path": model, "precision": precision},
            "learner": {"compile": "never"} | learner,
            "objective": {"name": "grpo"},
            "optimizer": {"learning_rate": 1e-6, "max_grad_norm": 1e9},
        }
    )


def gradient(config: RunConfig, model: str, rows: Rows) -> torch.Tensor:
    learner = Learner(config, Path(model))
    learner.update(rows)
    flat = torch.cat([p.grad.flatten().double().cpu() for p in learner.names if p.grad is not None])
    del learner
    torch.cuda.empty_cache()
    return flat


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def check_gradients(model: str, rows: Rows) -> dict[str, float]:
    """Distances from the float32 gradient, each relative to its norm."""
    exact = gradient(settings(model, precision="float32", tokens_per_micro_batch=100_000), model, rows)
    plain = gradient(settings(model, tokens_per_micro_batch=100_000), model, rows)
    return {
        "float32_split": relative(
            gradient(settings(model, precision="float32", tokens_per_micro_batch=1024), model, rows), exact
        ),
        "bfloat16": relative(plain, exact),
        "bfloat16_split": relative(gradient(settings(model, tokens_per_micro_batch=1024), model, rows), exact),
        "bfloat16_compiled_graphs": relative(
            gradient(settings(model, compile="always", tokens_per_micro_batch=100_000), model, rows), exact
        ),
        "bfloat16_compiled_graphs_split": relative(
            gradient(settings(model, compile="always", tokens_per_micro_batch=2048), model, rows), exact
        ),
    }


def check_log_probabilities(model: str, rows: Rows) -> dict[str, float]:
    """Mean and largest distance from float32 of ours and of transformers, both in bfloat16."""
    config = settings(model, tokens_per_micro_batch=100_000)
    learner = Learner(config, Path(model))
    batch, _ = make_update_batch(rows, config, learner.objective)
    assert batch is not None
    (part,) = micro_batches(batch.rows, learner._layout(), learner.device)
    with torch.no_grad():
        ours_BT = learner._forward(part)[0].cpu()
    reference = load(model, torch.float32)
    ours, theirs = [], []
    for place, row in enumerate(part.rows):
        ids = torch.from_numpy(np.r_[batch.rows.prompt(row), batch.rows.response(row)].astype(np.int64))[None].to(CUDA)
        start = len(batch.rows.prompt(row))
        exact, low = (_plain_logp(reference, ids, start, autocast).cpu() for autocast in (False, True))
        ours.append((ours_BT[place, : len(exact)] - exact).abs())
        theirs.append((low - exact).abs())
    mine, other = torch.cat(ours), torch.cat(theirs)
    return {
        "ours_mean": mine.mean().item(),
        "ours_max": mine.max().item(),
        "transformers_mean": other.mean().item(),
        "transformers_max": other.max().item(),
    }


@torch.no_grad()
def _plain_logp(model: Any, ids: torch.Tensor, start: int, autocast: bool) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids).logits[0, start - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, ids[0, start:, None]).squeeze(1)


def check_sampler(model: str, vocabulary: int, dtype: torch.dtype) -> dict[str, Any]:
    """Behaviour log-probabilities of the slots against plain passes over the same tokens; seeds."""
    sampler = HFSampler(SamplerSettings(), max_new_tokens=32, device=CUDA, dtype=dtype)
    sampler.load(Path(model))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, vocabulary, n).tolist() for n in rng.integers(3, 40, 24)]
    requests = [Request(prompt, 100 * i + j) for i, prompt in enumerate(prompts) for j in range(8)]
    first, second = sampler.sample(requests), sampler.sample(requests)
    exact, plain = (load(model, kind) for kind in (torch.float32, dtype))
    ours, theirs = [], []
    for request, response in zip(requests, first, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]], device=CUDA)
        expected, other = (_plain_logp(x, ids, len(request.prompt_ids), False).cpu() for x in (exact, plain))
        ours.append((expected - torch.tensor(response.logp)).abs())
        theirs.append((expected - other).abs())
    same = sum(a.token_ids == b.token_ids for a, b in zip(first, second, strict=True)) / len(first)
    mine, others = torch.cat(ours), torch.cat(theirs)
    return {
        "problem": sampler.slots_problem,
        "ours_mean": mine.mean().item(),
        "ours_max": mine.max().item(),
        "transformers_mean": others.mean().item(),
        "same_again": same,
    }


def load(model: str, dtype: torch.dtype) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return loaded.to(CUDA).eval()


def count_waits(model: str, rows: Rows) -> int:
    """Operations of one enqueued update that wait for the device."""
    learner = Learner(settings(model, tokens_per_micro_batch=2048), Path(model))
    learner.update(rows)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pending = learner.enqueue(rows)
    torch.cuda.set_sync_debug_mode("default")
    pending.metrics()
    return sum("synchronizing" in str(warning.message) for warning in caught)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or random_model(Path(scratch))
        vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
        rows = made_up_rows(vocabulary)
        found: dict[str, Any] = {
            "gradients": check_gradients(model, rows),
            "log_probabilities": check_log_probabilities(model, rows),
            "sampler_float32": check_sampler(model, vocabulary, torch.float32),
            "sampler_bfloat16": check_sampler(model, vocabulary, torch.bfloat16),
            "waits": count_waits(model, rows),
        }
    gradients, logp, low = found["gradients"], found["log_probabilities"], found["sampler_bfloat16"]
    found["passed"] = {
        "float32 gradients do not depend on the split": gradients["float32_split"] < 1e-4,
        "bfloat16 gradients do not depend on split, compiler and graphs": all(
            gradients[name] < 1.1 * gradients["bfloat16"] for name in gradients if name.startswith("bfloat16_")
        ),
        "bfloat16 log-probabilities are no worse than those of transformers": logp["ours_mean"]
        < 1.1 * logp["transformers_mean"],
        "slots give the log-probabilities of a plain pass": found["sampler_float32"]["ours_max"] < 2e-3,
        "slots in bfloat16 are no worse than transformers": low["ours_mean"] < 1.1 * low["transformers_mean"],
        "the same seeds give the same responses": low["same_again"] > 0.99,
        "an update is enqueued without waiting": found["waits"] == 0,
    }
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    return 0 if all(found["passed"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
