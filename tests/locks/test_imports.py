"""Who may import whom. A room is a package or a module directly under `stalewise`; a new one needs a row in the table.

The table is about imports anywhere in a file, also inside functions and under TYPE_CHECKING. "Without torch" is about
what happens when a module is imported, so only imports at import time count there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

PURE = frozenset({"objectives", "staleness"})
BASE = frozenset({"errors", "types", "statistics"})
DATA = BASE | PURE | {"store", "tasks", "config"}

# From the bottom up. docs/architecture.md has the same table.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "types": frozenset(),
    "statistics": frozenset(),
    "objectives": BASE,
    "staleness": BASE,
    "store": BASE,
    "tasks": BASE,
    "config": BASE | {"staleness", "store", "tasks"},
    "distributed": BASE | {"objectives"},
    "models": BASE | {"store", "tasks", "config"},
    "reporting": BASE | {"staleness", "store", "config"},
    "rollout": DATA | {"models", "distributed"},
    "trainer": DATA | {"models", "distributed"},
    "planning": DATA | {"models", "rollout", "trainer"},
    "orchestrator": DATA | {"models", "distributed", "reporting", "rollout", "trainer", "planning"},
    "integrations": DATA | {"models", "distributed", "reporting", "trainer"},
    "api": DATA | {"models", "distributed", "reporting", "rollout", "trainer", "planning", "orchestrator"},
    "cli": DATA | {"models", "reporting", "rollout", "planning", "orchestrator", "integrations", "api"},
    "__main__": frozenset({"cli"}),
}
MAX_ROWS = 20

# No files, no network, no configuration, no collectives, no models: this is all that the pure rooms may use.
PURE_EXTERNAL = frozenset(
    {
        *("__future__", "abc", "collections", "dataclasses", "enum", "functools", "inspect", "itertools", "math"),
        *("operator", "statistics", "types", "typing", "numpy", "scipy", "torch"),
    }
)
IMPURE_NAMES = frozenset({"open", "print", "input", "exec", "eval", "__import__"})
IMPURE_ATTRIBUTES = frozenset(
    {
        *("torch.distributed", "torch.multiprocessing", "torch.save", "torch.load", "torch.hub"),
        *("np.load", "np.save", "np.savez", "np.savetxt", "np.loadtxt", "np.fromfile", "np.memmap"),
    }
)

# "" is the package itself: it imports others when one of its names is first used.
WITHOUT_TORCH = BASE | {"", "store", "tasks", "config", "distributed", "reporting", "cli", "__main__"}
IMPORTED_LATE = frozenset({"stalewise.cli.demo"})  # by the command that it is
# Of other rooms, what a command uses before it imports torch, or without it: doctor, eval, fork, rescore, plan, export.
ALSO_WITHOUT_TORCH = frozenset(
    {
        *("stalewise.models", "stalewise.models.gguf", "stalewise.integrations.hub", "stalewise.rollout.sampler"),
        *(f"stalewise.orchestrator.{name}" for name in ("preflight", "evaluation", "contamination", "fork", "rescore")),
        *("stalewise.planning.planner", "stalewise.planning.cluster_plan", "stalewise.planning.sweep"),
    }
)
HEAVY = frozenset({"torch", "transformers", "accelerate", "trl", "vllm"})
# Also slow, and imported where they are used.
LATE = frozenset({"scipy", "pandas", "datasets", "tokenizers", "huggingface_hub", "fsspec", "matplotlib"})


@dataclass(frozen=True)
class Import:
    """`name` is the module, or the module and a name in it, that `line` asks for."""

    name: str
    line: int
    at_import_time: bool


@dataclass(frozen=True)
class Module:
    name: str  # dotted, without the `__init__` of a package
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        return room_of(self.name)

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @cache  # noqa: B019 - of as many modules as there are
    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self.package, at_import_time=True))


def _imports(node: ast.AST, package: str, at_import_time: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_import_time) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        # `from stalewise import trainer` imports the room trainer.
        yield from (Import(f"{module}.{alias.name}", node.lineno, at_import_time) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_types_only(node, child)
        yield from _imports(child, package, at_import_time and not later)


def _is_for_types_only(node: ast.AST, child: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body


@cache
def modules(source: Path = SOURCE) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for path in sorted((source / "stalewise").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text(), filename=str(path)))
    return found


def room_of(name: str) -> str:
    """The room of an import; empty for the package itself and for external packages."""
    parts = name.split(".")
    return parts[1] if parts[0] == "stalewise" and len(parts) > 1 and parts[1] != "__version__" else ""


def forbidden_arrows(found: dict[str, Module]) -> list[str]:
    problems: list[str] = []
    for module in found.values():
        if module.room == "":
            # Later is allowed: for types, and in `__getattr__`, which imports a function when it is first used.
            now = [i for i in module.imports() if i.at_import_time and room_of(i.name)]
            problems += [f"{module.name}:{i.line} imports {i.name}" for i in now]
            continue
        if module.room not in MAY_IMPORT:
            problems.append(f"{module.name} is in no room of the table")
            continue
        allowed = MAY_IMPORT[module.room] | {module.room, ""}
        problems += [
            f"{module.name}:{i.line} imports {i.name}" for i in module.imports() if room_of(i.name) not in allowed
        ]
    return problems


def impurities(found: dict[str, Module]) -> list[str]:
    problems: list[str] = []
    for module in found.values():
        if module.room not in PURE:
            continue
        for i in module.imports():
            top = i.name.split(".")[0]
            if top not in PURE_EXTERNAL | {"stalewise"} or any(is_within(i.name, bad) for bad in IMPURE_ATTRIBUTES):
                problems.append(f"{module.name}:{i.line} imports {i.name}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_NAMES:
                problems.append(f"{module.name}:{node.lineno} calls {node.func.id}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in IMPURE_ATTRIBUTES:
                problems.append(f"{module.name}:{node.lineno} uses {ast.unparse(node)}")
    return problems


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def way_to_torch(found: dict[str, Module], start: str) -> list[str]:
    """The chain of imports by which importing `start` imports torch or another heavy package; empty if it does not."""
    chains = [[start]]
    seen: set[str] = set()
    while chains:
        chain = chains.pop()
        if chain[-1] in seen:
            continue
        seen.add(chain[-1])
        for i in found[chain[-1]].imports():
            if i.at_import_time and i.name.split(".")[0] in HEAVY:
                return [*chain, i.name]
            if i.at_import_time:
                # Importing a.b.c runs a, a.b and a.b.c.
                parts = i.name.split(".")
                names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
                chains += [[*chain, name] for name in names if name in found]
    return []


def test_rooms_import_only_what_the_table_allows() -> None:
    assert forbidden_arrows(modules()) == []


def reachable(table: Mapping[str, frozenset[str]], room: str) -> set[str]:
    """Every room that a room may import, directly or through others."""
    reached: set[str] = set()
    waiting = [room]
    while waiting:
        waiting += (more := table[waiting.pop()] - reached)
        reached |= more
    return reached


def mutual(table: Mapping[str, frozenset[str]]) -> list[str]:
    """Rooms that may import themselves through others: with such a row the table is not one-way."""
    return [room for room in table if room in reachable(table, room)]


def documented(text: str) -> dict[str, frozenset[str]]:
    """The table under "## Who may import whom": `room | may import`, with backticked names."""
    _, _, section = text.partition("## Who may import whom\n")
    rows = re.findall(r"^\| *`(\w+)` *\|([^|\n]*)\|", section.partition("\n## ")[0], flags=re.MULTILINE)
    return {room: frozenset(re.findall(r"`(\w+)`", names)) for room, names in rows}


def test_the_table_is_small_and_one_way() -> None:
    assert len(MAY_IMPORT) <= MAX_ROWS
    assert mutual(MAY_IMPORT) == []


def test_a_cycle_in_the_table_is_found() -> None:
    pair, ring = {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a", "d": "a"}
    assert mutual({room: frozenset(names) for room, names in pair.items()}) == ["a", "b"]
    assert mutual({room: frozenset(names) for room, names in ring.items()}) == ["a", "b", "c"]


def test_the_table_is_in_the_documentation() -> None:
    assert documented(ARCHITECTURE.read_text()) == MAY_IMPORT


def test_a_table_that_differs_is_found() -> None:
    rows = "".join(f"| `{room}` | {', '.join(f'`{name}`' for name in names)} |\n" for room, names in MAY_IMPORT.items())
    page = f"# A\n\n## Who may import whom\n\n| room | may import |\n|---|---|\n{rows}\n## Next\n\n| `x` | `y` |\n"
    assert documented(page) == MAY_IMPORT
    assert documented(page.replace("| `__main__` | `cli` |", "| `__main__` |  |")) != MAY_IMPORT


def test_the_table_keeps_rollout_and_trainer_apart() -> None:
    reach = {room: reachable(MAY_IMPORT, room) for room in MAY_IMPORT}
    assert "trainer" not in reach["rollout"]
    assert "rollout" not in reach["trainer"]
    assert not {"rollout", "trainer", "models"} & reach["reporting"]
    assert all(reach[room] <= BASE for room in PURE)


def test_pure_rooms_do_no_input_or_output() -> None:
    assert impurities(modules()) == []


def without_torch() -> list[str]:
    assert modules().keys() >= ALSO_WITHOUT_TORCH
    in_rooms = [name for name, module in modules().items() if module.room in WITHOUT_TORCH]
    return [name for name in [*in_rooms, *sorted(ALSO_WITHOUT_TORCH)] if name not in IMPORTED_LATE]


@pytest.mark.slow
def test_rooms_without_torch_have_no_way_to_it() -> None:
    chains = [way_to_torch(modules(), name) for name in without_torch()]
    assert [" → ".join(chain) for chain in chains if chain] == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rooms_without_torch_import_without_it_for_real() -> None:
    names = without_torch()
    assert {"stalewise.store", "stalewise.tasks", "stalewise.types", "stalewise.errors"} <= set(names)
    loaded = run_python(f"import sys, {', '.join(names)}; print(*sorted({set(HEAVY | LATE)!r} & set(sys.modules)))")
    assert loaded == ""


@pytest.mark.slow
def test_every_pure_module_can_be_the_first_to_be_imported() -> None:
    names = [name for name, module in modules().items() if module.room in PURE]
    code = f"""
