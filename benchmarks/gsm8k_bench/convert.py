"""A GGUF file as a Hugging Face directory with bfloat16 weights, the output layer tied to the embedding."""

from __future__ import annotations

import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any


def convert(source: Path, directory: Path) -> dict[str, Any]:
    """Write the directory and say how long it took; one that is there already is left alone.

    The file stores the output layer apart from the embedding and in more bits, though upstream the two are one: both
    become what the output layer holds. The end tokens are the file's own and the one that ends a text.
    """
    if (directory / "config.json").is_file():
        return {"seconds": 0.0, "directory": directory.name}
    start = time.perf_counter()
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Reader(gguf.GGUFReader):
        """Reads through plain arrays: each slice of a memory map costs a hundred times as much, and there are 10⁶."""

        def _get(self, offset: Any, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            plain = self.__dict__.get("_plain")
            if plain is None:
                plain = self.__dict__["_plain"] = np.asarray(self.data)
            size = int(np.dtype(dtype).itemsize) * int(count)
            found = plain[int(offset) : int(offset) + size].view(dtype)[: int(count)]
            order = self.byte_order if override_order is None else override_order
            return found.view(found.dtype.newbyteorder(order))

    original = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(Reader)  # transformers reads the file three times
    try:
        place: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        tokenizer: Any = AutoTokenizer.from_pretrained(**place)
        model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    finally:
        gguf.GGUFReader = original
    config, state = model.config, dict(model.state_dict())
    head = state.pop("lm_head.weight", None)
    if head is not None:
        state["model.embed_tokens.weight"] = head
    config.tie_word_embeddings = True
    config.architectures = [type(model).__name__]  # vLLM chooses its model by it
    config._name_or_path = ""
    config.dtype = torch.bfloat16
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    ends = sorted({tokenizer.eos_token_id, tokenizer.pad_token_id}, reverse=True)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = config.max_position_embeddings
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(temporary)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = ends, tokenizer.pad_token_id
    generation.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    os.replace(temporary, directory)
    parameters = sum(tensor.numel() for tensor in weights.values())
    return {"seconds": time.perf_counter() - start, "directory": directory.name, "parameters": parameters}
