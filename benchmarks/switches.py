"""What a run waits for between generating and learning: seconds per switch, staged and with µ = 4, 16, 64, 256.

    python benchmarks/switches.py [--sizes 0.5b] [--updates 256] [--mu 4,16,64,256] [--parts copy,run] [--out FILE]
    python benchmarks/switches.py --parts disk --gb 1.7 --every 3.6 --work DIRECTORY      # a disk, on any machine
    python benchmarks/switches.py --quick        # a tiny model, in a minute, on a CPU

Policies have random weights in the shapes of Qwen2.5 (as Llama, without biases) and a tokenizer of made-up words; one
token in 500 ends a response, and rewards are a coin's. `copy` measures what blocks at least: the copy of weights and
moments to the host, into new memory and into memory that was used before, and the sampler's copy of the weights on the
device. `run` makes whole runs, called SIZE/ROLLOUTS/µ with the rollouts of an update. Those that differ in µ alone are
compared, by the seconds of an update; how many updates they have may differ. `--label disk` calls them
SIZE-disk/ROLLOUTS/µ, so that runs with `--work` elsewhere do not replace the others of a file.

A switch is everything from the last update on a generation batch to the next generation, and from there to the next
update: checkpoint, waiting for its commit, the sampler's new weights, opening the next batch. With `--engine vllm`, on
the learner's GPU, the sampler's part is waking vLLM and reloading from the checkpoint, which must be committed first;
putting it to sleep counts to the next learner. Start and end of a run (first checkpoint, first learner; last
checkpoint) are given apart. `background_s` is what writing took.

`disk` writes checkpoints of `--gb` gigabytes, one every `--every` seconds, each over the one before the last, as a run
does, or with `--remove` beside the removal of that one: seconds of both, and what each checkpoint waited for those
before it. `--no-checksums` leaves hashing out, where the processor has few cores for a fast disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.child_processes import ending, finish, start, when

from stalewise.api import run
from stalewise.config import make_config
from stalewise.models.transfer import HostBuffers
from stalewise.orchestrator.checkpoint_writer import CheckpointWriter
from stalewise.orchestrator.run_log import RunLog
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.store.checkpoints import prune, write_checkpoint
from stalewise.store.json_lines import read_jsonl
from stalewise.tasks import TASKS
from stalewise.tasks.base import LocalVerifier
from stalewise.trainer import snapshot as snapshot_module
from stalewise.trainer.snapshot import Snapshot
from stalewise.types import Prompt, Reward

# Width, inner width, layers, heads, heads of keys and values, tied embeddings.
SHAPES: dict[str, tuple[int, int, int, int, int, bool]] = {
    "tiny": (128, 256, 2, 4, 2, True),
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
}
VOCABULARY = {"tiny": 512}
ONE_IN = {"tiny": 20}  # tokens end a response, else 500
FORMAT = "stalewise.switches/2"
GROUP = 8  # responses to a prompt
ROUNDS = 3
CHECKPOINTS = 8
VLLM = {"gpu_memory_utilization": 0.4, "max_model_len": 2048, "copies": 1}
TASKS["coin"] = f"{__name__}:Coin"


class Heads(LocalVerifier):
    """The parity of a checksum of prompt and response."""

    def judge(self, prompt: Prompt, response: str) -> Reward:
        return Reward(float(zlib.crc32(f"{prompt.prompt_id} {response}".encode()) & 1))


class Coin:
    """Prompts of 16 words."""

    name, size = "coin", None

    def __init__(self, seed: int = 0) -> None:
        self.verifier = Heads()

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [self._prompt(i) for i in range(start, start + count)]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(-1 - i) for i in range(count)]

    @staticmethod
    def _prompt(index: int) -> Prompt:
        words = [zlib.crc32(f"{index} {place}".encode()) % 400 for place in range(16)]
        return Prompt(f"coin/{index}", " ".join(f"t{word}" for word in words), "")


def model_config(size: str) -> LlamaConfig:
    width, inner, layers, heads, keys, tied = SHAPES[size]
    vocabulary = VOCABULARY.get(size, 151_936 if size != "7b" else 152_064)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        eos_token_id=vocabulary - 1,
    )


def write_model(size: str, directory: Path) -> None:
    """A policy with random weights, made on the device where there is one."""
    config = model_config(size)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = LlamaForCausalLM(config)
    vocabulary = config.vocab_size
    model.generation_config.eos_token_id = list(range(vocabulary - vocabulary // ONE_IN.get(size, 500), vocabulary))
    model.to(torch.bfloat16).save_pretrained(directory)
    words = {f"t{i}": i for i in range(vocabulary - 1)} | {"<end>": vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="<end>", unk_token="t0")
    wrapped.save_pretrained(directory)


def measure_copy(size: str, moment_bytes: int) -> dict[str, Any]:
    """Seconds of copying weights and moments to the host, and weights in bfloat16 on the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(model_config(size)).named_parameters()}
    weights = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
    sampled = {name: torch.ones(shape, device=device, dtype=torch.bfloat16) for name, shape in shapes.items()}
    dtype = {4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}[moment_bytes]
    files = {"model": weights}
    for moment in ("first", "second"):
        files[moment] = {name: torch.ones(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
    buffers, seconds = HostBuffers(), list[float]()
    for _ in range(ROUNDS):
        _wait(device)
        start = time.perf_counter()
        for name, tensors in files.items():
            buffers.copy(name, tensors)
        seconds.append(time.perf_counter() - start)
    taken: list[float] = []
    for _ in range(ROUNDS):
        _wait(device)
        start = time.perf_counter()
        for name, tensor in weights.items():
            sampled[name].copy_(tensor)
        _wait(device)
        taken.append(time.perf_counter() - start)
    return {
        "bytes": buffers.nbytes,
        "moment_bytes": moment_bytes,
        "new_memory_s": seconds[0],
        "used_memory_s": statistics.median(seconds[1:]),
        "gb_per_s": buffers.nbytes / statistics.median(seconds[1:]) / 1e9,
        "sampler_takes_s": statistics.median(taken[1:]),
    }


def measure_disk(gigabytes: float, every: float, work: Path, *, removes: bool = False) -> dict[str, Any]:
    """Seconds that checkpoints wait for the writing and the removal of those before them."""
    directory = work / "disk"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tensors = {"weight": torch.rand(int(gigabytes * 1e9 / 12))}
    snapshot = Snapshot({f"{name}.safetensors": tensors for name in ("model", "first", "second")}, lambda place: None)
    nbytes = 3 * tensors["weight"].nbytes
    writer, notes, removed, waits = CheckpointWriter(RunLog(directory), HostBuffers()), list[dict[str, Any]](), [], []

    def commit(version: int) -> dict[str, Any]:
        notes.append({})
        save = partial(snapshot.write, spare=writer.spare)
        write_checkpoint(directory, version, save=save, state={}, notes=notes[-1])
        return notes[-1]

    def remove() -> None:
        start = time.perf_counter()
        prune(directory, keep=1, spare=None if removes else writer.spare_for(nbytes))
        removed.append(time.perf_counter() - start)

    for version in range(CHECKPOINTS):
        start = time.perf_counter()
        writer.begin(version, lambda version=version: commit(version), remove, nbytes)
        waits.append(time.perf_counter() - start)
        time.sleep(every)
    writer.finish()
    shutil.rmtree(directory)
    return {
        "gigabytes": gigabytes,
        "every_s": every,
        "writing_s": statistics.median([note["writing_s"] for note in notes]),
        "removing_s": statistics.median(removed[1:]),  # there was none before the first
        "waiting_s": statistics.median(waits[2:]),
        "longest_wait_s": max(waits),
    }


@contextlib.contextmanager
def no_checksums() -> Iterator[None]:
    """Files are written without being hashed."""

    class Nothing:
        def update(self, data: object) -> None: ...

        def digest(self) -> bytes:
            return b""

    class Hashes:
        sha256 = Nothing

    before, snapshot_module.hashlib = snapshot_module.hashlib, Hashes
    try:
        yield
    finally:
        snapshot_module.hashlib = before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_run(options: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """One run; its seconds from the journal."""
    size, mu, updates = options["size"], options["mu"], options["updates"]
    name, vllm = f"{size}-mu{mu}", VLLM | {"while_learning": options.get("sleep", "sleep")}
    settings = make_config(
        {
            "name": name,
            "runs": str(work),
            "task": {"name": "coin"},
            "model": {"path": str(work / size)},
            "schedule": {"kind": "synchronous", "updates": updates, "updates_per_generation": mu},
            "batch": {"prompts": options["prompts"], "group_size": GROUP},
            "sampler": {
                "max_new_tokens": options["tokens"],
                "engine": options["engine"],
                "vllm": vllm,
            },
            "objective": {"name": "mu_grpo"},
            "optimizer": {"learning_rate": 1e-7},
            "checkpoints": {"every": updates, "keep": 1},
            "evaluation": {"prompts": 8, "samples": 1},
        }
    )
    start = time.perf_counter()
    run(settings)
    seconds = time.perf_counter() - start
    journal = read_jsonl(settings.directory / "journal.jsonl")
    shutil.rmtree(settings.directory)
    sizes = {"prompts": options["prompts"], "rollouts": options["prompts"] * GROUP, "tokens": options["tokens"]}
    return {"mu": mu, "updates": updates, **sizes, "wall_s": seconds, **summary(journal)}


def summary(journal: Sequence[Mapping[str, Any]], *, is_whole: bool = True) -> dict[str, Any]:
    """Seconds of a run by what it did; blocking seconds of a switch without those of the start and the end.

    A run that is not whole ended before its last checkpoint.
    """
    spent = {"generate": 0.0, "learn": 0.0, "switch": 0.0, "start": 0.0, "end": 0.0}
    reasons: dict[str, list[float]] = {
        name: [] for name in ("memory", "checkpoint", "commit", "offload", "sampler", "learner", "check")
    }
    # The run ends with its last checkpoint; the commit of the one before may come after the last update.
    checkpoints = [place for place, one in enumerate(journal) if one.get("reason") == "checkpoint"]
    last = checkpoints[-1] if checkpoints and is_whole else len(journal)
    for place, record in enumerate(journal):
        event, reason, seconds = record["event"], record.get("reason", ""), float(record["seconds"])
        # It is logged before the checkpoint that waits for it.
        is_for_the_end = reason == "memory" and len(checkpoints) < 1 + is_whole
        if event == "switch" and (place >= last or is_for_the_end):
            spent["end"] += seconds
        elif reason == "first checkpoint" or (reason in ("learner", "sampler", "check") and not spent["learn"]):
            spent["start"] += seconds
        elif event in spent:
            spent[event] += seconds
            if event == "switch":
                reasons[reason].append(seconds)
    written = [record for record in journal if "bytes" in record]
    keys = ("writing_s", "checksums_s", "committing_s")
    switches = len(reasons["checkpoint"])
    return {
        "switches": switches,
        "blocking_s_per_switch": spent["switch"] / max(1, switches),
        "median_s": {reason: statistics.median(values) for reason, values in reasons.items() if values},
        "checkpoint_bytes": max((record["bytes"] for record in written), default=0),
        "background_s": statistics.median([sum(record[key] for key in keys) for record in written])
        if written
        else None,
        "seconds": spent,
    }


def headline(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Blocking seconds of a switch, and how much faster than with µ = 4 and all else the same an update is, by run.

    Seconds are of an update, without start and end, so runs of other lengths are compared, too.
    """
    blocking = {name: run["blocking_s_per_switch"] for name, run in runs.items() if run.get("switches")}
    apart = ("start", "end")
    total = {
        name: sum(v for k, v in run["seconds"].items() if k not in apart) / run["updates"] for name, run in runs.items()
    }
    bases = {name: f"{name.rpartition('/')[0]}/4" for name in runs}
    gains = {
        name: total[base] / total[name]
        for name, base in bases.items()
        if base in runs and total[name] and runs[base]["tokens"] == runs[name]["tokens"]
    }
    return {"blocking_s_per_switch": blocking, "times_faster_than_mu_4": gains}


def in_a_process(part: str, options: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """A measurement in a process of its own: device memory is free again after it."""
    found, log = work / "found.json", work / "log"
    work.mkdir(parents=True, exist_ok=True)
    found.unlink(missing_ok=True)
    spec = json.dumps({"part": part, **options})
    command = [sys.executable, __file__, "--work", str(work), "--one", spec, "--out", str(found)]
    code = finish(start(command, log))
    return read_json(found) if found.exists() else {"error": ending(code or 0, log)[-1]}


def one(options: dict[str, Any], work: Path) -> dict[str, Any]:
    if options["part"] == "copy":
        return measure_copy(options["size"], options["moment_bytes"])
    if not (work / options["size"]).is_dir():
        write_model(options["size"], work / options["size"])
    return measure_run(options, work)


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": gpu, "torch": torch.__version__}


def measure(arguments: argparse.Namespace, work: Path) -> tuple[dict[str, Any], bool]:
    """All results of the file with those that are measured now, and whether one of these failed."""
    sizes, parts = arguments.sizes.split(","), arguments.parts.split(",")
    result: dict[str, Any] = {"format": FORMAT, "machine": machine(), "copy": {}, "runs": {}}
    if arguments.out and arguments.out.is_file():  # further sizes or µ of the same machine
        before = read_json(arguments.out)
        if before["format"] != FORMAT:
            raise SystemExit(f"{arguments.out} has the format {before['format']}, not {FORMAT}: name another file")
        result |= before if before["machine"] == result["machine"] else {}
    began, failed = time.monotonic(), False
    if "disk" in parts:
        with no_checksums() if arguments.no_checksums else contextlib.nullcontext():
            found = measure_disk(arguments.gb, arguments.every, work, removes=arguments.remove)
        how = ", removed" * arguments.remove + ", no checksums" * arguments.no_checksums
        result.setdefault("disk", {})[f"{arguments.gb:g} GB every {arguments.every:g} s{how}"] = found
        print("disk", json.dumps(found), flush=True)
    for left in work.glob("*-mu*"):  # runs of a process that was ended would fill the disk
        shutil.rmtree(left)
    for size in sizes:
        if "copy" in parts:
            options = {"size": size, "moment_bytes": arguments.moment_bytes}
            result["copy"][size] = in_a_process("copy", options, work)
            failed |= "error" in result["copy"][size]
            print(size, "copy", json.dumps(result["copy"][size]), flush=True)
        for mu in map(int, arguments.mu.split(",")) if "run" in parts else ():
            options = {"size": size, "mu": mu, "updates": arguments.updates, "prompts": arguments.prompts}
            if mu > arguments.updates or time.monotonic() - began > arguments.deadline_s:
                continue
            more = {"tokens": arguments.tokens, "engine": arguments.engine, "sleep": arguments.sleep}
            found = {**when(), **in_a_process("run", {**options, **more}, work)}
            name = size if arguments.engine == "hf" else f"{size}-vllm" + ("-drop" if arguments.sleep == "drop" else "")
            name += f"-{arguments.label}" if arguments.label else ""
            name = f"{name}/{arguments.prompts * GROUP}/{mu}"
            result["runs"][name] = found
            failed |= "error" in found
            print(name, json.dumps(found), flush=True)
            result["headline"] = headline({k: run for k, run in result["runs"].items() if "error" not in run})
            if arguments.out:
                write_json_atomic(arguments.out, result)
        shutil.rmtree(work / size, ignore_errors=True)
    if arguments.out:
        write_json_atomic(arguments.out, result)
    return result, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b")
    parser.add_argument("--parts", default="copy,run")
    parser.add_argument("--mu", default="256,64,16,4", help="updates per generation; the largest is the staged run")
    parser.add_argument("--updates", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=16, help=f"of an update, with {GROUP} responses each")
    parser.add_argument("--tokens", type=int, default=256, help="of a response at most")
    parser.add_argument("--engine", default="hf", choices=("hf", "vllm"), help="vllm: on the learner's GPU, sleeping")
    parser.add_argument("--sleep", default="sleep", choices=("sleep", "drop"), help="of vLLM: level 1 or level 2")
    parser.add_argument("--label", default="", help="in the names of runs after their size")
    parser.add_argument("--moment-bytes", type=int, choices=(1, 2, 4), default=4, help="of a number in `copy`")
    parser.add_argument("--gb", type=float, default=5.9, help="of a checkpoint in `disk`")
    parser.add_argument("--every", type=float, default=3.6, help="seconds between checkpoints in `disk`")
    parser.add_argument("--remove", action="store_true", help="in `disk`, remove checkpoints; none is overwritten")
    parser.add_argument("--no-checksums", action="store_true", help="in `disk`, leave hashing out")
    parser.add_argument("--deadline-s", type=float, default=1e9, help="after which no further run is begun")
    parser.add_argument("--work", type=Path, help="where models and runs go; a temporary directory by default")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "/" in arguments.label:
        parser.error(f"--label {arguments.label} is to be a part of names like 0.5b/64/4: leave out the /")
    if arguments.one:
        write_json_atomic(arguments.out, one(json.loads(arguments.one), arguments.work))
        return 0
    if arguments.quick:
        arguments.sizes, arguments.mu, arguments.updates = "tiny", "8,4", 8
        arguments.prompts, arguments.tokens = 2, 64
    with tempfile.TemporaryDirectory() as temporary:
        result, failed = measure(arguments, arguments.work or Path(temporary))
    print(json.dumps(result.get("headline", {}), indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
