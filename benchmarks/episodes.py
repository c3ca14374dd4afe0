"""Episodes per second: the engine `hf` against vLLM, driving the same environment with the same policy and prompts.

    python benchmarks/episodes.py --model DIRECTORY --data gsm8k_test.jsonl --vllm DIRECTORY --episodes 4096
    python benchmarks/episodes.py --side ours                    # the embedded policy and the number game, on a CPU

With `--data` the rows are chat prompts in the environment `retry` (up to three tries; a right answer ends the episode),
or `--environment python`. vLLM goes on with an episode as soon as its environment has answered, as `hf` does: requests
are added between the steps of its engine, with prefix cache, CUDA graphs, log-probabilities, and no seeds. Both sides
sample at temperature 1, so episodes differ; tokens per second are given, too. A side is a process; the first of two
passes warms up. `--vllm` is put before PYTHONPATH of vLLM's process; without it vLLM must be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.child_processes import ending, finish, start

HERE = Path(__file__).resolve().parent
QUIET = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
# The engine in this process: one of its own that fails leaves this one waiting for it.
QUIET |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
Play = Callable[[Sequence[Any], Sequence[Any], Any], list[Any]]  # prompts, requests, environment: responses


def make_task(given: argparse.Namespace) -> Any:
    """Rows in an environment, or the number game."""
    from stalewise.tasks import make_task as make

    if not given.data:
        return make("arithmetic", environment="sums")
    environment = {"environment": given.environment, "environment_options": json.loads(given.environment_options)}
    return make("jsonl", path=given.data, chat=True, held_out=0.0, verifier="number", **environment)


def measure(play: Play, tokenizer: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Two passes over different prompts; the second counts."""
    from stalewise.rollout.episodes import encode_first
    from stalewise.rollout.sampler import Request
    from stalewise.tasks import close_task
    from stalewise.types import POLICY

    task, found = make_task(given), dict[str, Any]()
    try:
        for number in range(2):
            rows = task.prompts(number * given.episodes // 8, -(-given.episodes // 8))
            prompts, ids = encode_first(task.environment, rows, tokenizer)
            eight = [(prompt, one) for prompt, one in zip(prompts, ids, strict=True) for _ in range(8)][
                : given.episodes
            ]
            requests = [Request(one, 1_000_000 * number + row) for row, (_, one) in enumerate(eight)]
            start = time.perf_counter()
            responses = play([prompt for prompt, _ in eight], requests, task.environment)
            seconds = time.perf_counter() - start
            turns = [sum(one.by == POLICY for one in response.episode.segments) or 1 for response in responses]
            tokens = sum(len(response.token_ids) for response in responses)
            found = {
                "episodes": len(responses),
                "seconds": round(seconds, 3),
                "episodes_per_second": round(len(responses) / seconds, 2),
                "tokens_per_second": round(tokens / seconds, 1),
                "turns_per_episode": round(float(np.mean(turns)), 3),
                "tokens_per_episode": round(tokens / len(responses), 2),
                "errors": sum(bool(one.episode.reward and one.episode.reward.error) for one in responses),
            } | {"warm_up_seconds": round(seconds, 3) if not number else found["warm_up_seconds"]}
    finally:
        close_task(task)
    return found


def ours(given: argparse.Namespace) -> dict[str, Any]:
    """The engine `hf`: slots on a GPU."""
    import torch

    from stalewise.models import resolve_model
    from stalewise.rollout.engines.embedded import HFSampler
    from stalewise.rollout.episodes import play_episodes
    from stalewise.types import SamplerSettings

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    sampler = HFSampler(SamplerSettings(), max_new_tokens=given.max_new_tokens, device=device, dtype=dtype)
    sampler.load(Path(resolve_model(given.model)))

    def play(prompts: Sequence[Any], requests: Sequence[Any], environment: Any) -> list[Any]:
        numbers, options = range(len(requests)), {"sampler": sampler, "settings": SamplerSettings()}
        return play_episodes(environment, prompts, requests, numbers, **options)

    where = torch.cuda.get_device_name() if cuda else "cpu"
    return measure(play, sampler.tokenizer, given) | {"device": where, "problem": sampler.slots_problem}


def theirs(given: argparse.Namespace) -> dict[str, Any]:
    """vLLM's engine, step by step."""
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    from stalewise.models import resolve_model
    from stalewise.models.loading import load_tokenizer

    model = resolve_model(given.model)
    tokenizer = load_tokenizer(model)
    arguments = {"max_model_len": given.context, "max_num_seqs": given.max_num_seqs, "enable_prefix_caching": True}
    arguments |= {"dtype": "bfloat16" if torch.cuda.is_available() else "float32", "gpu_memory_utilization": 0.9}
    llm = vllm.LLM(model=model, logprobs_mode="processed_logprobs", generation_config="vllm", **arguments)

    def parameters(tokens: int) -> Any:
        stop = [tokenizer.eos_token_id]
        return vllm.SamplingParams(
            temperature=1.0, max_tokens=tokens, logprobs=0, detokenize=False, stop_token_ids=stop, ignore_eos=True
        )

    def play(prompts: Sequence[Any], requests: Sequence[Any], environment: Any) -> list[Any]:
        return drive(llm.llm_engine, parameters, tokenizer, given.max_new_tokens, prompts, requests, environment)

    return measure(play, tokenizer, given) | {"vllm": vllm.__version__, "arguments": arguments}


def drive(
    engine: Any,
    parameters: Callable[[int], Any],
    tokenizer: Any,
    max_new_tokens: int,
    prompts: Sequence[Any],
    requests: Sequence[Any],
    environment: Any,
) -> list[Any]:
    """Episodes on an engine of vLLM: a turn that has ended is answered, and its next one added, between two steps."""
    from stalewise.rollout.episodes import CallJournal, OpenEpisode, TurnEncoder, Turns
    from stalewise.rollout.sampler import Response
    from stalewise.types import FinishReason

    episodes = [OpenEpisode(*both) for both in zip(prompts, requests, strict=True)]
    encoder, journal = TurnEncoder(tokenizer), CallJournal(None)
    turns = Turns(
        environment,
        episodes,
        range(len(episodes)),
        encoder=encoder,
        max_new_tokens=max_new_tokens,
        journal=journal,
    )
    added = 0

    def add(number: int) -> None:
        nonlocal added
        episode = episodes[number]
        context = [*episode.request.prompt_ids, *episode.ids]
        name, added = f"{number}-{added}", added + 1
        engine.add_request(name, {"prompt_token_ids": context}, parameters(max_new_tokens - len(episode.ids)))

    for number in range(len(episodes)):
        add(number)
    while engine.has_unfinished_requests() or environment.pending:
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if not output.finished:
                continue
            made, number = output.outputs[0], int(output.request_id.partition("-")[0])
            ids = list(made.token_ids)
            logp = [position[token].logprob for position, token in zip(made.logprobs, ids, strict=True)]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            reason = FinishReason.STOP if made.finish_reason == "stop" else FinishReason.LENGTH
            turns.ended(number, Response(np.array(ids, np.int32), np.array(logp, np.float32), text, reason))
        for number, outside in turns.next(wait=not engine.has_unfinished_requests()):
            if outside:
                add(number)
    return [episode.response("") for episode in episodes]


def run_side(side: str, given: argparse.Namespace) -> dict[str, Any]:
    """A process of its own; what it found, or its last words."""
    environment = {**os.environ, **QUIET}
    places = [given.vllm if side == "vllm" else "", str(HERE.parent / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        command = [sys.executable, str(HERE / "episodes.py"), *sys.argv[1:], "--worker", side, "--out", str(out)]
        log = Path(place) / "log"
        code = finish(start(command, log, environment)) or 0
        return json.loads(out.read_text()) if code == 0 and out.is_file() else {"error": ending(code, log)}


def main(given: argparse.Namespace) -> int:
    if given.worker:
        given.out.write_text(json.dumps(ours(given) if given.worker == "ours" else theirs(given)))
        sys.stdout.flush()
        os._exit(0)  # threads of vLLM could delay an orderly exit
    record: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}
    record["settings"] = {
        "model": Path(given.model).name,
        "environment": given.environment if given.data else "sums",
        "episodes": given.episodes,
        "max_new_tokens": given.max_new_tokens,
    }
    for side in ("ours", "vllm"):
        if given.side in ("both", side):
            record[side] = run_side(side, given)
            print(side, json.dumps(record[side]), flush=True)
    rates = [record.get(side, {}).get("episodes_per_second") for side in ("ours", "vllm")]
    record["ratio"] = round(rates[0] / rates[1], 3) if all(rates) else None
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any("error" in record.get(side, {}) for side in ("ours", "vllm")))


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="arithmetic")
    parser.add_argument("--data", default="", help="JSONL with problem and answer")
    parser.add_argument("--environment", default="retry")
    parser.add_argument("--environment-options", default="{}", help="as JSON")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of a whole episode")
    parser.add_argument("--context", type=int, default=128, help="vLLM's max_model_len")
    parser.add_argument("--max-num-seqs", type=int, default=1024, help="vLLM's")
    parser.add_argument("--side", choices=("both", "ours", "vllm"), default="both")
    parser.add_argument("--vllm", default="", help="directory for PYTHONPATH of vLLM's process")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "episodes-h200.json")
    parser.add_argument("--worker", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main(parsed()))
