"""Train tiny random models of many families for two updates, and compare every recorded log-probability with a plain
forward pass.

    python scripts/architectures.py [--families llama,mamba] [--jobs 2] [--limit 300] [--json FILE] [--write]

Each family runs twice, the second time with gradient checkpointing, in a process of its own with a time limit. A family
is right, refused (with the message), wrong (it trained on log-probabilities that are off) or broken (a traceback).
Exit status 1 if any is wrong or broken. `--write` renews the table in docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

from families import FAMILIES, build, differences, plain_logp, settings  # noqa: E402  # pyright: ignore[reportMissingImports]
from stalewise.api import run  # noqa: E402
from stalewise.config import make_config  # noqa: E402
from stalewise.errors import StalewiseError  # noqa: E402
from stalewise.rollout.engines.embedded import HFSampler  # noqa: E402
from stalewise.rollout.sampler import Request  # noqa: E402
from stalewise.types import NullCallback, SamplerSettings  # noqa: E402

TOLERANCE = 1e-3  # nats, in float32
CPU = torch.device("cpu")
PAGE, BEGIN, END = ROOT / "docs" / "models.md", "<!-- architectures: begin -->", "<!-- architectures: end -->"
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
ORDER = ("right", "refused", "not built", "broken", "wrong")
PASSES = {"plain": {}, "checkpointed": {"gradient_checkpointing": True}}


class Notes(NullCallback):
    """Keeps what a run logs."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, message: str) -> None:
        self.lines.append(message)


def examine(family: str, directory: Path) -> dict[str, Any]:
    """Build the model and run it."""
    try:
        model = build(family, directory / "model")
    except Exception as error:
        return {"class": "", "outcome": "not built", "reason": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"class": type(model).__name__}
    for name, learner in PASSES.items():
        found[name] = attempt(directory, name, learner)
    if found["plain"]["outcome"] == "right":
        found["slots"] = slots(directory / "model")
    return found


def slots(directory: Path) -> str:
    """Why this family is not decoded in slots, the way of a GPU; empty: it is, and right."""
    sampler = HFSampler(SamplerSettings(), max_new_tokens=8, device=CPU, dtype=torch.float32, slots=True)
    sampler.load(directory)
    if sampler.slots_problem:
        return sampler.slots_problem.splitlines()[0]
    requests = [Request([3 + (place * length) % 15 for place in range(length)], length) for length in (2, 9, 30, 30)]
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    for request, response in zip(requests, sampler.trial(requests, 8), strict=True):
        expected = plain_logp(model, request.prompt_ids, response.token_ids.tolist()).numpy()
        if (off := float(abs(response.logp - expected).max())) > TOLERANCE:
            raise AssertionError(f"slots are off by {off:.2g} nats, and said nothing")
    return ""


def attempt(directory: Path, name: str, learner: dict[str, Any]) -> dict[str, Any]:
    """One run: its outcome, and how far it is from a plain forward pass."""
    notes, start = Notes(), time.perf_counter()
    try:
        run(make_config(settings(directory / "model", directory, name, **learner)), notes)
    except StalewiseError as error:
        return {"outcome": "refused", "reason": " ".join(str(error).replace(str(directory), "").split())}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return {"outcome": "broken", "reason": f"{type(error).__name__} in {where}: {' '.join(str(error).split())}"}
    seconds = time.perf_counter() - start
    sampling, learning = differences(directory / "model", directory / name)
    packed = not any("does not support packing" in line for line in notes.lines)
    is_right = sampling <= TOLERANCE and learning <= TOLERANCE  # NaN is not
    return {
        "outcome": "right" if is_right else "wrong",
        "sampling": sampling,
        "learning": learning,
        "packed": packed,
        "seconds": round(seconds, 1),
    }


def child(family: str, connection: Any) -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        connection.send(examine(family, Path(directory)))


def in_process(family: str, limit: float) -> dict[str, Any]:
    """Examine a family in a forked process, which is ended after `limit` seconds."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(family, there))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(limit) else {"outcome": "broken", "reason": f"no end within {limit:g} s"}
    except EOFError:
        process.join()
        found = {"outcome": "broken", "reason": f"the process ended with status {process.exitcode}"}
    process.kill()
    process.join()
    print(f"{family:20} {describe(found)}", file=sys.stderr, flush=True)
    return found


def describe(found: dict[str, Any]) -> str:
    if "outcome" in found:
        return f"{found['outcome']}: {found['reason']}"
    return " | ".join(
        f"{name}: {one['outcome']} "
        + (one.get("reason", "") or f"{one['sampling']:.1e} sampling, {one['learning']:.1e} learning")
        for name, one in found.items()
        if name in PASSES
    )


def outcome_of(found: dict[str, Any]) -> str:
    """The worst outcome of a family's runs."""
    outcomes = [found["outcome"]] if "outcome" in found else [found[name]["outcome"] for name in PASSES]
    return max(outcomes, key=ORDER.index)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Two tables: families that are right at least without checkpointing, and those that are refused."""
    right = {name: found for name, found in results.items() if found.get("plain", {}).get("outcome") == "right"}
    lines = ["| family | on a GPU | learner | sampling, nats | learning, nats | gradient checkpointing |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name, found in right.items():
        one, other = found["plain"], found["checkpointed"]
        decoding, learner = "growing cache" if found["slots"] else "slots", "packed" if one["packed"] else "padded"
        checkpointed = "yes" if other["outcome"] == "right" else shortened(other["reason"])
        figures = f"{one['sampling']:.0e} | {one['learning']:.0e}"
        lines.append(f"| `{name}` | {decoding} | {learner} | {figures} | {checkpointed} |")
    rest = {name: found for name, found in results.items() if name not in right}
    lines += ["", "| refused | why |", "| --- | --- |"]
    lines += [f"| `{name}` | {shortened((found.get('plain') or found)['reason'])} |" for name, found in rest.items()]
    return "\n".join(lines)


def shortened(reason: str) -> str:
    """A message without what repeats in every row."""
    reason = reason.replace('; model.check = "warn" goes on regardless', "").replace("/model is", "is")
    return reason.replace(": choose another model", "").replace("|", "/")


def write_page(text: str) -> None:
    """Put the tables between the markers of docs/models.md."""
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}\n{text}\n{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one family")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--write", action="store_true", help="renew the table in docs/models.md and its JSON")
    arguments = parser.parse_args()
    families = [name for name in arguments.families.split(",") if name] or sorted(FAMILIES)
    with ThreadPoolExecutor(arguments.jobs) as threads:
        results = dict(zip(families, threads.map(lambda one: in_process(one, arguments.limit), families), strict=True))
    if arguments.write and RESULTS.is_file():  # other families keep their rows
        kept = json.loads(RESULTS.read_text())
        results = {name: one for name, one in sorted({**kept, **results}.items()) if name in FAMILIES}
    for path in filter(None, [arguments.json, RESULTS if arguments.write else ""]):
        Path(path).write_text(json.dumps(results, indent=1) + "\n")
    if arguments.write:
        write_page(table(results))
    outcomes = [outcome_of(found) for found in results.values()]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ORDER))
    return int(any(outcome in ("wrong", "broken", "not built") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
