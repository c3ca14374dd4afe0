"""GSM8K with a Python tool against one turn: the same model, prompts, updates and verifier, three seeds.

    python benchmarks/tool_gsm8k.py --train gsm8k_train.jsonl --test gsm8k_test.jsonl --model DIRECTORY
    python benchmarks/tool_gsm8k.py --smoke          # a tiny random model on a CPU: that everything works, no figures
    python benchmarks/tool_gsm8k.py --table          # show what was measured

A job is an arm (`tool`, `one_turn`) and a seed. Its figures go into one JSON when it has ended; what is there is not
done again. A job that was interrupted goes on where its run was. `--budget-s` begins no job after that time. Rows
are those of benchmarks/gsm8k.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "tool_gsm8k-h200.json"
ARMS = ("tool", "one_turn")
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
TOOL = {"environment": "python", "environment_options": {"max_turns": 4, "seconds": 2.0, "limit_s": 20.0}}
RANDOM_REWARD = "benchmarks.gsm8k_bench.rewards:random_reward"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def settings(arm: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """The config of one run."""
    from stalewise.config import parse_override, set_dotted

    options: dict[str, Any] = {"path": str(given.train), "evaluation_path": str(given.test), "chat": True}
    options |= {"system": SYSTEM, "verifier": "math"}
    if given.smoke:  # a random model is never right
        options |= {"verifier": "python", "verifier_options": {"function": RANDOM_REWARD, "workers": 1}}
    record: dict[str, Any] = {
        "name": f"{arm}-s{seed}",
        "runs": str(given.work),
        "seed": seed,
        "recipe": "none",
        "model": {"path": str(given.model), "device": given.device},
        "task": {"name": "jsonl", "options": options | (TOOL if arm == "tool" else {})},
        "schedule": {"kind": "staged", "updates": given.updates, "stages": 2},
        "batch": {"prompts": given.prompts, "group_size": given.group_size},
        "sampler": {"max_new_tokens": given.max_new_tokens},
        "objective": {"name": "mu_grpo"},
        "optimizer": {"learning_rate": given.learning_rate, "schedule": "cosine", "max_grad_norm": 1.0},
        "checkpoints": {"every": max(1, given.updates // 4), "keep": 1},
        "evaluation": {"every": given.updates, "prompts": given.test_prompts, "samples": given.test_samples},
    }
    for text in given.set:
        set_dotted(record, *parse_override(text))
    return record


def run_job(arm: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Run, or go on with, one job."""
    import stalewise
    from stalewise.store import batch_directories, open_batch

    start = time.time()
    config = stalewise.make_config(settings(arm, seed, given), source="benchmark")
    result = stalewise.run(config)
    stages: list[dict[str, float]] = []
    for batch in batch_directories(config.directory / "rollouts"):
        rollouts = list(open_batch(batch).iter_rollouts())
        calls = [rollout.reward_parts.get("calls", 0.0) for rollout in rollouts]
        stages.append(
            {
                "episodes": len(rollouts),
                "with_call": sum(number > 0 for number in calls) / len(rollouts),
                "call_errors": sum(rollout.reward_parts.get("call_errors", 0.0) for rollout in rollouts),
                "unscored": sum(bool(rollout.reward_error) for rollout in rollouts),
                "policy_tokens": sum(sum(rollout.mask) for rollout in rollouts) / len(rollouts),
            }
        )
    return {
        "arm": arm,
        "seed": seed,
        "before": result.evaluations[0]["accuracy"],
        "after": result.evaluations[-1]["accuracy"],
        "stages": stages,
        "seconds": result.seconds,
        "process_seconds": round(time.time() - start, 1),
        "config": {key: value for key, value in settings(arm, seed, given).items() if key not in ("runs", "model")},
    }


def table(jobs: Sequence[dict[str, Any]]) -> str:
    """Accuracy of each job, and the mean of each arm, in Markdown."""
    lines = ["| arm | seed | accuracy before | after | episodes with a call, by stage |", "|---" * 5 + "|"]
    for arm in ARMS:
        own = [job for job in jobs if job["arm"] == arm]
        for job in own:
            calls = ", ".join(f"{stage['with_call']:.1%}" for stage in job["stages"])
            lines.append(
                f"| {arm} | {job['seed']} | {job['before']['value']:.3f} | {job['after']['value']:.3f} | {calls} |"
            )
        if own:
            means = [statistics.mean(job[when]["value"] for job in own) for when in ("before", "after")]
            lines.append(f"| {arm} | mean of {len(own)} | {means[0]:.3f} | {means[1]:.3f} | |")
    return "\n".join(lines)


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """One token per character, with a chat template; the tests of episodes use it, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(256)} | {"<|im_end|>": 256, "<|im_start|>": 257}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="\0", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(directory: Path) -> None:
    """A random model with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=258, max_position_embeddings=2048, eos_token_id=256, pad_token_id=0, **sizes)
    ).save_pretrained(directory)
    chat_tokenizer().save_pretrained(directory)


def prepare_smoke(given: argparse.Namespace) -> None:
    """Sizes of seconds, with rows and a model made on the spot."""
    given.work.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(HERE.parent))
    given.model, given.device = given.work / "tiny", "cpu"
    if not (given.model / "config.json").is_file():
        tiny_model(given.model)
    for name, first in (("train", 0), ("test", 100)):
        path = given.work / f"{name}.jsonl"
        rows = [
            {"id": f"{name}-{i}", "problem": f"What is {i}+1?", "answer": str(i + 1)} for i in range(first, first + 16)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        setattr(given, name, path)
    sizes = {"updates": 2, "prompts": 2, "group_size": 2, "max_new_tokens": 24, "test_prompts": 2, "test_samples": 1}
    for key, value in (sizes | {"seeds": min(given.seeds, 1)}).items():
        setattr(given, key, value)


def write(path: Path, jobs: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"jobs": jobs}, indent=1) + "\n")
    os.replace(temporary, path)


def main(given: argparse.Namespace) -> None:
    begun = time.monotonic()
    jobs: list[dict[str, Any]] = json.loads(given.out.read_text())["jobs"] if given.out.is_file() else []
    if not given.table:
        if given.smoke:
            prepare_smoke(given)
        done = {(job["arm"], job["seed"]) for job in jobs}
        for arm, seed in ((arm, seed) for seed in range(given.seeds) for arm in given.arms):
            if (arm, seed) in done:
                continue
            if given.budget_s and time.monotonic() - begun > given.budget_s:
                print(f"left for another call: {arm} {seed}", flush=True)
                continue
            jobs.append(run_job(arm, seed, given))
            write(given.out, jobs)
            shutil.rmtree(given.work / f"{arm}-s{seed}")  # its checkpoints are gigabytes
    print(table(jobs) if jobs else "nothing was measured")


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--train", type=Path, default=Path("gsm8k_train.jsonl"))
    parser.add_argument("--test", type=Path, default=Path("gsm8k_test.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of a whole episode")
    parser.add_argument("--learning-rate", type=float, default=2e-6)
    parser.add_argument("--test-prompts", type=int, default=1319)
    parser.add_argument("--test-samples", type=int, default=1)
    parser.add_argument(
        "--arms", nargs="+", default=list(ARMS), choices=ARMS, help="two processes: one arm each, --out each"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the config")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget-s", type=float, default=0.0)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("tool_gsm8k-runs"), help="for run directories")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parsed())
