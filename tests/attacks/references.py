"""Reference solutions of a file of code problems must score 1, wrong ones 0.

python -m attacks.references FILE [--count 1000000] [--seed 0] [--seconds 15]

FILE has rows of MBPP or HumanEval, with `answer` and `tests`. Each reference is scored as it is, with every value that
it returns replaced, and with one operator, comparison or number changed (such a change may leave a program right).
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from stalewise.tasks.verifiers.code import CodeVerifier
from stalewise.types import Prompt

_SWAPPED: dict[type, Any] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


def whole_program(row: dict[str, Any]) -> str:
    """The reference as a program: HumanEval's continues the problem."""
    return row["problem"] + row["answer"] if row.get("entry_point") else row["answer"]


def with_other_values(program: str) -> str:
    """The program with another object in place of each value that it returns."""
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return | ast.Yield):
            node.value = ast.Constant("no answer at all")
    return ast.unparse(tree)


def with_one_change(program: str, rng: random.Random) -> str:
    """The program with one operator, comparison or number changed; the same if there is none."""
    tree = ast.parse(program)
    places = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.Compare | ast.Constant)]
    rng.shuffle(places)
    for node in places:
        if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
            node.op = _SWAPPED[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
            node.ops[0] = _SWAPPED[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        return ast.unparse(tree)
    return program


def score_references(rows: list[dict[str, Any]], seed: int, verifier: CodeVerifier) -> dict[str, Any]:
    """How many score 1, as they are and changed, and the ids of those that should not be as they are."""
    rng = random.Random(seed)
    prompts = [Prompt(row["id"], row["problem"], row["answer"], {"row": json.dumps(row)}) for row in rows]
    programs = [whole_program(row) for row in rows]
    made = {
        "as they are": programs,
        "other values": [with_other_values(program) for program in programs],
        "one change": [with_one_change(program, rng) for program in programs],
    }
    result: dict[str, Any] = {"rows": len(rows)}
    for name, changed in made.items():
        rewards = verifier.score(prompts, [f"```python\n{program}\n```" for program in changed])
        right = [reward.value == 1 for reward in rewards]
        result[name] = {
            "score 1": sum(right),
            "timed out": sum(reward.parts.get("timed_out", 0) == 1 for reward in rewards),
            "errors": [f"{row['id']}: {one.error}" for row, one in zip(rows, rewards, strict=True) if one.error],
        }
        if name != "one change":
            wanted = name == "as they are"
            result[name]["wrong"] = [row["id"] for row, one in zip(rows, right, strict=True) if one is not wanted]
    return result


def main() -> None:
    """Score the references of a file and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.file.read_text().splitlines()]
    random.Random(arguments.seed).shuffle(rows)
    began = time.monotonic()
    result = score_references(rows[: arguments.count], arguments.seed, CodeVerifier(seconds=arguments.seconds))
    print(json.dumps({"file": arguments.file.name, **result, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(bool(result["as they are"]["wrong"] or result["other values"]["wrong"]))


if __name__ == "__main__":
    main()
