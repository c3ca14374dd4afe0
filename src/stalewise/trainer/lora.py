"""Whether an adapter was made for the model that it is put on, as far as that can be known."""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Callable
from copy import copy
from filecmp import cmp
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from stalewise.config import LoraSection, RunConfig
from stalewise.errors import ModelError, StoreError, nearest
from stalewise.models.loading import load_model, pick_weights_dtype
from stalewise.store.checkpoints import checkpoint_directory


def check_base(name: str, adapter: Path, source: str, config_file: Path, log: Callable[[str], object]) -> None:
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
        log(
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


# LoRA through PEFT: adapters are trained, whole models are saved.
# A checkpoint's `model.safetensors` is the merged policy, so that whoever samples or evaluates needs to know nothing of
# adapters. Beside it lies `adapter/` in PEFT's own layout. To go on, the learner needs the weights beneath the adapters:
# those of version 0, which stays for that reason. They are its `model.safetensors` where adapters start at nothing, and
# `base/` in it where the run started from an adapter.

ADAPTER, BASE = "adapter", "base"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # what PEFT puts before every name in an adapter's file
# What PEFT's LoRA can do besides a low-rank product on some linear layers.
_MORE_THAN_PRODUCTS = (
    *("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"),
    *("lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "velora_config"),
    *("kasa_config", "monteclora_config"),
)
# Ways to start an adapter that leave the weights beneath it alone.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


class Adapters:
    """The adapters of a model, put into it by the constructor; all its other weights are frozen."""

    def __init__(self, model: Any, peft_config: Any) -> None:
        from peft import inject_adapter_in_model

        self.model, self.peft_config = model, peft_config
        inject_adapter_in_model(peft_config, model)
        # By the name of the layer; PEFT names the adapter itself "default".
        self.layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
        self.weights = {
            f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)["default"].weight
            for name, layer in self.layers.items()
            if layer.lora_A  # an embedding has factors of another kind; an adapter with one is refused
            for part in ("lora_A", "lora_B")
        }
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in self.weights.values():
            parameter.data = parameter.data.float()  # small enough to be kept exactly, whatever lies beneath
            parameter.requires_grad_(True)

    def start(self, seed: int) -> None:
        """Products of zero with random first factors, as in PEFT, but drawn from this seed on any device."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers.values():
            first, second = (getattr(layer, part)["default"].weight for part in ("lora_A", "lora_B"))
            drawn = torch.empty(first.shape)
            torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            first.data.copy_(drawn)
            second.data.zero_()

    def load(self, directory: Path) -> None:
        """Take over the weights of an adapter in PEFT's layout; one for other layers or shapes is a ModelError."""
        path = directory / _WEIGHTS
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read ({error}): copy the adapter again, as safetensors") from error
        if wrong := sorted(found.keys() ^ self.weights.keys()):
            where = "the adapter's file" if wrong[0] in found else "the model with these targets"
            raise ModelError(
                f"the adapter {directory} is for another model than {self._name()}: {len(wrong)} of its weights do "
                f"not match, the first {wrong[0].removeprefix(_PREFIX)}, which only {where} has: {self._advice()}"
            )
        for name, parameter in self.weights.items():
            if found[name].shape != parameter.shape:
                raise ModelError(
                    f"the adapter {directory} is for another model than {self._name()}: "
                    f"{name.removeprefix(_PREFIX)} has shape {list(found[name].shape)} and should have "
                    f"{list(parameter.shape)}: {self._advice()}"
                )
            parameter.data.copy_(found[name])

    def merged(self) -> dict[str, Tensor]:
        """Weights of the policy as an ordinary model; those in memory stay as they are."""
        state: dict[str, Tensor] = self.model.state_dict()
        for name, layer in self.layers.items():
            for key in [key for key in state if key.startswith((f"{name}.lora_", f"{name}.base_layer."))]:
                value = state.pop(key)
                if ".base_layer." in key:
                    state[key.replace(".base_layer.", ".")] = value
            weight = state[f"{name}.weight"]
            # To the host at once, or saving would need the room of a second model on the device.
            with torch.no_grad():
                delta = layer.get_delta_weight("default")
                state[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype).cpu()
        return state

    def save(self, directory: Path) -> None:
        """Write the merged policy, and the adapter beside it."""
        self.model.save_pretrained(directory, state_dict=self.merged())
        (directory / ADAPTER).mkdir()
        tensors = {name: parameter.detach().contiguous() for name, parameter in self.weights.items()}
        save_file(tensors, directory / ADAPTER / _WEIGHTS, metadata={"format": "pt"})
        saved = copy(self.peft_config)
        saved.inference_mode = True  # as PEFT writes it: whoever loads it to train says so
        if isinstance(saved.target_modules, set):
            saved.target_modules = sorted(saved.target_modules)  # a set would be written in another order each time
        saved.save_pretrained(str(directory / ADAPTER))

    def _name(self) -> str:
        return str(self.peft_config.base_model_name_or_path)

    def _advice(self) -> str:
        return "name the model it was made for in model.path"


# ---------------------------------------------------------------- version 0


def save_first(
    config: RunConfig, model: Any, source: str, directory: Path, log: Callable[[str], object] = lambda text: None
) -> None:
    """Write the policy that becomes version 0; `model` was loaded from `source` and is changed."""
    if not config.model.trains_adapters:
        model.save_pretrained(directory)
        return
    need_peft()
    if config.model.adapter:
        adapter = Path(config.model.adapter).expanduser()
        peft_config = read_adapter_config(adapter, source, log)
        model.save_pretrained(directory / BASE)
        adapters = _inject(model, peft_config, adapter)
        adapters.load(adapter)
    else:
        adapters = Adapters(model, new_config(config.model.lora, model, source))
        adapters.start(config.seed)
    adapters.save(directory)


def new_config(settings: LoraSection, model: Any, source: str) -> Any:
    """PEFT's config of adapters that these settings ask for."""
    from peft import LoraConfig

    chosen = target_layers(model, settings.targets)
    return LoraConfig(
        r=settings.rank,
        # PEFT writes down whole numbers as such.
        lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,  # type: ignore[arg-type]
        target_modules=sorted({name.rpartition(".")[2] for name in chosen}),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in chosen.values()),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=_place(source),
    )


