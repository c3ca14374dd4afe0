"""Who may import whom. A room is a module or a package directly under `stalewise`; a new one needs a row here.

Arrows hold for imports anywhere in a file, inside functions and under TYPE_CHECKING, too. "Without torch" is about what
happens when a module is imported, so only what runs at import time counts there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

BASE = frozenset({"errors", "types"})
PURE = frozenset({"objectives", "diagnostics", "staleness"})
DATA = BASE | {"files", "exclusive", "sections", "control", "config", "tasks", "store", "checkpoints"}
CONTROL = frozenset({"records", "rollbacks", "guard", "course", "budget"})
ROOMS = frozenset({"models", "distributed", "generate", "workers", "learn", "memory", "evaluate", "report"})

# In the order in which data goes: tasks → generate → store → learn → checkpoints → evaluate → report.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "types": frozenset(),
    "objectives": BASE | {"diagnostics"},
    "diagnostics": BASE | {"objectives"},
    "staleness": BASE | {"objectives", "diagnostics"},
    "files": BASE,
    "exclusive": BASE | {"files"},
    "sections": frozenset(),
    "control": frozenset({"sections", "staleness"}),
    "config": BASE | PURE | {"files", "tasks", "sections", "control"},
    "tasks": BASE,
    "splitmix": frozenset(),
    "store": BASE | {"files", "exclusive", "splitmix"},
    "launch": BASE,
    "distributed": BASE | PURE | {"launch"},
    "gguf": BASE | {"files"},
    "smollm2": BASE | {"files", "gguf"},
    "models": BASE | {"files", "config", "gguf", "smollm2"},
    "checkpoints": BASE | {"files", "config", "models"},
    "kernels": frozenset(),
    "compilation": frozenset({"config", "kernels"}),
    "norms": frozenset(),
    "rotation": frozenset({"kernels"}),
    "recording": frozenset({"errors"}),
    "transfer": frozenset(),
    "attention": frozenset({"kernels", "transfer"}),
    "generate": DATA
    | {"models", "attention", "compilation", "kernels", "staleness", "norms", "rotation"}
    | {"splitmix", "recording", "transfer"},
    "learn": DATA
    | PURE
    | {"models", "attention", "compilation", "distributed", "kernels", "norms"}
    | {"recording", "transfer"},
    "depot": BASE | {"files", "exclusive"},
    "workers": DATA | {"depot", "distributed", "generate", "rundirectory", "watch"},
    "memory": BASE | {"config", "models", "objectives", "learn"},
    "intervals": frozenset(),
    "evaluate": DATA | {"models", "generate", "diagnostics", "staleness", "intervals"},
    "report": DATA | PURE,
    "compare": BASE | {"intervals", "report"},
    "watch": frozenset(),
    "rundirectory": BASE | {"files", "config"},
    "exclusion": DATA | {"rundirectory", "models", "gguf", "smollm2"},
    "records": DATA | {"staleness"},
    "rollbacks": DATA | {"staleness", "records"},
    "guard": DATA | {"staleness", "records", "rollbacks"},
    "course": DATA | {"staleness"},
    "budget": frozenset({"staleness"}),
    "stretch": DATA | PURE | CONTROL | {"learn", "watch"},
    "beginning": DATA | {"learn", "models"},
    "conductor": DATA | PURE | ROOMS | CONTROL | {"beginning", "calibration", "stretch"} | {"rundirectory", "watch"},
    "pipeline": DATA | PURE | {"rundirectory", "watch", "conductor", "launch"},
    "together": DATA | {"distributed", "models", "learn", "workers", "rundirectory", "launch"},
    "run": DATA | PURE | ROOMS | {"rundirectory", "watch", "calibration", "conductor", "pipeline", "together"},
    "relearn": DATA | PURE | ROOMS | {"rundirectory", "watch", "conductor"},
    "verbs": DATA
    | PURE
    | ROOMS
    | {"rundirectory", "watch", "calibration", "conductor", "run", "relearn", "exclusion", "together", "memory"},
    "demo": DATA | ROOMS | {"rundirectory", "watch", "run", "verbs"},
    "inspection": DATA | {"rundirectory"},
    "browser": DATA | {"report", "inspection"},
    "hub": DATA | {"report", "rundirectory", "gguf", "smollm2", "models", "objectives", "template"},
    "template": BASE | {"config", "control", "tasks"},
    "calibration": DATA | PURE | {"models", "rundirectory", "watch", "template"},
    "trackers": BASE | {"files", "config", "rundirectory"},
    "progress": BASE | {"config", "watch", "trackers"},
    "doctor": DATA | ROOMS | {"rundirectory", "run", "trackers"},
    "reproduce": DATA | PURE | ROOMS | {"rundirectory", "calibration", "run", "verbs", "compare", "intervals"},
    "integrations": BASE | PURE | {"store", "distributed", "learn"},
    "__main__": frozenset({"cli"}),
    "cli": DATA
    | {"report", "browser", "compare", "rundirectory", "run", "verbs", "demo", "inspection", "template", "progress"}
    | {"doctor", "hub", "reproduce", "together", "workers"}
    | {"calibration", "memory", "models"},
}

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

# The package itself is the room "": it reaches others only when a verb is asked for.
WITHOUT_TORCH = frozenset(
    {
        *("", "errors", "types", "files", "sections", "control", "config", "tasks", "store", "report"),
        *("intervals", "compare"),
        *(
            "splitmix",
            "exclusive",
            "launch",
            "watch",
            "rundirectory",
            "inspection",
            "browser",
            "hub",
            "template",
            "progress",
            "cli",
            "__main__",
        ),
    }
)
HEAVY = frozenset({"torch", "transformers", "accelerate", "trl", "vllm"})


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

    def imports(self) -> list[Import]:
        return list(_imports(self.tree, self.package, at_import_time=True))


def _imports(node: ast.AST, package: str, at_import_time: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_import_time) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        # `from stalewise import learn` asks for the room learn.
        yield from (Import(f"{module}.{alias.name}", node.lineno, at_import_time) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_types_only(node, child)
        yield from _imports(child, package, at_import_time and not later)


def _is_for_types_only(node: ast.AST, child: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body


def modules(source: Path = SOURCE) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for path in sorted((source / "stalewise").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text(), filename=str(path)))
    return found


def room_of(name: str) -> str:
    """The room that an import asks for; empty for the package itself and for other people's packages."""
    parts = name.split(".")
    return parts[1] if parts[0] == "stalewise" and len(parts) > 1 and parts[1] != "__version__" else ""


