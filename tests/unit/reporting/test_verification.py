"""`stalewise verify`: what is damaged, what depends on it, and what can be made again."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from stalewise.api import run as train
from stalewise.config import RunConfig, make_config, write_resolved
from stalewise.config.run_directory import read_config
from stalewise.errors import StoreError
from stalewise.integrations.hub import export_policy
from stalewise.orchestrator.fork import fork
from stalewise.orchestrator.rescore import rescore
from stalewise.reporting.verification import check_run, verify_run
from stalewise.store import TokenColumn, batch_directories, read_batch_manifest
from stalewise.store.atomic import write_json_atomic
from stalewise.store.json_lines import append_line
from stalewise.tasks.difficulty import DifficultyTable, PassCounts
from tiny import call, called_json, refused


@pytest.fixture
def run(tiny_run: RunConfig, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_run.directory, tmp_path / "run")


def change(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def without_checksums(run: Path) -> None:
    """As a release without them has left it."""
    for path in [*run.rglob("*.jsonl"), *run.rglob("*.json")]:
        if "checkpoints" in path.parts and path.name != "manifest.json":
            continue
        text = re.sub(r',\s+"checksum": "[0-9a-f]{16}"', "", path.read_text())
        path.write_text(text)
    (run / "records.json").unlink()
    for path in (run / "ledger" / "tokens").glob("*.json"):
        path.unlink()


def test_an_undamaged_run_is_covered_whole(run: Path) -> None:
    found = verify_run(run)
    assert found.damaged == [] and found.not_covered == []
    kinds = {"config", "json", "records", "checkpoints", "manifests", "shards", "token logs"}
    assert set(found.files) == kinds and found.bytes > 1e6
    assert called_json("verify", run)["damaged"] == []
    assert "none is damaged" in call("verify", run).stdout


@pytest.mark.parametrize(
    ("file", "depends", "again", "stops"),
    [
        ("checkpoints/v000004/model.safetensors", "the final policy", "goes on from version 2", True),
        ("checkpoints/v000004/optimizer_exp_avg.safetensors", "the final policy", "goes on from version 2", True),
        ("checkpoints/v000004/manifest.json", "the final policy", "goes on from version 2", True),
        ("rollouts/g000001-v000002/shard-00000.parquet", "updates 2 to 3", "from its seeds", False),
        ("rollouts/g000001-v000002/shard-00000.json", "updates 2 to 3", "from its seeds", True),
        ("rollouts/g000001-v000002/manifest.json", "updates 2 to 3", "from the shards", True),
        ("metrics.jsonl", "report", "only from a copy", True),
        ("ledger/updates.jsonl", "which rollouts", "only from a copy", True),
        ("eval.jsonl", "accuracies", "`stalewise eval`", True),
        ("journal.jsonl", "times", "only from a copy", True),
        ("records.json", "cut off", "delete it", True),
        ("ledger/tokens/u000000-u000001.parquet", "token colours", "only from a copy", False),
        ("config.resolved.json", "what the run is", "TOML", True),
        ("environment.json", "the machine", "`stalewise train` writes it", False),
    ],
)
def test_damage_is_named_with_what_depends_on_it(run: Path, file: str, depends: str, again: str, stops: bool) -> None:
    change(run / file)
    found = verify_run(run)
    assert {one.file for one in found.damaged} == {file}
    assert depends in found.damaged[0].depends and again in found.damaged[0].again
    assert found.damaged[0].stops is stops
    result = call("verify", run)
    assert result.exit_code == 1 and f"damaged: {file}" in result.stdout
    if stops and "model" not in file and "optimizer" not in file:
        with pytest.raises(StoreError):
            check_run(run)


@pytest.mark.parametrize("thorough", [True, False])
def test_a_damaged_state_of_a_checkpoint_does_not_count_as_a_damaged_manifest(run: Path, thorough: bool) -> None:
    (run / "checkpoints" / "v000004" / "state.json").write_bytes(b"\xff not json")
    assert [one.file for one in verify_run(run, thorough=thorough).damaged] == ["checkpoints/v000004/state.json"]


@pytest.mark.parametrize("file", ["checkpoints/v000004/model.safetensors", "metrics.jsonl", "eval.jsonl"])
def test_a_finished_run_is_not_called_finished_when_it_is_damaged(run: Path, tmp_path: Path, file: str) -> None:
    record = json.loads((run / "config.resolved.json").read_text())
    record = {key: value for key, value in record.items() if key not in ("format", "checksum")}
    config = make_config({**record, "runs": str(run.parent), "name": run.name})
    change(run / file)
    with pytest.raises(StoreError, match=re.escape(Path(file).name)):
        train(config)
    with pytest.raises(StoreError, match=re.escape(Path(file).name)):
        export_policy(run, tmp_path / "export")


def test_what_is_missing_is_damage_too(run: Path) -> None:
    (run / "checkpoints" / "v000004" / "manifest.json").unlink()
    lines = (run / "eval.jsonl").read_bytes().splitlines(keepends=True)
    (run / "eval.jsonl").write_bytes(b"".join(lines[:-1]))
    (run / "ledger" / "tokens" / "u000002-u000003.parquet").unlink()
    files = {one.file for one in verify_run(run).damaged}
    assert {"checkpoints/v000004/manifest.json", "eval.jsonl", "ledger/tokens/u000002-u000003.parquet"} <= files


def test_a_run_without_checksums_is_not_covered_and_goes_on(run: Path, tiny_run: RunConfig) -> None:
    without_checksums(run)
    found = verify_run(run)
    assert found.damaged == []
    assert any(text.startswith("metrics.jsonl: 4 of 4 lines") for text in found.not_covered)
    assert any(text.startswith("the ends of the records") for text in found.not_covered)
    check_run(run)
    shutil.rmtree(run / "checkpoints" / "v000004")
    config = make_config({**tiny_run.model_dump(mode="json"), "runs": str(run.parent), "name": run.name})
    train(config)
    weights = "checkpoints/v000004/model.safetensors"
    assert (run / weights).read_bytes() == (tiny_run.directory / weights).read_bytes()
    assert verify_run(run).damaged == []


def test_a_missing_config_is_no_new_run(run: Path, tiny_run: RunConfig, tmp_path: Path) -> None:
    (run / "config.resolved.json").unlink()
    record = tiny_run.model_dump(mode="json", exclude_defaults=True) | {"runs": str(run.parent), "name": run.name}
    config = make_config(record)
    with pytest.raises(StoreError, match="is missing, though the run has begun"):
        train(config)
    assert "is not a run directory" in refused("verify", tmp_path / "nothing")


def with_everything(run: Path) -> dict[str, Path]:
    """Add to a run what few runs have: further rewards, calls of environments, a column, a table, rows of a program."""
    rescore(run, name="again")
    batch = batch_directories(run / "rollouts")[0]
    shard = read_batch_manifest(batch).shards[0]
    append_line(batch / "calls-00000.jsonl", {"calls": [{"rollout": 0, "turn": 1, "turns": "a", "answer": "b"}]})
    column = TokenColumn(run / "columns" / "reference" / batch.name, "key")
    column.write(shard, np.linspace(-3, -1, shard.response_tokens, dtype=np.float32))
    write_json_atomic(run / "reference.json", {"reference": "initial", "key": "key"}, sealed=True)
    write_json_atomic(run / "difficulty.json", DifficultyTable({"a": PassCounts(1, 2)}).record(), sealed=True)
    rows = run / "data" / hashlib.sha256(b"{}\n").hexdigest()[:12] / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b"{}\n")
    paths = [run / f"rewards/again/{name}" for name in ("manifest.json", f"{batch.name}.parquet")]
    paths += [batch / "calls-00000.jsonl", column.path(shard), run / "reference.json", run / "difficulty.json", rows]
    return {path.relative_to(run).as_posix(): path for path in paths}


def test_what_few_runs_have_is_covered_too(run: Path) -> None:
    files = with_everything(run)
    found = verify_run(run)
    assert found.damaged == [] and found.not_covered == []
    assert (found.files["rewards"], found.files["columns"], found.files["data"]) == (3, 1, 1)
    for name, path in files.items():
        content = path.read_bytes()
        change(path, 0.05 if "columns" in name else 0.4)  # of a column only the numbers are covered
        assert {one.file for one in verify_run(run).damaged} == {name}
        path.unlink()
        missing = {one.file for one in verify_run(run).damaged}
        assert missing == (
            {name} if "rewards" in name else set()
        )  # others are made again, or the run does not need them
        path.write_bytes(content)
    assert verify_run(run).damaged == []


def test_what_the_config_or_the_journal_names_is_missed(run: Path) -> None:
    forked = fork(run, at=2, name="fork").directory
    assert verify_run(forked).damaged == []
    (forked / "fork.json").unlink()
    (lost,) = verify_run(forked).damaged
    assert (lost.file, lost.problem, lost.stops) == ("fork.json", "missing", True)
    with pytest.raises(StoreError, match=r"fork\.json is damaged: missing"):
        check_run(forked)
    record = read_config(run).model_dump(mode="json")
    rows = run / "data" / "abc" / "rows.jsonl"
    record |= {"objective": {**record["objective"], "kl": 0.1}}
    record |= {"task": {"name": "jsonl", "options": {"path": str(rows)}, "difficulty": "table.json"}}
    write_resolved(make_config(record), run / "config.resolved.json")
    assert {one.file for one in verify_run(run).damaged} == {
        "difficulty.json",
        "reference.json",
        "data/abc/rows.jsonl",
    }
