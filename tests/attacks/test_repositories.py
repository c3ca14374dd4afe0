"""A repository's own Python never runs, whatever standard input says."""

import ast
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stalewise
from attacks.repositories import KINDS, hostile_repository
from stalewise.cli import app
from tiny import tiny_record, write_config

LOADERS = {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModel"}


def say_yes(*words: object) -> tuple[int, str]:
    """A command with `yes |` before it."""
    result = CliRunner().invoke(app, [str(word) for word in words], input="yes\n" * 1000, prog_name="stalewise")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] if kind == "generation" else []) for kind in KINDS]
)
def test_code_of_a_repository_never_runs(kind: str, tmp_path: Path) -> None:
    witness, runs = tmp_path / "witness", tmp_path / "runs"
    model = hostile_repository(tmp_path / "model", kind, witness)
    record = tiny_record(runs, model={"path": str(model)}, schedule={"updates": 1, "stages": 1})
    config = write_config(tmp_path / "hostile.toml", record)
    loads = kind in ("known", "generation")
    for words in (
        ("doctor", config),
        ("train", config),
        ("eval", model, "--task", "arithmetic", "--prompts", 2, "--samples", 1),
        ("eval", runs / "tiny", "--prompts", 2, "--samples", 1),
        ("export", runs / "tiny", tmp_path / "exported"),
    ):
        code, errors = say_yes(*words)
        assert not witness.exists(), (kind, words)
        assert "Traceback" not in errors
        assert code in (0, 1, 2), errors
    assert (tmp_path / "exported" / "config.json").exists() is loads or kind == "tokenizer"
    assert not list((tmp_path / "exported").glob("*.py")) if loads else True


def test_every_loader_is_told_not_to_run_code() -> None:
    """No call without `trust_remote_code=False`: without the argument, transformers asks on standard input."""
    calls = 0
    for path in Path(stalewise.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in LOADERS and node.func.attr.startswith("from_"):
                calls += 1
                told = {word.arg: word.value for word in node.keywords}
                trust = told.get("trust_remote_code")
                assert isinstance(trust, ast.Constant) and trust.value is False, f"{path}:{node.lineno}"
    assert calls >= 10
