"""Uploads to a hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hubs import EXPORT_FILES, POLICY_FILES, Hub, file_names, hub_of_our_own
from stalewise.config import RunConfig
from stalewise.errors import ConfigError, HubError
from stalewise.integrations.hub import push
from tiny import call, called_json, refused


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_of_our_own() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", "hf_made_up")
        yield found


def test_a_push_uploads_what_it_would_write(tiny_run: RunConfig, tmp_path: Path, hub: Hub) -> None:
    result = call("push", tiny_run.directory, "me/tiny", "--private")
    assert result.stdout == f"{hub.url}/me/tiny\n"
    (record,) = hub.created
    assert record.get("visibility") == "private" or record.get("private") is True
    folder = tmp_path / "me" / "tiny"
    written = called_json("push", tiny_run.directory, "me/tiny", "--to", tmp_path)
    assert written == {"place": str(folder), "uploaded": False}
    assert hub.repositories["models/me/tiny"] == {name: (folder / name).read_bytes() for name in file_names(folder)}
    assert len(hub.created) == 1  # nothing was uploaded for the second


def test_rollouts_are_pushed_as_a_dataset(tiny_run: RunConfig, tmp_path: Path, hub: Hub) -> None:
    assert push(tiny_run.directory, "me/tiny", rollouts=True) == f"{hub.url}/datasets/me/tiny"
    folder = Path(push(tiny_run.directory, "me/tiny", rollouts=True, to=tmp_path))
    assert folder == tmp_path / "datasets" / "me" / "tiny"
    assert sorted(hub.repositories["datasets/me/tiny"]) == file_names(folder)


def test_force_also_removes_what_is_not_in_the_folder(tiny_run: RunConfig, hub: Hub) -> None:
    hub.repositories["models/me/tiny"] = {"old.safetensors": b"old"}
    push(tiny_run.directory, "me/tiny")
    assert "old.safetensors" in hub.repositories["models/me/tiny"]
    push(tiny_run.directory, "me/tiny", force=True)
    assert sorted(hub.repositories["models/me/tiny"]) == sorted([*POLICY_FILES, *EXPORT_FILES])


def test_a_hub_that_refuses_or_is_not_there_is_one_message(
    tiny_run: RunConfig, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses = 401
    message = refused("push", tiny_run.directory, "me/tiny")
    assert message.startswith(f"{hub.url} did not accept me/tiny: ") and "`hf auth login`" in message
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"did not accept me/tiny: ConnectError: .*--to DIRECTORY writes"):
        push(tiny_run.directory, "me/tiny")
    with pytest.raises(ConfigError, match="is not a valid repository name"):
        push(tiny_run.directory, "me/ti/ny")
    with pytest.raises(ConfigError, match="omit --version and --adapter"):
        push(tiny_run.directory, "me/tiny", rollouts=True, adapter=True)
