"""What a GGUF file says: metadata and tensors, parsed in a fraction of a second, and what can be refused by them."""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalewise.errors import ModelError

MAGIC = b"GGUF"
INSTALL = "pip install 'stalewise[gguf]'"

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {0: "<f4", 1: "<f2", 24: "<i1", 25: "<i2", 26: "<i4", 27: "<i8", 28: "<f8"}
# Bits per weight at which a quantized tensor would be as exact: float32, float16, bfloat16.
_EXACT_BITS = {0: 26.0, 1: 13.0, 30: 10.0}


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A file's metadata, with the types that it has there, and its tensors, none of which is read yet."""

    path: Path
    metadata: dict[str, Any]
    types: dict[str, list[int]]
    tensors: dict[str, tuple[tuple[int, ...], int, int, int]]  # shape, kind, place in the file, bytes
    content: mmap.mmap

    @property
    def architecture(self) -> str:
        """What GGUF calls it; transformers may have another name for it."""
        return str(self.metadata["general.architecture"])

    @property
    def rows(self) -> int:
        """Of the embedding: token ids are below it."""
        return self.tensors["token_embd.weight"][0][0]

    def array(self, name: str) -> Any:
        """A tensor's numbers, or its blocks where it is quantized."""
        import numpy as np

        shape, kind, place, size = self.tensors[name]
        values = np.frombuffer(self.content, np.uint8, size, place).view(_PLAIN.get(kind, "u1"))
        return values.reshape(shape if kind in _PLAIN else (*shape[:-1], -1))

    def bits(self, name: str) -> float:
        """Bits per weight; of a plain tensor those at which a quantized one would be as exact."""
        shape, kind, _, size = self.tensors[name]
        return _EXACT_BITS.get(kind, size * 8 / max(1, math.prod(shape)))

    def special(self, key: str) -> int | None:
        """A token id of the metadata, such as that of `eos`."""
        return self.metadata.get(f"tokenizer.ggml.{key}_token_id")


def read_header(path: Path) -> GGUFHeader:
    """Parse what precedes the weights, and refuse what cannot become a model."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(24)
        if begin[:4] != MAGIC:
            what = "is empty" if not size else "does not begin as GGUF files do"
            raise ModelError(f"{path} {what}: it is no model in GGUF, or a copy that went wrong; copy it again")
        version = int.from_bytes(begin[4:8], "little")
        if len(begin) == 24 and version not in _VERSIONS:
            swapped = ", written for a big-endian machine" if version & 0xFFFF == 0 else ""
            read = " and ".join(map(str, _VERSIONS))
            raise ModelError(f"{path} is GGUF of version {version}{swapped}; versions {read} are read: convert it anew")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = _parse(path, content)
        end = max((place + length for _, _, place, length in header.tensors.values()), default=0)
    except ModelError:
        raise
    except (struct.error, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        problem = f"its header does not hold together ({error})"
        raise ModelError(f"{path} is cut or damaged: {problem}; copy it again") from error
    if end > size:
        raise ModelError(f"{path} is cut: it has {size:,} bytes and should have {end:,}; copy it again")
    _check(header)
    return header


def _parse(path: Path, content: mmap.mmap) -> GGUFHeader:
    from gguf.constants import GGML_QUANT_SIZES

    place = 24

    def take(format: str) -> tuple[Any, ...]:
        nonlocal place
        found = struct.unpack_from(f"<{format}", content, place)
        place += struct.calcsize(f"<{format}")
        return found

    def text() -> str:
        nonlocal place
        (length,) = take("Q")
        place += length
        if place > len(content):
            raise ValueError(f"a text of {length} bytes ends after the file")
        return content[place - length : place].decode()

    def value(kind: int) -> tuple[Any, list[int]]:
        if kind == _STRING:
            return text(), [kind]
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"a value of type {kind} is unknown")
            return take(_SCALARS[kind])[0], [kind]
        element, length = take("IQ")
        if element not in (_STRING, *_SCALARS):
            raise ValueError(f"an array of type {element} is unknown")
        if element == _STRING:
            return [text() for _ in range(length)], [kind, element]
        return list(take(f"{length}{_SCALARS[element]}")), [kind, element]

    tensors_count, count = struct.unpack_from("<QQ", content, 8)
    metadata: dict[str, Any] = {}
    types: dict[str, list[int]] = {}
    for _ in range(count):
        key = text()
        metadata[key], types[key] = value(take("I")[0])
    tensors: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
    for _ in range(tensors_count):
        name, (dimensions,) = text(), take("I")
        shape, (kind, offset) = tuple(reversed(take(f"{dimensions}Q"))), take("IQ")
        if kind not in GGML_QUANT_SIZES:
            raise ModelError(f"{path} has a tensor of type {kind}, which the package gguf does not read: {INSTALL} -U")
        block, size = GGML_QUANT_SIZES[kind]
        tensors[name] = (shape, kind, offset, math.prod(shape) // block * size)
    alignment = metadata.get("general.alignment", 32)
    start = -(-place // alignment) * alignment
    tensors = {name: (shape, kind, start + at, size) for name, (shape, kind, at, size) in tensors.items()}
    return GGUFHeader(path, metadata, types, tensors, content)


def _check(header: GGUFHeader) -> None:
    """Refuse, in words, what transformers would fail on in its own."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    path, metadata = header.path, header.metadata
    known = set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"}
    with contextlib.suppress(ImportError):  # newer releases have a second list
        from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

        known |= set(GGUF_CONFIG_ARCHS)
    architecture = str(metadata.get("general.architecture"))
    if (parts := metadata.get("split.count", 0)) > 1:
        raise ModelError(f"{path} is one of {parts} parts: join them first, as with llama-gguf-split --merge")
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelError(f"{path} holds no model but what GGUF calls {kind}: name the file of the model itself")
    if _letters(architecture) not in map(_letters, known):  # qwen2moe is qwen2_moe there
        raise ModelError(
            f"{path} is of the architecture {architecture}, which transformers does not read from GGUF: name a Hugging "
            f"Face directory of the model instead; read from GGUF are {', '.join(sorted(known))}"
        )
    if "token_embd.weight" not in header.tensors:
        raise ModelError(f"{path} has no weights of a language model (token_embd.weight): it may be a vocabulary alone")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path} has no tokenizer: take a file that has one, or a Hugging Face directory of the model")
    if len(tokens) > header.rows:
        raise ModelError(f"{path} has {len(tokens)} tokens and an embedding of {header.rows} rows: it is of two models")
    if header.special("eos") is None:
        raise ModelError(f"{path} names no end token (tokenizer.ggml.eos_token_id): responses could never end")
    for key in ("bos", "eos", "eot", "eom", "padding"):
        if (token := header.special(key)) is not None and token >= len(tokens):
            raise ModelError(f"{path} says that {key} is token {token}, and has {len(tokens)} tokens: it is damaged")


def _letters(name: str) -> str:
    return name.replace("-", "").replace("_", "")
