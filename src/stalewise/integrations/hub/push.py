"""To a hub, or to a directory that has what the hub would get."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from stalewise.errors import ConfigError, HubError, StalewiseError
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
    """Upload a policy of a run, or its rollouts, to a repository that is made if need be; its address comes back.

    With `to` nothing is uploaded: the very folder is written under that directory, at the place that it has on the hub,
    `owner/name` for a policy and `datasets/owner/name` for rollouts. `force` replaces what is there: an earlier folder,
    or, on the hub, also the files that the new folder does not have.
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
    with tempfile.TemporaryDirectory(prefix="stalewise-push-") as place:
        folder = write(Path(place) / "folder", link=True)
        return _upload(folder, repo_id, rollouts=rollouts, private=private, force=force)


def check_name(repo_id: str) -> None:
    """Refuse what a hub would refuse as a name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} cannot be the name of a repository, as in owner/name: {error}") from None


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
    except StalewiseError:
        raise
    except Exception as error:  # the library has dozens of ways to fail: network, tokens, rights, sizes
        message = " ".join(str(error).split()).rstrip(".")
        raise HubError(
            f"{api.endpoint} did not take {repo_id}: {type(error).__name__}: {message}; log in with `hf auth login` "
            "where it asks who you are; without network, --to DIRECTORY writes the same folder for `hf upload` later"
        ) from error
    return str(made)
