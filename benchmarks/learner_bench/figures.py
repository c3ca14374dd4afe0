"""The pure part: which parts there are, what a step must compute and move at least, kernels by group, the table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from versus.figures import ModelShape, shared_prompt_flops

Record = Mapping[str, Any]

# Qwen2.5's shapes; `tiny` shows on a CPU that everything works.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "inner": 160, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 512, "tied": True},
    "0.5b": {
        "hidden": 896,
        "inner": 4864,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "vocabulary": 151936,
        "tied": True,
    },
    "1.5b": {
        "hidden": 1536,
        "inner": 8960,
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
        "vocabulary": 151936,
        "tied": True,
    },
    "7b": {
        "hidden": 3584,
        "inner": 18944,
        "layers": 28,
        "heads": 28,
        "kv_heads": 4,
        "vocabulary": 152064,
        "tied": False,
    },
}
ROLLOUTS = {"tiny": 16, "0.5b": 256, "1.5b": 128, "7b": 64}  # of an update, in groups of 8
GOALS = {"0.5b": 0.50, "1.5b": 0.55, "7b": 0.45}  # share of the measured matrix rate
MODES = {"launches": "never", "graphs": "graphs", "compile": "layers", "both": "always", "auto": "auto"}
KINDS = ("full", "lora", "stage", "lora-stage")
MEMORY = {"plain": False, "recompute": True}  # gradient checkpointing


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement. Its name is `size/kind/memory/mode`, as in `0.5b/full/recompute/graphs`."""

    size: str
    kind: str  # full or lora: updates alone; stage or lora-stage: generation, 8 updates, generation
    memory: str
    mode: str

    @property
    def name(self) -> str:
        """The key in the results."""
        return "/".join((self.size, self.kind, self.memory, self.mode))

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """What it sets in a config."""
        learner: dict[str, Any] = {"compile": MODES[self.mode], "gradient_checkpointing": MEMORY[self.memory]}
        if "lora" in self.kind:
            learner["tokens_per_micro_batch"] = 8192
        adapters = {"precision": "bfloat16-only", "lora": {"rank": 16}} if "lora" in self.kind else {}
        large = self.size == "7b" and not adapters  # with moments in float32 it does not fit
        if self.kind == "lora-stage":
            learner["offload"] = "always"  # as `auto` decides on a device of 40 GB
        return {"learner": learner, "model": adapters, "optimizer": {"moments": "int8"} if large else {}}


def parts_of(text: str) -> list[Part]:
    """Parts by name; `*` and `{a,b}` stand for several, and what does not exist is refused.

    >>> [part.name for part in parts_of("0.5b/full/*/{graphs,both}")]
    ['0.5b/full/plain/graphs', '0.5b/full/plain/both', '0.5b/full/recompute/graphs', '0.5b/full/recompute/both']
    """
    known = ([size for size in SHAPES if size != "tiny"], list(KINDS), list(MEMORY), list(MODES))
    found: dict[str, Part] = {}
    for pattern in re.split(r",(?![^{]*})", text):
        fields = pattern.strip().split("/")
        if len(fields) != len(known):
            raise SystemExit(f"{pattern!r} is no part: size/kind/memory/mode, as in 0.5b/full/plain/graphs")
        choices = []
        for field, names in zip(fields, known, strict=True):
            chosen = names if field == "*" else field.strip("{}").split(",")
            if wrong := [name for name in chosen if name not in (*names, *SHAPES)]:
                raise SystemExit(f"{pattern!r}: {wrong[0]!r} is none of {', '.join(names)}")
            choices.append(chosen)
        found |= {part.name: part for part in (Part(*fields) for fields in itertools.product(*choices))}
    return list(found.values())


# ---------------------------------------------------------------- the floor


def operations_of(
    shape: ModelShape, updates: Sequence[Sequence[tuple[int, Sequence[int]]]], *, is_frozen: bool
) -> dict[str, float]:
    """Operations of an update, the mean over updates: of all, of output layer and body, and of their forward passes.

    `updates`: for each one its groups, as in `shared_prompt_flops`.
    """
    count = len(updates)
    flops = sum(shared_prompt_flops(shape, groups, is_frozen=is_frozen) for groups in updates) / count
    trained = sum(shared_prompt_flops(shape, groups) for groups in updates) / count
    responses = sum(sum(lengths) for groups in updates for _, lengths in groups) / count
    output_forward = 2.0 * shape.hidden * shape.vocabulary * responses
    output = (2 if is_frozen else 3) * output_forward
    return {
        "flops": flops,
        "output_flops": output,
        "body_flops": flops - output,
        "output_forward_flops": output_forward,
        "body_forward_flops": trained / 3 - output_forward,
    }


