"""From GGUF to a Hugging Face directory, by way of transformers, which knows names, shapes and tokenizers.

What transformers leaves to the package gguf is slow, above all the vocabulary, which is read again at every step: while
a file is converted, transformers is handed a reader that has parsed it once, and a dequantizer that uses all cores.
Where a release of transformers asks for neither, the conversion takes longer and its result is the same.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
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
            raise ModelError(f"{path} {what}: it is not a model in GGUF, or a copy that went wrong; copy it again")
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


# Rounding to b bits per weight moves a matrix by 1.7 to 3 times 2^-b of its norm; another matrix is away by 1 or more.
_ROUNDING, _FARTHEST = 4.0, 0.5
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")  # of a turn, where the chat template writes them
_SAMPLE = "What is 12 + 345?\n x = 3.5 * (a_b - 'c')"
_PIECE = 1 << 20  # weights that one thread dequantizes at once
_converting = threading.Lock()


def convert(header: GGUFHeader, directory: Path) -> dict[str, Any]:
    """Write the model with float32 weights, which hold the dequantized ones exactly; return what was found out."""
    model, tokenizer = _load(header, directory)
    # The weights are plain by now, and a model that is marked as quantized cannot be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _scale_positions(model.config, header)
    away = tie(model, header)
    _set_tokens(model, tokenizer, header)
    model.config._name_or_path = ""
    with _quiet():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    _check_saved(directory, tokenizer, header)
    return {
        "architecture": header.architecture,
        "name": header.metadata.get("general.name", ""),
        "license": header.metadata.get("general.license", ""),
        "tied": bool(model.config.tie_word_embeddings),
        "output_from_embedding": away,
    }


def _load(header: GGUFHeader, directory: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # By a link of its own: what lies beside the file must not be taken for a part of it.
    alone = directory / "source"
    alone.mkdir()
    link = alone / "model.gguf"
    link.symlink_to(header.path.resolve())
    try:
        with _converting, _quiet():
            with _quick(header, with_vocabulary=False):
                config: Any = AutoConfig.from_pretrained(str(alone), gguf_file=link.name, trust_remote_code=False)
                config.get_text_config().vocab_size = header.rows
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    str(alone),
                    gguf_file=link.name,
                    config=config,
                    dtype=torch.float32,
                    quantization_config=GgufConfig(dequantize=True),
                    output_loading_info=True,
                    trust_remote_code=False,
                )
            with _quick(header, with_vocabulary=True):
                tokenizer = AutoTokenizer.from_pretrained(str(alone), gguf_file=link.name, trust_remote_code=False)
    except Exception as error:  # transformers and gguf fail in many ways on a file of another kind
        problem = " ".join(str(error).split())[:200]
        raise ModelError(
            f"transformers cannot read {header.path} as a language model ({type(error).__name__}: {problem}): copy it "
            "again, or name a Hugging Face directory of the model instead"
        ) from error
    finally:
        link.unlink()
        alone.rmdir()
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{header.path} lacks {len(missing)} weights of its architecture ({header.architecture}), the first "
            f"{missing[0]}: name a Hugging Face directory of the model instead"
        )
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config, trust_remote_code=False).state_dict()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if other := sorted(name for name, tensor in expected.items() if shapes.get(name, tensor.shape) != tensor.shape):
        raise ModelError(
            f"{header.path}: {len(other)} weights have other shapes than transformers takes from its header "
            f"({header.architecture}), the first {other[0]}: name a Hugging Face directory of the model instead"
        )
    return model, tokenizer


# ---------------------------------------------------------------- speed


@contextlib.contextmanager
def _quick(header: GGUFHeader, *, with_vocabulary: bool) -> Iterator[None]:
    """Have transformers find parts of gguf that are equal to its own, but fast."""
    import gguf

    reader, original, name_map = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map
    parsed = as_reader(header, with_vocabulary=with_vocabulary)

    def quick_reader(path: Any, *rest: Any) -> Any:
        return parsed if os.path.samefile(path, header.path) else reader(path, *rest)

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        replaced = {
            "GGUFReader": quick_reader,
            "dequantize": dequantizer(original, threads),
            "get_tensor_name_map": lru_cache(name_map),  # transformers makes it again for each module
        }
        try:
            for name, substitute in replaced.items():
                setattr(gguf, name, substitute)
            yield
        finally:
            gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map = reader, original, name_map


def as_reader(header: GGUFHeader, *, with_vocabulary: bool = True) -> Any:
    """The header in the form of gguf's own reader, as far as transformers looks; a vocabulary's size may do."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.gguf_reader import ReaderField

    fields: dict[str, Any] = {}
    size = f"{header.architecture}.vocab_size"
    for key, value in {**header.metadata, size: header.rows}.items():
        types = header.types.get(key, [4])
        if key.startswith("tokenizer.") and len(types) == 2 and not with_vocabulary:
            continue
        values = value if len(types) == 2 else [value]
        if types[-1] == 8:
            parts: list[Any] = [text.encode() for text in values]
        else:
            parts = [(item,) for item in values] if len(types) == 2 else [np.array(values)]
        fields[key] = ReaderField(0, key, parts, list(range(len(parts))), types)  # pyright: ignore[reportArgumentType]
    tensors = [
        SimpleNamespace(name=name, tensor_type=GGMLQuantizationType(kind), data=header.array(name), shape=shape[::-1])
        for name, (shape, kind, _, _) in header.tensors.items()
    ]
    return SimpleNamespace(fields=fields, tensors=tensors)


