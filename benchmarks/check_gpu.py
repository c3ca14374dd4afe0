"""What CPU tests cannot see: the GPU paths against plain ones. Prints JSON; exit 1 where a check fails.

    python benchmarks/check_gpu.py [--model DIRECTORY] [--out FILE] [--only gradients,rounding]

Without a model it makes one of SmolLM2's shape with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from versus.jobs import environment, now

from stalewise.config import RunConfig, make_config
from stalewise.errors import ModelError
from stalewise.models import EMBEDDED
from stalewise.models import transfer as host_copies
from stalewise.models.loading import load_model, pick_weights_dtype
from stalewise.models.transfer import HostBuffers
from stalewise.orchestrator.checkpoint_writer import CheckpointWriter
from stalewise.orchestrator.run_log import RunLog
from stalewise.rollout.engines import paged_cache, request_queue
from stalewise.rollout.engines.embedded import HFSampler, QuantizableWeights
from stalewise.rollout.engines.request_queue import RequestQueue
from stalewise.rollout.engines.slot_decode import SlotDecoder
from stalewise.rollout.sampler import Request, Response
from stalewise.store import RolloutColumns
from stalewise.store.checkpoints import checkpoint_directory, write_checkpoint
from stalewise.trainer import cuda_graphs, moments
from stalewise.trainer.logprobs import PLAIN_KERNELS, kernels_for
from stalewise.trainer.lora import save_first
from stalewise.trainer.trainer import Trainer
from stalewise.types import SamplerSettings

CUDA = torch.device("cuda")
BEGUN = time.perf_counter()


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


def sampled_rows(model: str, vocabulary: int, seed: int = 0, groups: int = 8) -> RolloutColumns:
    """Rollouts of the model itself to made-up prompts, with its own log-probabilities in float32.

    Of tokens that it would never choose rounding makes anything, and near ratio 1 no token is near a clip range, where
    gradients jump.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, vocabulary, length).tolist() for length in rng.integers(20, 44, groups)]
    requests = [Request(prompt, 1000 * seed + 8 * i + j) for i, prompt in enumerate(prompts) for j in range(8)]
    responses = make_sampler(model, torch.float32).sample(requests)
    reference, logp = load(model, torch.float32), []
    for request, response in zip(requests, responses, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]], device=CUDA)
        logp.append(_plain_logp(reference, ids, len(request.prompt_ids), False).cpu().numpy())
    count, lengths = len(requests), [len(response.token_ids) for response in responses]
    return RolloutColumns(
        rollout_id=np.arange(count),
        group=np.repeat(np.arange(groups), 8),
        reward=np.tile([1.0, 0.0], count // 2),
        truncated=np.zeros(count, dtype=np.bool_),
        version_first=np.zeros(count, dtype=np.int32),
        version_last=np.zeros(count, dtype=np.int32),
        prompt_ids=np.concatenate([request.prompt_ids for request in requests]).astype(np.int32),
        prompt_offsets=np.cumsum([0, *(len(request.prompt_ids) for request in requests)]),
        response_ids=np.concatenate([response.token_ids for response in responses]).astype(np.int32),
        behaviour_logp=np.concatenate(logp).astype(np.float32),
        response_offsets=np.cumsum([0, *lengths]),
    )


def settings(model: str, **trainer: Any) -> RunConfig:
    precision, device = trainer.pop("precision", "bfloat16"), trainer.pop("device", "cuda")
    lora = trainer.pop("lora", {})
    return make_config(
        {
            "model": {"path": model, "precision": precision, "device": device, "lora": lora},
            "learner": {"compile": "never"} | trainer,
            "objective": {"name": "grpo"},
            "optimizer": {"learning_rate": 1e-6, "max_grad_norm": 1e9},
        }
    )


def gradients(config: RunConfig, model: str, batches: list[RolloutColumns], graphs: bool = True) -> list[torch.Tensor]:
    """After an update that changes next to nothing: what graphs read must have followed it.

    Of all batches, and where graphs are recorded of all once more: a size is launched the first time it comes up,
    recorded the second time.
    """
    trainer = Trainer(config, Path(model))
    if not graphs:
        trainer.execution.graphs = None
    trainer.update(batches[0])
    rounds = 1 if trainer.execution.graphs is None else 2
    found = [trainer.gradient(rows).double().cpu() for rows in rounds * batches]
    del trainer
    torch.cuda.empty_cache()
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def tell(text: str) -> None:
    """Whoever is cut off should know how far it came."""
    print(f"{time.perf_counter() - BEGUN:6.1f} s  {text}", file=sys.stderr, flush=True)


def check_gradients(model: str, rows: RolloutColumns, vocabulary: int, compiled: bool) -> dict[str, float]:
    """Distances from the float32 gradient, by that of a plain bfloat16 pass on the same batch; medians over batches."""
    batches = [rows, *(sampled_rows(model, vocabulary, seed) for seed in (1, 2, 3))]
    exact = gradients(settings(model, precision="float32", tokens_per_micro_batch=100_000), model, batches)
    kinds: dict[str, dict[str, Any]] = {
        "bfloat16_split": {"tokens_per_micro_batch": 1024},
        "bfloat16_graphs": {"compile": "graphs", "tokens_per_micro_batch": 100_000},
        "bfloat16_graphs_split": {"compile": "graphs", "tokens_per_micro_batch": 2048},
        "bfloat16_recomputed": {"gradient_checkpointing": True, "tokens_per_micro_batch": 2048},
        "bfloat16_recomputed_graphs": {
            "gradient_checkpointing": True,
            "compile": "graphs",
            "tokens_per_micro_batch": 2048,
        },
    }
    compiled_kinds: dict[str, dict[str, Any]] = {
        "bfloat16_compiled": {"compile": "always", "tokens_per_micro_batch": 100_000, "graphs": False},
        "bfloat16_compiled_graphs": {"compile": "always", "tokens_per_micro_batch": 100_000},
        "bfloat16_compiled_graphs_split": {"compile": "always", "tokens_per_micro_batch": 2048},
        "bfloat16_half_the_activations": {"compile": "always", "keep_activations": 0.5},
    }
    plain = gradients(settings(model, tokens_per_micro_batch=100_000), model, batches)
    far = [relative(*pair) for pair in zip(plain, exact, strict=True)]
    tell(f"gradients of a plain pass: {far}")
    distances: dict[str, float] = {}
    if not compiled:
        split = gradients(settings(model, precision="float32", tokens_per_micro_batch=1024), model, batches)
        distances["float32_split"] = max(relative(*pair) for pair in zip(split, exact, strict=True))
    for name, kind in (compiled_kinds if compiled else kinds).items():
        graphs = kind.pop("graphs", True)
        found = gradients(settings(model, **kind), model, batches, graphs)
        rounds = [found[start : start + len(batches)] for start in range(0, len(found), len(batches))]
        ratios = [
            [relative(one, truth) / usual for one, truth, usual in zip(of_round, exact, far, strict=True)]
            for of_round in rounds
        ]
        distances[name] = max(float(np.median(each)) for each in ratios)
        if len(rounds) == 2:
            pairs = zip(*rounds, strict=True)
            distances[f"{name}_launched_and_recorded"] = max(relative(*pair) for pair in pairs)
        tell(f"gradients {name}: {ratios}")
    return distances | {"bfloat16_itself": float(np.median(far))}


def check_logits() -> dict[str, float]:
    """What the kernels read from logits and give back, against torch's own operators; both in bfloat16.

    Of a vocabulary of an odd size, so that rows begin anywhere.
    """
    torch.manual_seed(0)
    apart: dict[str, float] = {}
    for vocabulary in (101, 9001, 49152):
        logits = (5 * torch.randn(300, vocabulary, device=CUDA)).bfloat16()
        logits[0, : vocabulary // 2] = -torch.inf
        target = torch.randint(vocabulary // 2, vocabulary, (300,), device=CUDA)
        gradient = torch.randn(300, device=CUDA)
        kernels, plain = kernels_for(CUDA), PLAIN_KERNELS
        assert kernels is not plain
        expected = plain.statistics(logits, target)
        for name, one, other in zip(
            ("lse", "logp", "entropy"), kernels.statistics(logits, target), expected, strict=True
        ):
            apart[name] = max(apart.get(name, 0.0), float((one - other).abs().max()))
        given = (logits, expected[0], target, gradient, None)
        wanted = plain.gradient(*given).float()  # first: the other one writes over the logits
        apart["gradient"] = max(apart.get("gradient", 0.0), relative(kernels.gradient(*given).float(), wanted))
    return apart


def check_moments() -> dict[str, float]:
    """Steps with moments in fewer bits by the kernel, against the same steps in torch on the device."""
    torch.manual_seed(0)
    apart: dict[str, float] = {}
    for kind in ("bfloat16", "int8"):
        weights = [torch.randn(300, 1000, device=CUDA)] * 2
        weights = [weight.clone() for weight in weights]
        held = [moments.new_moments(weight, kind) for weight in weights]
        start = weights[0].clone()
        for number in range(1, 11):
            scalars = torch.tensor([1e-2, 1 - 0.9**number, (1 - 0.999**number) ** 0.5, 1.0], device=CUDA)
            numbers = moments.StepNumbers(0.9, 0.999, 1e-8, 0.0, scalars, moments.step_key(0, number, 0))
            gradient = torch.randn(300, 1000, device=CUDA)
            expected = moments._step_rows(weights[0], gradient, held[0], numbers, 0)
            square = moments.step(weights[1], gradient, held[1], numbers)
            apart[f"{kind}_norm"] = max(apart.get(f"{kind}_norm", 0.0), abs(float(square / expected) - 1))
        apart[f"{kind}_weights"] = relative(weights[1] - start, weights[0] - start)
        codes = [held[place]["exp_avg_sq"] for place in (0, 1)]
        apart[f"{kind}_that_differ"] = float((codes[0] != codes[1]).float().mean())
    return apart


def check_log_probabilities(model: str, rows: RolloutColumns) -> dict[str, float]:
    """Mean and largest distance from float32 of ours and of transformers, both in bfloat16."""
    config = settings(model, tokens_per_micro_batch=100_000)
    trainer = Trainer(config, Path(model))
    batch = trainer.prepare(rows)
    (part,) = batch.micro_batches
    with torch.no_grad():
        ours_BT = trainer.execution.forward(part)[0].cpu()
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


def made_up_requests(vocabulary: int) -> list[Request]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, vocabulary, n).tolist() for n in rng.integers(3, 40, 24)]
    return [Request(prompt, 100 * i + j) for i, prompt in enumerate(prompts) for j in range(8)]


def make_sampler(
    model: str, dtype: torch.dtype, compiled: bool = False, tokens: int = 32, slots: bool | None = None
) -> HFSampler:
    sampler = HFSampler(
        SamplerSettings(),
        max_new_tokens=tokens,
        device=CUDA,
        dtype=dtype,
        slots=slots,
        should_compile=lambda model: compiled,
    )
    sampler.load(Path(model))
    return sampler


def distances(reference: Any, requests: list[Request], responses: list[Response]) -> torch.Tensor:
    """Of the log-probabilities that came with responses from those of a plain pass."""
    found = []
    for request, response in zip(requests, responses, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]], device=CUDA)
        expected = _plain_logp(reference, ids, len(request.prompt_ids), False).cpu()
        found.append((expected - torch.tensor(response.logp)).abs())
    return torch.cat(found)


