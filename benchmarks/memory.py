"""What a run takes of a GPU's memory, beside the estimate of `doctor`.

    python benchmarks/memory.py [--parts 0.5b/full/one,1.5b/lora/pipelined] [--out FILE]
    python benchmarks/memory.py --parts tiny/full/one    # in a minute, on a CPU

A part is a size (0.5b, 1.5b, 7b), what is trained (full, or lora of rank 16 on bfloat16 weights; lora-offload with
`learner.offload`) and a schedule: `one` process, in two stages, or `pipelined`, with a generator beside the learner on
one GPU. Each is a whole run of eight updates with random weights in Qwen2.5's shapes, and rewards of a coin; with
`learner.offload`, and at 7B with all weights, of two stages of eight updates, since its switch is of interest. At 7B
with all weights a run ends before a checkpoint that has no room on a disk of 64 GB: in one process before its second
one of 46 GB, pipelined before its first one, when it has learned from a batch of eight updates beside the generator.
Where the disk is short for a checkpoint, the model and the weights of version 0 are removed when nothing needs them
any more. The peak is what the driver counts as used, looked at ten times a second, less what was used before: so CUDA
contexts and what torch's allocator reserves are in it. Beside it are the parts of the estimate, the seconds that
switches of the run blocked (as in switches.py, and one by one), and what the allocator of the learner's process held at
its own peak, by pool (of CUDA graphs, or of launches) and stream, and its largest blocks: what is not in use is cached.
Without a GPU the peak is the resident memory of the run's processes, and the estimate means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.child_processes import ending, finish, start, when
from benchmarks.switches import Coin, summary, write_model

from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.errors import StalewiseError
from stalewise.planning.memory import estimate
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory
from stalewise.store.json_lines import read_jsonl
from stalewise.types import NullCallback

FORMAT = "stalewise.memory/1"
DEFAULT = ",".join(map("/".join, product(("0.5b", "1.5b"), ("full", "lora"), ("one", "pipelined"))))
UPDATES, PROMPT_TOKENS = 8, 16
# Parts whose run ends before the checkpoint of this version. The generator reads version 0, which cannot make room.
ENDS_BEFORE = {"7b/full/one": 2 * UPDATES, "7b/full/pipelined": UPDATES}
MOST_BLOCKS = 12  # that are told
# Rollouts and tokens: 7B is trained with gradient checkpointing and, where all of it is, with moments in 8 bits.
PROMPTS = {"tiny": 2, "0.5b": 16, "1.5b": 8, "7b": 8}
TOKENS = {"tiny": 24}
ASKS = "--query-gpu=memory.used", "--format=csv,noheader,nounits"


def config_of(part: str, work: Path) -> RunConfig:
    """The config of a part's run."""
    size, kind, schedule = part.split("/")
    updates = 2 * UPDATES if kind == "lora-offload" or part in ENDS_BEFORE else UPDATES
    record: dict[str, Any] = {
        "name": part.replace("/", "-"),
        "runs": str(work),
        "task": {"name": "jsonl", "options": task_options(work)},
        "model": {"path": str(work / size)},
        "batch": {"prompts": PROMPTS[size], "group_size": 8},
        "sampler": {"max_new_tokens": TOKENS.get(size, 512)},
        "optimizer": {"learning_rate": 1e-7},
        "checkpoints": {"every": updates, "keep": 1},
        "evaluation": {"prompts": 8, "samples": 1},
    }
    if schedule == "pipelined":
        each = UPDATES if part in ENDS_BEFORE else 2
        record["schedule"] = {"kind": "pipelined", "updates": updates, "updates_per_generation": each, "lag": 1}
    else:
        record["schedule"] = {"kind": "staged", "updates": updates, "stages": 2}
    if kind != "full":
        record["model"] |= {"lora": {"rank": 16}, "precision": "auto" if size == "tiny" else "bfloat16-only"}
    record["learner"] = {"gradient_checkpointing": size == "7b"}
    if kind == "lora-offload":
        record["learner"] |= {"offload": "always"}
    if size == "7b":
        record["optimizer"] |= {"moments": "int8"} if kind == "full" else {}
    return make_config(record)


