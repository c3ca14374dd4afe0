"""The worker: updates of one part after the other on made-up rollouts, with a policy of random weights."""

from __future__ import annotations

import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from versus.clock import matmul_rate, model_shape, peak, reset_peak, set_up, synchronised
from versus.figures import ModelShape
from versus.ours import groups_of, learn, tokens_of
from versus.profiling import begin_profile, keep_profile, traced

from stalewise.config import RunConfig, make_config
from stalewise.config.sections import ModelSection
from stalewise.models import EMBEDDED
from stalewise.models.loading import pick_weights_dtype
from stalewise.models.transfer import HostBuffers
from stalewise.planning.memory import MemoryEstimate, estimate, offloads
from stalewise.rollout.engines import embedded
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.sampler import Request
from stalewise.store import RolloutColumns
from stalewise.store.columns import concatenate
from stalewise.trainer import trainer as trainer_module
from stalewise.trainer.lora import Adapters, new_config
from stalewise.trainer.trainer import Trainer

from .figures import ROLLOUTS, SHAPES, Part, by_group, floor_seconds, operations_of

LEFT_OVER = 1 << 28  # bytes on the device after a part: with more, the next one gets a process of its own


@dataclass(frozen=True)
class Settings:
    """Sizes of the measurements."""

    device: str = "cuda"
    threads: int = 0
    prompt_tokens: int = 128
    max_new_tokens: int = 512
    fewest_tokens: int = 256  # of a response; lengths are drawn evenly from here up to the most
    group_size: int = 8
    warmup: int = 4  # updates: sizes are launched once, then recorded
    distinct: int = 2  # updates that differ; they are repeated
    timed: int = 4
    stage_updates: int = 8  # of a stage part
    updates_of_run: int = 128  # as the config says, which decides whether compiling pays
    matmul_size: int = 8192
    changes: str = "{}"  # of the config, as JSON


# ---------------------------------------------------------------- policy and rollouts


