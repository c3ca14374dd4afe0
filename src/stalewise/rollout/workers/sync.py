"""Between a run directory here and its copy in a depot: checkpoints, rollouts, records. The manifest comes last.

Names in the depot are those of the run directory, but for two: a checkpoint's folder and a shard's file carry the
beginning of a SHA-256 (`checkpoints/v000064-1f0c…/`, `shard-00004-9ab2….parquet`). So nothing that somebody may be
reading is ever written over, and of two workers that made one shard the first manifest decides whose it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stalewise.errors import StoreError
from stalewise.store import committed_shards, read_batch_manifest, shard_path
from stalewise.store.atomic import (
    commit_directory,
    create_atomic,
    make_directory,
    read_json,
    sha256_file,
    temporary_name,
)
from stalewise.store.checkpoints import FORMAT as CHECKPOINT_FORMAT
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.store.manifest import BATCH_MANIFEST, read_shard_manifest, shard_manifest_path
from stalewise.store.object_store import ObjectStore

DIGITS = 12  # of a SHA-256 in a name; the whole of it is in the manifest
_SHARD = re.compile(r"shard-(\d{5,})\.json")
_LEARNERS = re.compile(r"(optimizer\w*|proximal)\.safetensors")  # of a checkpoint; whoever samples needs none of it


def digest_of(checkpoint: Path) -> str:
    """What names a policy: the SHA-256 of its manifest, which has those of all its files."""
    return sha256_file(checkpoint / "manifest.json")


def folder_of(version: int, digest: str) -> str:
    """Where a policy lies in a depot."""
    return f"checkpoints/v{version:06d}-{digest[:DIGITS]}"


class PolicySync:
    """One run in a depot."""

    def __init__(self, object_store: ObjectStore) -> None:
        self.object_store = object_store

    # ------------------------------------------------------------ checkpoints

    def publish_checkpoints(self, run: Path) -> None:
        """Put those that are here and not there; remove those that are gone here."""
        here = {folder_of(v, digest_of(checkpoint_directory(run, v))): v for v in versions(run)}
        for folder, version in here.items():
            if self.object_store.read(f"{folder}/manifest.json") is None:
                directory = checkpoint_directory(run, version)
                for name in read_json(directory / "manifest.json")["files"]:
                    self.object_store.upload(directory / name, f"{folder}/{name}")
                self.object_store.write(f"{folder}/manifest.json", (directory / "manifest.json").read_bytes())
        for name in self.object_store.names("checkpoints"):
            if f"checkpoints/{name}" not in here:
                self.object_store.remove(f"checkpoints/{name}/manifest.json")
                self.object_store.remove(f"checkpoints/{name}")

    def published(self) -> dict[int, str]:
        """Versions that are whole there, and the folder of each."""
        found: dict[int, str] = {}
        for name in self.object_store.names("checkpoints"):
            if (match := re.fullmatch(r"v(\d{6,})-[0-9a-f]+", name)) and self.object_store.read(
                f"checkpoints/{name}/manifest.json"
            ):
                found[int(match[1])] = f"checkpoints/{name}"
        return found

    def fetch_policy(self, version: int, digest: str, cache: Path) -> Path:
        """A checkpoint without the learner's state, as a directory here; the one that was fetched before."""
        folder = folder_of(version, digest)
        final = cache / folder
        if not final.is_dir():
            self._fetch(folder, final, digest, wanted=lambda name: not _LEARNERS.fullmatch(name))
        return final

    def fetch_checkpoint(self, folder: str, final: Path) -> None:
        """A whole checkpoint into a run directory."""
        self._fetch(folder, final, None, wanted=lambda name: True)

    def _fetch(self, folder: str, final: Path, digest: str | None, wanted: Callable[[str], bool]) -> None:
        content = self.object_store.read(f"{folder}/manifest.json")
        where = f"{self.object_store.where}/{folder}"
        if content is None:
            raise StoreError(f"{where} is no checkpoint: its manifest.json is missing; is the learner of this run on?")
        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise StoreError(f"{where} has another manifest than the order names: another policy lies there")
        files = _files(content, f"{where}/manifest.json")
        temporary = temporary_name(final)
        make_directory(temporary)
        try:
            for name, expected in files.items():
                if wanted(name):
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    self._download(f"{folder}/{name}", temporary / name, expected)
            (temporary / "manifest.json").write_bytes(content)
            if not final.exists():  # another worker that shares this cache may have been quicker
                commit_directory(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    # ------------------------------------------------------------ rollouts

    def shards(self, batch: str) -> set[int]:
        """Shards of a generation batch that are committed there."""
        return {int(match[1]) for match in map(_SHARD.fullmatch, self.object_store.names(f"rollouts/{batch}")) if match}

    def publish_shard(self, directory: Path, index: int) -> bool:
        """Put a committed shard there; False where somebody else's is there, which stays."""
        manifest = read_json(shard_manifest_path(directory, index))
        folder, name = f"rollouts/{directory.name}", _remote_name(index, manifest["sha256"])
        self.object_store.upload(shard_path(directory, index), f"{folder}/{name}")
        content = json.dumps({**manifest, "file": name}, indent=2).encode()
        if self.object_store.create(f"{folder}/shard-{index:05d}.json", content):
            return True
        if self._manifest(directory.name, index).get("file") == name:
            return True  # the same bytes
        self.object_store.remove(f"{folder}/{name}")
        return False

    def fetch_shard(self, directory: Path, index: int) -> None:
        """Get a shard that is committed there, compare every byte with its manifest, and commit it here."""
        manifest = self._manifest(directory.name, index)
        path, manifest_path = shard_path(directory, index), shard_manifest_path(directory, index)
        temporary = temporary_name(path)
        make_directory(directory)
        manifest_path.unlink(missing_ok=True)  # what it described is not here
        try:
            self._download(f"rollouts/{directory.name}/{manifest['file']}", temporary, manifest)
            path.unlink(missing_ok=True)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        create_atomic(manifest_path, json.dumps({**manifest, "file": path.name}, indent=2) + "\n")
        read_shard_manifest(directory, index)  # refuses another format

    def drop_misfits(self, batch: str, fits: Callable[[Mapping[str, Any]], bool]) -> list[int]:
        """Remove shards there that were made for an order which was taken back; say which."""
        gone = [index for index in self.shards(batch) if not fits(self._manifest(batch, index).get("extra", {}))]
        if gone:
            self.object_store.remove(f"rollouts/{batch}/{BATCH_MANIFEST}")
        for index in gone:
            self.object_store.remove(f"rollouts/{batch}/shard-{index:05d}.json")
        return gone

    def publish_batch(self, directory: Path) -> None:
        """Commit a generation batch there: all of its shards, then its manifest; what no manifest names is removed."""
        folder, there = f"rollouts/{directory.name}", self.shards(directory.name)
        for shard in committed_shards(directory):
            if shard.index not in there:
                self.publish_shard(directory, shard.index)
        record = read_json(directory / BATCH_MANIFEST)
        for shard in record["shards"]:
            shard["file"] = _remote_name(shard["index"], shard["sha256"])
        self.object_store.write(f"{folder}/{BATCH_MANIFEST}", json.dumps(record, indent=2).encode())
        named = {shard["file"] for shard in record["shards"]}
        for name in self.object_store.names(folder):
            if name.endswith(".parquet") and name not in named:
                self.object_store.remove(f"{folder}/{name}")

    def is_published(self, directory: Path) -> bool:
        """Whether the generation batch that is committed here is committed there, too."""
        if self.object_store.read(f"rollouts/{directory.name}/{BATCH_MANIFEST}") is None:
            return False
        return self.shards(directory.name) == {shard.index for shard in read_batch_manifest(directory).shards}

    def _manifest(self, batch: str, index: int) -> dict[str, Any]:
        name = f"rollouts/{batch}/shard-{index:05d}.json"
        try:
            record = json.loads(self.object_store.read(name) or b"")
            assert isinstance(record, dict) and isinstance(record["file"], str) and "/" not in record["file"]
            return record
        except (ValueError, KeyError, AssertionError):
            raise StoreError(
                f"{self.object_store.where}/{name} is half written or no manifest: remove it, and the shard is made again"
            ) from None

    def _download(self, name: str, path: Path, expected: Mapping[str, Any]) -> None:
        """Believe nothing that is not as its manifest says."""
        self.object_store.download(name, path)
        if path.stat().st_size != expected["bytes"] or sha256_file(path) != expected["sha256"]:
            raise StoreError(
                f"{self.object_store.where}/{name} is half written or damaged: {path.stat().st_size} bytes that are not the "
                f"{expected['bytes']} of its manifest; remove it and its manifest, and run the same command again"
            )


def _remote_name(index: int, sha256: str) -> str:
    return f"shard-{index:05d}-{sha256[:DIGITS]}.parquet"


def _files(content: bytes, where: str) -> dict[str, dict[str, Any]]:
    try:
        record = json.loads(content)
        if record["format"] != CHECKPOINT_FORMAT:
            raise StoreError(f"{where} has format {record['format']}; this release reads {CHECKPOINT_FORMAT}")
        files = dict(record["files"])
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{where} is half written or no manifest: run the learner again, it puts it there") from None
    if bad := [name for name in files if name.startswith("/") or ".." in Path(name).parts]:
        raise StoreError(f"{where} names {bad[0]}, which lies outside of the checkpoint: it is not one of ours")
    return files
