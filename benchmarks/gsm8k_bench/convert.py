"""A GGUF file as a Hugging Face directory with bfloat16 weights, as vLLM and TRL read it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any


def convert(source: Path, directory: Path) -> dict[str, Any]:
    """Write the directory and say how long it took; one that is there already is left alone.

    The weights are those of `model.path = "FILE.gguf"`, in bfloat16. The end tokens are the file's own and its padding
    token, which also ends a text of Qwen's.
    """
    if (directory / "config.json").is_file():
        return {"seconds": 0.0, "directory": directory.name}
    start = time.perf_counter()
    import torch
    from safetensors.torch import load_file, save_file

    from stalewise.models.gguf import MANIFEST, gguf_directory
    from stalewise.models.loading import load_tokenizer
    from stalewise.store.atomic import commit_directory, make_directory, read_json, temporary_name

    converted, temporary = gguf_directory(source), temporary_name(directory)
    make_directory(directory.parent)
    shutil.copytree(converted, temporary, ignore=shutil.ignore_patterns("*.safetensors", MANIFEST))
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(converted / "model.safetensors").items()}
    save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(str(converted))
    ends = sorted({tokenizer.eos_token_id, tokenizer.pad_token_id}, reverse=True)
    for name, changes in (("config.json", {"dtype": "bfloat16"}), ("generation_config.json", {"eos_token_id": ends})):
        (temporary / name).write_text(json.dumps({**read_json(temporary / name), **changes}, indent=2) + "\n")
    commit_directory(temporary, directory)
    parameters = sum(tensor.numel() for tensor in weights.values())
    return {"seconds": time.perf_counter() - start, "directory": directory.name, "parameters": parameters}
