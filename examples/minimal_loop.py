"""The whole method in one file: sample a stage, store it, learn from it, evaluate, repeat.

    python examples/minimal_loop.py [DIRECTORY]

This is what `stalewise train` does, with the library's own parts and without its orchestrator: no resume, no collapse
guard, no workers, no report. It trains the embedded policy (0.4 M parameters) on one-digit sums with µ-GRPO, in 2
stages of 48 updates. About a minute on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stalewise.config import make_config
from stalewise.models import resolve_model
from stalewise.orchestrator.evaluation import evaluate_checkpoint
from stalewise.rollout.factory import batch_plan, make_sampler
from stalewise.rollout.generate import generate_batch
from stalewise.staleness.schedule import staged
from stalewise.store import batch_directory, open_batch, rollouts_of_updates
from stalewise.store.checkpoints import write_checkpoint
from stalewise.tasks import make_task
from stalewise.trainer.trainer import Trainer


def train(directory: Path, *, updates: int = 96, stages: int = 2, prompts: int = 128) -> list[float]:
    """Train in `stages` stages and return the held-out accuracy before the first and after each."""
    # One config describes everything. `learning_rate` is η; µ, the updates on one stage, is updates / stages.
    config = make_config(
        {
            "task": {"name": "arithmetic"},
            "batch": {"prompts": 8, "group_size": 4},  # one update: 8 prompts × 4 responses
            "sampler": {"max_new_tokens": 8},
            "objective": {"name": "mu_grpo"},
            "optimizer": {"learning_rate": 6e-4, "schedule": "cosine", "warmup_updates": 8},
            "schedule": {"kind": "staged", "updates": updates, "stages": stages},
        }
    )
    schedule = staged(updates, stages)  # which update learns from which stage, and how old its rollouts are
    task = make_task("arithmetic", seed=config.seed)  # prompts, and the verifier that scores responses
    sampler = make_sampler(config)  # the embedded engine
    checkpoint = Path(resolve_model("arithmetic"))  # an ordinary Hugging Face directory
    trainer = Trainer(config, checkpoint)  # float32 weights, AdamW, the objective

    def accuracy(version: int) -> float:
        found = evaluate_checkpoint(checkpoint, version=version, task=task, sampler=sampler, prompts=prompts, samples=4)
        return found.accuracy.value

    accuracies = [accuracy(0)]
    print(f"before: accuracy {accuracies[0]:.3f}")
    for stage in range(stages):
        # 1. Generate the whole stage with the newest policy. Each response is stored with the log-probabilities of its
        #    tokens under that policy: the behaviour policy.
        plan = batch_plan(config, schedule, stage)
        made = generate_batch(plan, checkpoint=checkpoint, rollouts=directory / "rollouts", task=task, sampler=sampler)
        print(f"stage {stage}: {made.rows} rollouts, {made.tokens} tokens")

        # 2. Learn from it, each rollout once. The data is 0 updates old at first and µ − 1 at the end. The objective
        #    sees how far the policy has moved: the ratio of its probability of each token to the stored one.
        stored = batch_directory(directory / "rollouts", version=plan.version, generation_batch=stage)
        batch = open_batch(stored)
        for rollout_ids in rollouts_of_updates(batch, config.batch.prompts):
            metrics = trainer.update(batch.take(rollout_ids))
        print(
            f"stage {stage}: {trainer.version} updates, reward {metrics['reward']:.3f}, "
            f"effective sample size {metrics['ess']:.3f} at age {metrics['age_max']:.0f}"
        )

        # 3. Commit the next policy and evaluate it on held-out prompts.
        checkpoint = write_checkpoint(directory, trainer.version, save=trainer.save, state=trainer.state())
        accuracies.append(accuracy(trainer.version))
        print(f"stage {stage}: accuracy {accuracies[-1]:.3f}")
    sampler.close()
    task.verifier.close()
    return accuracies


if __name__ == "__main__":
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/minimal_loop"))
