"""Weights that are rounded once stand in for those that autocast rounds at every use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stalewise.models import resolve_model
from stalewise.models.compilation import compile_layers
from stalewise.models.loading import load_model
from stalewise.trainer.fused_linears import RoundedWeights, StreamParameters


@pytest.fixture
def model() -> Any:
    return load_model(resolve_model("auto", "arithmetic"), device=torch.device("cpu"))


def hidden(model: Any) -> torch.Tensor:
    ids = torch.arange(6).unsqueeze(0) + 3
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def test_rounded_weights_give_what_autocast_gives_and_the_same_gradients(model: Any) -> None:
    rounded = RoundedWeights(model.base_model, torch.bfloat16)
    parameters = list(model.base_model.parameters())
    plain = hidden(model)
    expected = torch.autograd.grad(plain.square().sum(), parameters)
    assert len(rounded.slices) == 7 * model.config.num_hidden_layers
    lanes = [StreamParameters(rounded), StreamParameters(rounded)]
    for lane in lanes:
        with rounded.swapped_in(), lane.swapped_in(model.base_model):
            found = hidden(model)
        gradients = lane.gradients(found.square().sum(), parameters, torch.ones(()))
        assert relative(found, plain) < 0.01
        assert_gradients(parameters, rounded, gradients, expected)
    assert all(parameter.grad is None for parameter in parameters)
    # Autograd must not meet a parameter of one pass in the other.
    first, second = ({id(twin) for twin in lane.parameters.values()} for lane in lanes)
    assert len(first) == len(second) > 0 and not first & second
    assert not (first | second) & {id(parameter) for parameter in parameters}


def assert_gradients(parameters: Any, rounded: RoundedWeights, gradients: Any, expected: Any) -> None:
    for parameter, one, other in zip(parameters, gradients, expected, strict=True):
        assert one is not None and one.shape == parameter.shape
        assert one.dtype is (torch.bfloat16 if parameter in rounded.slices else torch.float32)
        assert relative(one, other) < 0.03


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
def test_the_compiler_follows_and_takes_sizes_for_constants(model: Any) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    rounded = RoundedWeights(model.base_model, torch.bfloat16)
    with rounded.swapped_in():
        plain = hidden(model)
        compile_layers(model, backend=backend)
        found = []
        for lane in (StreamParameters(rounded), StreamParameters(rounded)):
            with lane.swapped_in(model.base_model):
                found.append(hidden(model))
    torch._dynamo.reset()
    assert all(torch.equal(one, plain) for one in found)
    assert len(graphs) == 1  # one graph, without breaks, for all layers
    products = [node for node in graphs[0].graph.nodes if node.op == "call_function" and "linear" in str(node.target)]
    splits = [node for node in graphs[0].graph.nodes if node.op == "call_method" and node.target == "split"]
    assert len(products) == 4
    assert len(splits) == 2
    assert all(isinstance(size, int) for node in splits for size in node.args[1])


def test_layers_that_read_the_same_are_one_product(model: Any) -> None:
    rounded = RoundedWeights(model.base_model, torch.bfloat16)
    layer = model.base_model.layers[0]
    weights = [getattr(layer.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    places = [rounded.slices[weight] for weight in weights]
    assert len({id(place.rounded) for place in places}) == 1
    assert [place.start for place in places] == [0, len(weights[0]), len(weights[0]) + len(weights[1])]
    x = torch.randn(5, model.config.hidden_size, dtype=torch.bfloat16)
    alone = [x @ weight.detach().bfloat16().T for weight in weights]
    with rounded.swapped_in():
        together = [getattr(layer.self_attn, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_what_is_in_place_of_the_weights_goes_again_and_follows_them(model: Any) -> None:
    rounded = RoundedWeights(model.base_model, torch.bfloat16)
    before = {name: id(weight) for name, weight in model.named_parameters()}
    with pytest.raises(ZeroDivisionError), rounded.swapped_in():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), StreamParameters(rounded).swapped_in(model):
        assert not {id(weight) for weight in model.parameters()} & set(before.values())
        raise ZeroDivisionError
    assert {name: id(weight) for name, weight in model.named_parameters()} == before
    with torch.no_grad():
        for number, weight in enumerate(rounded.slices):
            weight.mul_(1 + number)
    addresses = [place.rounded.data_ptr() for place in rounded.slices.values()]
    rounded.refresh()
    assert [place.rounded.data_ptr() for place in rounded.slices.values()] == addresses
    for weight, place in rounded.slices.items():
        assert torch.equal(place.of(place.rounded), weight.to(torch.bfloat16))


def module_of(**layers: torch.nn.Module) -> Any:
    module: Any = torch.nn.Module()
    for name, layer in layers.items():
        setattr(module, name, layer)
    return module


def gated() -> Any:
    """Two layers whose names say that they read the same."""
    return module_of(gate_proj=torch.nn.Linear(3, 4), up_proj=torch.nn.Linear(3, 2))


def test_biases_are_rounded_too_and_frozen_weights_have_no_gradient() -> None:
    module = gated()
    module.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
    rounded = RoundedWeights(module, torch.bfloat16)
    assert set(rounded.slices) == set(module.parameters())
    x = torch.randn(7, 3)
    expected = module.gate_proj(x), module.up_proj(x)
    with rounded.swapped_in():
        low = x.bfloat16()
        found = module.gate_proj(low), module.up_proj(low)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)
    assert not rounded.slices[module.frozen.weight].rounded.requires_grad


def test_layers_of_which_one_bias_is_frozen_stay_apart() -> None:
    module = gated()
    module.gate_proj.bias.requires_grad_(False)
    rounded = RoundedWeights(module, torch.bfloat16)
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    lane, x = StreamParameters(rounded), torch.randn(7, 3)
    with rounded.swapped_in(), lane.swapped_in(module):
        found = module.gate_proj(x.bfloat16()).sum() + module.up_proj(x.bfloat16()).sum()
    assert all(gradient is not None for gradient in lane.gradients(found, weights, torch.ones((), dtype=found.dtype)))


def test_a_weight_that_an_embedding_has_too_stays_as_it_is() -> None:
    tied = torch.nn.Linear(3, 4, bias=False)
    module = module_of(embedding=torch.nn.Embedding(4, 3), tied=tied, own=torch.nn.Linear(3, 3))
    module.tied.weight = module.embedding.weight
    rounded = RoundedWeights(module, torch.bfloat16)
    assert set(rounded.slices) == set(module.own.parameters())


def test_a_layer_that_is_used_twice_keeps_all_of_its_gradient() -> None:
    one, other, alone = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3)
    module = module_of(one=one, other=other, alone=alone)
    module.again, module.other.weight = module.one, module.alone.weight
    rounded = RoundedWeights(module, torch.bfloat16)
    assert set(rounded.slices) == set()  # the bias of `alone` is used once, but belongs to a layer that is not swapped
    module.lone = torch.nn.Linear(3, 3)
    assert set(RoundedWeights(module, torch.bfloat16).slices) == set(module.lone.parameters())


def test_layers_that_read_something_else_than_their_names_say_are_refused() -> None:
    module = gated()
    rounded = RoundedWeights(module, torch.bfloat16)
    x = torch.randn(7, 3, dtype=torch.bfloat16)
    with rounded.swapped_in(), pytest.raises(RuntimeError, match="read the same input"):
        module.gate_proj(x)
        module.up_proj(x + 1)