import importlib, sys, torch, scipy.optimize, scipy.special
for name in {names!r}:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "stalewise"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""
    assert run_python(code) == ""


# Each of these lines must be found in a copy of the package's shape.
BREACHES = [
    ("rollout/generate.py", "from stalewise.trainer.step import update", "imports stalewise.trainer.step.update"),
    ("trainer/trainer.py", "def f():\n    from stalewise import rollout", "imports stalewise.rollout"),
    ("trainer/trainer.py", "from ..rollout import generate", "imports stalewise.rollout.generate"),
    ("reporting/render.py", "import stalewise.trainer", "imports stalewise.trainer"),
    ("objectives/new.py", "from stalewise.config import Run", "imports stalewise.config.Run"),
    ("objectives/new.py", "import torch.distributed as dist", "imports torch.distributed"),
    ("objectives/new.py", "from torch import distributed", "imports torch.distributed"),
    ("objectives/new.py", "import torch\ntorch.distributed.barrier()", "uses torch.distributed"),
    ("objectives/diagnostics.py", "def f():\n    from pathlib import Path", "imports pathlib.Path"),
    ("staleness/law.py", "import transformers", "imports transformers"),
    ("staleness/law.py", "x = open('law.json')", "calls open"),
    ("store/reader.py", "from stalewise.config import RunConfig", "imports stalewise.config.RunConfig"),
    ("novelty.py", "x = 1", "is in no room of the table"),
    ("__init__.py", "from stalewise.api import run", "imports stalewise.api.run"),
]


@pytest.mark.parametrize(("path", "text", "problem"), BREACHES)
def test_a_breach_is_found(tmp_path: Path, path: str, text: str, problem: str) -> None:
    file = tmp_path / "stalewise" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    found = modules(tmp_path)
    assert any(line.endswith(problem) for line in forbidden_arrows(found) + impurities(found))


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("import torch", ["stalewise.store", "torch"]),
        ("from stalewise.staleness.law import fit", ["stalewise.store", "stalewise.staleness", "torch.Tensor"]),
        ("class A:\n    import torch", ["stalewise.store", "torch"]),
        ("def f():\n    import torch", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", []),
    ],
)
def test_a_way_to_torch_is_found(tmp_path: Path, text: str, chain: list[str]) -> None:
    for path, content in (
        ("__init__.py", ""),
        ("store.py", text),
        ("staleness/__init__.py", "from torch import Tensor"),
        ("staleness/law.py", ""),
    ):
        file = tmp_path / "stalewise" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert way_to_torch(modules(tmp_path), "stalewise.store") == chain
