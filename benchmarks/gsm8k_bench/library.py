"""The one place that knows stalewise's inner modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .settings import Settings, task_options


def math_judge() -> Any:
    """What the verifier `math` asks in its workers."""
    from stalewise.tasks.verifiers.math import load_judge

    return load_judge()


def task_of(settings: Settings, seed: int) -> Any:
    from stalewise.tasks import make_task

    return make_task("jsonl", seed=seed, **task_options(settings))


def model_directory(name: str) -> Path:
    """Where a model lies that is named as in `model.path`."""
    from stalewise.models import resolve_model

    return Path(resolve_model(name))


def tokenizer_of(directory: Path) -> Any:
    from stalewise.models.loading import load_tokenizer

    return load_tokenizer(str(directory))


def encoded(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """The token ids that stalewise gives the policy."""
    from stalewise.models.loading import encode_prompts

    return encode_prompts(list(prompts), tokenizer)


class Evaluator:
    """Accuracy of saved policies, whoever trained them: the same questions, sampler and random numbers.

    Greedy is sampling from the one most probable token.
    """

    def __init__(self, settings: Settings, *, greedy: bool = False, changes: Mapping[str, Any] | None = None) -> None:
        import stalewise
        from stalewise.rollout.factory import make_sampler

        sampler: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "rollouts_per_shard": settings.rollouts_per_shard,
        }
        record = {
            "model": {"path": settings.model, "device": settings.device, "threads": settings.threads},
            "task": {"name": "jsonl", "options": task_options(settings)},
            "batch": {"prompts": settings.prompts, "group_size": settings.group_size},
            "sampler": {**sampler, **({"top_k": 1} if greedy else {})},
        }
        self.settings, self.samples = settings, 1 if greedy else settings.test_samples
        self.sampler = make_sampler(stalewise.make_config(record, source="benchmark"))
        self.task = task_of(settings, 0)

    def __call__(self, checkpoint: Path, version: int) -> dict[str, Any]:
        """What is written to eval.jsonl, too."""
        from stalewise.orchestrator.evaluation import evaluate_checkpoint

        result = evaluate_checkpoint(
            checkpoint,
            version=version,
            task=self.task,
            sampler=self.sampler,
            prompts=self.settings.test_prompts,
            samples=self.samples,
            rows_at_once=self.settings.rollouts_per_shard,
        )
        return result.record()

    def close(self) -> None:
        self.sampler.close()
        self.task.verifier.close()


def newest_checkpoint(run: Path) -> tuple[Path, int]:
    """Where a run's last policy lies, and its version."""
    from stalewise.store.checkpoints import checkpoint_directory, versions

    version = versions(run)[-1]
    return checkpoint_directory(run, version), version