def dequantizer(original: Callable[..., Any], threads: ThreadPoolExecutor) -> Callable[[Any, Any], Any]:
    """`gguf.dequantize`, a large piece at a time in threads and not sixteen rows at a time in one."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES

    def dequantize(blocks: Any, kind: Any) -> Any:
        block, size = GGML_QUANT_SIZES[kind]
        if block == 1 or blocks.size // size * block <= _PIECE:
            return original(blocks, kind)
        flat, step = blocks.reshape(-1), _PIECE // block * size
        values = np.empty(flat.size // size * block, np.float32)
        original(flat[:size].reshape(1, -1), kind)  # some kinds have tables, which are made at the first call

        def fill(start: int) -> None:
            piece = original(flat[start : start + step].reshape(1, -1), kind).reshape(-1)
            values[start // size * block :][: piece.size] = piece

        list(threads.map(fill, range(0, flat.size, step)))
        return values.reshape(*blocks.shape[:-1], -1)

    return dequantize


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Progress bars of transformers cannot all be switched off."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


# ---------------------------------------------------------------- what transformers leaves open


def tie(model: Any, header: GGUFHeader) -> float | None:
    """Make output layer and embedding one where upstream they are one; return how far apart the file has them.

    A file may hold both, rounded to different numbers of bits. They are taken for one matrix where rounding explains
    their difference, relative to the norm; then the one of more bits serves for both.
    """
    if "output.weight" not in header.tensors:
        return None  # transformers has tied them
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None or output.weight is embedding.weight or output.weight.shape != embedding.weight.shape:
        return None
    bits = {name: header.bits(f"{name}.weight") for name in ("token_embd", "output")}
    away = _distance(embedding.weight.detach(), output.weight.detach())
    if not away <= min(_FARTHEST, _ROUNDING * 2 ** -min(bits.values())):
        return away
    if bits["output"] > bits["token_embd"]:
        embedding.weight.data = output.weight.data
    model.config.tie_word_embeddings = True
    model.tie_weights()
    if output.weight is not embedding.weight:  # an architecture that cannot tie them
        model.config.tie_word_embeddings = False
    return away


def _distance(first_VH: Any, second_VH: Any) -> float:
    parts = zip(first_VH.split(8192), second_VH.split(8192), strict=True)
    squares = [((a - b).square().sum().double(), b.square().sum().double()) for a, b in parts]
    apart, norm = (sum(float(square) for square in column) for column in zip(*squares, strict=True))
    return (apart / norm) ** 0.5 if norm else float("inf")


def _scale_positions(config: Any, header: GGUFHeader) -> None:
    """Rotary positions that are scaled are left out by transformers: take over those of Llama 3, refuse others."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if rope.get("rope_type", "default") != "default":
        return
    if "rope_freqs.weight" in header.tensors:
        factors = header.array("rope_freqs.weight")
        scaled = {**rope, "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0}
        scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if _explains(scaled, factors):
            config.rope_parameters = scaled
            return
        kind = "by its own factors (rope_freqs)"
    if kind != "none":
        raise ModelError(
            f"{header.path} scales its rotary positions ({kind}), which transformers does not take over from GGUF: "
            "name a Hugging Face directory of the model instead"
        )


def _explains(scaled: dict[str, Any], factors: Any) -> bool:
    import numpy as np

    low, high = scaled["low_freq_factor"], scaled["high_freq_factor"]
    longest = scaled["original_max_position_embeddings"]
    waves = 2 * np.pi * scaled["rope_theta"] ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((longest / waves - low) / (high - low), 0, 1)
    return bool(np.allclose(1 / ((1 - smooth) / scaled["factor"] + smooth), factors, rtol=1e-3))


# ---------------------------------------------------------------- the tokenizer


def ends(header: GGUFHeader) -> list[int]:
    """Tokens that end a response: those that the file names, and what ends a turn in its chat template."""
    tokens, template = header.metadata["tokenizer.ggml.tokens"], header.metadata.get("tokenizer.chat_template", "")
    found = [header.special(key) for key in ("eos", "eot", "eom")]
    # Where a template has <|return|>, <|end|> ends a message, after which the turn goes on.
    words = [word for word in _ENDS if word in template and not (word == "<|end|>" and "<|return|>" in template)]
    found += [tokens.index(word) for word in words if word in tokens]
    return list(dict.fromkeys(token for token in found if token is not None))


def _set_tokens(model: Any, tokenizer: Any, header: GGUFHeader) -> None:
    """Some releases of transformers read special tokens wrongly: the file's own count."""
    tokens, metadata = header.metadata["tokenizer.ggml.tokens"], header.metadata
    end, padding = header.special("eos"), header.special("padding")
    padding = end if padding is None else padding
    tokenizer.eos_token, tokenizer.pad_token = tokens[end], tokens[padding]
    if (begin := header.special("bos")) is not None:
        tokenizer.bos_token = tokens[begin]
        if isinstance(adds := metadata.get("tokenizer.ggml.add_bos_token"), bool):
            tokenizer.add_bos_token = adds
    if (template := metadata.get("tokenizer.chat_template")) and not tokenizer.chat_template:
        tokenizer.chat_template = template
    # Control tokens that are not marked as such would be cut into pieces where a text has them.
    kinds, vocabulary = metadata.get("tokenizer.ggml.token_type", []), tokenizer.get_vocab()
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == 3]
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    if new := [token for token in control if token in vocabulary and token not in known]:
        tokenizer.add_tokens(new, special_tokens=True)
    tokenizer.clean_up_tokenization_spaces = False
    if length := getattr(model.config, "max_position_embeddings", None):
        tokenizer.model_max_length = length
    found = ends(header)
    model.config.eos_token_id = end
    model.generation_config.eos_token_id = found if len(found) > 1 else end
    model.config.pad_token_id = model.generation_config.pad_token_id = padding


