"""The content of a checkpoint: its bytes, and that it is what the trainer held when it was taken."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stalewise.errors import StoreError
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.models.transfer import HostBuffers
from stalewise.store import atomic
from stalewise.store.atomic import sha256_of_pieces
from stalewise.store.checkpoints import write_checkpoint
from stalewise.trainer import snapshot as module
from stalewise.trainer.lora import save_first
from stalewise.trainer.snapshot import DTYPES, POLICY, stored_names, write_files
from stalewise.trainer.trainer import Trainer
from trainer_inputs import POLICY as EMBEDDED
from trainer_inputs import config, rollouts


@pytest.mark.parametrize("piece", [1000, 1 << 26])
def test_a_file_has_the_bytes_that_safetensors_writes(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "PIECE", piece)
    monkeypatch.setattr(module, "AT_ONCE", 16)
    torch.manual_seed(0)
    drawn = {f"{name}{i}": (10 * torch.randn(5, 3)).to(d) for i, d in enumerate(DTYPES) for name in ("z", "a.b", "é")}
    tensors = {**drawn, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "turned": torch.randn(3, 2).T}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    digests = write_files({tmp_path / POLICY: tensors, tmp_path / "other": {"one": torch.ones(2)}})
    ours = (tmp_path / POLICY).read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes() and len(ours) > 4000
    pieces = [hashlib.sha256(ours[start : start + 1000]).digest() for start in range(0, len(ours), 1000)]
    whole = hashlib.sha256(ours).hexdigest()
    assert digests[tmp_path / POLICY] == (whole if piece > len(ours) else hashlib.sha256(b"".join(pieces)).hexdigest())
    assert digests == {path: sha256_of_pieces(path) for path in digests}


def test_a_disk_that_is_full_in_the_middle_ends_all_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "PIECE", 64)
    monkeypatch.setattr(module, "THREADS", 2)
    written, write = list[int](), os.pwrite

    def pwrite(file: int, content: memoryview, start: int) -> int:
        written.append(start)
        if len(written) > 5:
            time.sleep(0.01)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:7], start)  # less than all of it

    monkeypatch.setattr(module.os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        write_files({tmp_path / name: {"x": torch.arange(4000.0)} for name in ("a", "b")})
    assert len(written) < 100  # of 500 pieces: the others were not begun
    monkeypatch.setattr(module.os, "pwrite", lambda file, content, start: write(file, content[:7], start))
    write_files({tmp_path / "c": {"x": torch.arange(400.0)}})
    assert torch.equal(load_file(tmp_path / "c")["x"], torch.arange(400.0))


def test_files_are_written_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lets one thread at a time write to a file: threads on pieces of one file would wait for each other."""
    monkeypatch.setattr(atomic, "PIECE", 64)
    monkeypatch.setattr(module, "THREADS", 1)
    order, write = list[int](), os.pwrite

    def pwrite(file: int, content: memoryview, start: int) -> int:
        order.append(file)
        return write(file, content, start)

    monkeypatch.setattr(module.os, "pwrite", pwrite)
    sizes = {"a": 16 * 100, "b": 16 * 10}
    write_files({tmp_path / name: {"x": torch.arange(float(size))} for name, size in sizes.items()})
    first, second = order[0], next(file for file in order if file != order[0])
    pieces_of_b = order.count(second)
    assert 10 < pieces_of_b < order.count(first) == len(order) - pieces_of_b
    turns = [file for i, file in enumerate(order) if i == 0 or file != order[i - 1]]
    assert len(turns) >= 2 * (pieces_of_b - 1)  # a header and what follows it are two writes of one piece
    for name, size in sizes.items():
        assert torch.equal(load_file(tmp_path / name)["x"], torch.arange(float(size)))


def test_a_dtype_that_we_do_not_know_is_left_to_safetensors(tmp_path: Path) -> None:
    tensors = {"complex": torch.tensor([1 + 2j])}
    (digest,) = write_files({tmp_path / "x.safetensors": tensors}).values()
    assert torch.equal(load_file(tmp_path / "x.safetensors")["complex"], tensors["complex"])
    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("rank", [0, 2])
def test_what_is_written_later_is_the_policy_as_it_was(rank: int, tmp_path: Path) -> None:
    settings, start = config(model={"lora": {"rank": rank}}), make(tmp_path / "checkpoints" / "v000000")
    model = load_model(str(EMBEDDED), device=torch.device("cpu"))
    save_first(settings.model, 0, model, str(EMBEDDED), start)
    load_tokenizer(str(EMBEDDED)).save_pretrained(start)
    (start / "manifest.json").write_text("{}")
    trainer = Trainer(settings, start)
    trainer.update(rollouts(seed=0))
    trainer.save(make(tmp_path / "at once"))
    taken = trainer.snapshot(HostBuffers())
    assert taken is not None
    trainer.update(rollouts(seed=1))
    digests = taken.write(make(tmp_path / "later"))
    written = {path.relative_to(tmp_path / "later"): path for path in (tmp_path / "later").rglob("*") if path.is_file()}
    assert Path("optimizer_exp_avg.safetensors") in written and Path("config.json") in written
    for name, path in written.items():
        assert path.read_bytes() == (tmp_path / "at once" / name).read_bytes(), name
    for name, digest in digests.items():
        assert digest == hashlib.sha256((tmp_path / "later" / name).read_bytes()).hexdigest()
    assert taken.nbytes <= trainer.checkpoint_bytes() * (2 if rank else 1)


def test_the_files_are_those_of_save_pretrained(tmp_path: Path) -> None:
    trainer = Trainer(config(), EMBEDDED)
    trainer.save(make(tmp_path / "ours"))
    trainer.model.save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes(), path.name


def test_weights_under_other_names_are_left_to_transformers(tmp_path: Path) -> None:
    trainer = Trainer(config(), EMBEDDED)
    assert trainer.stored
    assert stored_names(EMBEDDED, ["other"]) == stored_names(tmp_path, ["other"]) == frozenset()
    trainer.stored = frozenset()
    assert trainer.snapshot(HostBuffers()) is None
    trainer.save(make(tmp_path / "a"))
    assert load_file(tmp_path / "a" / POLICY).keys() == load_file(EMBEDDED / POLICY).keys()


def test_a_directory_that_is_gone_is_one_message(tmp_path: Path) -> None:
    taken = Trainer(config(), EMBEDDED).snapshot(HostBuffers())
    assert taken is not None

    def save(directory: Path) -> None:
        directory.rmdir()
        write_files({directory / POLICY: taken.files[POLICY]})

    with pytest.raises(StoreError, match=r"cannot write .*v000003: No such file or directory"):
        write_checkpoint(tmp_path, 3, save=save, state={})


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


@pytest.mark.parametrize("before", [7, 300_000])
def test_what_is_overwritten_has_the_bytes_of_a_new_file(before: int, tmp_path: Path) -> None:
    tensors = {"weight": torch.arange(20_000.0)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    (tmp_path / POLICY).write_bytes(b"x" * before)  # shorter, or longer
    inode = (tmp_path / POLICY).stat().st_ino
    digests = write_files({tmp_path / POLICY: tensors})
    assert (tmp_path / POLICY).read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digests == {tmp_path / POLICY: sha256_of_pieces(tmp_path / "theirs")}
    assert (tmp_path / POLICY).stat().st_ino == inode
