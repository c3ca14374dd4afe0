"""Models from GGUF files: small ones, written here from models of transformers, come back as the same models."""

from __future__ import annotations

import json
import os
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import stalewise.models.gguf as package
from stalewise.errors import ModelError
from stalewise.models import resolve_model
from stalewise.models.gguf import MANIFEST, is_gguf
from stalewise.models.loading import load_model, load_tokenizer, stop_token_ids
from tiny import refused, tiny_record, write_config

gguf = pytest.importorskip("gguf")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers": "blk",
}


def byte_letters() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(256 - len(printable))]


TOKENS = [*SPECIAL, *byte_letters(), "ab", "12"]


def small_model(architecture: str, *, tied: bool = True) -> Any:
    torch.manual_seed(0)
    kind, config = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[architecture]
    model = kind(config(vocab_size=len(TOKENS), tie_word_embeddings=tied, initializer_range=0.1, **SHAPE)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):  # zeros and ones would hide a mistake
            torch.nn.init.normal_(parameter, float("norm" in name), 0.1)
    return model


def write_gguf(
    path: Path,
    model: Any,
    kind: str = "F32",
    *,
    output: str = "",
    metadata: dict[str, Any] | None = None,
    architecture: str = "",
    without: str = "",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """A model as GGUF, its matrices as `kind`, an output layer that is tied only as `output`; with metadata changed."""
    architecture = architecture or model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    for set_value, value in (
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
    ):
        set_value(value)
    said: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": "qwen2",
        "ggml.tokens": TOKENS,
        "ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "ggml.merges": ["a b", "1 2"],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "chat_template": TEMPLATE,
    }
    said = {f"tokenizer.{key}": value for key, value in said.items()} | (metadata or {})
    for key, value in said.items():
        if value is None:
            continue
        add = writer.add_array if isinstance(value, list) else writer.add_uint32 if type(value) is int else None
        (add or (writer.add_bool if isinstance(value, bool) else writer.add_string))(key, value)
    for name, value in matrices(model, with_output=bool(output)).items():
        as_kind = kind if value.ndim == 2 else "F32"
        if name == "output.weight":
            as_kind = output or kind
        if name != without:
            number = gguf.GGMLQuantizationType[as_kind]
            writer.add_tensor(name, gguf.quants.quantize(value, number), raw_dtype=number)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def matrices(model: Any, *, with_output: bool) -> dict[str, np.ndarray]:
    """By their names in GGUF, with the rows of a Llama's rotary heads interleaved as there."""
    found: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings and not with_output:
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        array = value.numpy()
        if model.config.model_type == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = len(array) // (model.config.hidden_size // model.config.num_attention_heads)
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        found[name] = np.ascontiguousarray(array)
    return found


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(3, 60)[None]).logits


def load(path: Path) -> Any:
    return load_model(resolve_model(str(path)), device=torch.device("cpu"))


def rounded(model: Any, kind: str) -> Any:
    """The model with its matrices rounded as the file rounds them."""
    number = gguf.GGMLQuantizationType[kind]
    for parameter in model.parameters():
        if parameter.ndim == 2:
            value = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), number), number)
            parameter.data = torch.from_numpy(value)
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STALEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


# ---------------------------------------------------------------- whole files


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_the_model_is_the_one_in_the_file(tmp_path: Path, architecture: str, kind: str) -> None:
    model = small_model(architecture)
    found = load(write_gguf(tmp_path / "small.gguf", model, kind))
    expected = logits(rounded(model, kind))
    assert type(found) is type(model)
    assert (logits(found) - expected).abs().max() < 1e-5
    assert not hasattr(found.config, "quantization_config")
    found.save_pretrained(tmp_path / "again")  # as checkpoints do


def test_tokenizer_ends_and_template_are_the_files(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": None}
    directory = resolve_model(str(write_gguf(tmp_path / "small.gguf", small_model("qwen2"), metadata=metadata)))
    model, tokenizer = load_model(directory, device=torch.device("cpu")), load_tokenizer(directory)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    # <|im_end|> ends a turn of the template, though the file names another end.
    assert stop_token_ids(model.config, model.generation_config, tokenizer) == (0, 2)
    assert tokenizer.chat_template == TEMPLATE
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False)
    assert tokenizer(text)["input_ids"].count(2) == 1
    assert tokenizer("ab12")["input_ids"] == [TOKENS.index(token) for token in ("ab", "1", "2")]  # qwen2 splits digits
    assert tokenizer.model_max_length == 128


def test_rows_beyond_the_vocabulary_stay(tmp_path: Path) -> None:
    kinds = [3] * 3 + [1] * (len(TOKENS) - 4)
    metadata = {"tokenizer.ggml.tokens": TOKENS[:-1], "tokenizer.ggml.token_type": kinds}
    metadata["tokenizer.ggml.merges"] = ["a b"]
    model = small_model("qwen2")
    found = load(write_gguf(tmp_path / "padded.gguf", model, metadata=metadata))
    assert found.config.vocab_size == len(TOKENS)
    assert torch.equal(logits(found), logits(model))


