"""Model repositories with Python of their own, which writes a file when it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from stalewise.models import EMBEDDED

CODE = """
from pathlib import Path
Path({witness!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "{kind}"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    return None
"""
KINDS = ("of its own", "known", "tokenizer", "generation", "pickle")


def hostile_repository(directory: Path, kind: str, witness: Path) -> Path:
    """A copy of an embedded policy whose repository has code: a new architecture, a known one, a tokenizer, …"""
    shutil.copytree(EMBEDDED / "arithmetic", directory)
    name = "hostile" if kind == "of its own" else "llama"
    code = CODE.format(witness=str(witness), kind=name)
    for file in ("hostile.py", "custom_generate/generate.py", "setup.py", "conftest.py", "__init__.py"):
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_text(code)
    (directory / "custom_generate" / "requirements.txt").write_text("")
    classes = {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model", "AutoModel": "hostile.Model"}
    if kind in ("of its own", "known"):
        _edit(directory / "config.json", {"model_type": name, "architectures": ["Model"], "auto_map": classes})
    if kind == "tokenizer":
        both = {
            "tokenizer_class": "Tokenizer",
            "auto_map": {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]},
        }
        _edit(directory / "tokenizer_config.json", both)
    if kind == "generation":
        _edit(directory / "generation_config.json", {"custom_generate": "hostile", "trust_remote_code": True})
    if kind == "pickle":
        (directory / "model.safetensors").unlink()
        payload = f"cpathlib\nPath\n(V{witness}\ntR.".encode()
        (directory / "pytorch_model.bin").write_bytes(payload)
    return directory


def _edit(path: Path, changes: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
