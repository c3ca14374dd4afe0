from __future__ import annotations

import struct
from pathlib import Path

import pytest

from stalewise.errors import ModelError
from stalewise.models.gguf_conversion import MAGIC, read_header


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        read_header(path)
    return str(error.value)


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    assert "copy it again" in refusal(tmp_path, b"PK\x03\x04" + bytes(60))
    assert "copy it again" in refusal(tmp_path, b"")


def test_another_version_is_refused(tmp_path: Path) -> None:
    assert "version 99" in refusal(tmp_path, MAGIC + struct.pack("<IQQ", 99, 0, 0))


def test_a_count_beyond_the_file_is_refused(tmp_path: Path) -> None:
    assert "is cut or damaged" in refusal(tmp_path, MAGIC + struct.pack("<IQQ", 3, 0, 2**40))
