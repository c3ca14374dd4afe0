"""Two environments that the package `verifiers` ships, learned by the embedded policy on a CPU.

    pip install 'stalewise[verifiers,gym]' gymnasium
    python -m experiments.lab.verifiers_environments --output FILE

`sums` is `ReasoningGymEnv`: one turn, sums of reasoning-gym, scored by its own rubric. `lake` is `GymEnv`: gymnasium's
Frozen Lake, six fields with one hole and without slipping, a move per turn, scored by the game's reward. Their data,
rollouts, stop conditions and rubrics are those of the package. The embedded policy knows digits, "+" and "=" alone, so
its chat template shows it the sum of a question. It ends after one answer, so for the lake it is shown the form of a
game first: random moves, in 60 supervised steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from stalewise import run
from stalewise.config import RunConfig, make_config
from stalewise.models import EMBEDDED
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.store import batch_directories, open_batch

TEMPLATE = (
    "{% for m in messages if m['role'] != 'system' %}"
    "{% if m['content'].startswith('Calculate ') %}{{ m['content'][10:-1] | replace(' ', '') + '=' }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "operators": ["+"]}
PLAIN = {"allow_parentheses": False, "allow_negation": False}
NAMES = ("sums", "lake")
LAKE = {"desc": ["SFF", "FHG"], "is_slippery": False}  # S: start, H: a hole, G: worth 1
MOVES = 8  # of a game, at most
IGNORED = -100  # label of tokens without a loss


def load_environment(name: str, training: int = 1000, held_out: int = 256) -> Any:
    """What `verifiers.load_environment("experiments.lab.verifiers_environments", name=…)` returns."""
    import verifiers as vf  # pyright: ignore[reportMissingImports]

    if name == "sums":
        from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv  # pyright: ignore[reportMissingImports]

        sums: dict[str, Any] = {"name": "basic_arithmetic", "weight": 1.0, "config": TERMS | PLAIN}
        sizes = {"num_train_examples": training, "num_eval_examples": held_out}
        return ReasoningGymEnv([sums], system_prompt="", parser=vf.Parser(), **sizes)
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv  # pyright: ignore[reportMissingImports]
    from verifiers.envs.experimental.gym_env import GymEnv  # pyright: ignore[reportMissingImports]

    return GymEnv(
        FrozenLakeEnv,
        env_kwargs=LAKE,
        action_parser="0123".index,
        obs_to_text=lambda field: f"{field}=",
        num_train_episodes=training,
        num_eval_episodes=held_out,
        max_episode_steps=MOVES,
    )


def write_policy(directory: Path, *, moves: bool = False, seed: int = 0) -> Path:
    """A copy of the embedded policy with the chat template; `moves`: it was shown the form of a game."""
    source = str(EMBEDDED / "arithmetic")
    model, tokenizer = load_model(source, device=torch.device("cpu")), load_tokenizer(source)
    if moves:
        torch.manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
        for _ in range(60):
            ids = torch.tensor([random_game(tokenizer) for _ in range(32)])
            is_move = torch.arange(ids.shape[1]) % 4 >= 2  # a field, "=", a move, the end of the turn
            loss = model(input_ids=ids, labels=ids.where(is_move, IGNORED)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval().save_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def random_game(tokenizer: Any) -> list[int]:
    """Token ids of fields and moves, all at random."""
    ids: list[int] = []
    for field, move in zip(torch.randint(6, (MOVES,)).tolist(), torch.randint(4, (MOVES,)).tolist(), strict=True):
        ids += [*tokenizer(f"{field}={move}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return ids


def settings(name: str, runs: Path, policy: Path, *, updates: int = 32, prompts: int = 16, seed: int = 0) -> RunConfig:
    """µ-GRPO in two stages; in four for the lake, where rewards are rare at first."""
    made = {"env": __spec__.name, "arguments": {"name": name}}
    options = {**made, "environment": "verifiers", "environment_options": {**made, "max_turns": 12}}
    is_sums = name == "sums"
    return make_config(
        {
            "name": f"{name}-{seed}",
            "runs": str(runs),
            "seed": seed,
            "task": {"name": "verifiers", "options": options},
            "model": {"path": str(policy), "device": "cpu"},
            "sampler": {"max_new_tokens": 8 if is_sums else 120},
            "batch": {"prompts": prompts if is_sums else prompts // 2, "group_size": 8},
            "schedule": {"updates": updates, "stages": 2 if is_sums else 4},
            "optimizer": {"learning_rate": 5e-4 if is_sums else 1e-3, "schedule": "cosine"},
            "evaluation": {"prompts": 256 if is_sums else 64, "samples": 4},
        }
    )


def learn(config: RunConfig) -> dict[str, Any]:
    """Train, and what came of it: held-out reward before and after, and what the episodes of each stage were."""
    result = run(config)
    stages: list[dict[str, float]] = []
    for path in batch_directories(config.directory / "rollouts"):
        rollouts = list(open_batch(path).iter_rollouts())
        rewards = [one.reward for one in rollouts if not one.reward_error]
        stages.append(
            {
                "episodes": len(rollouts),
                "without_reward": len(rollouts) - len(rewards),
                "reward": round(sum(rewards) / len(rewards), 4),
                "turns": round(sum(max(1, (len(one.segments) + 1) // 2) for one in rollouts) / len(rollouts), 3),
            }
        )
    return {
        "name": config.name,
        "updates": result.updates,
        "seconds": round(sum(result.seconds.values()), 1),
        "before": result.evaluations[0]["accuracy"],
        "after": result.evaluations[-1]["accuracy"],
        "stages": stages,
    }


def main() -> None:
    """Train in both, print and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("verifiers_environments.json"))
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--updates", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.only:
            policy = write_policy(Path(scratch) / f"policy-{name}", moves=name == "lake", seed=given.seed)
            config = settings(name, Path(scratch) / "runs", policy, updates=given.updates, seed=given.seed)
            results.append(learn(config))
            print(json.dumps(results[-1]), flush=True)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({"runs": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