def _check_saved(directory: Path, made: Any, header: GGUFHeader) -> None:
    """Compare the tokenizer, as it will be loaded, with what the file says."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    path, metadata, tokens = header.path, header.metadata, header.metadata["tokenizer.ggml.tokens"]
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    problem = ""
    named = {key: header.special(key) for key in ("bos", "eos", "eot", "eom", "padding")}
    wrong = [key for key, token in named.items() if token is not None and vocabulary.get(tokens[token]) != token]
    equal = sum(vocabulary.get(token) == place for place, token in enumerate(tokens))
    begins = bool(ids := tokenizer(_SAMPLE)["input_ids"]) and ids[0] == header.special("bos")
    if (highest := max(vocabulary.values())) >= header.rows:
        problem = f"it has a token {highest}, and the embedding {header.rows} rows"
    elif wrong:
        problem = f"its {wrong[0]} token is {vocabulary.get(tokens[named[wrong[0]] or 0])}, and {named[wrong[0]]} there"
    elif equal < 0.95 * len(tokens):  # a few are spelled another way, such as those of blanks
        problem = f"{len(tokens) - equal} of {len(tokens)} tokens have other ids"
    elif tokenizer.eos_token_id != header.special("eos"):
        problem = f"its end token is {tokenizer.eos_token_id}, and {header.special('eos')} there"
    elif (tokenizer.chat_template or "") != metadata.get("tokenizer.chat_template", ""):
        problem = "its chat template is another one"
    elif ids != made(_SAMPLE)["input_ids"]:
        problem = "it makes other tokens of a text once it is saved and loaded"
    elif isinstance(adds := metadata.get("tokenizer.ggml.add_bos_token"), bool) and begins != adds:
        problem = f"it begins a text {'with' if begins else 'without'} the begin token"
    if problem:
        raise ModelError(
            f"the tokenizer that transformers makes of {path} is not the one in the file: {problem}; name a Hugging "
            "Face directory of the model instead, or use another release of transformers"
        )
