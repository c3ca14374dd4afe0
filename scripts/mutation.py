"""Mutation run of the pure rooms: change the code in one place, run its tests, and see whether they notice.

    python scripts/mutation.py --sample 200 --seed 0                      # what `make mutation` runs
    python scripts/mutation.py --sample 0 --only staleness/schedule.py    # every mutant of one file
    python scripts/mutation.py --list                                     # the mutants themselves, none is run

A mutant is one small edit of a source file (the operators are in `Operators`). The sample is drawn at random from all
mutants of all files, so that its share of killed ones estimates the share of the whole. Each mutant gets a process of
its own, forked after the heavy imports, in which the mutated text is what `import` finds. All of it works on a copy of
the sources and tests: the files are never touched, and may be edited meanwhile. A mutant is killed where a test fails,
the import fails, or the CPU time limit is passed. Every mutant that survives is printed with its diff, those that no
test could kill because they mean the same included.

hypothesis runs without randomness and without a database, at 10 examples where a test does not ask for a number of its
own: a full run of the suite sees more examples than a mutant does. Tests of more than a few seconds are left out (see
`LEFT_OUT`): a mutant that only they would kill counts as a survivor here.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/stalewise")  # in the snapshot, which is the working directory

# Tests of a file besides its own `tests/unit/<room>/test_<file>.py`, which comes first: most mutants die there.
OBJECTIVES = (
    *("surrogates", "batch_statistics", "tokens", "registry", "diagnostics", "loss", "reduce", "oracle", "advantages"),
    *("../../equivalence/test_splits.py", "../../properties/test_objective_properties.py"),
    "../../parity/test_feynrl.py",
)
FURTHER = {
    "staleness/law.py": ("plan",),
    "staleness/likelihood.py": ("law", "plan"),
    "staleness/spent.py": ("schedule", "collapse"),
}
LEFT_OUT = (
    "tests/equivalence/test_splits.py::test_two_ranks_give_the_gradient_of_one",  # spawns processes
    "tests/unit/staleness/test_law.py::test_the_interval_covers_the_truth_as_often_as_it_says",  # minutes; marked slow
    "tests/unit/staleness/test_plan.py::test_the_planned_rate_is_safe_on_simulated_runs",
)
EXAMPLES = 10

# --- mutants ---------------------------------------------------------------------------------------------------------

COMPARISONS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Pow: ("**", "*"),
    ast.MatMult: ("@", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
UNARY: dict[type[ast.AST], str] = {ast.Not: "not", ast.Invert: "~", ast.USub: "-"}
NAMES = {"max": "min", "any": "all", "maximum": "minimum", "ceil": "floor", "argmax": "argmin", "amax": "amin"}
NAMES |= {other: name for name, other in NAMES.items()}
# Calls of these are taken away: `x.detach()` becomes `x`, `math.log(x)` becomes `x`.
METHODS = {"abs", "bool", "clamp", "copy", "cumsum", "detach", "exp", "log", "masked_fill", "sign", "sqrt", "square"}
METHODS |= {"unsqueeze", "where"}
FUNCTIONS = {"ceil", "exp", "expm1", "isfinite", "log", "sort", "sorted", "sqrt", "square"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit: the bytes from `start` to `end` of a file become `text`."""

    file: str  # relative to the package
    line: int
    operator: str
    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self) -> str:
        before = (PACKAGE / self.file).read_bytes()
        old, new = (text.decode().splitlines() for text in (before, self.applied(before)))
        changed = difflib.unified_diff(old, new, lineterm="", n=0)
        return "\n".join(line for line in changed if not line.startswith(("---", "+++", "@@")))


