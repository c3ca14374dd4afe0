"""Loading policies and tokenizers: any causal language model that transformers loads, from a directory or a name."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from stalewise.errors import ModelError, nearest
from stalewise.gguf import gguf_directory, is_gguf
from stalewise.smollm2 import NAME as SMOLLM2
from stalewise.smollm2 import smollm2_directory
from stalewise.types import Prompt

EMBEDDED = Path(__file__).parent / "policies"

# Progress bars of transformers' loading would tear ours apart.
transformers_logging.disable_progress_bar()


def embedded_policies() -> list[str]:
    """Names of the policies that come with the package."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def resolve_model(path: str, task: str = "") -> str:
    """Turn the config's `model.path` into what transformers loads; `auto` is the embedded policy of the task."""
    if path == "auto":
        if task not in embedded_policies():
            raise ModelError(f'task {task} has no embedded policy: say model.path = "a directory or a hub name"')
        return str(EMBEDDED / task)
    if path in embedded_policies():
        return str(EMBEDDED / path)
    if path == SMOLLM2:
        return str(smollm2_directory())
    if is_gguf(path):
        return str(gguf_directory(Path(path).expanduser()))
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelError(f"{directory} has no config.json: it is no Hugging Face model directory, or half copied")
        return str(directory)
    if looks_local:
        raise ModelError(f"{path} is no directory; embedded policies: {nearest(path, [*embedded_policies(), SMOLLM2])}")
    return path  # owner/name on a hub


def pick_device(device: str) -> torch.device:
    """`auto` is the first GPU where there is one. The one that is picked is torch's own from here on.

    Streams, graphs and page-locked copies belong to the device that is torch's own at the time.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f'model.device is {device!r}: expected "auto", "cpu", "cuda" or "cuda:N"') from error
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f'model.device is {device!r} but there is no GPU here: say "auto" or "cpu"')
    if picked.type == "cuda" and picked.index is not None:
        if picked.index >= (count := torch.cuda.device_count()):
            raise ModelError(f"model.device is {device!r}: GPUs are counted from 0 on, and this machine has {count}")
        torch.cuda.set_device(picked)
    return picked


def device_name(device: str) -> str:
    """The GPU that a config's device is, as its maker calls it; else cpu."""
    picked = pick_device(device)
    return torch.cuda.get_device_name(picked) if picked.type == "cuda" else "cpu"


def pick_precision(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on GPUs that have it, else float32 (bfloat16 on a CPU is slower by orders of magnitude)."""
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.float32 if precision == "float32" else torch.bfloat16


def pick_weights_dtype(precision: str) -> torch.dtype:
    """What the learner holds its weights in. Only `bfloat16-only` loses updates to rounding."""
    return torch.bfloat16 if precision == "bfloat16-only" else torch.float32


def load_model(path: str, *, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model with weights in `dtype`, in evaluation mode: dropout is off in both rooms."""
    _check_weights(path)
    try:
        config = AutoConfig.from_pretrained(path)
        # transformers would make up weights that are missing, and report it among its warnings.
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True)
        model, report = loaded
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise loading_error(path, "does not load as a causal language model", error) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{path} lacks {len(missing)} weights of its architecture, the first {missing[0]}: copy it again"
        )
    model.to(device)
    model.eval()
    _check_causal(model, path)
    return model


def loading_error(path: str, what: str, error: Exception) -> ModelError:
    """The error to raise where transformers cannot load something; a name on a hub has remedies of its own."""
    if isinstance(error, OSError) and not Path(path).is_dir():
        return ModelError(
            f"{path} is no directory, and no hub gives it out ({_first_line(error).rstrip('.')}): name a directory "
            "that holds the model, or be online, with HF_TOKEN set where the hub lets only some in; "
            f'model.path = "auto" and "{SMOLLM2}" need no hub'
        )
    return ModelError(f"{path} {what}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """What an error of others says first, or all of it where that begins a list: theirs have many lines, ours one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines) if lines[0].endswith(":") else lines[0]


