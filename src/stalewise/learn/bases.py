"""Whether an adapter was made for the model that it is put on, as far as that can be known."""

from __future__ import annotations

from collections.abc import Callable
from filecmp import cmp
from pathlib import Path

from stalewise.errors import ModelError


def check_base(name: str, adapter: Path, source: str, config_file: Path, say: Callable[[str], object]) -> None:
    """Refuse an adapter whose base, which its config calls `name`, is known to be another model than `source`.

    Two directories are compared by their weights: all checkpoints of ours have names like v000016, and others have
    checkpoint-500 or final. A directory may have been moved, or been downloaded from a hub: what is left then is its
    last name, and `say` hears that this is all.
    """
    recorded, ours = Path(name).expanduser(), Path(source)
    if not name or name == source or (ours.is_dir() and recorded.resolve() == ours.resolve()):
        return
    same = _same_weights(recorded, ours)
    if same is None and _on_hub(name) and _on_hub(source):
        same = name.lower() == source.lower()
    if same is None and recorded.name.lower() == ours.name.lower():
        say(
            f"the adapter {adapter} was made for {name}, which is not here to be compared: by its last name alone "
            f"{source} is taken for the same model"
        )
    elif not same:
        others = ", which has other weights" if ours.is_dir() and same is False else ""
        raise ModelError(
            f"the adapter {adapter} was made for {name}, and model.path is {source}{others}: name that model in "
            f"model.path, or, where it is the same under another name, correct base_model_name_or_path in {config_file}"
        )


def _same_weights(first: Path, second: Path) -> bool | None:
    """Whether the files with weights in two directories are equal; None where they cannot be compared.

    Only the model's own count: a checkpoint of ours has the learner's beside them, an export of it has not.
    """
    try:
        weights = [{path.name: path for path in directory.glob("model*.safetensors")} for directory in (first, second)]
        ours, theirs = weights
        if not ours or ours.keys() != theirs.keys():  # not here, or cut into other files
            return None
        return all(cmp(ours[name], theirs[name], shallow=False) for name in ours)
    except OSError:  # somebody else's directory
        return None


def _on_hub(name: str) -> bool:
    """Whether this is an owner and a name, and no directory here."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).is_dir()
