"""Sampling against vLLM: the same models, prompts and lengths, log-probabilities on both sides, on one GPU.

    python benchmarks/versus_vllm.py --vllm DIRECTORY                    # every part, about an hour on an H200
    python benchmarks/versus_vllm.py --vllm DIRECTORY --parts 1.5b/512   # or part by part, in any order
    python benchmarks/versus_vllm.py --budget-s 550                      # begins nothing that would end later
    python benchmarks/versus_vllm.py --table                             # show what was measured

Models have random weights in the shapes of SmolLM2-135M and of Qwen2.5. A part is a size and a number of new tokens;
it is measured with responses of exactly that length, and with lengths from a long-tailed distribution that are cut
there (log-normal, median a sixth of it, half of the spread by prompt). Each prompt has 8 responses. No token ends a
response, so both sides make the same number of tokens. Temperature 1, bfloat16, log-probability of each token.

Ours: the `hf` engine. vLLM: the best of several `max_num_seqs`, with CUDA graphs, prefix cache, 90% of the memory, no
seeds for single requests (slower), no text (ours has it). Both are warmed up with other prompts. Our side of a part is
a process; so is vLLM with one size and one `max_num_seqs`, for all parts that are asked for, since it takes a minute to
start. Results are merged into one JSON, and what is there is not measured again (`--again` does).

`DIRECTORY` holds vLLM and what it needs, for PYTHONPATH of its process alone; without it, vLLM must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.child_processes import ending, finish, start, when

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "versus_vllm-h200.json"
GROUP_SIZE = 8
Sample = Callable[[Sequence[int], int], tuple[float, list[int]]]  # lengths and a seed: seconds, and lengths found
KINDS = ("fixed", "drawn")
SPREAD, MEDIAN_SHARE, FEWEST_TOKENS = 0.9, 1 / 6, 4
WARM_UP_TOKENS = 48
QUIET = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
PROFILED = 16  # kernels of a profile that are kept


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    kind: str
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    context: int = 32_768


@dataclass(frozen=True)
class Part:
    """What is measured at once; `seconds` is what all of it is expected to take on an H200."""

    requests: int
    prompt: int
    seqs: tuple[int, ...]  # vLLM's max_num_seqs to try; one where every request is decoded at once in any case
    bar: float = 1.0  # the ratio that is wanted
    seconds: int = 120


SHAPES = {
    "135m": Shape("llama", 49_152, 576, 1536, 30, 9, 3, True, 8192),
    "0.5b": Shape("qwen2", 151_936, 896, 4864, 24, 14, 2, True),
    "1.5b": Shape("qwen2", 151_936, 1536, 8960, 28, 12, 2, True),
    "7b": Shape("qwen2", 152_064, 3584, 18_944, 28, 28, 4, False),
    "tiny": Shape("llama", 512, 128, 128, 2, 4, 2, True, 512),  # to try the script without a GPU
}
PARTS = {
    "135m/64": Part(8192, 36, (512, 2048, 4096, 8192), seconds=600),
    "0.5b/512": Part(2048, 128, (256, 512, 1024, 2048), seconds=360),
    "0.5b/4096": Part(256, 128, (512,), seconds=200),
    "0.5b/16384": Part(64, 128, (512,), seconds=290),
    "1.5b/512": Part(2048, 128, (256, 512, 1024, 2048), 3.0, seconds=480),
    "1.5b/4096": Part(256, 128, (512,), seconds=220),
    "1.5b/16384": Part(64, 128, (512,), seconds=320),
    "7b/256": Part(1024, 128, (128, 256, 512, 1024), 1.3, seconds=400),
    "7b/4096": Part(128, 128, (512,), seconds=250),
}
TRIAL = {"tiny/12": Part(24, 9, (8,)), "tiny/30": Part(16, 9, (8,))}


def lengths(kind: str, requests: int, tokens: int, seed: int = 0) -> list[int]:
    """The length of each response: all `tokens`, or long-tailed and alike within a group of 8."""
    if kind == "fixed":
        return [tokens] * requests
    rng = np.random.default_rng([seed, requests, tokens])
    of_prompt = np.repeat(rng.normal(size=-(-requests // GROUP_SIZE)), GROUP_SIZE)[:requests]
    log = np.log(tokens * MEDIAN_SHARE) + SPREAD * np.sqrt(0.5) * (of_prompt + rng.normal(size=requests))
    return np.clip(np.exp(log), FEWEST_TOKENS, tokens).astype(int).tolist()


def prompts(part: Part, vocabulary: int, seed: int) -> list[list[int]]:
    """Token ids of each request's prompt; groups of 8 share one."""
    rng = np.random.default_rng([7, seed])
    ids = rng.integers(3, vocabulary, size=(-(-part.requests // GROUP_SIZE), part.prompt)).tolist()
    return [ids[row // GROUP_SIZE] for row in range(part.requests)]


def make_model(size: str, directory: Path) -> None:
    """Random weights in the shape of that size, saved in bfloat16 (float32 without a GPU)."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    from stalewise.models import EMBEDDED

    shape = SHAPES[size]
    configuration, model = (LlamaConfig, LlamaForCausalLM) if shape.kind == "llama" else (Qwen2Config, Qwen2ForCausalLM)
    config = configuration(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        made = model(config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_suffix(".tmp")
    made.save_pretrained(temporary, max_shard_size="100GB")
    AutoTokenizer.from_pretrained(str(EMBEDDED / "arithmetic")).save_pretrained(temporary)
    temporary.rename(directory)


# ---------------------------------------------------------------- one side in its own process


def limited_sampler(size: str, tokens: int, model: Path, *, compiled: bool = False) -> tuple[Any, Callable[..., Any]]:
    """Our engine, which ends each response at a length of its own and nowhere else; and its `sample` for requests of
    (part, lengths, seed): seconds and responses.
    """
    import torch

    from stalewise.rollout.engines.embedded import HFSampler
    from stalewise.rollout.engines.request_queue import LengthHistory, RequestQueue
    from stalewise.rollout.sampler import Request, Response
    from stalewise.types import SamplerSettings

    class LimitedSampler(HFSampler):
        limit_of: Mapping[int, int] = {}

        def load(self, checkpoint: Path) -> None:
            super().load(checkpoint)
            self._stop_ids, self._stops = self._stop_ids[:0], []

        def _queue(self, requests: Sequence[Request]) -> RequestQueue:
            limits = [self.limit_of[request.seed] for request in requests]
            return RequestQueue(requests, self.max_new_tokens, self._history, limits)

    cuda = torch.cuda.is_available()
    sampler = LimitedSampler(
        SamplerSettings(),
        max_new_tokens=tokens,
        device=torch.device("cuda" if cuda else "cpu"),
        dtype=torch.bfloat16 if cuda else torch.float32,
        slots=True,
        should_compile=lambda model: compiled,
    )
    sampler.load(model)

    def sample(part: Part, limits: Sequence[int], seed: int) -> tuple[float, list[Response]]:
        ids = prompts(part, SHAPES[size].vocabulary, seed)
        requests = [Request(prompt, 1_000_000 * seed + row) for row, prompt in enumerate(ids)]
        sampler.limit_of = {request.seed: limit for request, limit in zip(requests, limits, strict=True)}
        sampler._history = LengthHistory()  # nothing is known of these prompts
        start = _now(cuda)
        responses = sampler.sample(requests)
        seconds = _now(cuda) - start
        if any(len(one.logp) != len(one.token_ids) or not np.isfinite(one.logp).all() for one in responses):
            raise RuntimeError("a response lacks log-probabilities")
        return seconds, responses

    return sampler, sample


def measure_ours(name: str, part: Part, model: Path, compiled: bool, profile: bool) -> dict[str, Any]:
    """Our engine: seconds of each kind of lengths, after one warm-up."""
    import torch

    size, tokens = name.split("/")
    sampler, made = limited_sampler(size, int(tokens), model, compiled=compiled)

    def sample(limits: Sequence[int], seed: int) -> tuple[float, list[int]]:
        seconds, responses = made(part, limits, seed)
        return seconds, [len(one.token_ids) for one in responses]

    found = measured(sample, part, int(tokens))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    if profile:
        found["profile"] = profiled(sample, part, int(tokens))
    found |= {"compiled": compiled, "problem": sampler.slots_problem, "peak_bytes": peak, "where": _where()}
    assert sampler._decoder is not None
    return {**found, "size": str(sampler._decoder.size), "rows": sorted(sampler._decoder.graphs)}


def measure_vllm(names: Sequence[str], model: Path, seqs: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM with one `max_num_seqs`: what was found of each of these parts of one size."""
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    cuda = torch.cuda.is_available()
    arguments = {
        "dtype": "bfloat16" if cuda else "float32",
        "max_model_len": max(part_of(name).prompt + int(name.split("/")[1]) for name in names) + 8,
        "max_num_seqs": seqs,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        **options,
    }
    start = _now(False)
    engine = vllm.LLM(
        model=str(model),
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        **arguments,
    )
    head: dict[str, Any] = {"start_seconds": _now(False) - start, "arguments": arguments, "vllm": vllm.__version__}
    flat = {"flat_logprobs": True} if hasattr(vllm.SamplingParams(), "flat_logprobs") else {}

    def sample(part: Part, vocabulary: int, limits: Sequence[int], seed: int) -> tuple[float, list[int]]:
        asked = [{"prompt_token_ids": ids} for ids in prompts(part, vocabulary, seed)]
        settings = [
            vllm.SamplingParams(
                temperature=1.0, max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False, **flat
            )
            for limit in limits
        ]
        start = _now(cuda)
        outputs = [output.outputs[0] for output in engine.generate(asked, settings, use_tqdm=False)]
        seconds = _now(cuda) - start
        if any(len(one.logprobs) != len(one.token_ids) for one in outputs):
            raise RuntimeError("a response lacks log-probabilities")
        return seconds, [len(one.token_ids) for one in outputs]

    found: dict[str, Any] = {}
    for name in names:
        size, tokens = name.split("/")
        part = part_of(name)
        found[name] = head | measured(partial(sample, part, SHAPES[size].vocabulary), part, int(tokens))
    return found


def part_of(name: str) -> Part:
    """The part of this name."""
    return {**PARTS, **TRIAL}[name]


def measured(sample: Sample, part: Part, tokens: int) -> dict[str, Any]:
    """Warm up with lengths of all sizes, so that steps of fewer rows are captured, too; then time each kind."""
    warm_up = (np.arange(part.requests) % min(WARM_UP_TOKENS, tokens) + 1).tolist()
    found: dict[str, Any] = {"warm_up_seconds": sample(warm_up, 1)[0]}
    for seed, kind in enumerate(KINDS, start=2):
        wanted = lengths(kind, part.requests, tokens)
        seconds, made = sample(wanted, seed)
        if wanted != made:
            raise RuntimeError("responses do not have the lengths that were asked for")
        found[kind] = {"seconds": seconds, "tokens": sum(made), "tokens_per_second": sum(made) / seconds}
    return found


def profiled(sample: Sample, part: Part, tokens: int) -> dict[str, Any]:
    """What our engine does in a few steps in the middle of responses of fixed length: milliseconds a step by kernel."""
    from torch.profiler import profile

    from stalewise.rollout.engines.slot_decode import SlotDecoder, steps_per_check

    run, seen, profiler, steps = SlotDecoder.run, [0], profile(), steps_per_check(tokens)
    checks = max(1, min(8, tokens // 4 // steps))
    first = max(1, tokens // 2 // steps - checks)

    def watched(self: SlotDecoder, rows: int, slots: np.ndarray, steps: int) -> None:
        seen[0] += 1
        if seen[0] in (first, first + checks):
            _now(self.device.type == "cuda")
            (profiler.start if seen[0] == first else profiler.stop)()
        run(self, rows, slots, steps)

    SlotDecoder.run = watched
    try:
        sample([min(tokens, steps * (first + checks + 2))] * part.requests, 9)
    finally:
        SlotDecoder.run = run
    times = {
        event.key[:80]: event.self_device_time_total or event.self_cpu_time_total for event in profiler.key_averages()
    }
    longest = sorted(times, key=lambda name: -times[name])[:PROFILED]
    per_step = {name: times[name] / 1e3 / (checks * steps) for name in longest}
    return {"at_token": first * steps, "ms_per_step": per_step}


def _now(cuda: bool) -> float:
    if cuda:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def _where() -> dict[str, Any]:
    """Machine and versions."""
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def work(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What a process of its own does."""
    names, model = spec["parts"], Path(spec["model"])
    if spec["side"] == "model":
        make_model(names[0].split("/")[0], model)
        return {}
    if spec["side"] == "ours":
        return {name: measure_ours(name, part_of(name), model, spec["compiled"], spec["profile"]) for name in names}
    return measure_vllm(names, model, spec["seqs"], spec["options"])


# ---------------------------------------------------------------- all of them, and one file


def summary(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Ratio of tokens per second to vLLM's best, by part (and `PART drawn`), and the bars that are missed."""
    ratios: dict[str, float] = {}
    for name, found in parts.items():
        for kind in KINDS:
            ours, best = _rate(found.get("ours"), kind), best_vllm(found, kind)[0]
            if ours and best:
                ratios[name if kind == "fixed" else f"{name} {kind}"] = round(ours / best, 3)
    bars = {name: bar_of(name) for name in ratios}
    return {"ratios": ratios, "bars": bars, "missed": [name for name in ratios if ratios[name] < bars[name]]}


def bar_of(name: str) -> float:
    """The ratio wanted; bars above 1 are for fixed lengths."""
    part = {**PARTS, **TRIAL}.get(name)  # none has the name of drawn lengths
    return part.bar if part is not None else 1.0


def best_vllm(found: Mapping[str, Any], kind: str) -> tuple[float, str]:
    """vLLM's best rate, and its `max_num_seqs`; 0 if it was not measured."""
    rates = {seqs: _rate(one, kind) for seqs, one in found.get("vllm", {}).items()}
    best = max(rates, key=lambda seqs: rates[seqs], default="")
    return rates.get(best, 0.0), best


def _rate(found: Mapping[str, Any] | None, kind: str) -> float:
    return float((found or {}).get(kind, {}).get("tokens_per_second", 0.0))


def table(record: Mapping[str, Any]) -> str:
    """Rates of both sides, in Markdown."""
    lines = [
        "| model/tokens | lengths | ours, tokens/s | vLLM, tokens/s | max_num_seqs | ratio | bar |",
        "|---" * 7 + "|",
    ]
    for name, found in record["parts"].items():
        for kind in KINDS:
            ours, (theirs, seqs) = _rate(found.get("ours"), kind), best_vllm(found, kind)
            ratio = f"{ours / theirs:.2f}" if ours and theirs else "–"  # those of the file are rounded already
            rates = " | ".join(f"{rate:,.0f}" if rate else "–" for rate in (ours, theirs))
            bar = bar_of(name if kind == "fixed" else f"{name} {kind}")
            lines.append(f"| {name} | {kind} | {rates} | {seqs or '–'} | {ratio} | {bar:g} |")
    return "\n".join(lines)


def jobs(
    record: Mapping[str, Any],
    names: Sequence[str],
    *,
    again: bool = False,
    compiled: bool = False,
    profile: bool = False,
) -> list[dict[str, Any]]:
    """The processes that are missing for these parts: ours, and vLLM with each `max_num_seqs` of a size."""
    wanted: list[dict[str, Any]] = []
    theirs: dict[tuple[str, int], dict[str, Any]] = {}
    for name in names:
        part, found = part_of(name), record["parts"].get(name, {})
        share = part.seconds / (1 + len(part.seqs))
        if again or not _rate(found.get("ours"), KINDS[-1]):
            options = {"compiled": compiled, "profile": profile}
            wanted.append({"parts": [name], "side": "ours", "seconds": share, **options})
        for seqs in part.seqs:
            if again or not _rate(found.get("vllm", {}).get(str(seqs)), KINDS[-1]):
                key = (name.split("/")[0], seqs)
                if key not in theirs:
                    theirs[key] = {"parts": [], "side": "vllm", "seqs": seqs, "seconds": 0.0}
                    wanted.append(theirs[key])
                theirs[key]["parts"].append(name)
                theirs[key]["seconds"] += share
    return wanted


def run_job(job: Mapping[str, Any], model: Path, vllm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """One process; what it found, or why it failed."""
    environment = {**os.environ, **QUIET}
    if job["side"] == "vllm" and vllm:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [vllm, environment.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as place:
        spec = {"profile": False, **job, "model": str(model), "out": f"{place}/found.json", "options": dict(options)}
        command = [sys.executable, str(HERE / "versus_vllm.py"), "--worker", json.dumps(spec)]
        log = Path(place) / "log"
        code = finish(start(command, log, environment)) or 0
        found = json.loads(Path(spec["out"]).read_text()) if code == 0 else {"error": ending(code, log)}
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    record |= summary(record["parts"])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)


def main(arguments: argparse.Namespace) -> int:
    begun, out = time.monotonic(), arguments.out
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}, "ratios": {}}
    names = arguments.parts.split(",") if arguments.parts else list(PARTS)
    if unknown := [name for name in names if name not in {**PARTS, **TRIAL}]:
        raise SystemExit(f"no part is called {unknown[0]}: choose from {', '.join(PARTS)}")
    wanted = (
        []
        if arguments.table
        else jobs(record, names, again=arguments.again, compiled=arguments.compile, profile=arguments.profile)
    )
    for job in (job for job in wanted if arguments.side in ("both", job["side"])):
        if arguments.budget_s and time.monotonic() - begun + job["seconds"] > arguments.budget_s:
            print(f"left for another call: {_named(job)}", flush=True)
            continue
        size = job["parts"][0].split("/")[0]
        model, start = arguments.work / size, time.monotonic()
        options = json.loads(arguments.vllm_options)
        found = {} if model.exists() else run_job({**job, "side": "model"}, model, "", {})
        about: dict[str, Any] = when()
        found = found or run_job(job, model, arguments.vllm, options)
        about["process_seconds"] = time.monotonic() - start  # of all its parts
        for name in job["parts"]:
            part = record["parts"].setdefault(name, {})
            of_it = (found if "error" in found else found[name]) | about
            if job["side"] == "ours":
                part["ours"] = of_it
            else:
                part.setdefault("vllm", {})[str(job["seqs"])] = of_it
        write(out, record)
        rates = {name: [round(_rate(found[name], kind)) for kind in KINDS] for name in found if name != "error"}
        print(f"{_named(job)}: {found.get('error', rates)} ({about['process_seconds']:.0f} s)", flush=True)
    print(table(record) if record["parts"] else "nothing was measured")
    return 1 if record.get("missed") else 0


def _named(job: Mapping[str, Any]) -> str:
    return f"{','.join(job['parts'])} {job['side']} {job.get('seqs', '')}".strip()


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help=f"with commas between them; all: {','.join(PARTS)}")
    parser.add_argument("--side", choices=("both", "ours", "vllm"), default="both")
    parser.add_argument("--vllm", default="", help="directory for PYTHONPATH of vLLM's process")
    parser.add_argument("--vllm-options", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--compile", action="store_true", help="ours with compiled layers, as runs of 512 updates have")
    parser.add_argument("--profile", action="store_true", help="also which kernels our steps spend their time in")
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--budget-s", type=float, default=0, help="begin nothing that would end after so many seconds")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "versus_vllm", help="for the models")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    given = parsed()
    if given.worker:
        description = json.loads(given.worker)
        Path(description["out"]).write_text(json.dumps(work(description)))
        sys.stdout.flush()
        os._exit(0)  # threads of vLLM could delay an orderly exit
    sys.exit(main(given))
