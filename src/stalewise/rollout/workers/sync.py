"""Copies checkpoints and rollouts between a run directory and an object store; the manifest comes last.

Objects are named as the files of a run directory, except that a checkpoint's folder and a shard's file contain the
beginning of a SHA-256 (`checkpoints/v000064-1f0c…/`, `shard-00004-9ab2….parquet`). So no file is overwritten while it
may be read, and if two workers make one shard, the first manifest decides.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stalewise.errors import StoreError
from stalewise.store import atomic, committed_shards, shard_path
from stalewise.store.atomic import check_format, parse_json, read_json, sealed_json, sha256_file
from stalewise.store.checkpoints import SHA256, checkpoint_directory, versions
from stalewise.store.manifest import BATCH_MANIFEST, read_shard_manifest, shard_manifest_path
from stalewise.store.object_store import ObjectStore

DIGITS = 12  # of a SHA-256 in a name; the manifest has all digits
_SHARD = re.compile(r"shard-(\d{5,})\.json")
_CHECKPOINT = re.compile(r"v(\d{6,})-[0-9a-f]+")
_TRAINER_FILES = re.compile(r"(optimizer\w*|proximal)\.safetensors")  # files of a checkpoint that samplers do not need


def policy_digest(checkpoint: Path) -> str:
    """Identifies a policy: the SHA-256 of its manifest, which contains the SHA-256 of each of its files."""
    return sha256_file(checkpoint / "manifest.json")


def policy_folder(version: int, digest: str) -> str:
    """The folder of a policy in the object store."""
    return f"checkpoints/v{version:06d}-{digest[:DIGITS]}"


def shard_indices(names: Iterable[str]) -> set[int]:
    """Indices of the shards whose manifests are among these file names."""
    return {int(match[1]) for match in map(_SHARD.fullmatch, names) if match}


class PolicySync:
    """One run in an object store."""

    def __init__(self, object_store: ObjectStore) -> None:
        self.object_store = object_store

    def publish_checkpoints(self, run: Path) -> None:
        """Upload new checkpoints; remove those that were deleted here."""
        version_of = {policy_folder(v, policy_digest(checkpoint_directory(run, v))): v for v in versions(run)}
        for folder, version in version_of.items():
            if self.object_store.read(f"{folder}/manifest.json") is None:
                directory = checkpoint_directory(run, version)
                for name in read_json(directory / "manifest.json")["files"]:
                    self.object_store.upload(directory / name, f"{folder}/{name}")
                self.object_store.write(f"{folder}/manifest.json", (directory / "manifest.json").read_bytes())
        for name in self.object_store.names("checkpoints"):
            if f"checkpoints/{name}" not in version_of:
                self.object_store.remove(f"checkpoints/{name}/manifest.json")
                self.object_store.remove(f"checkpoints/{name}")

    def published(self) -> dict[int, str]:
        """Folders of the complete checkpoints in the object store, by version."""
        matches = (match for match in map(_CHECKPOINT.fullmatch, self.object_store.names("checkpoints")) if match)
        complete = (match for match in matches if self.object_store.read(f"checkpoints/{match[0]}/manifest.json"))
        return {int(match[1]): f"checkpoints/{match[0]}" for match in complete}

    def fetch_policy(self, version: int, digest: str, cache: Path) -> Path:
        """Download a checkpoint without the trainer's state, unless the cache has it."""
        folder = policy_folder(version, digest)
        final = cache / folder
        if not final.is_dir():
            self.fetch_checkpoint(folder, final, digest, unwanted=_TRAINER_FILES)
        return final

    def fetch_checkpoint(
        self, folder: str, final: Path, digest: str | None = None, unwanted: re.Pattern[str] | None = None
    ) -> None:
        """Download a checkpoint without its `unwanted` files; its manifest must have this `digest`, if given."""
        content = self.object_store.read(f"{folder}/manifest.json")
        where = f"{self.object_store.where}/{folder}"
        if content is None:
            raise StoreError(f"{where} is not a checkpoint: its manifest.json is missing; does the run's trainer run?")
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise StoreError(f"{where} has another manifest than the order names: another policy is there")
        sha256, files = _checkpoint_files(content, f"{where}/manifest.json")
        temporary = atomic.temporary_name(final)
        atomic.make_directory(temporary)
        try:
            for name, expected in files.items():
                if unwanted is None or not unwanted.fullmatch(name):
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    self._download(f"{folder}/{name}", temporary / name, expected, sha256)
            (temporary / "manifest.json").write_bytes(content)
            if not final.exists():  # another worker with the same cache may have been faster
                atomic.commit_directory(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def shards(self, batch: str) -> set[int]:
        """Shards of a generation batch that are committed in the object store."""
        return shard_indices(self.object_store.names(f"rollouts/{batch}"))

    def publish_shard(self, directory: Path, index: int) -> bool:
        """Upload a committed shard; False if another process committed this shard there first."""
        manifest = read_json(shard_manifest_path(directory, index))
        folder, name = f"rollouts/{directory.name}", _remote_name(index, manifest["sha256"])
        self.object_store.upload(shard_path(directory, index), f"{folder}/{name}")
        content = sealed_json({**manifest, "file": name}).encode()
        if self.object_store.create(f"{folder}/shard-{index:05d}.json", content):
            return True
        if self._manifest(directory.name, index)["file"] == name:
            return True  # the same bytes
        self.object_store.remove(f"{folder}/{name}")
        return False

    def fetch_shard(self, directory: Path, index: int) -> None:
        """Download a committed shard, compare every byte with its manifest, and commit it here."""
        manifest = self._manifest(directory.name, index)
        path, manifest_path = shard_path(directory, index), shard_manifest_path(directory, index)
        temporary = atomic.temporary_name(path)
        atomic.make_directory(directory)
        manifest_path.unlink(missing_ok=True)  # a manifest without its shard
        try:
            self._download(f"rollouts/{directory.name}/{manifest['file']}", temporary, manifest)
            path.unlink(missing_ok=True)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        atomic.create_atomic(manifest_path, sealed_json({**manifest, "file": path.name}))
        read_shard_manifest(directory, index)  # refuses another format

    def drop_misfits(self, batch: str, fits: Callable[[Mapping[str, Any]], bool]) -> list[int]:
        """Remove shards from the object store that were made for a withdrawn order; returns their indices."""
        dropped = [index for index in self.shards(batch) if not fits(self._manifest(batch, index).get("extra", {}))]
        if dropped:
            self.object_store.remove(f"rollouts/{batch}/{BATCH_MANIFEST}")
        for index in dropped:
            self.object_store.remove(f"rollouts/{batch}/shard-{index:05d}.json")
        return dropped

    def publish_batch(self, directory: Path) -> None:
        """Commit a generation batch in the object store: shards, then the manifest. Unnamed shard files are removed."""
        folder, there = f"rollouts/{directory.name}", self.shards(directory.name)
        for shard in committed_shards(directory):
            if shard.index not in there:
                self.publish_shard(directory, shard.index)
        record = read_json(directory / BATCH_MANIFEST)
        for shard in record["shards"]:
            shard["file"] = _remote_name(shard["index"], shard["sha256"])
        self.object_store.write(f"{folder}/{BATCH_MANIFEST}", sealed_json(record).encode())
        named = {shard["file"] for shard in record["shards"]}
        for name in self.object_store.names(folder):
            if name.endswith(".parquet") and name not in named:
                self.object_store.remove(f"{folder}/{name}")

    def _manifest(self, batch: str, index: int) -> dict[str, Any]:
        name = f"rollouts/{batch}/shard-{index:05d}.json"
        try:
            record = parse_json(self.object_store.read(name) or b"", name)
            if isinstance(record["file"], str) and "/" not in record["file"]:
                return record
            raise ValueError
        except (StoreError, KeyError, TypeError, ValueError):
            problem = "is half written or no manifest: remove it, and the shard is made again"
            raise StoreError(f"{self.object_store.where}/{name} {problem}") from None

    def _download(
        self, name: str, path: Path, expected: Mapping[str, Any], sha256: Callable[[Path], str] = sha256_file
    ) -> None:
        """Download a file and compare it with its manifest."""
        self.object_store.download(name, path)
        if path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
            raise StoreError(
                f"{self.object_store.where}/{name} is half written or damaged: {path.stat().st_size} bytes that are "
                f"not the {expected['bytes']} of its manifest; remove both, and run the same command again"
            )


def _remote_name(index: int, sha256: str) -> str:
    return f"shard-{index:05d}-{sha256[:DIGITS]}.parquet"


def _checkpoint_files(content: bytes, where: str) -> tuple[Callable[[Path], str], dict[str, dict[str, Any]]]:
    """The function that computes the checksums of a checkpoint, and its files, from the manifest's content."""
    try:
        record = parse_json(content, where)
        written, files = record["format"], dict(record["files"])
    except (StoreError, ValueError, KeyError, TypeError):
        raise StoreError(f"{where} is half written or no manifest: run the trainer again, it uploads it") from None
    check_format(where, written, *sorted(SHA256))
    if bad := [name for name in files if name.startswith("/") or ".." in Path(name).parts]:
        raise StoreError(f"{where} names {bad[0]}, which is outside of the checkpoint: it is not from stalewise")
    return SHA256[written], files