class Operators(ast.NodeVisitor):
    """Collects the mutants of one file.

    What is not mutated, and why:
    - docstrings, annotations, imports, `__all__`: not behaviour;
    - decorators (`frozen`, `slots`): declarations that the type checker and the record tests hold;
    - texts: f-strings, and what is inside a `raise` (the raise itself is removed as a whole);
    - the keywords `dtype`, `device` and `strict`, and the calls `.double()`, `.to()`, `.cpu()`: the same numbers in
      another precision or place, or an assertion about lengths that are equal by construction;
    - keywords of constructors and of `cls`: a missing field is a TypeError at once: no test is needed.
    """

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.mutants: list[Mutant] = []
        self.bound: set[str] = set()  # names that have a value already, in the function being read
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        at: Any = node
        start = self.line_starts[at.lineno - 1] + at.col_offset
        return start, self.line_starts[at.end_lineno - 1] + at.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, operator: str, start: int, end: int, text: str) -> None:
        line = self.source.count(b"\n", 0, start) + 1
        self.mutants.append(Mutant(self.file, line, operator, start, end, text))

    def replace(self, operator: str, node: ast.AST, text: str) -> None:
        self.add(operator, *self.span(node), text)

    def between(self, operator: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace the operator that stands between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = self.source[start:end]
        code = b"\n".join(line.split(b"#")[0].ljust(len(line)) for line in gap.split(b"\n"))  # not in comments
        at = start + code.index(old.encode())
        self.add(operator, at, at + len(old.encode()), new)

    # Left out, as the docstring says.

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.string(node.value)
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace("raise removed", node, "pass")

    # Statements.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        for default in [*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)]:
            self.string(default)
            self.visit(default)
        outer = self.bound
        self.bound = outer | {arg.arg for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
        for statement in node.body:
            self.visit(statement)
        self.bound = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return
        names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        # Where a name has no value before, removing the assignment would only be a NameError.
        if names and names <= self.bound and not any(isinstance(target, ast.Subscript) for target in node.targets):
            self.replace("assignment removed", node, "pass")
        self.bound = self.bound | names
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("assignment removed", node, "pass")
        old, new = ARITHMETIC[type(node.op)]
        self.between("arithmetic", node.target, node.value, f"{old}=", f"{new}=")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring, or the `...` of a protocol
            return
        self.replace("call removed", node, "pass")
        self.visit(node.value)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        # Comparisons and the like get mutants of their own, which say the same.
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            self.replace("condition", node.test, f"not {self.text(node.test)}")
        self.generic_visit(node)

    visit_IfExp = visit_If

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            old, news = COMPARISONS[type(operator)]
            for new in news:
                self.between("comparison", left, right, old, new)
        for operand in operands:
            self.string(operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        old, new = ARITHMETIC[type(node.op)]
        self.between("arithmetic", node.left, node.right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("and/or", left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, end = self.span(node)
        old = UNARY[type(node.op)]
        self.add(f"{old} removed", start, end, self.source[start + len(old) : end].decode().lstrip())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace("constant", node, str(not value))
        elif isinstance(value, int):
            for other in {0: (1,), 1: (0, 2)}.get(value, (value + 1,)):
                self.replace("constant", node, str(other))
        elif isinstance(value, float):
            self.replace("constant", node, repr(value * 2 if value else 1.0))
        elif isinstance(value, str) and value in NAMES:
            self.replace("name", node, repr(NAMES[value]))

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in NAMES:
            end = self.span(function)[1]
            self.add("name", end - len(name), end, NAMES[name])
        module = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
        module = module and function.value.id in ("math", "np", "torch")  # type: ignore[union-attr]
        if isinstance(function, ast.Attribute) and not module and name in METHODS:
            self.replace("call removed", node, self.text(function.value))
        if (module or isinstance(function, ast.Name)) and name in FUNCTIONS and len(node.args) == 1:
            self.replace("call removed", node, self.text(node.args[0]))
        for keyword in node.keywords:
            if keyword.arg in ("dtype", "device", "strict"):
                continue
            if keyword.arg in ("min", "max") and name == "clamp":
                start = self.span(keyword)[0]
                self.add("name", start, start + 3, NAMES[keyword.arg])
            if keyword.arg is not None and name.islower() and name != "cls":
                self.drop(node, keyword)
        self.visit(function)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in ("dtype", "device", "strict"):
                self.visit(keyword.value)

    def drop(self, call: ast.Call, keyword: ast.keyword) -> None:
        """Take a keyword argument out of a call, with the comma before it (or after it, where it is the first)."""
        start, end = self.span(keyword)
        arguments = sorted([*call.args, *call.keywords], key=lambda argument: self.span(argument)[0])
        index = arguments.index(keyword)
        if index > 0:
            start = self.source.rindex(b",", 0, start)
        elif len(arguments) > 1:
            end = self.span(arguments[1])[0]
        self.add("keyword dropped", start, end, "")

    def string(self, node: ast.AST) -> None:
        """A name that decides something: compared with, or a default."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.replace("string", node, repr(node.value + "?"))


def sources() -> Iterator[str]:
    for path in sorted([*PACKAGE.glob("objectives/*.py"), *PACKAGE.glob("staleness/*.py")]):
        if path.name != "__init__.py":  # docstrings, imports and `__all__` only
            yield path.relative_to(PACKAGE).as_posix()


def tests_of(file: str) -> list[str]:
    """Test files of a source file, its own first."""
    room, _, name = file.removesuffix(".py").partition("/")
    further = OBJECTIVES if room == "objectives" else FURTHER.get(file, ())
    names = [one if one.endswith(".py") else f"test_{one}.py" for one in (name, *further)]
    paths = [os.path.normpath(f"tests/unit/{room}/{one}") for one in names]
    return [path for path in dict.fromkeys(paths) if Path(path).exists()]


def mutants_of(file: str) -> list[Mutant]:
    source = (PACKAGE / file).read_bytes()
    operators = Operators(file, source)
    operators.visit(ast.parse(source))
    original, seen, kept = ast.dump(ast.parse(source)), set[str](), list[Mutant]()
    for mutant in operators.mutants:
        tree = ast.dump(ast.parse(mutant.applied(source)))  # a SyntaxError here is a mistake of this script
        if tree != original and tree not in seen:
            kept.append(mutant)
        seen.add(tree)
    return kept


# --- running ---------------------------------------------------------------------------------------------------------


class MutatedImport(importlib.abc.MetaPathFinder):
    """Makes `import` find a given text for one module."""

    def __init__(self, file: str, source: bytes) -> None:
        self.name, self.path = module_name(file), str((PACKAGE / file).resolve())
        self.source = source

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        loader = SourceFileLoader(fullname, self.path)
        code = compile(self.source, self.path, "exec", dont_inherit=True)
        loader.get_code = lambda fullname: code  # type: ignore[method-assign]
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


def module_name(file: str) -> str:
    return ".".join(["stalewise", *Path(file).with_suffix("").parts])


class FirstFailure:
    """A pytest plugin: writes the name of the test that killed the mutant."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(f"collection of {report.nodeid}")


def preload() -> None:
    """Import once what every child needs. Nothing of stalewise: the children import it, mutated."""
    import hypothesis
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import scipy.optimize
    import scipy.special
    import scipy.stats  # noqa: F401
    import torch
    import torch.distributed
    import torch.multiprocessing

    torch.set_num_threads(1)
    hypothesis.settings.register_profile(
        "mutation",
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),  # a failure is a kill; no need to shrink it
    )
    hypothesis.settings.load_profile("mutation")
    loaded = [name for name in sys.modules if name.split(".")[0] == "stalewise"]
    assert not loaded, f"{loaded} are imported before the mutant is"


def run_tests(file: str, source: bytes, report: Path) -> int:
    """In the child: the tests of `file`, with `source` in its place. Returns pytest's exit status."""
    import pytest

    sys.meta_path.insert(0, MutatedImport(file, source))
    try:
        # Before pytest, which imports the modules whose doctests it runs by a path of its own.
        importlib.import_module(module_name(file))
    except BaseException as error:
        report.write_text(f"import: {type(error).__name__}")
        return 1
    # The fixtures of conftest.py are those of whole runs: the tests of the pure rooms need none.
    options = ["-x", "-q", "--tb=no", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # hypothesis is imported before pytest could rewrite its assertions; warnings are errors here.
    options.append("-Wignore::pytest.PytestAssertRewriteWarning")
    deselected = [f"--deselect={name}" for name in LEFT_OUT]
    return int(
        pytest.main([*options, *deselected, f"src/stalewise/{file}", *tests_of(file)], plugins=[FirstFailure(report)])
    )


@dataclass(slots=True)
class Child:
    """A process at work on one mutant (None: on the file as it is)."""

    file: str
    mutant: Mutant | None
    report: Path
    limit: int  # seconds of CPU time
    pid: int = 0
    started: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status = 3
        try:
            os.setpgid(0, 0)
            # CPU time, not wall time: the verdict must not depend on what else the machine does.
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit, self.limit))
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            source = (PACKAGE / self.file).read_bytes()
            status = run_tests(self.file, self.mutant.applied(source) if self.mutant else source, self.report)
        finally:
            os._exit(status)

    def overdue(self) -> bool:
        return time.monotonic() - self.started > 10 * self.limit  # asleep: uses no CPU time, and never ends


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one process: `killed_by` is a test, `import: …`, a signal, or None for a survivor."""

    file: str
    mutant: Mutant | None
    killed_by: str | None
    cpu_seconds: float


def outcome_of(child: Child, status: int, usage: resource.struct_rusage) -> Outcome:
    cpu_seconds = usage.ru_utime + usage.ru_stime
    killed_by = child.report.read_text() if child.report.exists() else None
    if os.WIFSIGNALED(status):
        killed_by = f"signal {signal.Signals(os.WTERMSIG(status)).name}"  # SIGXCPU or SIGKILL: out of time
    elif os.WEXITSTATUS(status) == 0:
        killed_by = None
    elif killed_by is None:  # neither passed nor failed: no verdict, and a share of killed mutants must not rest on it
        what = child.mutant or child.file
        raise RuntimeError(f"pytest ended with status {os.WEXITSTATUS(status)} without a failed test: {what}")
    return Outcome(child.file, child.mutant, killed_by, cpu_seconds)


def run_all(work: Sequence[tuple[str, Mutant | None]], limits: dict[str, int], jobs: int) -> Iterator[Outcome]:
    """Outcomes in the order in which they end; at most `jobs` processes at a time."""
    waiting, running = list(reversed(work)), dict[int, Child]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    file, mutant = waiting.pop()
                    child = Child(file, mutant, Path(folder) / str(len(waiting)), limits[file])
                    child.start()
                    running[child.pid] = child
                for pid, child in list(running.items()):
                    done, status, usage = os.wait4(pid, os.WNOHANG)
                    if done:
                        del running[pid]
                        yield outcome_of(child, status, usage)
                    elif child.overdue():
                        os.killpg(pid, signal.SIGKILL)
                time.sleep(0.02)
        finally:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def baseline(files: Sequence[str], jobs: int) -> dict[str, int]:
    """Run every file's tests on the file as it is: they must pass. Returns the CPU seconds a mutant may take."""
    limits = dict.fromkeys(files, 600)
    found: dict[str, int] = {}
    for outcome in run_all([(file, None) for file in files], limits, jobs):
        print(f"  {outcome.file:32} {outcome.cpu_seconds:6.1f} s of tests", flush=True)
        if outcome.killed_by:
            sys.exit(f"{outcome.file}: {outcome.killed_by} fails without a mutant; nothing can be said")
        found[outcome.file] = int(10 + 3 * outcome.cpu_seconds)
    return found


# --- command line ----------------------------------------------------------------------------------------------------


def print_report(outcomes: Sequence[Outcome], all_mutants: dict[str, list[Mutant]]) -> None:
    survivors = sorted(
        (outcome.mutant for outcome in outcomes if outcome.mutant and outcome.killed_by is None),
        key=lambda mutant: (mutant.file, mutant.start),
    )
    print(f"\n{'file':32} {'killed':>7} {'run':>5} {'of all':>7}")
    for file, mutants in all_mutants.items():
        killed = [outcome.killed_by is not None for outcome in outcomes if outcome.file == file]
        print(f"{file:32} {sum(killed):7} {len(killed):5} {len(mutants):7}")
    print(f"\n{len(survivors)} survived:")
    for mutant in survivors:
        print(f"\nsrc/stalewise/{mutant.file}:{mutant.line} ({mutant.operator})\n{mutant.diff()}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="how many mutants to draw; 0: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--threshold", type=float, default=0.9, help="exit with 1 where a smaller share is killed")
    parser.add_argument("--only", nargs="*", metavar="FILE", help="these files alone, such as staleness/schedule.py")
    parser.add_argument(
        "--json", type=lambda path: Path(path).resolve(), metavar="FILE", help="write every outcome there, too"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants of the sample and run nothing")
    return parser.parse_args()


def snapshot(folder: Path) -> None:
    """Copy what the tests read, and work there: nothing that happens to the repository changes a verdict."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    os.chdir(folder)
    sys.path.insert(0, str(folder / "src"))


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        snapshot(Path(folder).resolve())
        try:
            return report(arguments)
        finally:
            os.chdir(ROOT)


def report(arguments: argparse.Namespace) -> int:
    """Draw, run, print. Returns the exit status."""
    files = [file for file in sources() if not arguments.only or file in arguments.only]
    all_mutants = {file: mutants_of(file) for file in files}
    sample = [mutant for mutants in all_mutants.values() for mutant in mutants]
    if 0 < arguments.sample < len(sample):
        sample = random.Random(arguments.seed).sample(sample, arguments.sample)
    total = sum(map(len, all_mutants.values()))
    print(f"{len(sample)} of {total} mutants in {len(files)} files, seed {arguments.seed}")
    if arguments.list:
        for mutant in sorted(sample, key=lambda mutant: (mutant.file, mutant.start)):
            print(f"\nsrc/stalewise/{mutant.file}:{mutant.line} ({mutant.operator})\n{mutant.diff()}")
        return 0

    started = time.monotonic()
    preload()
    print("without a mutant:")
    limits = baseline(sorted({mutant.file for mutant in sample}), arguments.jobs)
    outcomes: list[Outcome] = []
    for outcome in run_all([(mutant.file, mutant) for mutant in sample], limits, arguments.jobs):
        outcomes.append(outcome)
        killed = sum(one.killed_by is not None for one in outcomes)
        if len(outcomes) % 10 == 0 or len(outcomes) == len(sample):
            seconds = time.monotonic() - started
            print(f"{len(outcomes)} of {len(sample)} run, {killed} killed, {seconds:.0f} s", flush=True)
    print_report(outcomes, all_mutants)
    killed = sum(outcome.killed_by is not None for outcome in outcomes)
    if arguments.json:
        rows = [asdict(outcome) | {"diff": outcome.mutant.diff() if outcome.mutant else ""} for outcome in outcomes]
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "killed": killed, "outcomes": rows}, indent=1))
    print(f"\nkilled {killed} of {len(outcomes)} ({killed / len(outcomes):.1%})")
    return 0 if killed >= arguments.threshold * len(outcomes) else 1


if __name__ == "__main__":
    # Before numpy and torch start their threads: a fork keeps only the thread that called it.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    sys.exit(main())
