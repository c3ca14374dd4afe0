"""Models: where they come from, loading, attention, fast operators and GPU kernels.

What `model.path` means is found here without torch, and what `model.device` and `model.precision` mean without
transformers; `stalewise.models.loading` loads the model.
"""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from stalewise.errors import ModelError, nearest
from stalewise.models.gguf import SMOLLM2, gguf_directory, is_gguf, smollm2_directory

if TYPE_CHECKING:
    import torch

EMBEDDED = Path(__file__).parent / "policies"


def import_packages(*names: str) -> None:
    """Import packages for a command: what they create stays, and is never searched for garbage.

    Without names these are torch and transformers with its models.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in names or ("torch", "transformers.modeling_utils"):
            import_module(name)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def embedded_policies() -> list[str]:
    """Names of the policies in the package."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def embedded_policy(path: str) -> str:
    """The name of an embedded policy, written with or without `embedded:`; empty if it is none."""
    name = path.removeprefix("embedded:")
    if name != path and name not in embedded_policies():
        raise ModelError(f"there is no embedded policy {name!r}; {nearest(name, embedded_policies())}")
    return name if name in embedded_policies() else ""


def is_hub_name(text: str) -> bool:
    """Whether a text has the form `owner/name` of a repository on a hub; a directory of that name may exist, too."""
    return text.count("/") == 1 and not text.startswith((".", "/", "~"))


def resolve_model(path: str, task: str = "") -> str:
    """The directory or hub name of `model.path`; `auto` is the embedded policy of the task."""
    if path == "auto" and task not in embedded_policies():
        raise ModelError(f'task {task} has no embedded policy: set model.path = "a directory or a hub name"')
    if name := task if path == "auto" else embedded_policy(path):
        return str(EMBEDDED / name)
    if path == SMOLLM2:
        return str(smollm2_directory())
    if is_gguf(path):
        return str(gguf_directory(Path(path).expanduser()))
    directory = Path(path).expanduser()
    if directory.is_dir():
        if (directory / "config.resolved.json").is_file():
            raise ModelError(f"{directory} is a run directory, not a model: {_policy_of(directory)}")
        if not (directory / "config.json").is_file():
            raise ModelError(f"{directory} has no config.json: it is no Hugging Face model directory, or incomplete")
        return str(directory)
    if not is_hub_name(path):
        known = nearest(path, [*embedded_policies(), SMOLLM2])
        raise ModelError(f"{path} is not a directory; embedded policies: {known.removeprefix('known: ')}")
    _check_hub(path)
    return path  # owner/name on a hub


def _policy_of(run: Path) -> str:
    """Advice on what to pass instead of a run directory."""
    newest = sorted((run / "checkpoints").glob("v[0-9]*"))[-1:]
    if newest and not (newest[0] / "config.json").is_file():
        return f"its checkpoints hold adapters; `stalewise export {run}` makes a model of the newest"
    return f"pass its newest checkpoint, {newest[0]}" if newest else "it has no checkpoint yet"


def _check_hub(name: str) -> None:
    """Raise at once where no hub answers and the model is not in its cache: loading would retry for minutes."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.is_offline_mode() or isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    from stalewise.tasks.hf_datasets import check_answers

    try:
        check_answers(constants.ENDPOINT)
    except ConnectionError as error:
        raise loading_error(name, "", error) from None


def loading_error(path: str, what: str, error: Exception) -> ModelError:
    """The error for what transformers cannot load, with remedies for a hub name."""
    if isinstance(error, OSError) and not Path(path).is_dir():
        return ModelError(
            f"{path} is not a directory, and no hub provides it ({first_line(error).rstrip('.')}): name a directory "
            "with the model, or connect to the hub, with HF_TOKEN set if it restricts access; "
            f'model.path = "auto" and "{SMOLLM2}" need no hub'
        )
    return ModelError(f"{path} {what}: {first_line(error)}")


def first_line(error: Exception) -> str:
    """The first line of an error, or all of it if that line introduces a list."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines) if lines[0].endswith(":") else lines[0]


def pick_device(device: str) -> torch.device:
    """The device of a config, which becomes torch's current one, as streams and graphs need; `auto`: a GPU if any."""
    import torch

    picked = find_device(device)
    if picked.type == "cuda" and picked.index is not None:
        torch.cuda.set_device(picked)
    return picked


def find_device(device: str, setting: str = "model.device") -> torch.device:
    """The same, without a change of torch's current device: for one that another process uses."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f'{setting} is {device!r}: expected "auto", "cpu", "cuda" or "cuda:N"') from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f'{setting} is {device!r} but there is no GPU here: set "auto" or "cpu"')
    if found.type == "cuda" and found.index is not None and found.index >= (count := torch.cuda.device_count()):
        raise ModelError(f"{setting} is {device!r}: GPUs are counted from 0, and this machine has {count}")
    return found


def pick_precision(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on GPUs that support it, else float32 (bfloat16 is far slower on a CPU)."""
    import torch

    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return torch.float32 if precision == "float32" else torch.bfloat16
