"""Compares a policy, as a run decodes and trains it, with plain forward passes, before anything is generated.

A cache that a model ignores, padding that it attends to, or a factor that follows the longest position of a batch makes
log-probabilities wrong without an error. So a few tokens are decoded after prompts of different lengths, up to the
longest that the run allows, and the trainer computes the same tokens. At the start of a stage the first update compares
sampler and trainer once more, on all of its tokens.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stalewise.config import RunConfig
from stalewise.config.sections import ModelSection
from stalewise.errors import ModelError, StalewiseError
from stalewise.models import pick_device, pick_precision
from stalewise.models.loading import (
    context_length,
    encode_prompts,
    load_model,
    load_model_config,
    load_tokenizer,
    pick_weights_dtype,
)
from stalewise.models.plain_forward import Agreement, compare, failure, layer_count, plain_logits, tolerance
from stalewise.planning.memory import offloads
from stalewise.rollout.engines.embedded import HFSampler, QuantizableWeights
from stalewise.rollout.mixed_policy import MixedPolicySampler
from stalewise.rollout.sampler import Request, Sampler
from stalewise.store import RolloutColumns
from stalewise.tasks import Task
from stalewise.trainer.micro_batch import micro_batches
from stalewise.trainer.trainer import Trainer

NEW_TOKENS = 6  # decoded after each prompt
SHORT = 3  # tokens of the shortest prompt
PROMPTS = 256  # training prompts among which the longest is found
# Limits of mean and largest difference of sampler and trainer, over all tokens of an update at age 0.
FLOAT32_LIMITS, HALF_LIMITS = (0.01, 0.1), (0.2, math.inf)
Values = list[np.ndarray]  # log-probabilities of each response
Log = Callable[[str], object]


def check_model(
    config: RunConfig, checkpoint: Path, task: Task, sampler: Sampler | None, log: Log, *, learns: bool = True
) -> str:
    """Refuse a policy whose decoding or training differs from plain forward passes; returns the findings as text.

    `model.check` turns the error into a warning, or the check off.
    """
    if config.model.check == "off":
        return "not checked: model.check is off"
    found = agreements(config, checkpoint, task, sampler, learns=learns)
    if wrong := [agreement for agreement in found if not agreement.is_right]:
        problem = _problem(config, checkpoint, wrong[0])
        if wrong[0].error:  # the run would raise it too
            raise ModelError(problem)
        report_problem(config.model.check, problem, log)
    return "; ".join(map(str, found)) or "nothing is decoded or trained in this process"


def report_problem(check: str, problem: str, log: Log) -> None:
    """Raise the problem as a ModelError, or log it, as `model.check` says."""
    if check == "refuse":
        raise ModelError(f'{problem}; model.check = "warn" goes on regardless')
    log(f"warning: {problem}")


def agreements(
    config: RunConfig, checkpoint: Path, task: Task, sampler: Sampler | None, *, learns: bool = True
) -> list[Agreement]:
    """How far each way of running the policy that the run uses is from plain forward passes."""
    requests = trial_requests(config, checkpoint, task)
    engine = sampler.own if isinstance(sampler, MixedPolicySampler) else sampler
    responses, values, name = _random_responses(requests), list[np.ndarray](), ""
    if isinstance(engine, HFSampler):
        engine.load(checkpoint)
        name = "decoding with a growing cache" if engine.slots_problem else "decoding in slots"
        try:
            decoded = engine.trial(requests, NEW_TOKENS)
        except (StalewiseError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the architecture
            return [failure(name, error)]
        responses, values = [response.token_ids for response in decoded], [response.logp for response in decoded]
        if learns and offloads(config, str(checkpoint)):
            engine.sleep(weights=True)
    plain = _plain_model(config, checkpoint, engine)
    expected, spread = _plain_values(plain, requests, responses)
    allowed = tolerance(_precision(config.model), layer_count(plain), spread)
    found = []
    if values:
        with_weights = expected
        if config.sampler.weights != "exact":
            QuantizableWeights(plain).use(config.sampler.weights)
            with_weights, _ = _plain_values(plain, requests, responses)
        found.append(compare(name, values, with_weights, allowed))
    del plain
    if learns:
        found.append(_trainer_agreement(config, checkpoint, _rows(requests, responses), expected, allowed))
        _free_memory()
    return found


def trial_requests(config: RunConfig, checkpoint: Path, task: Task) -> list[Request]:
    """Prompts of the task's tokens in three lengths, one of them twice; the longest ends near the run's limit."""
    count = PROMPTS if task.size is None else min(PROMPTS, task.size)
    prompts = [*(task.prompts(0, count) if count else ()), *task.evaluation_prompts(config.evaluation.prompts)]
    encoded = encode_prompts(prompts, load_tokenizer(str(checkpoint)))
    longest = max(map(len, encoded)) + config.sampler.max_new_tokens
    limit = context_length(load_model_config(str(checkpoint)))
    longest = max(min(longest, limit or longest) - NEW_TOKENS, 1)
    tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
    lengths = (min(SHORT, longest), longest, -(-longest // 2), min(SHORT, longest))
    made = [np.resize(np.roll(tokens, -index), length).tolist() for index, length in enumerate(lengths)]
    made[-1] = made[0]  # one prompt with two responses
    return [Request(ids, seed) for seed, ids in enumerate(made)]


def _random_responses(requests: Sequence[Request]) -> list[np.ndarray]:
    tokens = np.concatenate([np.asarray(request.prompt_ids, dtype=np.int32) for request in requests])
    return list(np.random.default_rng(0).choice(tokens, (len(requests), NEW_TOKENS)))


def _precision(model: ModelSection) -> torch.dtype:
    return pick_precision(model.precision, pick_device(model.device))


def _plain_model(config: RunConfig, checkpoint: Path, engine: Sampler | None) -> Any:
    """The policy without our kernels: on a CPU the sampler's own, which has none."""
    device, dtype = pick_device(config.model.device), pick_weights_dtype(config.model.precision)
    if isinstance(engine, HFSampler) and device.type == "cpu" and config.sampler.weights == "exact":
        return engine.model
    return load_model(str(checkpoint), device=device, dtype=dtype)