def task_options(work: Path) -> dict[str, Any]:
    """Prompts of 16 words, and rewards by parity of a checksum, in files, which a generator's process can read."""
    rows, rewards = work / "prompts.jsonl", work / "coin_of_memory.py"
    texts = [prompt.text for prompt in Coin().prompts(0, 512)]
    rows.write_text("".join(json.dumps({"problem": text, "answer": "0"}) + "\n" for text in texts))
    rewards.write_text("import zlib\n\n\ndef coin(response):\n    return float(zlib.crc32(response.encode()) & 1)\n")
    options = {"function": "coin_of_memory:coin", "workers": 1}
    return {"path": str(rows), "verifier": "python", "verifier_options": options}


def work_on(part: str, work: Path) -> dict[str, Any]:
    """The run, in a process of its own; what `doctor` foresaw, and what the allocator held."""
    config = config_of(part, work)
    foreseen = estimate(config, config.model.path, longest_prompt=PROMPT_TOKENS, alone=True)
    held = Held() if torch.cuda.is_available() else None
    if held is not None:
        held.start()
    ends_before = ENDS_BEFORE.get(part)
    found: dict[str, Any] = {"estimate_bytes": foreseen and foreseen.peak, "certain_bytes": foreseen and foreseen.least}
    try:
        with contextlib.suppress(BeforeCheckpointError):
            run(config, MakesRoom(config, ends_before))
    except StalewiseError as error:  # the switches until then are told all the same
        found["error"] = [str(error)]
    journal = read_jsonl(config.directory / "journal.jsonl")
    found["switches"] = summary(journal, is_whole=ends_before is None and "error" not in found) | {
        "one_by_one": [one for one in journal if one["event"] == "switch"]
    }
    if foreseen is not None:
        found["estimate"] = {**foreseen.certain, **foreseen.learning, **foreseen.sampling, "stays": foreseen.stays}
    if held is not None:
        held.is_over.set()
        held.join()
        found["allocator"] = held.found
    return found


class BeforeCheckpointError(Exception):
    """A run ends, as it is to."""


class MakesRoom(NullCallback):
    """Where the disk has no room for a checkpoint with 8-bit moments: removes what the run has read.

    The model goes when the run has its own copy, version 0; the weights of version 0 go when the run learns. Ends a
    run before the checkpoint of the version `ends_before`.
    """

    def __init__(self, config: RunConfig, ends_before: int | None = None) -> None:
        self.model, self.ends_before = Path(config.model.path), ends_before
        self.first = checkpoint_directory(config.directory, 0)
        # A checkpoint has 3 times the bytes. A run that ends before its first one needs no room.
        writes_one = ends_before is None or ends_before > config.schedule.schedule().updates_of(0).stop
        self.room = 3.2 * sum(file.stat().st_size for file in self.model.glob("*")) if writes_one else 0.0

    def metrics(self, update: int, record: Mapping[str, Any]) -> None:
        if update + 1 == self.ends_before:
            raise BeforeCheckpointError
        if self.is_short():
            for weights in self.first.glob("*.safetensors"):
                weights.unlink()

    def begin(self, what: str, total: int) -> None:
        if self.is_short():
            shutil.rmtree(self.model, ignore_errors=True)

    def is_short(self) -> bool:
        """Whether the disk of the runs has too little room."""
        return shutil.disk_usage(self.first.parents[2]).free < self.room


class Held(threading.Thread):
    """Looks at what torch's allocator holds in this process; keeps the largest, and its pools."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: dict[str, Any] = {"reserved_bytes": 0}
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.2):
            reserved = torch.cuda.memory_reserved()
            if reserved > 1.01 * self.found["reserved_bytes"]:
                segments = torch.cuda.memory_snapshot(include_traces=False)
                self.found = {"reserved_bytes": reserved, "pools": by_pool(segments)}
                self.found["blocks"] = largest_blocks(segments)
                self.found["allocated_bytes"] = torch.cuda.memory_allocated()


def by_pool(segments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bytes of the allocator's segments, and how many of them are in use, by pool and stream; the largest first."""
    sums: dict[tuple[str, int], list[int]] = {}
    for one in segments:
        total = sums.setdefault((pool_of(one), int(one["stream"])), [0, 0])
        total[0] += int(one["total_size"])
        total[1] += int(one["allocated_size"])
    order = sorted(sums.items(), key=lambda item: -item[1][0])
    return [{"pool": kind, "bytes": size, "in_use": used} for (kind, _), (size, used) in order]


