"""Export directories are whole, name their base, and contain nothing of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hubs import EXPORT_FILES, POLICY_FILES, file_names
from stalewise.api import run
from stalewise.config import RunConfig, load_config, make_config
from stalewise.errors import StoreError
from stalewise.integrations.hub import export, export_policy, export_rollouts
from stalewise.integrations.hub.card import BasePolicy, base_of, config_file, shareable
from stalewise.models import EMBEDDED
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory
from tiny import call, refused


def test_its_config_trains_the_same_policy(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = export_policy(tiny_run.directory, tmp_path / "out")
    again = load_config(target / "training_config.toml", {"runs": str(tmp_path / "runs")})
    assert again.identity() == tiny_run.identity()
    run(again)
    weights = [load_file(place / "model.safetensors") for place in (target, checkpoint_directory(again.directory, 4))]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_is_there_is_not_overwritten(tiny_run: RunConfig, tmp_path: Path) -> None:
    target = export_policy(tiny_run.directory, tmp_path / "out", version=2)
    assert "exists and is not overwritten" in refused("export", tiny_run.directory, target)
    assert read_json(target / "stalewise.json")["version"] == 2
    assert call("export", tiny_run.directory, target, "--force").exit_code == 0
    assert read_json(target / "stalewise.json")["version"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for precious in (tiny_run.directory, checkpoint_directory(tiny_run.directory, 4)):
        before = file_names(precious)
        message = refused("export", tiny_run.directory, precious, "--force")
        assert "is not an earlier export, so --force does not replace it" in message
        assert file_names(precious) == before
    (tmp_path / "file").write_text("mine")
    assert "is not an earlier export" in refused("export", tiny_run.directory, tmp_path / "file", "--force")
    (tmp_path / "empty").mkdir()
    assert file_names(export_policy(tiny_run.directory, tmp_path / "empty")) == sorted([*POLICY_FILES, *EXPORT_FILES])


def test_an_export_that_fails_leaves_what_was_there(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = export_policy(tiny_run.directory, tmp_path / "out", version=2)

    def fails(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "model_card", fails)
    with pytest.raises(StoreError, match=r"disk full while writing .*out: free some space; run the same"):
        export_policy(tiny_run.directory, target, force=True)
    assert read_json(target / "stalewise.json")["version"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_base_is_followed_to_where_it_began(tiny_run: RunConfig, tmp_path: Path) -> None:
    def base(path: str) -> BasePolicy:
        return base_of(path, "arithmetic")

    assert base("auto").words == "the small policy `arithmetic` that comes with stalewise"
    assert (base("owner/name").name, base("smollm2").name) == ("owner/name", "HuggingFaceTB/SmolLM2-135M-Instruct")
    later = base(str(checkpoint_directory(tiny_run.directory, 4)))
    assert (
        later.words
        == "version 4 of the run tiny, which started from the small policy `arithmetic` that comes with stalewise"
    )
    assert not later.is_itself
    assert base(str(export_policy(tiny_run.directory, tmp_path / "out"))) == later
    shutil.copytree(EMBEDDED / "arithmetic", tmp_path / "mine")
    assert base(str(tmp_path / "mine")).words == "a model in a directory called `mine`"


def test_nothing_of_this_machine_gets_out(adapted: RunConfig, tmp_path: Path) -> None:
    places = {"task": {"name": "jsonl", "options": {"path": "/data/secret/train.jsonl", "chat": True}}}
    served = {"engine": "server", "server": {"urls": ["http://10.0.0.7:9000"], "paths": {"/data": "/mnt"}}}
    planned = {"learning_rate": "planned", "calibration": "/data/c.json"}
    stored = {"url": "s3://mine/run", "options": {"endpoint_url": "http://10.0.0.7:9001"}}
    elsewhere = {"plan": planned, "runs": "/data/runs", "trackers": ["wandb"], "storage": stored}
    config = make_config({**places, "sampler": served, **elsewhere})
    text = config_file(config)
    assert not any(word in text for word in ("/data", "/mnt", "10.0.0.7", "wandb", "planned", "mine"))
    (tmp_path / "config.toml").write_text(text)
    again = load_config(tmp_path / "config.toml")
    assert (again.task.options["path"], again.sampler.server.urls) == ("train.jsonl", ["http://localhost:8000"])
    assert shareable(again) == shareable(config)
    for target in (
        export_policy(adapted.directory, tmp_path / "merged"),
        export_policy(adapted.directory, tmp_path / "alone", adapter=True),
        export_rollouts(adapted.directory, tmp_path / "rollouts"),
    ):
        for name in file_names(target):
            data = (target / name).read_bytes()
            assert str(adapted.runs).encode() not in data and str(EMBEDDED).encode() not in data
            assert b'"worker"' not in data  # the names of machines