def _plain_values(model: Any, requests: Sequence[Request], responses: Sequence[np.ndarray]) -> tuple[Values, float]:
    """Log-probabilities by plain forward passes, and the standard deviation of logits, averaged over tokens."""
    values, spreads = [], []
    for request, response in zip(requests, responses, strict=True):
        logits_NV = plain_logits(model, request.prompt_ids, response.tolist())
        chosen_N1 = torch.from_numpy(response.astype(np.int64)).to(logits_NV.device).unsqueeze(1)
        values.append(logits_NV.log_softmax(dim=1).gather(1, chosen_N1).squeeze(1).cpu().numpy())
        spreads.append(float(logits_NV.std(dim=1).mean()))
    return values, max(spreads)


def _rows(requests: Sequence[Request], responses: Sequence[np.ndarray]) -> RolloutColumns:
    count, tokens = len(requests), sum(map(len, responses))
    return RolloutColumns(
        rollout_id=np.arange(count),
        group=np.arange(count),
        reward=np.zeros(count),
        truncated=np.zeros(count, dtype=np.bool_),
        version_first=np.zeros(count, dtype=np.int32),
        version_last=np.zeros(count, dtype=np.int32),
        prompt_ids=np.concatenate([np.asarray(request.prompt_ids, dtype=np.int32) for request in requests]),
        prompt_offsets=np.cumsum([0, *(len(request.prompt_ids) for request in requests)]),
        response_ids=np.concatenate(responses).astype(np.int32),
        behaviour_logp=np.zeros(tokens, dtype=np.float32),
        response_offsets=np.cumsum([0, *map(len, responses)]),
    )


