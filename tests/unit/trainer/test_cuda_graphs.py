"""The body as graphs, with streams that do nothing: what is launched, by the code that is recorded, runs on the CPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaConfig, LlamaForCausalLM, OlmoConfig, OlmoForCausalLM, Qwen2Config, Qwen2ForCausalLM

from policies import SIZE
from stalewise.models.attention import PACKED
from stalewise.trainer import cuda_graphs as graphs
from stalewise.trainer.cuda_graphs import GraphedBody, _copied
from stalewise.trainer.logprobs import response_logp
from stalewise.trainer.micro_batch import Layout, MicroBatch, micro_batches
from stalewise.trainer.weights import FlatWeights, SideStream
from trainer_inputs import rollouts, tokens_of

CPU = torch.device("cpu")


class Pool:
    """Memory of graphs and launches; it notes how often it was used."""

    id = (0, 1)
    uses = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        self.uses += 1
        yield


class Stream:
    """Everything is in order without it; it notes who waited for whom."""

    waits: ClassVar[list[tuple[Stream, Stream]]] = []

    def __init__(self, device: int | None = None) -> None: ...

    def wait_stream(self, other: Stream) -> None:
        self.waits.append((self, other))


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.waits = []
    here, autocast = Stream(), torch.autocast
    for name, stand_in in {
        "Stream": Stream,
        "current_stream": lambda: here,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: True,
        "MemPool": Pool,
        "use_mem_pool": Pool.used,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs, "free_cache_for_graphs", lambda: None)
    monkeypatch.setattr(graphs.torch, "autocast", lambda device, **options: autocast("cpu", **options))


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "biases":
        return Qwen2ForCausalLM(Qwen2Config(**SIZE, tie_word_embeddings=True))
    if kind == "clamped":
        return OlmoForCausalLM(OlmoConfig(**SIZE, clip_qkv=0.05))
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=kind != "untied"))
    if kind == "partly frozen":
        model.model.layers[0].requires_grad_(False)
        model.model.layers[1].self_attn.k_proj.weight.requires_grad_(False)
    if kind == "adapters":
        targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
        inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)
    return model


@pytest.mark.parametrize(
    ("kind", "recomputes"),
    [
        *((kind, False) for kind in ("tied", "untied", "biases", "clamped", "partly frozen", "adapters")),
        *((kind, True) for kind in ("tied", "biases", "adapters")),
    ],
)
def test_both_lanes_give_the_gradients_of_a_plain_pass(
    kind: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stalewise.trainer.packing.HALVES_RATIO", 1.1)
    model = model_of(kind).eval()
    model.set_attn_implementation(PACKED)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    seen: set[int] = set()

    def gradients(body: GraphedBody | None) -> list[torch.Tensor]:
        for rows, budget in ((rollouts(groups=6, seed=3), 10_000), (rollouts(groups=1, seed=4), 60)):
            for part in micro_batches(rows, Layout(budget, common_sizes=True, two_halves=True), CPU):
                seen.add(len(part.inputs))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logp_BT, _ = response_logp(model, part, dtype=torch.bfloat16, body=body)
                (logp_BT * torch.linspace(-1, 1, logp_BT.shape[1])).sum().backward()
        return [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in weights]

    expected = gradients(None)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        model.train()
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 0)
    body = GraphedBody(model, FlatWeights(weights, SideStream(CPU)), torch.bfloat16, recomputes=recomputes)
    found = gradients(body)
    assert seen == {1, 2}
    assert all(weight.grad is total for weight, total in zip(weights, body.weights.gradients, strict=True))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm() + 1e-6


def test_a_capture_that_fails_is_said_once_and_passes_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = model_of("tied"), list[str]()
    model.set_attn_implementation(PACKED)
    weights = FlatWeights(list(model.parameters()), SideStream(CPU))
    body = GraphedBody(model, weights, torch.bfloat16, log=said.append)
    used: Any = body.pool
    attempts: list[MicroBatch] = []

    def fail(self: GraphedBody, part: MicroBatch) -> Any:
        attempts.append(part)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(GraphedBody, "_capture", fail)
    (part,) = micro_batches(rollouts(groups=4), Layout(10_000, common_sizes=True), CPU)
    norms = []
    for _ in range(3):
        weights.zero_gradients()
        body(part).sum().backward()
        norms.append(weights.gradient_norm().item())
    assert len(attempts) == 1 and norms[0] > 0 and norms == [norms[0]] * 3
    assert used.uses == 2  # of the first forward and backward pass: afterwards the pool may not be in order
    assert said == [
        "CUDA graphs are off, since a pass could not be captured: operation not permitted when stream is capturing"
    ]


def test_launches_use_the_memory_of_graphs_and_ask_for_room_when_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("tied")
    model.set_attn_implementation(PACKED)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 0)
    body: Any = GraphedBody(model, FlatWeights(list(model.parameters()), SideStream(CPU)), torch.bfloat16)
    layout, asked = Layout(10_000, common_sizes=True), list[int]()
    small, large = (next(micro_batches(rollouts(groups=n), layout, CPU)) for n in (1, 8))
    assert small.padded_tokens < large.padded_tokens
    monkeypatch.setattr(graphs, "free_cache_for_graphs", lambda: asked.append(body.pool.uses))
    for part in (small, small, large, small):
        body(part).sum().backward()
    assert body.pool.uses == 8  # of four forward and four backward passes
    assert asked == [0, 4]  # before the first, and before one that is larger


def test_a_launch_that_runs_out_of_memory_is_tried_again_with_all_that_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, said = model_of("tied"), list[str]()
    model.set_attn_implementation(PACKED)
    body = GraphedBody(model, FlatWeights(list(model.parameters()), SideStream(CPU)), torch.bfloat16)
    forward = body._forward

    def once(inputs: Any) -> Any:
        said.append("forward")
        if len(said) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    monkeypatch.setattr(body, "_forward", once)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("freed"))
    (part,) = micro_batches(rollouts(groups=2), Layout(10_000, common_sizes=True), CPU)
    body(part).sum().backward()
    assert said == ["forward", "freed", "forward"] and gc.isenabled()


def test_streams_are_joined_though_a_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("tied")
    body = GraphedBody(model, FlatWeights(list(model.parameters()), SideStream(CPU)), torch.bfloat16)

    def fail(model: Any, passages: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "hidden_states", fail)
    (part,) = micro_batches(rollouts(groups=10), Layout(10_000, common_sizes=True, two_halves=True), CPU)
    with pytest.raises(torch.OutOfMemoryError):
        body(part)
    here = torch.cuda.current_stream()
    assert Stream.waits[-2:] == [(here, body.other_streams[0]), (here, body.stream)]
    assert not body.launched


def test_a_size_is_captured_when_it_soon_comes_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("tied")
    model.set_attn_implementation(PACKED)
    body = GraphedBody(model, FlatWeights(list(model.parameters()), SideStream(CPU)), torch.bfloat16)
    captured: list[int] = []

    def capture(self: GraphedBody, part: MicroBatch) -> Any:
        captured.append(part.inputs[0]["input_ids"].shape[1])

    monkeypatch.setattr(GraphedBody, "_capture", capture)
    monkeypatch.setattr(graphs, "SOON", 4)
    layout = Layout(10_000, common_sizes=True)
    small, large = (next(micro_batches(rollouts(groups=n), layout, CPU)) for n in (1, 4))
    with torch.no_grad():
        for _ in range(2):
            body(small)  # without a backward pass, which is not set up by this
    assert not captured
    body(small).sum().backward()
    body(large).sum().backward()
    assert not captured
    with torch.no_grad():
        body(small)
    sizes = [part.inputs[0]["input_ids"].shape[1] for part in (small, large)]
    assert captured == sizes[:1]
    for _ in range(graphs.SOON):
        body(small)
    body(large).sum().backward()  # the first time is too long ago
    assert captured == sizes[:1]
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    body(large).sum().backward()
    assert captured == sizes[:1]
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    for _ in range(graphs.SOON - 1):
        body(small)
    body(large)
    assert captured == sizes


def test_recorded_passages_take_on_another_micro_batch_of_their_size() -> None:
    layout = Layout(10_000, common_sizes=True, two_halves=True, grids=False)
    (one,), (other,) = (list(micro_batches(rollouts(groups=40, seed=seed), layout, CPU)) for seed in (0, 4))
    assert [tokens_of(one), len(one.inputs)] == [tokens_of(other), 2]
    buffer, passages = _copied(one)
    assert_alike(passages, one.inputs)
    buffer.copy_(other.buffer[: len(buffer)])
    assert_alike(passages, other.inputs)


def assert_alike(passages: Any, expected: Any) -> None:
    for found, given in zip(passages, expected, strict=True):
        assert torch.equal(found["input_ids"], given["input_ids"])
        for name, value in given.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