def write_description(size: str, work: Path) -> Path:
    """A directory with config and tokenizer, and no weights: 7B would take 30 GB and a minute to read."""
    directory, shape = work / size, SHAPES[size]
    if not directory.exists():
        Qwen2Config(
            hidden_size=shape["hidden"],
            intermediate_size=shape["inner"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            vocab_size=shape["vocabulary"],
            tie_word_embeddings=shape["tied"],
            max_position_embeddings=32768,
            architectures=["Qwen2ForCausalLM"],
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=2,
        ).save_pretrained(directory)
        AutoTokenizer.from_pretrained(str(EMBEDDED / "arithmetic")).save_pretrained(directory)
    return directory


def random_policy(section: ModelSection, checkpoint: Path, device: torch.device) -> tuple[Any, Adapters | None]:
    """What `load_policy` returns, with weights that are drawn on the device instead of read."""
    model = random_model(str(checkpoint), device=device, dtype=pick_weights_dtype(section.precision))
    if not section.trains_adapters:
        return model, None
    adapters = Adapters(model, new_config(section.lora, model, str(checkpoint)))
    adapters.start(0)
    return model, adapters


def rollouts(settings: Settings, size: str, update: int) -> RolloutColumns:
    """The rollouts of one update: random tokens, each second one right, at the probability of a random policy."""
    rng, vocabulary = np.random.default_rng(update), SHAPES[size]["vocabulary"]
    count = ROLLOUTS[size]
    groups = count // settings.group_size
    lengths = rng.integers(settings.fewest_tokens, settings.max_new_tokens + 1, count)
    prompts = [rng.integers(3, vocabulary, settings.prompt_tokens) for _ in range(groups)]
    return RolloutColumns(
        rollout_id=np.arange(count) + update * count,
        group=np.repeat(np.arange(groups), settings.group_size),
        reward=(np.arange(count) % 2).astype(np.float64),
        truncated=np.zeros(count, dtype=np.bool_),
        version_first=np.zeros(count, dtype=np.int32),
        version_last=np.zeros(count, dtype=np.int32),
        prompt_ids=np.concatenate([prompts[row // settings.group_size] for row in range(count)]).astype(np.int32),
        prompt_offsets=np.arange(count + 1) * settings.prompt_tokens,
        response_ids=rng.integers(3, vocabulary, int(lengths.sum())).astype(np.int32),
        behaviour_logp=np.full(int(lengths.sum()), -math.log(vocabulary), dtype=np.float32),
        response_offsets=np.cumsum([0, *lengths]),
    )


def config_of(settings: Settings, part: Part, work: Path) -> RunConfig:
    """The config of a run in which this part would be an update."""
    record: dict[str, Any] = {
        "name": "learner",
        "runs": str(work),
        "model": {"path": str(write_description(part.size, work)), "device": settings.device},
        "schedule": {"kind": "staged", "updates": settings.updates_of_run, "stages": 1},
        "batch": {"prompts": ROLLOUTS[part.size] // settings.group_size, "group_size": settings.group_size},
        "sampler": {"max_new_tokens": settings.max_new_tokens},
        "optimizer": {"learning_rate": 1e-8},  # the cost is measured, not the policy
    }
    if "stage" in part.kind:  # all of it in one call
        record["sampler"]["rollouts_per_shard"] = settings.stage_updates * ROLLOUTS[part.size]
    for changes in (json.loads(settings.changes), part.changes):
        for table, values in changes.items():
            record[table] = record.get(table, {}) | values
    return make_config(record)


# ---------------------------------------------------------------- measuring


def measure_stage(settings: Settings, part: Part, work: Path, rates: dict[str, float]) -> dict[str, Any]:
    """A stage as a run does it, in one process: generate, learn, generate with the trainer there. Peaks by phase."""
    config, said = config_of(settings, part, work), list[str]()
    directory = Path(config.model.path)
    foreseen = estimate(config, str(directory), longest_prompt=settings.prompt_tokens, alone=True)
    sampler: Any = make_sampler(config, log=said.append)
    phases: dict[str, dict[str, Any]] = {}

    def phase(name: str, work_of_it: Callable[[], Any]) -> Any:
        reset_peak()
        start = synchronised()
        result = work_of_it()
        phases[name] = {"seconds": synchronised() - start, **peak()}
        return result

    prompts = concatenate([rollouts(settings, part.size, update) for update in range(settings.stage_updates)])
    phase("load the sampler", lambda: sampler.load(directory))
    made = phase("generate", lambda: _sampled(sampler, prompts))
    updates = _dealt(made, settings.stage_updates)
    waits = offloads(config, str(directory))
    phase("the sampler leaves", lambda: sampler.sleep(weights=True, drop=True)) if waits else sampler.sleep()
    held = phase("load the trainer", lambda: Trainer(config, directory, log=said.append))
    _, last = phase("learn", lambda: learn(held, updates))
    if waits:
        copied = phase("the policy's copy", lambda: HostBuffers().copy("", held.policy()))
        phase("to host memory", held.sleep)
        phase("the sampler takes the policy", lambda: sampler.take(copied, "learned"))
    phase("generate again", lambda: _sampled(sampler, prompts))
    phase("the sampler leaves again", lambda: sampler.sleep(weights=True, drop=True)) if waits else sampler.sleep()
    if waits:  # coming back drops the graphs
        phase("back to the device", held.execution.wake)
        phase("record graphs again", lambda: learn(held, updates[:2]))
    phase("learn again", lambda: learn(held, updates[:2]))
    seconds = phases["learn again"]["seconds"] / 2  # graphs are recorded in the first updates
    found = {
        "part": asdict(part),
        "config": config.model_dump(mode="json"),
        "said": said,
        "phases": phases,
        "offloads": waits,
        "tokens_generated": int(made.response_offsets[-1]),
        "update_seconds": seconds,
        **_work_done(held, updates[:2], 2 * seconds, rates),
        "estimate_bytes": None if foreseen is None else foreseen.peak,
        "estimate": None if foreseen is None else {**foreseen.certain, **foreseen.learning, **foreseen.sampling},
        "last_metrics": last,
    }
    for key in ("peak_bytes", "peak_reserved_bytes"):
        found[key] = max((one[key] or 0 for one in phases.values()), default=0) or None
    reserved = found["peak_reserved_bytes"]  # what CUDA graphs keep is not "allocated" after their capture
    found["estimate_ratio"] = found["estimate_bytes"] / reserved if reserved and foreseen else None
    return found


def _sampled(sampler: Any, rows: RolloutColumns) -> RolloutColumns:
    """The same prompts with responses of the sampler, each second one right."""
    requests = [Request(rows.prompt(row).tolist(), row) for row in range(len(rows))]
    responses = sampler.sample(requests)
    return replace(
        rows,
        response_ids=np.concatenate([response.token_ids for response in responses]).astype(np.int32),
        behaviour_logp=np.concatenate([response.logp for response in responses]).astype(np.float32),
        response_offsets=np.cumsum([0, *(len(response.token_ids) for response in responses)]),
        trained=np.ones(sum(len(response.token_ids) for response in responses), dtype=np.bool_),
    )


def _dealt(rows: RolloutColumns, updates: int) -> list[RolloutColumns]:
    """Equal parts, one for each update."""
    count = len(rows) // updates
    return [rows.take(np.arange(update * count, (update + 1) * count)) for update in range(updates)]


def random_model(path: str, *, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """What `load_model` returns, with weights that are drawn on the device instead of read."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(Qwen2Config.from_pretrained(path), dtype=dtype)
    return model.eval()


def measure(settings: Settings, part: Part, work: Path, rates: dict[str, float]) -> dict[str, Any]:
    """Time, memory and kernels of the updates of one part."""
    config, said = config_of(settings, part, work), list[str]()
    foreseen = estimate(config, str(config.model.path), longest_prompt=settings.prompt_tokens)
    distinct = [rollouts(settings, part.size, update) for update in range(settings.distinct)]
    reset_peak()
    start = synchronised()
    held = Trainer(config, Path(config.model.path), log=said.append)
    loading = synchronised() - start
    learn(held, _cycle(distinct, settings.warmup))
    warming = synchronised() - start - loading
    timed = list(_cycle(distinct, settings.timed))
    start = synchronised()
    _, last = learn(held, timed)
    seconds = synchronised() - start
    found = {
        "part": asdict(part),
        "config": config.model_dump(mode="json"),
        "said": said,
        "loading_seconds": loading,
        "warmup_seconds": warming,
        "seconds": seconds,
        "updates": len(timed),
        "update_seconds": seconds / len(timed),
        **_work_done(held, timed, seconds, rates),
        **memory_figures(foreseen),
        "token_budget": held.token_budget,  # less than the config's where the device ran out of memory
        "paths": {"graphs": _graphs(held), "compiled": held.execution.compiled, "packed": held.execution.packed},
        "last_metrics": last,
    }
    found["floor_seconds"] = floor_seconds(found)
    if settings.device.startswith("cuda"):
        found |= _profile(held, distinct, work)
    return found


def _cycle(distinct: list[RolloutColumns], count: int) -> Iterable[RolloutColumns]:
    return (distinct[number % len(distinct)] for number in range(count))


def _work_done(held: Trainer, timed: list[RolloutColumns], seconds: float, rates: dict[str, float]) -> dict[str, Any]:
    """Tokens and operations; recomputation does not count, and a shared prompt counts once."""
    shape, count, is_frozen = ModelShape(**model_shape(held.model)), len(timed), held.config.model.trains_adapters
    operations = operations_of(shape, [list(groups_of(rows)) for rows in timed], is_frozen=is_frozen)
    tokens = sum(map(tokens_of, timed))
    prepared = held.prepare(timed[0])
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_through_the_model": sum(part.tokens for part in prepared.micro_batches),
        "padded_tokens": sum(part.padded_tokens for part in prepared.micro_batches),
        "micro_batches": len(prepared.micro_batches),
        **operations,
        "recomputes": held.config.learner.gradient_checkpointing,
        "trained_parameters": sum(weight.numel() for weight in held.names),
        **rates,
        "mfu": operations["flops"] / (seconds / count) / rates["matmul_flops_per_second"],
    }


def memory_figures(foreseen: MemoryEstimate | None) -> dict[str, Any]:
    """The peak since the part began, and what was foreseen for a learner without a sampler beside it."""
    measured = peak()
    if foreseen is None:
        return {**measured, "estimate_bytes": None, "estimate_ratio": None}
    certain = {name: size for name, size in foreseen.certain.items() if not name.startswith("sampler")}
    expected = sum(certain.values()) + sum(foreseen.learning.values())
    actual = measured["peak_bytes"]
    return {
        **measured,
        "estimate": {**certain, **foreseen.learning},
        "estimate_bytes": expected,
        "estimate_ratio": None if actual is None else expected / (measured["peak_reserved_bytes"] or 1),
    }


def _graphs(held: Trainer) -> int | None:
    graphs = held.execution.graphs
    return None if graphs is None else len(graphs.captured)


def _profile(held: Trainer, distinct: list[RolloutColumns], work: Path) -> dict[str, Any]:
    """One more round of updates under the profiler: milliseconds of each group of kernels in an update."""
    profiler = begin_profile()
    learn(held, distinct)
    synchronised()
    keep_profile(profiler)
    start = synchronised()
    learn(held, distinct)
    seconds = synchronised() - start
    profiler.stop()
    count = len(distinct)
    intervals = traced(profiler, work)
    longest: dict[str, list[float]] = {}
    for begin, end, name in intervals:
        longest.setdefault(name[:100], []).append((end - begin) / 1e3)
    top = sorted(longest.items(), key=lambda item: -sum(item[1]))[:30]
    return {
        "profiled_update_seconds": seconds / count,
        "groups_ms": {group: round(ms / count, 3) for group, ms in by_group(intervals).items()},
        "top_kernels": [
            {"name": name, "ms": round(sum(ms) / count, 3), "calls": round(len(ms) / count, 1)} for name, ms in top
        ],
    }


def copy_rate(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes read and written per second by a large copy: the best of five."""
    size = size if device.type == "cuda" else 1 << 24
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(5):
        start = synchronised()
        target.copy_(source)
        best = max(best, 2 * size / (synchronised() - start))
    return best


def work_on_parts(spec: dict[str, Any]) -> None:
    """Measure the parts one after the other; a line of JSON for each. Ends early where memory is not given back."""
    settings, work = Settings(**spec["settings"]), Path(spec["work"])
    device = set_up(settings.device, settings.threads)
    trainer_module.load_policy, embedded.load_model = random_policy, random_model
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = {
        "matmul_flops_per_second": matmul_rate(device, dtype, settings.matmul_size),
        "copy_bytes_per_second": copy_rate(device),
    }
    _empty(device)
    for fields in spec["parts"]:
        part, start = Part(**fields), time.perf_counter()
        print(f"begin {part.name}", flush=True)
        try:
            found = (measure_stage if "stage" in part.kind else measure)(settings, part, work, rates)
        except Exception as error:  # out of memory, say: the next part may fit
            found = {"error": "".join(traceback.format_exception(error)[-4:]), **peak()}
            del error
        with open(spec["result"], "a") as file:
            file.write(json.dumps({"name": part.name, "part_seconds": time.perf_counter() - start, **found}) + "\n")
        if _empty(device) > LEFT_OVER:
            print(f"{part.name} left memory behind", flush=True)
            return


def _empty(device: torch.device) -> int:
    """Free what the last part held; returns the bytes that are still held."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
