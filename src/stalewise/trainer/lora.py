"""LoRA through PEFT: adapters are trained, whole models are saved.

A checkpoint's `model.safetensors` is the merged policy, so that sampling and evaluation need no adapters; beside it is
`adapter/` in PEFT's layout. Training resumes from the weights beneath the adapters, which are those of version 0: its
`model.safetensors` where adapters start at zero, its `base/` where the run started from an adapter.

Besides linear layers, the matrices of experts and routers are adapted. Mixtures of experts keep them in parameters of
their own, to which PEFT adds the product for each forward pass.
"""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
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

from stalewise.config.sections import LoraSection, ModelSection
from stalewise.errors import ModelError, StoreError, nearest
from stalewise.models import is_hub_name
from stalewise.models.loading import load_model, pick_weights_dtype
from stalewise.store.checkpoints import checkpoint_directory

ADAPTER, BASE = "adapter", "base"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every name in PEFT's file
# Settings of PEFT's LoRA beyond low-rank products of linear layers.
_MORE_THAN_PRODUCTS = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "kasa_config",
    "monteclora_config",
)
# Names that experts and routers had in transformers 4, and that PEFT takes for theirs: in a mixture of experts, linear
# layers of these names (of dense layers and shared experts) are adapted as parameters.
_FORMER_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Initialisations that do not change the weights beneath the adapter.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
Log = Callable[[str], object]
_NAME_MODEL = "name the model it was made for in model.path"


class Adapters:
    """The adapters of a model; the constructor injects them and freezes all other weights."""

    def __init__(self, model: Any, peft_config: Any) -> None:
        from peft import inject_adapter_in_model

        self.model, self.peft_config = model, peft_config
        inject_adapter_in_model(peft_config, model)
        self.layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
        self.weights = {
            f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)["default"].weight
            for name, layer in self.layers.items()
            if layer.lora_A  # empty for an embedding, which `_inject` refuses
            for part in ("lora_A", "lora_B")
        }
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in self.weights.values():
            parameter.data = parameter.data.float()  # small enough for full precision
            parameter.requires_grad_(True)

    def start(self, seed: int) -> None:
        """Initialise as PEFT does (A random, B zero), but from this seed on any device."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers.values():
            first, second = (getattr(layer, part)["default"].weight for part in ("lora_A", "lora_B"))
            drawn = torch.empty(first.shape)
            torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            first.data.copy_(drawn)
            second.data.zero_()

    def load(self, directory: Path) -> None:
        """Load an adapter in PEFT's layout; a ModelError where its layers or shapes differ."""
        path = directory / _WEIGHTS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read ({error}): copy the adapter again, as safetensors") from error
        problem = ""
        if wrong := sorted(tensors.keys() ^ self.weights.keys()):
            where = "the adapter's file" if wrong[0] in tensors else "the model with these targets"
            problem = f"{len(wrong)} of its weights do not match, the first {wrong[0]}, which only {where} has"
        elif wrong := [name for name, weight in self.weights.items() if tensors[name].shape != weight.shape]:
            shape, expected = (list(weights[wrong[0]].shape) for weights in (tensors, self.weights))
            problem = f"{wrong[0]} has shape {shape} and should have {expected}"
        if problem:
            raise ModelError(
                f"the adapter {directory} is for another model than {self.peft_config.base_model_name_or_path}: "
                f"{problem.replace(_PREFIX, '')}: {_NAME_MODEL}"
            )
        for name, parameter in self.weights.items():
            parameter.data.copy_(tensors[name])

    def merged(self) -> dict[str, Tensor]:
        """The weights of the merged policy in host memory; the model itself does not change."""
        return {name: tensor.cpu() for name, tensor in MergedWeights(self).items()}

    @property
    def file(self) -> str:
        """The file of the adapter's tensors, within a checkpoint."""
        return f"{ADAPTER}/{_WEIGHTS}"

    def tensors(self) -> dict[str, Tensor]:
        """The adapter's weights by their names in PEFT's file."""
        return {name: parameter.detach().contiguous() for name, parameter in self.weights.items()}

    def save(self, directory: Path) -> None:
        """Write the merged policy and the adapter."""
        self.model.save_pretrained(directory, state_dict=self.merged())
        self.save_config(directory)
        save_file(self.tensors(), directory / self.file, metadata={"format": "pt"})

    def save_config(self, directory: Path) -> None:
        """Write PEFT's config of the adapter."""
        (directory / ADAPTER).mkdir()
        saved = copy(self.peft_config)
        saved.inference_mode = True  # as PEFT writes it
        if isinstance(saved.target_modules, set):
            saved.target_modules = sorted(saved.target_modules)  # the order of a set varies
        if isinstance(saved.target_parameters, set):
            saved.target_parameters = sorted(saved.target_parameters)
        saved.save_pretrained(str(directory / ADAPTER))


