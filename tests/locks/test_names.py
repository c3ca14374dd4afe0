"""Names and words: nothing is called the same twice, every module has its test, and the prose is plain."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "stalewise"
UNIT = ROOT / "tests" / "unit"
TEXTS = [*SOURCE.rglob("*.*"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SUFFIXES = {".py", ".md", ".js", ".css", ".html", ".toml"}

# Words of a private vocabulary, and what to write instead is in docs/notation.md or plain English.
PRIVATE_WORDS = re.compile(
    r"\b(sittings?|whoever|(?:come|comes|came|coming) home|bears|aside|crews?|crowds?|a word before|nobody knows)\b",
    re.IGNORECASE,
)
MAX_CONFIG_PARAMETERS = 70


def trees(source: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(source.rglob("*.py")):
        yield path, parsed(path.read_text())


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def repeated_classes(source: Path) -> dict[str, list[str]]:
    """Public classes at the top of a module, by name, that exist more than once."""
    where: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees(source):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(source)))
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def names_bound_again(source: Path) -> list[str]:
    """Names at the top of a module that a later line binds anew: what was written between reads the later value."""
    found = []
    for path, tree in trees(source):
        seen: set[str] = set()
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            names += [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
            found += [
                f"{path.relative_to(source)}:{node.lineno} {name}" for name in names if name in seen and name != "_"
            ]
            seen.update(names)
    return found


def repeated_modules(source: Path) -> dict[str, list[str]]:
    """Modules and packages of one name; a file may be called after its own room, and a file in cli/ after any room."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in sorted(source.rglob("*")):
        is_package = path.is_dir() and (path / "__init__.py").exists()
        may_repeat = path.parent.name in ("cli", path.stem) and (source / path.stem).is_dir() and not is_package
        if (is_package or path.suffix == ".py") and path.stem != "__init__" and not may_repeat:
            where[path.stem].append(str(path.relative_to(source)))
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def callable_modules(source: Path) -> list[str]:
    """Modules that change their class, which is how a module becomes callable."""
    return [
        f"{path.relative_to(source)}:{node.lineno}"
        for path, tree in trees(source)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "__class__"
    ]


def private_words(paths: list[Path]) -> list[str]:
    return [
        f"{path.name}:{number}: {match[0]}"
        for path in sorted(paths)
        if path.suffix in SUFFIXES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in PRIVATE_WORDS.finditer(line)
    ]


def config_parameters(source: Path) -> list[str]:
    """Parameters annotated with RunConfig: functions take what they use."""
    return [
        f"{path.relative_to(source)}:{argument.lineno} {node.name}({argument.arg})"
        for path, tree in trees(source)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if argument.annotation is not None and re.search(r"\bRunConfig\b", ast.unparse(argument.annotation))
    ]


def schedule_checks(source: Path) -> list[str]:
    return [
        f"{path.relative_to(source)}:{node.lineno}"
        for path, tree in trees(source)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and "StageSchedule" in ast.unparse(node)
    ]


def untested_modules(source: Path, unit: Path) -> list[str]:
    """Modules without a tests/unit/<room>/test_<file>.py that imports them."""
    missing: list[str] = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if parts[-1] in ("__init__", "__main__"):
            continue
        test = unit / ("" if len(parts) == 1 else parts[0]) / f"test_{parts[-1]}.py"
        module = ".".join(("stalewise", *parts))
        package, _, name = module.rpartition(".")
        imports = rf"\b{re.escape(module)}\b|from {re.escape(package)} import (?:\([^)]*|[^\n]*)\b{name}\b"
        if not test.is_file() or not re.search(imports, test.read_text()):
            missing.append(f"{module}: {test.relative_to(unit.parent)}")
    return missing


def test_a_module_binds_each_of_its_names_once(tmp_path: Path) -> None:
    assert names_bound_again(SOURCE) == []
    (tmp_path / "joined.py").write_text("BLOCK = 4096\n\n\ndef size():\n    return BLOCK\n\n\nBLOCK = 64\n")
    assert names_bound_again(tmp_path) == ["joined.py:8 BLOCK"]


def test_no_public_class_name_exists_twice() -> None:
    assert repeated_classes(SOURCE) == {}


def test_no_module_name_exists_twice() -> None:
    assert repeated_modules(SOURCE) == {}


def test_no_module_is_callable() -> None:
    assert callable_modules(SOURCE) == []


def test_no_private_word_is_left() -> None:
    assert private_words(TEXTS) == []


def test_few_functions_take_the_whole_config() -> None:
    assert len(config_parameters(SOURCE)) <= MAX_CONFIG_PARAMETERS, "\n".join(config_parameters(SOURCE))


def test_schedules_are_not_told_apart_by_class() -> None:
    assert schedule_checks(SOURCE) == []


def test_every_module_has_its_test() -> None:
    assert untested_modules(SOURCE, UNIT) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in {
        "api.py": "import sys\nclass Run: ...\nsys.modules[__name__].__class__ = Run",
        "store/__init__.py": "",
        "store/reader.py": "class Batch: ...\nclass _Own: ...\ndef f(config: RunConfig | None, *, x: int): ...",
        "store/select.py": "class Batch: ...\nclass _Own: ...\nisinstance(x, (int, schedules.StageSchedule))",
        "tasks/reader.py": "# Whoever reads it when they came home, for the crowd.\n# crowded, besides, bearsome",
        "tasks/tasks.py": "",
        "cli/store.py": "",
        "cli/api.py": "",
    }.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "source"


def test_each_rule_can_be_broken(package: Path) -> None:
    assert repeated_classes(package) == {"Batch": ["store/reader.py", "store/select.py"]}
    assert repeated_modules(package) == {
        "api": ["api.py", "cli/api.py"],
        "reader": ["store/reader.py", "tasks/reader.py"],
    }
    assert callable_modules(package) == ["api.py:3"]
    assert private_words(list(package.rglob("*.py"))) == [
        *("reader.py:1: Whoever", "reader.py:1: came home", "reader.py:1: crowd"),
    ]
    assert config_parameters(package) == ["store/reader.py:3 f(config)"]
    assert schedule_checks(package) == ["store/select.py:3"]


def test_a_module_without_a_test_is_found(package: Path, tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "unit"
    (unit / "store").mkdir(parents=True)
    (unit / "store" / "test_reader.py").write_text("from stalewise.store.reader import Batch")
    (unit / "store" / "test_select.py").write_text("from stalewise.store.reader import Batch")
    missing = [line.partition(":")[0].removeprefix("stalewise.") for line in untested_modules(package, unit)]
    assert missing == ["api", "cli.api", "cli.store", "store.select", "tasks.reader", "tasks.tasks"]