def check_few_blocks(model: str, vocabulary: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same with blocks for a few responses, of which many begin and are put back; programs share their keys."""
    put_back, count, usual = SlotDecoder._put_back, [0], (paged_cache.MOST_BLOCKS, request_queue.FIRST_GUESS)

    def counted(self: SlotDecoder, queue: RequestQueue, slots: np.ndarray) -> Any:
        count[0] += len(slots)
        return put_back(self, queue, slots)

    SlotDecoder._put_back = counted
    paged_cache.MOST_BLOCKS, request_queue.FIRST_GUESS = 150, 2
    kernel: Any = importlib.import_module("stalewise.models.kernels.decode_attention")
    part, kernel.PART = kernel.PART, 64
    try:
        return {**check_sampler(model, vocabulary, dtype, tokens=200), "put_back": count[0]}
    finally:
        SlotDecoder._put_back, kernel.PART = put_back, part
        paged_cache.MOST_BLOCKS, request_queue.FIRST_GUESS = usual


def check_sampler(
    model: str, vocabulary: int, dtype: torch.dtype, compiled: bool = False, tokens: int = 32
) -> dict[str, Any]:
    """Behaviour log-probabilities of the slots against plain passes over the same tokens; seeds."""
    sampler, requests = make_sampler(model, dtype, compiled, tokens), made_up_requests(vocabulary)
    first, second = sampler.sample(requests), sampler.sample(requests)
    exact, plain = (load(model, kind) for kind in (torch.float32, dtype))
    others = []
    for request, response in zip(requests, first, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]], device=CUDA)
        expected, other = (_plain_logp(x, ids, len(request.prompt_ids), False).cpu() for x in (exact, plain))
        others.append((expected - other).abs())
    same = sum(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True)) / len(first)
    mine = distances(exact, requests, first)
    return {
        "problem": sampler.slots_problem,
        "fused": sampler.fused,
        "ours_mean": mine.mean().item(),
        "ours_max": mine.max().item(),
        "transformers_mean": torch.cat(others).mean().item(),
        "same_again": same,
    }


def check_memory_ends(model: str, vocabulary: int) -> dict[str, Any]:
    """A limit on torch's memory that no estimate knows of: with a growing cache, of one response, and in slots."""
    warned = Warned()
    logger = logging.getLogger("stalewise.rollout.engines.embedded")
    logger.addHandler(warned)
    requests, found = made_up_requests(vocabulary), dict[str, Any]()
    sampler, slots = make_sampler(model, torch.float32, tokens=200, slots=False), make_sampler(model, torch.float32)
    try:
        with memory_left(0.8):
            responses = sampler.sample(requests)
        found["halvings"], found["responses"] = warned.count("from here on at most"), len(responses)
        found["ours_max"] = distances(load(model, torch.float32), requests, responses).max().item()
        sampler.max_new_tokens = 4000
        for when, room, prompt in (("first", 0.001, 2000), ("later", 0.03, 8)):
            with memory_left(room):
                found[when] = said_by(sampler, [Request(list(range(3, 3 + prompt)), 0)])
        with memory_left(0.05):
            found["slots"] = said_by(slots, requests)
        sampler.max_new_tokens = 8
        found["afterwards"] = [len(one.sample(requests)) for one in (sampler, slots)]
    finally:
        logger.removeHandler(warned)
    return found


class Warned(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def count(self, text: str) -> int:
        return sum(text in one for one in self.said)


@contextlib.contextmanager
def memory_left(gigabytes: float) -> Iterator[None]:
    """Torch may take so much more than it holds; what the driver counts as free stays as it is."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + gigabytes * 1e9) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def said_by(sampler: HFSampler, requests: list[Request]) -> str:
    """The message where sampling ends with one; else how many responses there are."""
    try:
        return f"{len(sampler.sample(requests))} responses"
    except ModelError as error:
        return f"ModelError: {error}"


def check_waiting(model: str, vocabulary: int) -> dict[str, float]:
    """Weights that wait in host memory: what stays on the device, and responses when they are back or were replaced."""
    before = allocated_bytes()
    sampler, requests = make_sampler(model, torch.bfloat16), made_up_requests(vocabulary)
    weights = sum(weight.nbytes for weight in sampler.model.parameters())
    expected, found = sampler.sample(requests), dict[str, float]()
    for back in ("copied", "replaced"):
        sampler.sleep(weights=True)
        found[f"left_{back}"] = (allocated_bytes() - before) / weights
        if back == "replaced" and not sampler.take(load(model, torch.bfloat16).state_dict(), "others"):
            raise RuntimeError("the sampler does not take weights from memory")
        pairs = zip(sampler.sample(requests), expected, strict=True)
        found[f"same_{back}"] = float(np.mean([np.array_equal(one.token_ids, other.token_ids) for one, other in pairs]))
    return found


def allocated_bytes() -> int:
    """What tensors take on the device, without the workspaces of libraries."""
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
    return torch.cuda.memory_allocated()


def check_rounding(model: str, vocabulary: int) -> dict[str, float]:
    """Slots whose graphs were captured with exact weights, asked for rounded ones, and for exact ones again."""
    sampler, requests = make_sampler(model, torch.float32), made_up_requests(vocabulary)[:64]
    found: dict[str, float] = {}
    for kind in ("exact", "fp8", "int8", "exact"):
        reference = load(model, torch.float32)
        QuantizableWeights(reference).use(kind)
        responses = sampler.sample(requests, replace(sampler.settings, weights=kind))
        found[kind] = max(found.get(kind, 0.0), distances(reference, requests, responses).max().item())
    return found


def check_token_record(model: str, rows: RolloutColumns) -> dict[str, float]:
    """What the learner says of an update and writes down of each token, on the GPU and on the CPU."""
    records, metrics = [], []
    for device in ("cuda", "cpu"):
        config = settings(model, precision="float32", tokens_per_micro_batch=2048, device=device)
        pending = Trainer(config, Path(model)).enqueue(rows)
        metrics.append(pending.metrics())
        records.append(pending.tokens())
    gpu, cpu = records
    assert gpu is not None and cpu is not None and (gpu.order == cpu.order).all()
    assert metrics[0].keys() == metrics[1].keys()
    # Rounding apart: what is next to nothing may differ by all of itself.
    apart = {name: abs(metrics[0][name] - value) / (abs(value) + 1e-3) for name, value in metrics[1].items()}
    worst = max((name for name in apart if apart[name] == apart[name]), key=lambda name: apart[name])
    tell(f"metrics: {worst} is {metrics[0][worst]} on the GPU, {metrics[1][worst]} on the CPU")
    return {
        "tokens": len(gpu.logp),
        "logp_max": float(np.abs(gpu.logp - cpu.logp).max()),
        "flags_that_differ": float((gpu.flags != cpu.flags).mean()),
        "metrics_max": apart[worst],
        "metrics_unknown_to_one": sum(math.isnan(metrics[0][name]) != math.isnan(metrics[1][name]) for name in apart),
    }


def check_steps(model: str, rows: RolloutColumns, vocabulary: int) -> dict[str, float]:
    """Updates through graphs: whether they moved the weights as far as they say, and say the same in a row."""
    batches = 2 * [rows, *(sampled_rows(model, vocabulary, seed) for seed in (1, 2))]  # recorded the second time
    config = settings(model, compile="always", tokens_per_micro_batch=100_000)
    alone, ahead = (Trainer(config, Path(model)) for _ in range(2))
    apart, said = [], []
    for batch in batches:
        before = [weight.detach().clone() for weight in alone.names]
        said.append(alone.update(batch))
        moved = torch.stack([(b - w.detach()).double().norm() for b, w in zip(before, alone.names, strict=True)]).norm()
        apart.append(abs(said[-1]["update_norm"] / float(moved) - 1))
    found = [pending.metrics() for pending in [ahead.enqueue(batch) for batch in batches]]
    differ = sum(a[name] != b[name] for a, b in zip(said, found, strict=True) for name in a if a[name] == a[name])
    return {"update_norm_apart": max(apart), "numbers": sum(map(len, said)), "numbers_that_differ_ahead": differ}


def check_failed_capture(model: str, rows: RolloutColumns) -> dict[str, float]:
    """Updates after a capture that fails, against launched ones; and what dropping everything leaves on the device."""
    usual, said, before = cuda_graphs.hidden_states, list[str](), allocated_bytes()

    def asks_the_device(model: Any, inputs: Any) -> torch.Tensor:
        hidden_TH = usual(model, inputs)
        if torch.cuda.is_current_stream_capturing():
            hidden_TH.sum().item()  # which no graph can hold
        return hidden_TH

    found: list[list[float]] = []
    for hidden_states in (usual, asks_the_device):
        compile = "never" if hidden_states is usual else "graphs"
        config = settings(model, compile=compile, tokens_per_micro_batch=100_000)
        trainer = Trainer(config, Path(model), log=said.append)
        cuda_graphs.hidden_states = hidden_states
        try:
            found.append([trainer.update(rows)["loss"] for _ in range(4)])
        finally:
            cuda_graphs.hidden_states = usual
        trainer.execution.free_memory()
        del trainer
    gc.collect()
    torch.cuda.empty_cache()
    apart = max(abs(one - other) for one, other in zip(*found, strict=True))
    return {"loss_apart": apart, "said": len(said), "left": (allocated_bytes() - before) / 2**20}


def load(model: str, dtype: torch.dtype) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    return loaded.to(CUDA).eval()


def check_saving(model: str, rows: RolloutColumns) -> dict[str, float]:
    """Numbers of a saved policy and its moments that are not those on the device, nor a sampler's that takes it over.

    In large pieces and in small ones, from files and from memory.
    """
    trainer, differ = Trainer(settings(model), Path(model)), 0.0
    trainer.update(rows)
    sampler, usual = make_sampler(model, torch.bfloat16), host_copies.PIECE
    expected = {name: tensor for file in trainer.gather(True)[1].values() for name, tensor in file.items()}
    expected |= {name: weight.detach() for weight, name in trainer.names.items()}
    for piece in (usual, 2**20):
        host_copies.PIECE = piece
        with tempfile.TemporaryDirectory() as place:
            trainer.save(Path(place))
            files = Path(place).glob("*.safetensors")
            found = {name: tensor for file in files for name, tensor in load_file(file, device="cuda").items()}
            sampler.load(Path(place))
        assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
        differ += sum((found[name] != tensor).sum().item() for name, tensor in expected.items())
        taken = sampler._model.state_dict()
        differ += sum((taken[name] != w.bfloat16()).sum().item() for w, name in trainer.names.items())
    host_copies.PIECE = usual
    trainer.update(rows)
    assert sampler.take(trainer.policy(), object()), "the sampler does not take weights from memory"
    taken = sampler._model.state_dict()
    differ += sum((taken[name] != w.bfloat16()).sum().item() for w, name in trainer.names.items())
    return {"numbers": float(sum(tensor.numel() for tensor in expected.values())), "that_differ": differ}


def check_learner_waiting(model: str, rows: RolloutColumns) -> dict[str, float]:
    """A learner that waits in host memory between updates: all of it trained, and an adapter.

    What stays on the device, what a sampler that takes the policy from the checkpoint's copy does not hold, and losses
    beside those of a learner that stays.
    """
    found = {"left": 0.0, "that_differ": 0.0, "loss_apart": 0.0}
    for kind in ({}, {"precision": "bfloat16-only", "lora": {"rank": 8}}):
        with tempfile.TemporaryDirectory() as place:
            config = settings(model, **kind)
            first = write_first(config, model, Path(place))
            writer = CheckpointWriter(RunLog(Path(place)), HostBuffers())
            for name, value in _wait_between_updates(config, first, rows, writer).items():
                found[name] = float(np.max([found[name], value]))
            writer.close(tell)
    return found


def write_first(config: RunConfig, model: str, run: Path) -> Path:
    """Version 0 of a run of this model."""
    loaded = load_model(model, device=torch.device("cpu"), dtype=pick_weights_dtype(config.model.precision))

    def save(directory: Path) -> None:
        save_first(config.model, 0, loaded, model, directory)
        AutoTokenizer.from_pretrained(model).save_pretrained(directory)

    write_checkpoint(run, 0, save=save, state={})
    return checkpoint_directory(run, 0)


def _wait_between_updates(
    config: RunConfig, first: Path, rows: RolloutColumns, writer: CheckpointWriter
) -> dict[str, float]:
    trainer, found = Trainer(config, first), {"left": 0.0, "that_differ": 0.0, "loss_apart": 0.0}
    expected = [trainer.update(rows)["loss"] for _ in range(3)]
    sampler = make_sampler(config.model.path, torch.bfloat16)
    sampler.sleep(weights=True)
    del trainer
    gc.collect()
    before, trainer = allocated_bytes(), Trainer(config, first)
    for loss in expected:
        apart = abs(trainer.update(rows)["loss"] - loss)
        found["loss_apart"] = float(np.max([found["loss_apart"], apart]))  # unlike max, it keeps what is not a number
        own = {name: weight.bfloat16().cpu() for name, weight in trainer.policy().items()}
        held, copy = allocated_bytes() - before, writer.copy(trainer)
        assert copy is not None, "no room in host memory for a copy"
        trainer.sleep()
        found["left"] = max(found["left"], (allocated_bytes() - before) / held)
        assert sampler.take(writer.policy(trainer), object()), "the sampler does not take the copy"
        taken = sampler._model.state_dict()
        found["that_differ"] += sum((taken[name].cpu() != weight).sum().item() for name, weight in own.items())
        sampler.sleep(weights=True)
    return found


def count_waits(model: str, rows: RolloutColumns, compile: str) -> int:
    """Operations of one enqueued update that wait for the device."""
    trainer = Trainer(settings(model, tokens_per_micro_batch=2048, compile=compile), Path(model))
    for _ in range(3):  # graphs are recorded when a size comes up for the second time
        trainer.update(rows)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pending = trainer.enqueue(rows)
    torch.cuda.set_sync_debug_mode("default")
    pending.metrics()
    return sum("synchronizing" in str(warning.message) for warning in caught)


def verdicts(name: str, found: Any) -> dict[str, bool]:
    """What a check shows, in words."""
    if name.startswith("gradients"):
        low = [value for key, value in found.items() if key.startswith("bfloat16_") and key != "bfloat16_itself"]
        said = {"in bfloat16 neither split nor compiler nor graphs take them farther from float32": max(low) < 1.1}
        if "float32_split" in found:
            said["in float32 they do not depend on the split"] = found["float32_split"] < 1e-4
        return said
    if name == "logits":
        return {"kernels read them as torch does": max(found.values()) < 1e-3}
    if name == "moments":
        return {"the kernel takes torch's steps": max(found.values()) < 0.01}
    if name == "log_probabilities":
        return {"no worse than those of transformers": found["ours_mean"] < 1.1 * found["transformers_mean"]}
    if name == "sampler_float32":
        return {"slots give those of a plain pass": found["ours_max"] < 2e-3}
    if name == "sampler_waiting":
        return {
            "weights leave the device": max(found["left_copied"], found["left_replaced"]) < 0.1,
            "they give the same responses afterwards": min(found["same_copied"], found["same_replaced"]) > 0.99,
        }
    if name == "sampler_blocks":
        close = found["ours_mean"] < 1.1 * found["transformers_mean"]
        return {"responses that are put back and go on are no worse than transformers": close and found["put_back"] > 0}
    if name == "sampler_memory":
        ended = "ModelError: out of memory while sampling one response"
        return {
            "half as many rows, and the log-probabilities of a plain pass": found["halvings"] > 0
            and found["responses"] == 192
            and found["ours_max"] < 2e-3,
            "one response ends with the estimate, at its first token and later": found["first"].startswith(ended)
            and found["later"].startswith(ended),
            "slots end with all responses or with a message": found["slots"] == "192 responses"
            or found["slots"].startswith("ModelError"),
            "afterwards they sample again": found["afterwards"] == [192, 192],
        }
    if name.startswith("sampler"):
        return {
            "no worse than transformers": found["ours_mean"] < 1.1 * found["transformers_mean"],
            "the same seeds give the same responses": found["same_again"] > 0.99,
            "all four operators are fused unless layers are compiled": (len(found["fused"]) == 4)
            != (name == "sampler_compiled"),
        }
    if name == "rounding":
        return {"captured steps compute with rounded weights, and with exact ones again": max(found.values()) < 2e-3}
    if name == "token_record":
        return {
            "that of the CPU": found["logp_max"] < 2e-3 and found["flags_that_differ"] < 1e-3,
            "so are the metrics": found["metrics_max"] < 0.02 and not found["metrics_unknown_to_one"],
        }
    if name == "steps":
        return {
            "an update says how far it moved the weights": found["update_norm_apart"] < 1e-3,
            "updates that nobody waits for say the same": found["numbers_that_differ_ahead"] == 0,
        }
    if name == "failed_capture":
        return {
            "it is said once, and updates go on": found["said"] == 1 and found["loss_apart"] < 1e-3,
            "nothing stays on the device": found["left"] < 64,
        }
    if name == "saving":
        return {"files hold what the device holds, and a sampler takes it over": found["that_differ"] == 0}
    if name == "learner_waiting":
        return {
            "it leaves the device": found["left"] < 0.1,
            "a sampler takes the policy from the checkpoint's copy": found["that_differ"] == 0,
            "it goes on as one that stays": found["loss_apart"] < 1e-3,
        }
    return {"an update is enqueued without waiting": max(found.values()) == 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="some of the checks, with commas between them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or random_model(Path(scratch))
        vocabulary = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
        rows = sampled_rows(model, vocabulary)
        checks: dict[str, Callable[[], Any]] = {
            "gradients": lambda: check_gradients(model, rows, vocabulary, compiled=False),
            "gradients_compiled": lambda: check_gradients(model, rows, vocabulary, compiled=True),
            "logits": check_logits,
            "moments": check_moments,
            "log_probabilities": lambda: check_log_probabilities(model, rows),
            "sampler_float32": lambda: check_sampler(model, vocabulary, torch.float32),
            "sampler_bfloat16": lambda: check_sampler(model, vocabulary, torch.bfloat16),
            "sampler_compiled": lambda: check_sampler(model, vocabulary, torch.bfloat16, compiled=True),
            "sampler_blocks": lambda: check_few_blocks(model, vocabulary, torch.bfloat16),
            "sampler_waiting": lambda: check_waiting(model, vocabulary),
            "sampler_memory": lambda: check_memory_ends(model, vocabulary),
            "rounding": lambda: check_rounding(model, vocabulary),
            "token_record": lambda: check_token_record(model, rows),
            "steps": lambda: check_steps(model, rows, vocabulary),
            "failed_capture": lambda: check_failed_capture(model, rows),
            "saving": lambda: check_saving(model, rows),
            "learner_waiting": lambda: check_learner_waiting(model, rows),
            "waits": lambda: {kind: count_waits(model, rows, kind) for kind in ("never", "graphs", "always")},
        }
        found: dict[str, Any] = {}
        passed: dict[str, bool] = {}
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        where = {**environment("cuda"), "model": arguments.model, "PYTORCH_CUDA_ALLOC_CONF": allocator}
        sitting: dict[str, Any] = {"date": now(), **where, "checks": []}
        tell("begun")
        for name in arguments.only.split(",") if arguments.only else list(checks):
            found[name] = checks[name]()
            passed |= {f"{name}: {words}": bool(is_so) for words, is_so in verdicts(name, found[name]).items()}
            tell(f"{name}: {found[name]}")
            sitting["checks"].append(name)
            record = {**found, "passed": passed, "sittings": [sitting]}
            if arguments.out:
                arguments.out.write_text(json.dumps(record, indent=2))
    print(json.dumps({**found, "passed": passed}, indent=2))
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