class MergedWeights(Mapping[str, Tensor]):
    """The weights of the merged policy by name. Each is computed when it is read: a device may not hold two models."""

    def __init__(self, adapters: Adapters, names: Container[str] | None = None) -> None:
        """Merge the weights with these names, or all."""
        # The adapters of two parameters of one module are nested.
        self._layers = {
            f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}": layer
            for name, layer in adapters.layers.items()
        }
        own, inside = (tuple(f"{name}.{part}" for name in adapters.layers) for part in ("lora_", "base_layer."))
        whole: dict[str, Tensor] = {
            key.replace(".base_layer", "") if key.startswith(inside) else key: tensor
            for key, tensor in adapters.model.state_dict().items()
            if not key.startswith(own)
        }
        # The weight beneath each adapter, of the same shape and type.
        self.sources = whole if names is None else {name: whole[name] for name in whole if name in names}

    def __getitem__(self, name: str) -> Tensor:
        weight = self.sources[name]
        if name not in self._layers:
            return weight
        with torch.no_grad():
            delta = self._layers[name].get_delta_weight("default")
            return (weight.float() + delta.float()).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def save_first(
    section: ModelSection, seed: int, model: Any, source: str, directory: Path, log: Log = lambda text: None
) -> None:
    """Write version 0. `model` was loaded from `source`; it gets adapters if adapters are trained."""
    if not section.trains_adapters:
        model.save_pretrained(directory)
        return
    need_peft()
    if section.adapter:
        adapter = Path(section.adapter).expanduser()
        peft_config = read_adapter_config(adapter, source, log)
        model.save_pretrained(directory / BASE)
        adapters = _inject(model, peft_config, adapter)
        adapters.load(adapter)
    else:
        targets, peft_config = find_targets(model, section.lora.targets), new_config(section.lora, model, source)
        log(f"adapters of rank {section.lora.rank} on {targets}")
        adapters = Adapters(model, peft_config)
        if len(adapters.layers) != (expected := len(targets.layers) + len(targets.parameters)):
            raise ModelError(
                f"PEFT adapts {len(adapters.layers)} of the {expected} matrices of {type(model).__name__} that were "
                "chosen: name fewer in model.lora.targets"
            )
        adapters.start(seed)
    adapters.save(directory)


def new_config(settings: LoraSection, model: Any, source: str) -> Any:
    """PEFT's config of new adapters."""
    from peft import LoraConfig

    chosen = find_targets(model, settings.targets)
    names, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    mistaken = [name for name in chosen.layers if chosen.has_experts and _last(name) in _FORMER_NAMES]
    return LoraConfig(
        r=settings.rank,
        lora_alpha=int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,  # type: ignore[arg-type]
        target_modules=_endings(chosen.layers.keys() - mistaken, names, segments=1),
        target_parameters=_endings(
            [*chosen.parameters, *(f"{name}.weight" for name in mistaken)], parameters, segments=2
        )
        or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in chosen.layers.values()),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=_absolute(source),
    )


@dataclass(frozen=True, slots=True)
class Targets:
    """The matrices of a model by name: which get adapters and which do not."""

    layers: dict[str, Any]
    parameters: dict[str, Tensor]  # of experts [experts, ·, ·] and routers [experts, ·]
    left_out: list[str]  # last names
    has_experts: bool  # whether the model has any

    def factors(self, rank: int) -> int:
        """Numbers in the adapters."""
        shapes = [layer.weight.shape for layer in self.layers.values()]
        shapes += [parameter.shape for parameter in self.parameters.values()]
        return sum(rank * math.prod(shape[:-2]) * (shape[-2] + shape[-1]) for shape in shapes)

    def __str__(self) -> str:
        layers = f"{len(self.layers)} linear layers ({', '.join(sorted({_last(name) for name in self.layers}))})"
        experts = f"{len(self.parameters)} matrices of experts and routers "
        experts += f"({', '.join(sorted({_target_name(name) for name in self.parameters}))})"
        parts = [text for text, chosen in ((layers, self.layers), (experts, self.parameters)) if chosen]
        return " and ".join(parts) + (f"; not trained: {', '.join(self.left_out)}" if self.left_out else "")