def test_a_file_is_known_by_its_content(tmp_path: Path, cache: Path) -> None:
    first = write_gguf(tmp_path / "small.gguf", small_model("llama"))
    directory = resolve_model(str(first))
    blob = tmp_path / "blob"  # without the suffix: by its first bytes
    first.rename(blob)
    assert is_gguf(str(blob))
    assert Path(resolve_model(str(blob))).name.split("-")[1:] == Path(directory).name.split("-")[1:]
    write_gguf(first, small_model("llama"), "F16")
    assert resolve_model(str(first)) != directory
    assert not list(cache.glob(".*"))


def test_what_lies_beside_the_file_is_not_a_part_of_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", small_model("llama"))
    strange = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(strange))
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "strange.Strange"}}))
    assert load_tokenizer(resolve_model(str(path))).eos_token_id == 2


# ---------------------------------------------------------------- output layer and embedding


@pytest.mark.parametrize(("embedding", "output"), [("Q5_0", "Q8_0"), ("Q8_0", "Q5_0"), ("Q4_0", "F16"), ("F16", "F32")])
def test_one_matrix_in_two_roundings_is_one_again(tmp_path: Path, embedding: str, output: str) -> None:
    model = small_model("qwen2")
    directory = resolve_model(str(write_gguf(tmp_path / "tied.gguf", model, embedding, output=output)))
    found = load_model(directory, device=torch.device("cpu"))
    assert found.config.tie_word_embeddings
    assert found.lm_head.weight is found.model.embed_tokens.weight
    finer = max((embedding, output), key=["Q4_0", "Q5_0", "Q8_0", "F16", "F32"].index)
    upstream = model.model.embed_tokens.weight.detach()
    number = gguf.GGMLQuantizationType[finer]
    expected = gguf.quants.dequantize(gguf.quants.quantize(upstream.numpy(), number), number)
    assert np.array_equal(found.lm_head.weight.detach().numpy(), expected)
    assert json.loads((Path(directory) / MANIFEST).read_text())["tied"] is True


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("kinship", [0.0, 0.9])
def test_two_matrices_stay_two(tmp_path: Path, kind: str, kinship: float) -> None:
    model = small_model("llama", tied=False)
    with torch.no_grad():  # akin, as after training them apart from one beginning: further than rounding
        model.lm_head.weight.mul_(1 - kinship).add_(kinship * model.model.embed_tokens.weight)
        model.lm_head.weight.mul_(1.3)
    found = load(write_gguf(tmp_path / "untied.gguf", model, kind, output=kind))
    assert not found.config.tie_word_embeddings
    assert (logits(found) - logits(rounded(model, kind))).abs().max() < 1e-5


# ---------------------------------------------------------------- speed changes nothing


def test_gguf_is_itself_again_afterwards(tmp_path: Path) -> None:
    before = (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map)
    resolve_model(str(write_gguf(tmp_path / "small.gguf", small_model("llama"))))
    with pytest.raises(ModelError):
        resolve_model(str(write_gguf(tmp_path / "less.gguf", small_model("llama"), without="output_norm.weight")))
    assert (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map) == before


# ---------------------------------------------------------------- rotary positions


