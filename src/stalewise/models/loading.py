"""Loads policies and tokenizers: any causal language model of transformers, from a directory or a hub name."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.utils import logging as transformers_logging

from stalewise.errors import ModelError
from stalewise.models import first_line, loading_error, pick_device
from stalewise.models import resolve_model as resolve_model  # earlier documentation imports it from here
from stalewise.types import Prompt

# They would break our own progress bars.
transformers_logging.disable_progress_bar()
# A model's own code is never run. Where `trust_remote_code` is not given, transformers would ask on standard input, and
# take `yes |` for an answer; without time for one it refuses.
dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0

TEMPLATE_S = 10.0  # in which chat templates must be rendered, and a hundredth of a second more for each prompt
LONGEST_TEMPLATE = 1 << 18  # characters
LONGEST_CHAT = 1 << 22  # characters of one rendered prompt, beyond its messages
TEMPLATE_MEMORY = 1 << 29  # bytes that rendering may take


def device_name(device: str) -> str:
    """The product name of the GPU that a config selects, or cpu."""
    picked = pick_device(device)
    return torch.cuda.get_device_name(picked) if picked.type == "cuda" else "cpu"


def pick_weights_dtype(precision: str) -> torch.dtype:
    """Type of the trainer's weights. Only `bfloat16-only` loses updates to rounding."""
    return torch.bfloat16 if precision == "bfloat16-only" else torch.float32


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # what a user sets there stays


def let_memory_grow(device: torch.device) -> None:
    """Let torch's allocator extend its memory in place on a GPU (expandable segments); called before a model is there.

    Micro-batches have many sizes, and memory in fixed pieces fits few of them. It is not set in the environment, which
    other processes would inherit: vLLM cannot sleep with it.
    """
    if device.type == "cuda" and not any(name in os.environ for name in ALLOCATOR):
        set_allocator: Any = torch._C._accelerator_setAllocatorSettings  # pyright: ignore[reportAttributeAccessIssue]
        set_allocator("expandable_segments:True")


def load_model(path: str, *, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model with weights in `dtype`, in evaluation mode."""
    _check_weights(path)
    let_memory_grow(device)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        # transformers would initialise missing weights at random, with only a warning.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
        model, report = loaded
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise loading_error(path, "does not load as a causal language model", error) from error
    if missing := sorted(report["missing_keys"]):
        problem = f"lacks {len(missing)} weights of its architecture, the first {missing[0]}: copy it again"
        raise ModelError(f"{path} {problem}")
    model.to(device).eval()
    _check_causal(model, path)
    return model


@torch.no_grad()
def _check_causal(model: Any, path: str) -> None:
    """Refuse encoders (BERT) that load as language models but attend to later tokens."""
    logits_RTV = model(input_ids=torch.tensor([[0, 0], [0, 1]], device=model.device)).logits.float()
    difference = (logits_RTV[0, 0] - logits_RTV[1, 0]).abs().max()
    if not difference.isfinite():
        raise ModelError(f"{path} has weights that are not finite: copy it again, or choose an earlier checkpoint")
    tolerance = 1e-5 if model.dtype is torch.float32 else 0.02
    if difference > tolerance * logits_RTV.abs().max():
        raise ModelError(f"{path} is not a causal language model: {type(model).__name__} attends to later tokens")


def load_model_config(path: str) -> Any:
    """The config of a model, without its weights."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise loading_error(path, "has no config that transformers can load", error) from error


def vocabulary_size(path: str) -> int:
    """Rows of the policy's embedding; token ids are below it."""
    return int(load_model_config(path).get_text_config().vocab_size)


def _check_weights(path: str) -> None:
    directory, index = Path(path), Path(path, "model.safetensors.index.json")
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(shard for shard in shards if not (directory / shard).is_file()):
            raise ModelError(f"{directory} is incomplete: {', '.join(missing)} missing")
    elif directory.is_dir() and not list(directory.glob("*.safetensors")):
        raise ModelError(f"{directory} has no *.safetensors: it is incomplete, or its weights are in another format")


def tensor_names(weights: Path) -> frozenset[str]:
    """Names of the tensors in a safetensors file, read from its header; ModelError if the file is damaged."""
    try:
        with safe_open(weights, framework="pt") as file:
            return frozenset(file.keys())
    except SafetensorError as error:
        raise ModelError(f"{weights} cannot be read ({error}): copy it again") from error


def load_tokenizer(path: str) -> Any:
    """A tokenizer with an end-of-sequence token, which is also the padding token if there is none (padding is masked).

    Cached and shared by sampler and trainer, which must not change it: reading takes longer than for a small model.
    """
    files = Path(path).iterdir() if Path(path).is_dir() else ()
    stats = ((file.name, file.stat()) for file in files if file.is_file() and file.suffix != ".safetensors")
    return _load_tokenizer(path, tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)))


@lru_cache(maxsize=2)
def _load_tokenizer(path: str, files: tuple[tuple[str, int, int], ...]) -> Any:
    """`files` identify the tokenizer: another may be at the same path later."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise loading_error(path, "has no tokenizer that transformers can load", error) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path} has no end-of-sequence token, so responses could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(model_config: Any, generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's, and those of the model's configs."""
    stop_ids = {tokenizer.eos_token_id}
    for config in (model_config, generation_config):
        eos = getattr(config, "eos_token_id", None)
        stop_ids.update(eos if isinstance(eos, list | tuple) else [eos] if eos is not None else [])
    return tuple(sorted(stop_ids))