def floor_seconds(record: Record) -> dict[str, float]:
    """Seconds of an update that nothing can avoid, on the measured rate of matrix products and of copies.

    `products`: forward and backward by the model's definition. `recompute`: one more forward pass of the body with
    checkpointing, and of the output layer always. `step`: AdamW reads and writes weights and two moments in float32,
    reads the gradient; gradients are zeroed, summed and measured; weights are rounded.
    """
    rate, bandwidth = record["matmul_flops_per_second"], record["copy_bytes_per_second"]
    again = record["body_forward_flops"] * record["recomputes"] + record["output_forward_flops"]
    step_bytes = (28 + 4 + 4 + 8 + 6) * record["trained_parameters"]
    passes = 12 * record["trained_parameters"] * record["micro_batches"]  # a gradient in bfloat16 is added to float32
    return {
        "products": record["flops"] / rate,
        "recompute": again / rate,
        "step": step_bytes / bandwidth,
        "gradients": passes / bandwidth,
    }


# ---------------------------------------------------------------- kernels by group

GROUPS = (
    ("own kernels", r"^_gated|^_rotate"),
    ("attention", r"flash|fmha|attention|mha_"),
    ("matrix products", r"gemm|nvjet|xmma|cutlass|splitk|cublas|_mm_|dot_kernel"),
    ("logits", r"^_statistics|^_gradient\b"),
    ("keys and values", r"^_sum|indexselect|index_select|gather"),
    ("norms", r"^_norm|rms_?norm|layer_?norm|gammabeta"),
    ("optimizer and lists", r"multi_tensor|fused_?adam|foreach|_adamw|lpnorm|^_step"),
    ("compiled", r"^triton_"),
    ("copies", r"memcpy|memset|copy_kernel|catarray|fill"),
    ("embedding", r"embedding"),
    ("reductions", r"reduce"),
    ("elementwise", r"elementwise|vectorized|unrolled"),
)


def group_of(kernel: str) -> str:
    """The group of a kernel by its name.

    >>> group_of("void flash::flash_fwd_kernel<…>"), group_of("nvjet_hsh_128x256"), group_of("something")
    ('attention', 'matrix products', 'other')
    """
    return next((group for group, names in GROUPS if re.search(names, kernel, re.IGNORECASE)), "other")


def by_group(intervals: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Milliseconds of each group of kernels, the largest first; intervals are in µs."""
    total: dict[str, float] = {}
    for start, end, name in intervals:
        group = group_of(name)
        total[group] = total.get(group, 0.0) + (end - start) / 1e3
    return {group: round(total[group], 3) for group in sorted(total, key=lambda group: -total[group])}


# ---------------------------------------------------------------- results


def fastest(runs: Mapping[str, Record]) -> dict[str, dict[str, Any]]:
    """By size, kind and memory: the fastest mode, how close `auto` comes to it, and whether the goal is met.

    By share of the matrix rate, since runs of a file may be from machines that are not equally fast. `auto` is compared
    with the modes of its own sitting alone: earlier ones may be of another revision.
    """
    places: dict[str, dict[str, Record]] = {}
    for name, run in runs.items():
        if not run.get("error") and "stage" not in name:
            place, _, mode = name.rpartition("/")
            places.setdefault(place, {})[mode] = run
    return {place: _fastest_of(modes, GOALS.get(place.partition("/")[0])) for place, modes in places.items()}


def _fastest_of(modes: Mapping[str, Record], goal: float | None) -> dict[str, Any]:
    def speed(run: Record) -> float:
        return run["tokens_per_second"] if run["mfu"] is None else run["mfu"]

    mode, run = max(modes.items(), key=lambda item: speed(item[1]))
    best: dict[str, Any] = {key: run[key] for key in ("tokens_per_second", "mfu", "peak_bytes", "estimate_ratio")} | {
        "mode": mode
    }
    if (auto := modes.get("auto")) is not None:
        beside = [speed(one) for one in modes.values() if one.get("sitting") == auto.get("sitting")]
        if len(beside) > 1:  # not `auto` alone
            best["auto_share"] = speed(auto) / max(beside)
    if goal is not None and best["mfu"] is not None:
        best["goal_met"] = best["mfu"] >= goal
    return best


def headline(runs: Mapping[str, Record]) -> dict[str, Any]:
    """What stands first in the file."""
    failed = {name: str(run["error"]).splitlines()[-1] for name, run in runs.items() if run.get("error")}
    return {"fastest": fastest(runs), "failed": failed}


def table(record: Record) -> str:
    """Markdown: a row for each part."""
    head = (
        "| part | tokens/s | of the matrix rate | s an update | peak GB | estimate GB | largest groups of kernels, ms |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, run in record["runs"].items():
        if run.get("error"):
            lines.append(f"| {name} | {str(run['error']).splitlines()[-1][:80]} | | | | | |")
            continue
        groups = ", ".join(f"{group} {ms:.0f}" for group, ms in list((run.get("groups_ms") or {}).items())[:5])
        lines.append(
            f"| {name} | {run['tokens_per_second']:,.0f} | {_percent(run['mfu'])} | {run['update_seconds']:.3f} | "
            f"{_giga(run['peak_bytes'])} | {_giga(run['estimate_bytes'])} | {groups} |"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _giga(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.1f}"
