"""The workers: what a rollout or a token costs in the store, in the learner and in the sampler, at one size."""

from __future__ import annotations

import itertools
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from versus.clock import model_shape, set_up, synchronised
from versus.figures import ModelShape, training_flops
from versus.ours import learn, tokens_of

from stalewise.config import RunConfig, make_config
from stalewise.models import resolve_model
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.sampler import Request
from stalewise.rollout.token_sampling import rollout_seed
from stalewise.store import (
    Batch,
    RolloutColumns,
    batch_directory,
    commit_batch,
    open_batch,
    split_into_updates,
    write_shard,
)
from stalewise.store.columns import concatenate
from stalewise.trainer.trainer import Trainer
from stalewise.types import FinishReason, Rollout, SamplerSettings

VOCABULARY = 32
CONTEXT = 8192
PROMPT = 8  # tokens
SHORT = 8  # response tokens where rollouts are counted


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurements."""

    device: str = "cpu"
    model: str = "tiny"
    threads: int = 1
    group_size: int = 8
    rollouts_per_update: int = 256
    rollouts_per_shard: int = 2048
    store_tokens: int = 1 << 20
    update_tokens: int = 1 << 15
    timed_updates: int = 3
    sampler_rows: int = 64


# ---------------------------------------------------------------- a policy that never ends a response


def policy(settings: Settings, work: Path) -> Path:
    """A Hugging Face directory with a context of 8192 tokens whose responses reach any length that is asked for."""
    directory = work / "policy"
    if directory.exists():
        return directory
    temporary = work / "policy.new"
    shutil.rmtree(temporary, ignore_errors=True)
    model, tokenizer = tiny() if settings.model == "tiny" else endless(resolve_model(settings.model))
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(directory)
    return directory


def tiny() -> tuple[Any, Any]:
    """A random Llama; the token that ends a response lies beyond its vocabulary, so it is never drawn."""
    words = {f"t{i}": i for i in range(VOCABULARY)} | {"<end>": VOCABULARY}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="<end>", unk_token="t0")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config), wrapped


def endless(path: str) -> tuple[Any, Any]:
    """A pretrained model that ends its responses with a special token which it practically never draws."""
    model, tokenizer = load_model(path, device=torch.device("cpu")), load_tokenizer(path)
    usual = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token}
    rare = [token for token in tokenizer.all_special_tokens if token not in usual and "im_" not in token]
    tokenizer.eos_token = rare[-1] if rare else tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def run_config(settings: Settings, work: Path, *, max_new_tokens: int, updates: int = 1024) -> RunConfig:
    return make_config(
        {
            "name": "scaling",
            "runs": str(work),
            "model": {"path": str(policy(settings, work)), "device": settings.device, "threads": settings.threads},
            "schedule": {"kind": "staged", "updates": updates, "stages": 1},
            "batch": {"prompts": settings.rollouts_per_update // settings.group_size},
            "sampler": {"max_new_tokens": max_new_tokens, "rollouts_per_shard": settings.rollouts_per_shard},
            "optimizer": {"learning_rate": 1e-8},  # the cost is measured, not the policy
        }
    )


# ---------------------------------------------------------------- store


def made_up(settings: Settings, count: int, length: int, first: int = 0) -> Iterator[Rollout]:
    """Rollouts of random tokens; each second one is right."""
    rng = np.random.default_rng(first)
    sampler = SamplerSettings()
    for rollout_id in range(first, first + count):
        response = rng.integers(3, 18, size=length)
        yield Rollout(
            rollout_id=rollout_id,
            prompt_id=f"made/{rollout_id // settings.group_size}",
            group=rollout_id // settings.group_size,
            prompt_ids=tuple(range(3, 3 + PROMPT)),
            response_ids=tuple(response.tolist()),
            behaviour_logp=(-3.0,) * length,
            reward=float(rollout_id % 2),
            reward_parts={"correct": float(rollout_id % 2)},
            reward_error="",
            finish_reason=FinishReason.LENGTH,
            version_first=0,
            version_last=0,
            sampler=sampler,
            seed=rollout_id,
            text="x" * length,
        )


def write(settings: Settings, directory: Path, count: int, length: int) -> float:
    """Seconds to write and commit a generation batch; making the rollouts up does not count."""
    seconds = 0.0
    # A shard holds as many tokens as 2048 short rollouts at most a hundred times over: memory stays small.
    per_shard = max(settings.group_size, min(settings.rollouts_per_shard, settings.store_tokens // length))
    shards = -(-count // per_shard)
    for shard in range(shards):
        first = shard * per_shard
        rollouts = list(made_up(settings, min(per_shard, count - first), length, first))
        start = synchronised()
        write_shard(directory, shard, rollouts)
        seconds += synchronised() - start
    start = synchronised()
    commit_batch(directory, shards=shards, task="made")
    return seconds + synchronised() - start


def store(settings: Settings, work: Path, count: int, length: int, keep: bool) -> dict[str, Any]:
    """Write, open with checksums, read update by update as the learner does, and stream; the best of a few times."""
    set_up("cpu", settings.threads)
    _warm_up(settings, work / "made" / "warm-up")
    root = work / "made" / f"{count}x{length}"
    directory = batch_directory(root, version=0, generation_batch=0)
    times: list[dict[str, float]] = []
    for _ in range(3):
        shutil.rmtree(root, ignore_errors=True)
        times.append({"write": write(settings, directory, count, length), **_read(settings, directory)})
    tokens = count * (PROMPT + length)
    size = sum(path.stat().st_size for path in directory.iterdir())
    if not keep:
        shutil.rmtree(root)
    unit, units = ("rollout", count) if length == SHORT else ("token", tokens)
    best = {name: min(found[name] for found in times) for name in times[0]}
    return {
        "rollouts": count,
        "tokens": tokens,
        "bytes": size,
        "times": times,
        "seconds": sum(best.values()),
        "costs": {f"{name}, ns per {unit}": 1e9 * value / units for name, value in best.items()},
    }


def _read(settings: Settings, directory: Path) -> dict[str, float]:
    seconds: dict[str, float] = {}
    start = synchronised()
    batch = open_batch(directory)
    dealt = ids_of_updates(settings, batch)
    seconds["open and deal"] = synchronised() - start
    start = synchronised()
    for ids in dealt:
        batch.take(ids)
    seconds["read by update"] = synchronised() - start
    start = synchronised()
    for _ in batch.iter_rows():
        pass
    seconds["stream"] = synchronised() - start
    return seconds


def _warm_up(settings: Settings, root: Path) -> None:
    """Imports and first calls."""
    directory = batch_directory(root, version=0, generation_batch=0)
    write(settings, directory, settings.group_size, SHORT)
    open_batch(directory).take([0])
    shutil.rmtree(root)


def ids_of_updates(settings: Settings, batch: Batch) -> list[np.ndarray]:
    ids = batch.column("rollout_id")
    groups = settings.rollouts_per_update // settings.group_size
    return [ids[rows] for rows in split_into_updates(batch.column("group"), groups)]


# ---------------------------------------------------------------- learner


def learn_rollouts(settings: Settings, work: Path, count: int) -> dict[str, Any]:
    """Updates at the end of a generation batch of so many rollouts, each read from the store."""
    set_up(settings.device, settings.threads)
    batch = open_batch(batch_directory(work / "made" / f"{count}x{SHORT}", version=0, generation_batch=0), verify=False)
    dealt = [ids for ids in ids_of_updates(settings, batch) if len(ids) == settings.rollouts_per_update]
    trainer = Trainer(run_config(settings, work, max_new_tokens=SHORT), policy(settings, work))
    wanted = [dealt[-1 - i % len(dealt)] for i in range(2 + settings.timed_updates)]
    learn(trainer, (batch.take(ids) for ids in wanted[:2]))
    start = synchronised()
    marks, _ = learn(trainer, (batch.take(ids) for ids in wanted[2:]))
    return _learner_record([start, *marks], batch.take(wanted[-1]), None)


def learn_length(settings: Settings, work: Path, length: int) -> dict[str, Any]:
    """Updates of so many tokens in all, in responses of this length."""
    set_up(settings.device, settings.threads)
    count = max(2, settings.update_tokens // (PROMPT + length) // 2 * 2)
    rows = _rows(settings, count, length)
    trainer = Trainer(run_config(settings, work, max_new_tokens=length), policy(settings, work))
    shape = ModelShape(**model_shape(trainer.model))
    learn(trainer, [rows] * 2)
    start = synchronised()
    marks, _ = learn(trainer, [rows] * settings.timed_updates)
    return _learner_record([start, *marks], rows, shape)


def _rows(settings: Settings, count: int, length: int) -> RolloutColumns:
    """Rollouts in memory, in groups of two."""
    rng = np.random.default_rng(0)

    def one(rollout_id: int) -> RolloutColumns:
        return RolloutColumns(
            rollout_id=np.array([rollout_id]),
            group=np.array([rollout_id // 2]),
            reward=np.array([float(rollout_id % 2)]),
            truncated=np.array([True]),
            version_first=np.zeros(1, np.int32),
            version_last=np.zeros(1, np.int32),
            prompt_ids=np.arange(3, 3 + PROMPT, dtype=np.int32),
            prompt_offsets=np.array([0, PROMPT]),
            response_ids=rng.integers(3, 18, size=length).astype(np.int32),
            behaviour_logp=np.full(length, -3.0, dtype=np.float32),
            response_offsets=np.array([0, length]),
        )

    return concatenate([one(rollout_id) for rollout_id in range(count)])


def _learner_record(marks: list[float], rows: RolloutColumns, shape: ModelShape | None) -> dict[str, Any]:
    """The median of updates that have equally many tokens each."""
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    tokens = tokens_of(rows)
    found: dict[str, Any] = {"seconds": sum(seconds), "update_seconds": seconds, "tokens": tokens}
    found["costs"] = {"ns per token": 1e9 * statistics.median(seconds) / tokens}
    if shape is not None:
        found["expected"] = training_flops(shape, rows.prompt_lengths, rows.response_lengths) / tokens
    return found


# ---------------------------------------------------------------- sampler


def sample_rollouts(settings: Settings, work: Path, count: int) -> dict[str, Any]:
    """So many short responses, shard by shard as they are generated."""
    return _sample(settings, work, count, SHORT, warm=min(count, settings.rollouts_per_shard))


def sample_length(settings: Settings, work: Path, length: int) -> dict[str, Any]:
    """The same number of responses at any length: what differs is what each token looks back on."""
    found = _sample(settings, work, settings.sampler_rows, length, warm=settings.sampler_rows)
    model = load_model(str(policy(settings, work)), device=torch.device("cpu"))
    shape, config = model_shape(model), model.config.get_text_config()
    # Bytes (in numbers) that decoding one token reads: the weights, shared by all rows, and the row's own cache.
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    keys = 2 * shape["layers"] * heads * shape["attention_width"] // config.num_attention_heads
    weights = shape["body_parameters"] + shape["hidden"] * shape["vocabulary"]
    return {**found, "expected": weights / settings.sampler_rows + keys * (PROMPT + length / 2)}


def _sample(settings: Settings, work: Path, count: int, length: int, warm: int) -> dict[str, Any]:
    set_up(settings.device, settings.threads)
    sampler = make_sampler(run_config(settings, work, max_new_tokens=length))
    sampler.load(policy(settings, work))
    prompt = list(range(3, 3 + PROMPT))
    if length <= 256 or settings.device.startswith("cuda"):  # a GPU may record its kernels in the first call
        sampler.sample([Request(prompt, rollout_seed(1, row)) for row in range(warm)])
    seconds, tokens = 0.0, 0
    for first in range(0, count, settings.rollouts_per_shard):
        rows = range(first, min(first + settings.rollouts_per_shard, count))
        requests = [Request(prompt, rollout_seed(0, row)) for row in rows]
        start = synchronised()
        responses = sampler.sample(requests)
        seconds += synchronised() - start
        tokens += sum(len(response.token_ids) for response in responses)
    sampler.close()
    return {
        "seconds": seconds,
        "tokens": tokens,
        "rollouts": count,
        "mean_length": tokens / count,
        "costs": {"ns per token": 1e9 * seconds / tokens},
    }
