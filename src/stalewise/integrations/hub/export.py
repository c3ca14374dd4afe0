"""Writes a policy or the rollouts of a run as a directory with a card, and uploads it to the hub."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stalewise.config.run_directory import EXPORT_CONFIG, read_config
from stalewise.errors import ConfigError, HubError, StoreError
from stalewise.integrations.hub.card import (
    BasePolicy,
    base_of,
    config_file,
    dataset_card,
    model_card,
    new_folder,
    place_file,
)
from stalewise.reporting.read import read_run
from stalewise.reporting.verification import check_run
from stalewise.store import batch_directories, is_committed, open_batch
from stalewise.store.atomic import read_json
from stalewise.store.checkpoints import checkpoint_directory, pick_version, read_state
from stalewise.tasks.sandbox import scratch_folder

CARD, CONFIG = "README.md", EXPORT_CONFIG
ADAPTER, ADAPTER_CONFIG = "adapter", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL_FILES = frozenset({".json", ".jinja", ".txt", ".model"})
NOT_THE_POLICY = frozenset({"state.json", "manifest.json"})  # files of the trainer and the store
NOT_THE_TOKENIZER = frozenset({"config.json", "generation_config.json", INDEX})


def export_policy(
    run: str | Path,
    directory: str | Path,
    *,
    version: int | None = None,
    adapter: bool = False,
    force: bool = False,
    link: bool = False,
) -> Path:
    """Write a version of a run, by default the newest, as a Hugging Face directory with a model card.

    A run that trained adapters gives the merged policy, or with `adapter` the adapter alone in PEFT's layout. With
    `link` large files are links into the run directory.
    """
    run, directory = Path(run), Path(directory).expanduser()
    config = read_config(run)
    check_run(run)  # the card must not show numbers of damaged records
    version = pick_version(run, version, "export")
    checkpoint = checkpoint_directory(run, version)
    if adapter and not config.model.trains_adapters:
        raise StoreError(f"{run} trained all weights and has no adapter: leave out --adapter")
    read_state(checkpoint)  # compares its files with their checksums
    base = base_of(config.model.path, config.task.name)
    record = {"kind": "adapter" if adapter else "policy", "run": config.name, "version": version, "base": asdict(base)}
    with new_folder(directory, record, force=force) as folder:
        if adapter:
            _place_adapter(checkpoint, folder, base, link=link)
        else:
            _place_policy(checkpoint, folder, link=link)
        (folder / CONFIG).write_text(config_file(config))
        card = model_card(read_run(run), config, version, base, adapter=adapter, config_name=CONFIG)
        (folder / CARD).write_text(card)
    return directory


def export_rollouts(run: str | Path, directory: str | Path, *, force: bool = False, link: bool = False) -> Path:
    """Write the committed rollouts of a run for `datasets.load_dataset` and `stalewise learn --rollouts`, with a card.

    Shards are copied unchanged, manifests without the names of workers.
    """
    run, directory = Path(run), Path(directory).expanduser()
    config = read_config(run)
    check_run(run, everything=True)
    batches = [path for path in batch_directories(run / "rollouts") if is_committed(path)]
    if not batches:
        others = " (it learned from those of other runs: name these)" if (run / "sources.json").is_file() else ""
        raise StoreError(f"{run} has no committed rollouts of its own{others}")
    base = base_of(config.model.path, config.task.name)
    record = {"kind": "rollouts", "run": config.name, "base": asdict(base)}
    with new_folder(directory, record, force=force) as folder:
        for path in batches:
            open_batch(path)  # compares its files with their checksums
            for file in sorted(path.iterdir()):
                target = folder / "rollouts" / path.name / file.name
                if file.suffix == ".parquet":
                    place_file(file, target, link=link)
                elif file.suffix == ".json":
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(json.dumps(_without_workers(read_json(file)), indent=2) + "\n")
        (folder / CONFIG).write_text(config_file(config))
        (folder / CARD).write_text(dataset_card(read_run(run), config, base, config_name=CONFIG))
    return directory


def _without_workers(value: Any) -> Any:
    """A manifest without the names of workers, which often contain host names."""
    if isinstance(value, dict):
        return {key: _without_workers(item) for key, item in value.items() if key != "worker"}
    return [_without_workers(item) for item in value] if isinstance(value, list) else value


def _place_policy(checkpoint: Path, folder: Path, *, link: bool) -> None:
    """Model config, weights and tokenizer."""
    weights = set(read_json(checkpoint / INDEX)["weight_map"].values())
    names = {file.name for file in _small_files(checkpoint)} - ({INDEX} if weights == {WEIGHTS} else set())
    for name in sorted(names | weights):
        place_file(checkpoint / name, folder / name, link=link)


def _place_adapter(checkpoint: Path, folder: Path, base: BasePolicy, *, link: bool) -> None:
    """The adapter and the tokenizer."""
    small = [file for file in _small_files(checkpoint) if file.name not in NOT_THE_TOKENIZER]
    for file in [*small, *sorted((checkpoint / ADAPTER).glob("*.safetensors"))]:
        place_file(file, folder / file.name, link=link)
    adapter: dict[str, Any] = read_json(checkpoint / ADAPTER / ADAPTER_CONFIG)
    directory = Path(str(adapter["base_model_name_or_path"])).name  # a path of this machine means nothing elsewhere
    adapter["base_model_name_or_path"] = base.name if base.name and base.is_itself else directory
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter, indent=2, sort_keys=True))


def _small_files(checkpoint: Path) -> list[Path]:
    files = [path for path in sorted(checkpoint.iterdir()) if path.is_file() and path.suffix in SMALL_FILES]
    return [path for path in files if path.name not in NOT_THE_POLICY]


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
        raise ConfigError("--rollouts pushes the rollouts of all versions: omit --version and --adapter")

    def write(directory: Path, *, force: bool = False, link: bool = False) -> Path:
        if rollouts:
            return export_rollouts(run, directory, force=force, link=link)
        return export_policy(run, directory, version=version, adapter=adapter, force=force, link=link)

    if to is not None:
        return str(write(Path(to).expanduser() / ("datasets" if rollouts else "") / repo_id, force=force))
    with scratch_folder("push") as temporary:
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