@torch.no_grad()
def _check_causal(model: Any, path: str) -> None:
    """Refuse encoders (BERT) that load as language models: they look at the tokens to come."""
    logits_RTV = model(input_ids=torch.tensor([[0, 0], [0, 1]], device=model.device)).logits.float()
    difference = (logits_RTV[0, 0] - logits_RTV[1, 0]).abs().max()
    if not difference.isfinite():
        raise ModelError(f"{path} has weights that are not finite: copy it again, or choose an earlier checkpoint")
    tolerance = 1e-5 if model.dtype is torch.float32 else 0.02
    if difference > tolerance * logits_RTV.abs().max():
        raise ModelError(f"{path} is not a causal language model: {type(model).__name__} looks at the tokens to come")


def vocabulary_size(path: str) -> int:
    """Rows of the policy's embedding: token ids are below it."""
    try:
        return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)
    except (OSError, ValueError, KeyError) as error:
        raise loading_error(path, "has no config that transformers can load", error) from error


def _check_weights(path: str) -> None:
    directory = Path(path)
    if not directory.is_dir():
        return
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(shard for shard in shards if not (directory / shard).is_file())
        if missing:
            raise ModelError(f"{directory} is half copied: {', '.join(missing)} missing")
    elif not list(directory.glob("*.safetensors")):
        raise ModelError(f"{directory} has no *.safetensors: it is half copied, or its weights are in another format")


def load_tokenizer(path: str) -> Any:
    """A tokenizer with an end-of-sequence and a padding token; one without padding pads with end-of-sequence.

    Padding is masked everywhere, so which token pads changes nothing. Sampler and learner share one, which nobody may
    change: to read it takes longer than to read a small model.
    """
    files = Path(path).iterdir() if Path(path).is_dir() else ()
    stats = ((file.name, file.stat()) for file in files if file.is_file() and file.suffix != ".safetensors")
    return _load_tokenizer(path, tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)))


@lru_cache(maxsize=2)
def _load_tokenizer(path: str, files: tuple[tuple[str, int, int], ...]) -> Any:
    """`files` say which it is: another may lie at the same place later."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise loading_error(path, "has no tokenizer that transformers can load", error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path} has no end-of-sequence token: responses could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(model_config: Any, generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's, and those that the model's own configs name."""
    found = {tokenizer.eos_token_id}
    for config in (model_config, generation_config):
        eos = getattr(config, "eos_token_id", None)
        found.update(eos if isinstance(eos, list | tuple) else [eos] if eos is not None else [])
    return tuple(sorted(found))


def encode_prompts(prompts: list[Prompt], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt; those marked as chat go through the chat template, with the turn opened for a reply."""
    chat = [prompt.metadata.get("format") == "chat" for prompt in prompts]
    if any(chat) and not tokenizer.chat_template:
        raise ModelError(
            f"the task asks for a chat template and the tokenizer of {tokenizer.name_or_path} has none: choose an "
            "instruct model, or add a chat_template.jinja to it"
        )
    texts = [
        _chat_text(prompt, tokenizer) if is_chat else prompt.text for prompt, is_chat in zip(prompts, chat, strict=True)
    ]
    # A chat template writes its own special tokens; a second beginning-of-sequence would be off the training data.
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=not any(chat))["input_ids"]
    empty = [prompt.prompt_id for prompt, ids in zip(prompts, encoded, strict=True) if not ids]
    if empty:
        raise ModelError(f"prompt {empty[0]} has no tokens: the first token of its response would have no context")
    return encoded


def _chat_text(prompt: Prompt, tokenizer: Any) -> str:
    """The prompt within the chat template, and the beginning of the reply where the prompt has one."""
    messages = _messages(prompt)
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:  # a program of its own, which refuses or is wrong
        remedy = "leave out the task's option system, or use" if "system" in prompt.metadata else "use"
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path} does not take prompt {prompt.prompt_id}: "
            f"{_first_line(error)}: {remedy} another template (chat_template.jinja) or model"
        ) from error
    return text + prompt.metadata.get("prefill", "")


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    system = [{"role": "system", "content": prompt.metadata["system"]}] if "system" in prompt.metadata else []
    return [*system, {"role": "user", "content": prompt.text}]


def context_length(model_config: Any) -> int | None:
    """Positions that the model has, or None where its config does not say."""
    return getattr(model_config, "max_position_embeddings", None)


def turn_dropout_off(model: Any) -> None:
    """Make training mode deterministic: dropout is a module in some architectures and a number in others."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