def forbidden_arrows(found: dict[str, Module]) -> list[str]:
    problems: list[str] = []
    for module in found.values():
        if module.room == "":
            # Later is allowed: for types, and in `__getattr__`, which fetches a verb when somebody asks for it.
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
    """The chain of imports by which importing `start` imports torch or its like; empty where it does not."""
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


FOUND = modules()


def test_rooms_import_only_what_the_table_allows() -> None:
    assert forbidden_arrows(FOUND) == []


def test_the_table_keeps_generation_and_learning_apart() -> None:
    def reachable(room: str) -> set[str]:
        reached: set[str] = set()
        waiting = [room]
        while waiting:
            waiting += (more := MAY_IMPORT[waiting.pop()] - reached)
            reached |= more
        return reached

    assert "learn" not in reachable("generate")
    assert "generate" not in reachable("learn")
    assert not {"generate", "learn"} & reachable("report")
    assert not {"config", "files", "store", "distributed", "models"} & set().union(*map(reachable, PURE))


def test_pure_rooms_do_no_input_or_output() -> None:
    assert impurities(FOUND) == []


def test_rooms_without_torch_have_no_way_to_it() -> None:
    chains = [way_to_torch(FOUND, name) for name, module in FOUND.items() if module.room in WITHOUT_TORCH]
    assert [" → ".join(chain) for chain in chains if chain] == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_rooms_without_torch_import_without_it_for_real() -> None:
    names = [name for name, module in FOUND.items() if module.room in WITHOUT_TORCH]
    assert {"stalewise.store", "stalewise.tasks", "stalewise.types", "stalewise.errors"} <= set(names)
    loaded = run_python(f"import sys, {', '.join(names)}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))")
    assert loaded == ""


def test_every_pure_module_can_be_the_first_to_be_imported() -> None:
    names = [name for name, module in FOUND.items() if module.room in PURE]
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


# The locks must be able to close: each line below, in a copy of the package's shape, has to be found.
BREACHES = [
    ("generate/hf.py", "from stalewise.learn.step import update", "imports stalewise.learn.step.update"),
    ("learn/loop.py", "def f():\n    from stalewise import generate", "imports stalewise.generate"),
    ("learn/loop.py", "from ..generate import hf", "imports stalewise.generate.hf"),
    ("report/html.py", "import stalewise.learn", "imports stalewise.learn"),
    ("objectives/new.py", "from stalewise.config import Run", "imports stalewise.config.Run"),
    ("objectives/new.py", "import torch.distributed as dist", "imports torch.distributed"),
    ("objectives/new.py", "from torch import distributed", "imports torch.distributed"),
    ("objectives/new.py", "import torch\ntorch.distributed.barrier()", "uses torch.distributed"),
    ("diagnostics.py", "def f():\n    from pathlib import Path", "imports pathlib.Path"),
    ("staleness/law.py", "import transformers", "imports transformers"),
    ("staleness/law.py", "x = open('law.json')", "calls open"),
    ("novelty.py", "x = 1", "is in no room of the table"),
    ("__init__.py", "from stalewise.run import run", "imports stalewise.run.run"),
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