def test_the_factors_of_llama_3_are_taken_over(tmp_path: Path) -> None:
    model = small_model("llama")
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model.config.rope_parameters = scaled
    upstream = LlamaForCausalLM(model.config).eval()
    upstream.load_state_dict(model.state_dict())
    plain = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = (plain / upstream.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = write_gguf(tmp_path / "llama3.gguf", upstream, extra={"rope_freqs.weight": factors})
    found = load(path)
    assert found.config.rope_parameters["rope_type"] == "llama3"
    assert (logits(found) - logits(upstream)).abs().max() < 1e-5
    path = write_gguf(tmp_path / "own.gguf", upstream, extra={"rope_freqs.weight": factors * factors})
    with pytest.raises(ModelError, match=r"scales its rotary positions \(by its own factors"):
        resolve_model(str(path))


# ---------------------------------------------------------------- bad input


def config_file(tmp_path: Path, path: Path) -> Path:
    task = {"name": "arithmetic-chat"}
    return write_config(tmp_path / "config.toml", tiny_record(tmp_path / "runs", model={"path": str(path)}, task=task))


def test_a_cut_file(tmp_path: Path, cache: Path) -> None:
    whole = write_gguf(tmp_path / "small.gguf", small_model("llama")).read_bytes()
    path = tmp_path / "cut.gguf"
    for length, word in ((0, "is empty"), (3, "does not begin as GGUF files do"), (10, "is cut or damaged")):
        path.write_bytes(whole[:length])
        assert word in refused("train", config_file(tmp_path, path))
    path.write_bytes(whole[: len(whole) // 100])
    assert "is cut or damaged: its header does not hold together" in refused("train", config_file(tmp_path, path))
    path.write_bytes(whole[:-5000])
    message = refused("train", config_file(tmp_path, path))
    assert f"is cut: it has {len(whole) - 5000:,} bytes and should have" in message
    assert not cache.exists()


def test_a_damaged_header_never_takes_long(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "small.gguf", small_model("llama")).read_bytes())
    whole[8:16] = struct.pack("<Q", 2**60)  # tensors
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="is cut or damaged"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architecture": "clip"}, "is of the architecture clip, which transformers does not read from GGUF"),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, "has no tokenizer"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": None}}, "names no end token"),
        ({"metadata": {"tokenizer.ggml.eot_token_id": 9999}}, "says that eot is token 9999"),
        ({"metadata": {"tokenizer.ggml.tokens": [*TOKENS, "more"]}}, "tokens and an embedding of"),
        ({"metadata": {"split.count": 3}}, "is one of 3 parts: join them first"),
        ({"metadata": {"general.type": "adapter"}}, "holds no model but what GGUF calls adapter"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "scales its rotary positions (yarn)"),
        ({"without": "token_embd.weight"}, "has no weights of a language model"),
        ({"without": "blk.1.ffn_up.weight"}, "lacks 1 weights of its architecture (llama)"),
        ({"metadata": {"tokenizer.ggml.model": "strange"}}, "transformers cannot read"),
    ],
)
def test_a_file_that_cannot_become_a_model(tmp_path: Path, cache: Path, changed: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "wrong.gguf", small_model("llama"), **changed)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_weights_of_another_shape_than_the_header_says(tmp_path: Path, cache: Path) -> None:
    model = small_model("llama")
    model.config.intermediate_size = 128  # the weights have 96
    path = write_gguf(tmp_path / "wrong.gguf", model)
    with pytest.raises(ModelError, match=r"6 weights have other shapes than transformers takes from its header"):
        resolve_model(str(path))
    assert not cache.exists() or not list(cache.iterdir())


def test_a_kind_of_tensor_that_is_not_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "new.gguf", small_model("llama"))
    content = path.read_bytes()
    entry = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8  # one dimension, then the kind
    path.write_bytes(content[:entry] + struct.pack("<I", 250) + content[entry + 4 :])
    with pytest.raises(ModelError, match="has a tensor of type 250, which the package gguf does not read"):
        resolve_model(str(path))


def test_a_version_that_is_not_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "old.gguf", small_model("llama"))
    content = bytearray(path.read_bytes())
    for version, words in ((1, "is GGUF of version 1; versions 2 and 3 are read"), (3 << 24, "big-endian")):
        content[4:8] = struct.pack("<I", version)
        path.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            resolve_model(str(path))


def test_without_a_file_or_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.gguf"
    assert refused("train", config_file(tmp_path, path)).startswith(f"{path} is not a file: name a GGUF file")
    write_gguf(path, small_model("llama"))
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    assert "needs the package gguf: pip install 'stalewise[gguf]'" in refused("train", config_file(tmp_path, path))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("chat_template", "another", "its chat template is another one"),
        ("eos_token", "ab", "its end token is"),
    ],
)
def test_a_tokenizer_that_is_not_the_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    from stalewise.models import gguf_conversion as conversion

    settle = conversion._set_tokens

    def spoil(model: Any, tokenizer: Any, header: Any) -> None:
        settle(model, tokenizer, header)
        setattr(tokenizer, name, value)

    monkeypatch.setattr(conversion, "_set_tokens", spoil)
    with pytest.raises(ModelError, match=words):
        resolve_model(str(write_gguf(tmp_path / "small.gguf", small_model("llama"))))
    assert not list(cache.iterdir())


# ---------------------------------------------------------------- the cache


def test_what_is_not_whole_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", small_model("llama"))
    directory = Path(resolve_model(str(path)))
    for spoil in (
        lambda: (directory / MANIFEST).unlink(),
        lambda: (directory / "tokenizer.json").unlink(),
        lambda: os.truncate(directory / "model.safetensors", 100),
        lambda: shutil.rmtree(directory),
    ):
        spoil()
        assert Path(resolve_model(str(path))) == directory
        load_model(str(directory), device=torch.device("cpu"))
    assert [entry.name for entry in cache.iterdir()] == [directory.name]


def test_several_at_once_make_one(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf", small_model("llama"))
    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(lambda _: resolve_model(str(path)), range(3)))
    assert len(found) == 1
    assert [str(entry) for entry in cache.iterdir()] == list(found)


@pytest.mark.slow
def test_a_real_file() -> None:
    if not (name := os.environ.get("STALEWISE_TEST_GGUF")):
        pytest.skip("STALEWISE_TEST_GGUF names no file, such as one of Qwen2.5-Coder-0.5B-Instruct")
    directory = resolve_model(name)
    model, tokenizer = load_model(directory, device=torch.device("cpu")), load_tokenizer(directory)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0])