def find_targets(model: Any, targets: list[str]) -> Targets:
    """The matrices that get adapters: those named, or all but embeddings and output layer; `model` may be on meta."""
    head = model.get_output_embeddings()
    layers: dict[str, Any] = {}
    parameters: dict[str, Tensor] = {}
    others: set[str] = set()  # such as the filters of convolutions
    for name, module in model.named_modules():
        if module is head or isinstance(module, torch.nn.Embedding):
            continue
        # The forward pass of a router that is a linear layer returns more than a product.
        if isinstance(module, torch.nn.Linear | Conv1D) and not _is_router(module):
            layers[name] = module
            continue
        for part, parameter in module.named_parameters(recurse=False):
            is_experts = "Experts" in type(module).__name__ and parameter.ndim == 3
            if is_experts or (_is_router(module) and part == "weight" and parameter.ndim == 2):
                parameters[f"{name}.{part}"] = parameter
            elif parameter.ndim > 1 and "bias" not in part:
                others.add(_target_name(f"{name}.{part}"))
    known = {_last(name) for name in layers} | {_target_name(name) for name in parameters}
    if "all-linear" in targets and "all-linear" not in known:  # PEFT's word
        raise ModelError("model.lora.targets names 'all-linear': leave targets out, which adapts all linear layers")
    if wrong := [target for target in targets if target not in known]:
        raise ModelError(
            f"model.lora.targets names {wrong[0]!r}, which is not a linear layer, expert or router within "
            f"{type(model).__name__}; {nearest(wrong[0], known)}"
        )
    chosen = known if not targets else set(targets)
    return Targets(
        {name: module for name, module in layers.items() if _last(name) in chosen},
        {name: parameter for name, parameter in parameters.items() if _target_name(name) in chosen},
        sorted((known - chosen) | others),
        has_experts=bool(parameters),
    )


def _is_router(module: Any) -> bool:
    return any(part in type(module).__name__ for part in ("Router", "Gate"))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _target_name(parameter: str) -> str:
    """The name of a parameter in `model.lora.targets`: its own, or for a `weight` its module's.

    >>> [_target_name(name) for name in ("layers.0.mlp.experts.down_proj", "layers.0.mlp.gate.weight")]
    ['down_proj', 'gate']
    """
    return _last(parameter.removesuffix(".weight"))


def _endings(chosen: Iterable[str], names: Iterable[str], *, segments: int) -> list[str]:
    """The last segments of the chosen names, by which PEFT finds them; whole names if other names end so too."""
    wanted = set(chosen)
    short = {".".join(name.split(".")[-segments:]) for name in wanted}
    found = {name for name in names if name in short or name.endswith(tuple(f".{end}" for end in short))}
    return sorted(short if found == wanted else wanted)


def adapts_parameters(model: Any) -> bool:
    """Whether parameters other than linear layers have adapters, which change modules in the forward pass."""
    return any(hasattr(module, "lora_A") and hasattr(module, "parameter_name") for module in model.modules())


def read_adapter_config(adapter: Path, source: str, log: Log) -> Any:
    """PEFT's config of an existing adapter; a ModelError where it cannot be trained or is for another model."""
    need_peft()
    from peft import LoraConfig

    if not (adapter / _CONFIG).is_file():
        raise ModelError(f"model.adapter is {adapter}, which has no {_CONFIG}: name the directory of a PEFT adapter")
    try:
        record = json.loads((adapter / _CONFIG).read_text())
        kind = record.get("peft_type")
        if kind != "LORA":
            raise ModelError(f"the adapter {adapter} is of the kind {kind}: only LORA can be trained on")
        loaded: Any = LoraConfig.from_pretrained(str(adapter))
    except ModelError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{adapter / _CONFIG} is not a config of a PEFT adapter: {error}") from error
    more = [name for name in _MORE_THAN_PRODUCTS if getattr(loaded, name, None)]
    more += ["bias"] if loaded.bias != "none" else []
    more += ["init_lora_weights"] if loaded.init_lora_weights not in _PLAIN_STARTS else []
    if more:
        raise ModelError(
            f"the adapter {adapter} has {more[0]} = {getattr(loaded, more[0])!r}, which is more than low-rank products "
            "of linear layers: merge it with PEFT's merge_and_unload and name the result in model.path"
        )
    check_base(str(record.get("base_model_name_or_path") or ""), adapter, source, log)
    loaded.base_model_name_or_path = _absolute(source)
    loaded.inference_mode = False
    loaded.lora_dropout = 0.0  # dropout is off everywhere
    loaded.init_lora_weights = True  # its weights are loaded
    return loaded