def target_layers(model: Any, targets: list[str]) -> dict[str, Any]:
    """The linear layers that get adapters, by name; `model` may be one without data, on the meta device."""
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    known = {name.rpartition(".")[2] for name in linear}
    if wrong := [target for target in targets if target not in known]:
        raise ModelError(
            f"model.lora.targets names {wrong[0]!r}, which is no linear layer within {type(model).__name__}; "
            f"{nearest(wrong[0], known)}"
        )
    return {name: module for name, module in linear.items() if not targets or name.rpartition(".")[2] in targets}


def read_adapter_config(adapter: Path, source: str, log: Callable[[str], object]) -> Any:
    """PEFT's config of an adapter that exists; one that we cannot train or that is for another model is refused.

    `say` hears of one that cannot be told from one for another model.
    """
    need_peft()
    from peft import LoraConfig

    if not (adapter / _CONFIG).is_file():
        raise ModelError(f"model.adapter is {adapter}, which has no {_CONFIG}: name the directory of a PEFT adapter")
    try:
        record = json.loads((adapter / _CONFIG).read_text())
        kind = record.get("peft_type")
        if kind != "LORA":
            raise ModelError(f"the adapter {adapter} is of the kind {kind}: only LORA can be trained on")
        found: Any = LoraConfig.from_pretrained(str(adapter))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{adapter / _CONFIG} is no config of a PEFT adapter: {error}") from error
    more = [name for name in _MORE_THAN_PRODUCTS if getattr(found, name, None)]
    more += ["bias"] if found.bias != "none" else []
    more += ["init_lora_weights"] if found.init_lora_weights not in _PLAIN_STARTS else []
    if more:
        raise ModelError(
            f"the adapter {adapter} has {more[0]} = {getattr(found, more[0])!r}, which is more than low-rank products "
            "of linear layers: merge it with PEFT's merge_and_unload and name the result in model.path"
        )
    check_base(str(record.get("base_model_name_or_path") or ""), adapter, source, adapter / _CONFIG, log)
    found.base_model_name_or_path = _place(source)
    found.lora_dropout = 0.0  # dropout is off everywhere
    found.init_lora_weights = True  # its weights are loaded
    found.inference_mode = False
    return found


