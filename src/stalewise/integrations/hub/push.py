"""Uploads an export to a hub, or writes the same folder to a directory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from stalewise.errors import ConfigError, HubError
from stalewise.integrations.hub.export import export_policy, export_rollouts


def push(
    run: str | Path,
    repo_id: str,
    *,
    version: int | None = None,
    adapter: bool = False,
    rollouts: bool = False,
    private: bool = False,
    to: str | Path | None = None,
    force: bool = False,
) -> str:
    """Upload a policy of a run, or its rollouts, to a repository, which is created if needed. Returns its address.

    With `to` nothing is uploaded: the same folder is written under that directory, as `owner/name` for a policy and
    `datasets/owner/name` for rollouts. `force` replaces an earlier folder, or removes other files on the hub.
    """
    check_name(repo_id)
    if rollouts and (adapter or version is not None):
        raise ConfigError("rollouts are pushed all together: leave out --version and --adapter")

    def write(directory: Path, *, force: bool = False, link: bool = False) -> Path:
        if rollouts:
            return export_rollouts(run, directory, force=force, link=link)
        return export_policy(run, directory, version=version, adapter=adapter, force=force, link=link)

    if to is not None:
        return str(write(Path(to).expanduser() / ("datasets" if rollouts else "") / repo_id, force=force))
    with tempfile.TemporaryDirectory(prefix="stalewise-push-") as temporary:
        folder = write(Path(temporary) / "folder", link=True)
        return _upload(folder, repo_id, rollouts=rollouts, private=private, force=force)


def check_name(repo_id: str) -> None:
    """Raise a ConfigError for an invalid repository name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} is not a valid repository name, such as owner/name: {error}") from None


def _upload(folder: Path, repo_id: str, *, rollouts: bool, private: bool, force: bool) -> str:
    from huggingface_hub import HfApi

    api: Any = HfApi()
    kind = "dataset" if rollouts else "model"
    try:
        made = api.create_repo(repo_id, repo_type=kind, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            repo_type=kind,
            folder_path=folder,
            commit_message="Upload by stalewise",
            delete_patterns="*" if force else None,
        )
    except Exception as error:  # the library raises many kinds: network, tokens, rights, sizes
        message = " ".join(str(error).split()).rstrip(".")
        raise HubError(
            f"{api.endpoint} did not accept {repo_id}: {type(error).__name__}: {message}; log in with `hf auth login` "
            "if it asks for a login; without network, --to DIRECTORY writes the same folder for `hf upload` later"
        ) from error
    return str(made)