def check_base(name: str, adapter: Path, source: str, log: Log) -> None:
    """Refuse an adapter whose config names a base model, `name`, other than `source`.

    Directories are compared by their weights, since checkpoints of different runs have the same names. A directory that
    was moved, or downloaded from a hub, can be compared by its last name only, which is logged.
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
            f"model.path, or, where it is the same under another name, correct base_model_name_or_path in "
            f"{adapter / _CONFIG}"
        )


def _same_weights(first: Path, second: Path) -> bool | None:
    """Whether the model files of two directories are equal; None where they cannot be compared."""
    try:
        names = [{path.name for path in directory.glob("model*.safetensors")} for directory in (first, second)]
        if not names[0] or names[0] != names[1]:  # not here, or split into other files
            return None
        return all(cmp(first / name, second / name, shallow=False) for name in names[0])
    except OSError:  # no permission
        return None


def _on_hub(name: str) -> bool:
    """Whether this is `owner/name` and no local directory."""
    return is_hub_name(name) and not Path(name).is_dir()


def _absolute(source: str) -> str:
    """The absolute path of a directory; a hub name as it is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def _inject(model: Any, peft_config: Any, adapter: Path) -> Adapters:
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied targets, which are refused here
            adapters = Adapters(model, peft_config)
    except ValueError as error:  # no layer has the names of its targets
        name = peft_config.base_model_name_or_path
        raise ModelError(f"the adapter {adapter} does not fit {name}: {error}: {_NAME_MODEL}") from error
    # The trainer reads the output layer's own weight, and would ignore an adapter on it.
    head = model.get_output_embeddings()
    for name, layer in adapters.layers.items():
        if layer is head or not layer.lora_A:
            kind = "the output layer" if layer is head else "an embedding"
            # With tied weights, merging an adapter of one layer would change both.
            merge = "merge it with PEFT's merge_and_unload and name the result in model.path, or "
            raise ModelError(
                f"the adapter {adapter} has a product for {name}, {kind}, and only those of linear layers within the "
                f"model are trained: {'' if tied else merge}make an adapter without that target"
            )
    return adapters


def check_adapter(adapter: Path, source: str, log: Log) -> Any:
    """PEFT's config of an adapter that fits the model at `source`, whose weights are not read."""
    peft_config = read_adapter_config(adapter, source, log)
    if (model := _meta_model(source)) is not None:
        _inject(model, peft_config, adapter).load(adapter)
    return peft_config


def describe_targets(settings: LoraSection, source: str) -> str:
    """The matrices of the model at `source` that get new adapters, in words; its weights are not read."""
    model = _meta_model(source)
    return "unknown layers" if model is None else str(find_targets(model, settings.targets))


def _meta_model(source: str) -> Any:
    try:
        with torch.device("meta"):
            described = AutoConfig.from_pretrained(source, trust_remote_code=False)
            return AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    except Exception:  # custom code or a damaged file: loading will report it where it matters
        return None


def need_peft() -> None:
    """Raise a ModelError where PEFT is not installed."""
    if find_spec("peft") is None:
        raise ModelError("adapters need the package peft: pip install 'stalewise[lora]'")


def load_policy(section: ModelSection, checkpoint: Path, device: torch.device) -> tuple[Any, Adapters | None]:
    """The model to train, and its adapters where adapters are trained."""
    if torch.cuda.is_initialized():
        gc.collect()  # reference cycles of the compiler may keep an earlier policy in GPU memory
    dtype = pick_weights_dtype(section.precision)
    if not section.trains_adapters:
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
    """The directory with the weights beneath the adapters of a run's checkpoint."""
    first = checkpoint_directory(checkpoint.parent.parent, 0)
    if not (first / "manifest.json").is_file():
        raise StoreError(
            f"{first} holds the weights beneath the adapters of {checkpoint} and is missing: restore it from a copy, "
            f"or start a new run from {checkpoint}, which is a whole model"
        )
    return first / BASE if (first / BASE).is_dir() else first