def _trainer_agreement(
    config: RunConfig, checkpoint: Path, rows: RolloutColumns, expected: Values, allowed: float
) -> Agreement:
    """The trainer's log-probabilities of these rows, forward and backward, in micro-batches as in the run."""
    name = "learning"
    values: Values = [np.empty(0)] * len(rows)
    objective = config.objective.model_copy(update={"policy_temperature": 1.0})  # as in a plain forward pass
    config = config.model_copy(update={"objective": objective})
    try:
        trainer = Trainer(config, checkpoint)
        execution = trainer.execution
        name = "learning from packed rows" if execution.packed else "learning from padded rows"
        name += " with gradient checkpointing" if config.learner.gradient_checkpointing else ""
        layout = execution.layout(trainer.token_budget, trainer.tokenizer.pad_token_id)
        for part in micro_batches(rows, layout, trainer.device):
            logp_BT, _ = execution.forward(part)
            (logp_BT * part.mask_BT).sum().backward()
            for row, logp_T in zip(part.rows, logp_BT.detach().float().cpu().numpy(), strict=True):
                values[row] = logp_T[: rows.response_lengths[row]]
        gradients = [weight.grad for weight in trainer.names if weight.grad is not None]
        if not gradients or not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return Agreement(name, math.nan, math.nan, allowed, "its gradient is empty or not finite")
    except (StalewiseError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of the architecture
        return failure(name, error)
    return compare(name, values, expected, allowed)


def _free_memory() -> None:
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _problem(config: RunConfig, checkpoint: Path, wrong: Agreement) -> str:
    """What is wrong, by how much, and what to do."""
    model = load_model_config(str(checkpoint))
    kind = (getattr(model, "architectures", None) or [type(model).__name__])[0]
    if wrong.error:
        problem = f"{kind} cannot be used: {wrong}"
    else:
        problem = (
            f"{kind} would have wrong log-probabilities: {wrong.what} differs from a plain forward pass by up "
            f"to {wrong.largest:.2g} nats, where rounding explains {wrong.tolerance:.1g}"
        )
    rope = getattr(model.get_text_config(), "rope_parameters", None) or {}
    changes_at = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    if changes_at:
        return (
            f"{problem}: its rotary factors depend on whether a batch has positions beyond {changes_at}; shorten "
            "prompts or lower sampler.max_new_tokens until both fit"
        )
    if config.learner.gradient_checkpointing and wrong.what.startswith("learning"):
        return f"{problem}: set learner.gradient_checkpointing = false, or choose another model"
    return f"{problem}: choose another model"


def stage_problem(config: RunConfig, metrics: Mapping[str, float]) -> str:
    """Why the trainer cannot be the policy that sampled an update's rollouts at age 0, or an empty string.

    Settings of the sampler that change its distribution are a difference that was asked for.
    """
    sampler = config.sampler
    is_plain = (sampler.top_p, sampler.top_k, sampler.weights) == (1.0, 0, "exact")
    is_plain = is_plain and sampler.temperature == config.objective.policy_temperature
    mean, largest = metrics.get("mismatch_mean", math.nan), metrics.get("mismatch_max", math.nan)
    if config.model.check == "off" or sampler.foreign.share or not is_plain or math.isnan(mean):
        return ""
    exact = _precision(config.model) is torch.float32 and (
        sampler.engine != "server" or sampler.server.precision == "float32"
    )
    most_mean, most = FLOAT32_LIMITS if exact else HALF_LIMITS
    if mean <= most_mean and largest <= most:
        return ""
    return (
        f"the trainer's log-probabilities of fresh rollouts differ from those of the engine {sampler.engine} by "
        f"{mean:.2g} nats on average and {largest:.2g} at most, where rounding explains {most_mean:g}: one of the two "
        "is wrong for this model, so nothing was learned from this stage; choose another model or engine"
    )