def largest_blocks(segments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The largest blocks of the allocator's segments, in use or cached; the largest first."""
    blocks = sorted(
        ((int(block["size"]), pool_of(one), str(block["state"])) for one in segments for block in one["blocks"]),
        reverse=True,
    )
    return [
        {"pool": pool, "bytes": size, "in_use": state != "inactive", "state": state}
        for size, pool, state in blocks[:MOST_BLOCKS]
    ]


def pool_of(segment: Mapping[str, Any]) -> str:
    """Whether a segment is of CUDA graphs or of launches."""
    return "launches" if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0) else "graphs"


def used_bytes(process: psutil.Process | None = None) -> int:
    """Bytes in use on the GPU; without one, by a process and its children."""
    try:
        said = subprocess.run(["nvidia-smi", *ASKS], capture_output=True, text=True, check=True).stdout
        return int(said.splitlines()[0]) << 20
    except (OSError, subprocess.CalledProcessError):
        if process is None:
            return 0
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.Error:  # it has ended
            continue
    return total


class Peak(threading.Thread):
    """Looks at the memory in use until it is stopped."""

    def __init__(self, process: psutil.Process, before: int) -> None:
        super().__init__(daemon=True)
        self.process, self.before, self.most, self.is_over = process, before, 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.1):
            try:
                self.most = max(self.most, used_bytes(self.process) - self.before)
            except psutil.NoSuchProcess:
                return


def measure(part: str, work: Path) -> dict[str, Any]:
    """Peak and estimate of a part, or why it failed; no run is left."""
    remove_runs(work)
    try:
        return in_a_process(part, work)
    finally:
        remove_runs(work)


def remove_runs(work: Path) -> None:
    """Remove runs of all parts: their checkpoints would fill the disk, and a run that ended early would go on."""
    for part in product(PROMPTS, ("full", "lora", "lora-offload"), ("one", "pipelined")):
        shutil.rmtree(work / "-".join(part), ignore_errors=True)


def in_a_process(part: str, work: Path) -> dict[str, Any]:
    """A part in a process of its own, whose memory is looked at from here."""
    size, own, place = part.partition("/")[0], [sys.executable, __file__, "--work", str(work)], work / "found.json"
    if not (work / size).is_dir():  # in another process: it is made in float32, which may be more than the run takes
        subprocess.run([*own, "--write", size], check=True)
    place.unlink(missing_ok=True)
    about, before, began = when(), used_bytes(), time.monotonic()
    command = [*own, "--one", part, "--out", str(place)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")])}
    process = start(command, work / "log", environment)
    peak = Peak(psutil.Process(process.pid), before)
    peak.start()
    try:
        code = finish(process)
    finally:
        peak.is_over.set()
        peak.join()
    if code or not place.exists():
        return {**about, "error": ending(code or 0, work / "log")}
    found = {**about, **read_json(place), "peak_bytes": peak.most, "seconds": time.monotonic() - began}
    foreseen = found["estimate_bytes"]
    return found | {"estimate_ratio": foreseen / peak.most if foreseen and peak.most else None}


def line(part: str, found: Mapping[str, Any]) -> str:
    """A part in one line."""
    if "error" in found:
        return f"{part}: {' | '.join(found['error'][-3:])}"
    foreseen = found["estimate_bytes"] or 0
    share = f", {found['estimate_ratio']:.2f} of the peak" if found["estimate_ratio"] else ""
    return f"{part}: peak {found['peak_bytes'] / 1e9:.1f} GB, estimate {foreseen / 1e9:.1f} GB{share}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=DEFAULT)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help="where models and runs go; a temporary directory by default")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write_model(arguments.write, arguments.work / arguments.write)
        return 0
    if arguments.one:
        arguments.out.write_text(json.dumps(work_on(arguments.one, arguments.work)))
        return 0
    result: dict[str, Any] = read_json(arguments.out) if arguments.out and arguments.out.is_file() else {}
    result = {"format": FORMAT, "parts": {}} | result
    with tempfile.TemporaryDirectory() as place:
        work = arguments.work or Path(place)
        work.mkdir(parents=True, exist_ok=True)
        for part in arguments.parts.split(","):
            found = measure(part, work)
            result["parts"][part] = found
            print(line(part, found), flush=True)
            if arguments.out:
                write_json_atomic(arguments.out, result)
    return int(any("error" in result["parts"][part] for part in arguments.parts.split(",")))


if __name__ == "__main__":
    sys.exit(main())