def _place(source: str) -> str:
    """A directory by its whole path, a name on a hub as it is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def _inject(model: Any, peft_config: Any, adapter: Path) -> Adapters:
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of targets that are tied, which are refused here
            adapters = Adapters(model, peft_config)
    except ValueError as error:  # no layer has the names of its targets
        raise ModelError(
            f"the adapter {adapter} does not fit {peft_config.base_model_name_or_path}: {error}: name the model it was "
            "made for in model.path"
        ) from error
    # The learner takes the output layer's own weight, and would not see a product beside it.
    head = model.get_output_embeddings()
    for name, layer in adapters.layers.items():
        if layer is head or not layer.lora_A:
            kind = "the output layer" if layer is head else "an embedding"
            # Merged, a product of one of two layers that share their weights would be one of both.
            merge = "merge it with PEFT's merge_and_unload and name the result in model.path, or "
            raise ModelError(
                f"the adapter {adapter} has a product for {name}, {kind}, and only those of linear layers within the "
                f"model are trained: {'' if tied else merge}make an adapter without that target"
            )
    return adapters


def check_adapter(adapter: Path, source: str, log: Callable[[str], object]) -> Any:
    """PEFT's config of an adapter that fits the model at `source`, of which nothing but the config is read."""
    peft_config = read_adapter_config(adapter, source, log)
    try:
        with torch.device("meta"):  # layers without data
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    except Exception:  # code of its own, a damaged file: where it matters, loading will say so
        return peft_config
    _inject(model, peft_config, adapter).load(adapter)
    return peft_config


def need_peft() -> None:
    """Refuse, with the remedy, where PEFT is not installed."""
    if find_spec("peft") is None:
        raise ModelError("adapters need the package peft: pip install 'stalewise[lora]'")


# ---------------------------------------------------------------- later versions


def load_policy(config: RunConfig, checkpoint: Path, device: torch.device) -> tuple[Any, Adapters | None]:
    """The model to train, with its adapters in it where adapters are trained."""
    if torch.cuda.is_initialized():
        gc.collect()  # a policy that was dropped may lie in cycles of a compiler's, and in the memory of the GPU
    dtype = pick_weights_dtype(config.model.precision)
    if not config.model.trains_adapters:
        return load_model(str(checkpoint), device=device, dtype=dtype), None
    need_peft()
    from peft import LoraConfig

    model = load_model(str(base_directory(checkpoint)), device=device, dtype=dtype)
    peft_config = LoraConfig.from_pretrained(str(checkpoint / ADAPTER))
    peft_config.inference_mode = False
    adapters = Adapters(model, peft_config)
    adapters.load(checkpoint / ADAPTER)
    return model, adapters


def base_directory(checkpoint: Path) -> Path:
    """Where the weights beneath the adapters of a run's checkpoint lie."""
    first = checkpoint_directory(checkpoint.parent.parent, 0)
    if not (first / "manifest.json").is_file():
        raise StoreError(
            f"{first} holds the weights beneath the adapters of {checkpoint} and is missing: restore it from a copy, "
            f"or start a new run from {checkpoint}, which is a whole model"
        )
    return first / BASE if (first / BASE).is_dir() else first
