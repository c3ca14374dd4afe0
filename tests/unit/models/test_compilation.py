"""Layers that are compiled keep as much for the backward pass as they may, and have the same gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from stalewise.models import resolve_model
from stalewise.models.compilation import compile_layers, kept_logits, should_capture_graphs, should_compile
from stalewise.models.loading import load_model


def bytes_and_gradients(keep: float) -> tuple[int, list[torch.Tensor]]:
    torch._dynamo.reset()
    model = load_model(resolve_model("auto", "arithmetic"), device=torch.device("cpu"))
    compile_layers(model, keep, backend="aot_eager_decomp_partition")  # all but the generation of code
    weights = {weight.data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keeping(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keeping, lambda tensor: tensor):
        ids = torch.arange(64).unsqueeze(0) % 12 + 3
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    parameters = [weight for weight in model.base_model.parameters() if weight.requires_grad]
    return sum(kept.values()), list(torch.autograd.grad(hidden.square().sum(), parameters))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch, about itself
def test_half_of_the_activations_are_kept_where_that_is_asked_for() -> None:
    whole, expected = bytes_and_gradients(1.0)
    half, found = bytes_and_gradients(0.5)
    assert 0.4 * whole < half < 0.6 * whole
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "device", "updates", "memory", "compiled", "recorded"),
    [
        ("auto", "cuda", 511, 5e9, False, True),
        ("auto", "cuda", 512, 5e9, True, True),
        ("auto", "cuda", 512, 2.89e9, True, True),  # 60 million parameters and 40 frozen ones: 1.2 + 0.24 GB, twice
        ("auto", "cuda", 512, 2.87e9, True, False),
        ("auto", "cpu", 512, 5e9, False, False),
        ("graphs", "cuda", 1, 0, False, True),
        ("layers", "cuda", 1, 0, True, False),
        ("always", "cuda", 1, 0, True, True),
        ("never", "cuda", 9999, 9e9, False, False),
    ],
)
def test_what_is_compiled_and_what_is_recorded(
    chosen: str,
    device: str,
    updates: int,
    memory: float,
    compiled: bool,
    recorded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [torch.empty(60_000_000, device="meta", requires_grad=True), torch.empty(40_000_000, device="meta")]
    model = SimpleNamespace(device=torch.device(device), parameters=lambda: iter(weights))
    monkeypatch.setattr("stalewise.models.compilation.can_compile", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    assert (should_compile(chosen, updates, model), should_capture_graphs(chosen, model)) == (compiled, recorded)


def test_smaller_moments_leave_room_for_graphs_and_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.empty(100_000_000, device="meta", requires_grad=True)]
    layer = SimpleNamespace(weight=torch.empty(10_000_000, device="meta"))
    model = SimpleNamespace(
        device=torch.device("cuda"), parameters=lambda: iter(weights), get_output_embeddings=lambda: layer
    )
    # 12 bytes and 8, 4 or 2 for the moments, twice: 4, 3.2, 2.8 GB.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=3e9))
    assert [should_capture_graphs("auto", model, moments) for moments in ("float32", "bfloat16", "int8")] == [0, 0, 1]
    assert [kept_logits(model, moments) for moments in ("bfloat16", "int8")] == [0, int(3e9 / 16)]
    layer.weight = layer.weight[1:]  # less than a tenth of the parameters: it would not save much
    assert kept_logits(model, "int8") == 0
    assert kept_logits(SimpleNamespace(device=torch.device("cpu")), "int8") == 0