def encode_prompts(prompts: list[Prompt], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt; chat prompts go through the chat template, up to the start of the reply."""
    chat = [prompt.metadata.get("format") == "chat" for prompt in prompts]
    if any(chat) and not tokenizer.chat_template:
        raise ModelError(
            f"the task asks for a chat template and the tokenizer of {tokenizer.name_or_path} has none: choose an "
            "instruct model, or add a chat_template.jinja to it"
        )
    rendered = iter(_chat_texts([prompt for prompt, is_chat in zip(prompts, chat, strict=True) if is_chat], tokenizer))
    texts = [next(rendered) if is_chat else prompt.text for prompt, is_chat in zip(prompts, chat, strict=True)]
    # A chat template writes its own special tokens; a second beginning-of-sequence would be wrong.
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=not any(chat))["input_ids"]
    if empty := [prompt.prompt_id for prompt, ids in zip(prompts, encoded, strict=True) if not ids]:
        raise ModelError(f"prompt {empty[0]} has no tokens, so the first token of its response would have no context")
    return encoded


def describe_prompt(prompt_ids: Sequence[int], tokenizer: Any) -> str:
    """What the policy sees: the text of the tokens, with special tokens in «»."""
    special, text, plain = set(tokenizer.all_special_ids), "", list[int]()
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for token in [*prompt_ids, None]:
        if token is not None and token not in special:
            plain.append(token)
            continue
        text += tokenizer.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False) if plain else ""
        text += "" if token is None else f"«{tokenizer.convert_ids_to_tokens(token)}»"
        plain = []
    return text


def _chat_texts(prompts: list[Prompt], tokenizer: Any) -> list[str]:
    """Each prompt within the chat template, and its prefill, if any."""
    if not prompts:
        return []
    if len(str(tokenizer.chat_template)) > LONGEST_TEMPLATE:
        raise _template_error(tokenizer, f"is longer than {LONGEST_TEMPLATE:,} characters")
    for name in {name for prompt in prompts for name in json.loads(prompt.metadata.get("template", "{}"))}:
        if name not in str(tokenizer.chat_template):
            raise ModelError(
                f"the chat template of {tokenizer.name_or_path} has no variable {name}, so chat_template_kwargs would "
                "change nothing: correct the name, or leave it out"
            )
    answer = call_limited(
        lambda: [_render(prompt, tokenizer) for prompt in prompts],
        seconds=TEMPLATE_S + 0.01 * len(prompts),
        memory=TEMPLATE_MEMORY,
        longest=len(prompts) * 6 * LONGEST_CHAT,
    )
    if isinstance(answer, str):
        raise _template_error(tokenizer, f"could not be rendered within its limits: {answer}")
    for prompt, (text, error) in zip(prompts, answer, strict=True):
        if error:
            remedy = "leave out the task's option system, or use" if "system" in prompt.metadata else "use"
            raise ModelError(
                f"the chat template of {tokenizer.name_or_path} does not accept prompt {prompt.prompt_id}: "
                f"{error}: {remedy} another template (chat_template.jinja) or model"
            )
        whole = len(prompt.text) + sum(map(len, prompt.metadata.values()))
        if len(text) > LONGEST_CHAT + 8 * whole:
            raise _template_error(tokenizer, f"makes {len(text):,} characters of prompt {prompt.prompt_id}")
    texts = [text for text, _ in answer]
    return [text + prompt.metadata.get("prefill", "") for text, prompt in zip(texts, prompts, strict=True)]


def _template_error(tokenizer: Any, problem: str) -> ModelError:
    name = tokenizer.name_or_path
    return ModelError(f"the chat template of {name} {problem}: use another template (chat_template.jinja) or model")


def _render(prompt: Prompt, tokenizer: Any) -> tuple[str, str]:
    """A prompt within the chat template, and why that failed, if it did. Runs in a child, within jinja's sandbox."""
    system = [{"role": "system", "content": prompt.metadata["system"]}] if "system" in prompt.metadata else []
    history, variables = json.loads(prompt.metadata.get("history", "[]")), prompt.metadata.get("template", "{}")
    messages = [*system, *history, {"role": "user", "content": prompt.text}]
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **json.loads(variables)
        )
        return text, ""
    except Exception as error:  # templates are programs that may refuse or fail
        return "", (first_line(error) or type(error).__name__)[:500]


def call_limited(function: Callable[[], Any], *, seconds: float, memory: int, longest: int) -> Any:
    """What a function returns, as JSON, or why it did not. It runs in a forked child with limits on time and memory.

    Only for functions that use no GPU, no threads and no locks of others: after a fork these are not there.
    """
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
        pid = os.fork()
    if pid == 0:
        _answer_limited(function, writes, seconds, memory)
    os.close(writes)
    read, deadline = bytearray(), time.monotonic() + seconds
    try:
        with open(reads, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while len(read) <= longest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return f"it took more than {seconds:.0f} s"
                if not (chunk := pipe.read(1 << 16)):
                    break
                read += chunk
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if len(read) > longest:
        return "it makes too long a text"
    try:
        return json.loads(read)
    except ValueError:
        return f"its process ended ({signal.strsignal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else status})"


def _answer_limited(function: Callable[[], Any], writes: int, seconds: float, memory: int) -> None:
    """The child of `call_limited`: does not return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(OSError, ValueError):  # not on every system
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        try:
            answer = function()
        except (MemoryError, RecursionError) as problem:
            answer = type(problem).__name__
        with open(writes, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def context_length(model_config: Any) -> int | None:
    """Maximal number of positions, or None if the config does not have it."""
    text = getattr(model_config, "get_text_config", lambda: model_config)()  # of a model with images, that of its text
    return getattr(text, "max_position_embeddings", None)


def model_body(model: Any) -> Any:
    """The part of a model below its output layer; transformers' `base_model` is the model itself for some (Llama 4)."""
    body = model.base_model
    return getattr(model, "model", model) if body is model else body
