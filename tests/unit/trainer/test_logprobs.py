"""Log-probabilities in chunks are those of a plain forward pass."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from policies import SIZE
from stalewise.errors import ModelError
from stalewise.models.attention import PACKED
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.trainer import logprobs
from stalewise.trainer.logprobs import (
    CHUNK_ELEMENTS,
    KEPT_STEP,
    PLAIN_KERNELS,
    KeptLogits,
    Kernels,
    LogitMap,
    OutputLayerLogp,
    chunk_gradient,
    chunk_statistics,
    kept_rows,
    kernels_for,
    measure_logit_map,
    response_logp,
)
from stalewise.trainer.micro_batch import Layout, micro_batches
from stalewise.trainer.packing import size_above
from stalewise.trainer.trainer import Trainer
from trainer_inputs import (
    CPU,
    POLICY,
    config,
    gradient_after_update,
    of_lengths,
    plain_logp,
    rollouts,
    tokens_of,
)


@pytest.mark.parametrize(("token_budget", "chunk_elements"), [(1, 1 << 24), (60, 18), (10_000, 100)])
@pytest.mark.parametrize(
    ("shared", "common_sizes", "two_halves"),
    [(True, False, False), (True, True, False), (True, True, True), (False, False, False), (False, False, True)],
)
def test_log_probabilities_equal_a_plain_forward_pass(
    token_budget: int,
    chunk_elements: int,
    shared: bool,
    common_sizes: bool,
    two_halves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stalewise.trainer.packing.HALVES_RATIO", 1.1)  # few rollouts have no halves of one size
    rows, model = rollouts(groups=10 if two_halves else 3, shared=shared), load_model(str(POLICY), device=CPU)
    model.set_attn_implementation(PACKED)
    expected, found = plain_logp(rows), np.full(len(rows.response_ids), np.nan)
    seen: list[int] = []
    for part in micro_batches(rows, Layout(token_budget, common_sizes=common_sizes, two_halves=two_halves), CPU):
        logp_BT, entropy_BT = response_logp(model, part, chunk_elements=chunk_elements)
        if two_halves:
            assert len(part.inputs) == 2 or token_budget < 1000
        else:
            assert tokens_of(part) == [size_above(part.tokens, 1.05) if common_sizes else part.tokens]
        assert part.tokens <= (1.1 if two_halves else 1.0) * token_budget or len(part.rows) == 1
        assert (entropy_BT[part.mask_BT] > 0).all()
        assert (entropy_BT <= math.log(18)).all()
        for place, row in enumerate(part.rows):
            length = rows.response_lengths[row]
            found[rows.response_offsets[row] : rows.response_offsets[row + 1]] = logp_BT[place, :length].detach()
            assert part.mask_BT[place].sum() == length
            assert part.behaviour_logp_BT[place, :length].numpy() == pytest.approx(rows.logp(int(row)))
            seen.append(int(row))
    assert sorted(seen) == list(range(len(rows)))
    # 1e-5, or the rounding of float32 where a made-up token is as improbable as e^−17.
    assert found == pytest.approx(expected, abs=1e-5, rel=5e-6)


def test_log_probabilities_of_a_large_vocabulary_equal_a_plain_forward_pass() -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 49_152, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    rows = rollouts()
    with torch.no_grad():
        alone: list[Tensor] = []
        for row in range(len(rows)):
            ids = torch.tensor([*rows.prompt(row), *rows.response(row)])
            first = len(rows.prompt(row))
            # Logits in float32; their sum in float64, since float32's own is farther off than ours.
            logp_TV = model(input_ids=ids[None]).logits[0, first - 1 : -1].double().log_softmax(dim=1)
            alone.append(logp_TV.gather(1, ids[first:, None]).squeeze(1))
        model.set_attn_implementation(PACKED)
        (part,) = micro_batches(rows, Layout(10_000), CPU)
        logp_BT, _ = response_logp(model, part, chunk_elements=50 * 49_152)
    assert 5 < -logp_BT[part.mask_BT].mean() < 20
    for place, row in enumerate(part.rows):
        expected = alone[row].tolist()
        assert logp_BT[place, : len(expected)].tolist() == pytest.approx(expected, abs=1e-5, rel=0)


def test_kept_logits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    product = logprobs._product
    monkeypatch.setattr(logprobs, "_product", lambda *given: (made.append(1), product(*given))[1])
    plain, _ = gradient_after_update("grpo", 100_000)
    passes = len(made)
    monkeypatch.setattr("stalewise.trainer.execution.kept_logits", lambda *_: 1 << 30)
    kept, _ = gradient_after_update("grpo", 100_000)
    assert torch.equal(kept, plain)
    assert len(made) - passes == passes // 2  # no second product in the backward pass


def test_chunked_logits_change_gradients_only_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = gradient_after_update("grpo", 100_000)
    monkeypatch.setattr("stalewise.trainer.logprobs.response_logp.__kwdefaults__", {"chunk_elements": 90})
    chunked, _ = gradient_after_update("grpo", 100_000)
    assert (chunked - whole).norm() <= 2e-4 * whole.norm()


def test_kept_logits_have_memory_for_a_power_of_two_or_a_multiple_of_tokens() -> None:
    sizes = {0: 256, 1: 256, 256: 256, 257: 512, 2049: 4096, 4096: 4096, 4097: 8192, 8192: 8192, 13_000: 16_384}
    assert {tokens: kept_rows(tokens) for tokens in sizes} == sizes
    assert KEPT_STEP == 4096


@pytest.mark.parametrize("budget", [25, 60])
@pytest.mark.parametrize("bonus", [0.0, 0.01])
def test_several_micro_batches_share_the_memory_of_kept_logits(
    budget: int, bonus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = gradient_after_update("grpo", budget, entropy_bonus=bonus)
    taken: list[tuple[int, int]] = []
    take = KeptLogits.take

    def seen(self: KeptLogits, hidden_NH: Tensor, vocabulary: int) -> tuple[int, Tensor]:
        ticket, logits_NV = take(self, hidden_NH, vocabulary)
        taken.append((len(logits_NV), logits_NV.data_ptr()))
        return ticket, logits_NV

    monkeypatch.setattr(KeptLogits, "take", seen)
    monkeypatch.setattr("stalewise.trainer.execution.kept_logits", lambda *_: 1 << 30)
    kept, _ = gradient_after_update("grpo", budget, entropy_bonus=bonus)
    assert torch.equal(kept, plain)
    assert len({tokens for tokens, _ in taken}) > 2 and len({place for _, place in taken}) == 1


def overwriting_gradient(product_CV: Tensor, *of_token: Any) -> Tensor:
    """As the kernel on a GPU: in the memory of the logits."""
    return product_CV.copy_(chunk_gradient(product_CV, *of_token))


OVERWRITING = Kernels(chunk_statistics, overwriting_gradient)


def layer_pass(tokens: int, kept: KeptLogits | None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """Weighted log-probabilities of made-up hidden states, and the inputs to take a gradient of."""
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((tokens, 6), (30, 6)))
    inputs = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    target, factor = torch.randint(30, (tokens,), generator=generator), torch.randn(tokens, generator=generator)
    found: Any = OutputLayerLogp.apply(*inputs, None, target, tokens, dtype, OVERWRITING, kept, False)
    return (found[0] * factor).sum(), inputs


def test_memory_of_kept_logits_is_used_again_and_grows_when_it_must() -> None:
    kept, places = KeptLogits(1 << 30), list[int]()
    for tokens in (200, 11, 256, 300, 512, 11):
        for one, other in zip(*(torch.autograd.grad(*layer_pass(tokens, k)) for k in (kept, None)), strict=True):
            assert torch.equal(one, other)
        assert kept.memory is not None
        places.append(kept.memory.data_ptr())
        assert kept.memory.numel() == 30 * (256 if len(places) <= 3 else 512)
    assert len(set(places[:3])) == len(set(places[3:])) == 1
    for one, other in zip(*(torch.autograd.grad(*layer_pass(9, k, torch.float64)) for k in (kept, None)), strict=True):
        assert torch.equal(one, other)
    assert kept.memory is not None and (kept.memory.dtype, kept.memory.numel()) == (torch.float64, 30 * 256)
    # A larger vocabulary needs more memory for as many tokens.
    assert kept.take(torch.zeros(9, 6).double(), 3000)[1].shape == (9, 3000)
    assert kept.memory.numel() == 3000 * 256


def test_the_old_memory_of_kept_logits_is_gone_before_the_new_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = KeptLogits(1 << 30), list[object]()
    torch.autograd.grad(*layer_pass(200, kept))
    old = weakref.ref(kept.memory)
    monkeypatch.setattr(logprobs, "kept_rows", lambda tokens: (seen.append(old()), kept_rows(tokens))[1])
    torch.autograd.grad(*layer_pass(300, kept))
    assert seen == [None]


@pytest.mark.parametrize("tokens", [11, 300])  # fewer than the first pass has, and more
def test_a_second_forward_pass_before_the_backward_pass_is_refused(tokens: int) -> None:
    kept = KeptLogits(1 << 30)
    first, inputs = layer_pass(20, kept)
    second, of_second = layer_pass(tokens, kept)
    wanted = torch.autograd.grad(*layer_pass(tokens, None))
    for one, other in zip(torch.autograd.grad(second, of_second), wanted, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="another forward pass took their memory"):
        torch.autograd.grad(first, inputs)
    gone, inputs = layer_pass(20, kept)
    kept.release()
    with pytest.raises(RuntimeError, match="the logits of this forward pass are gone"):
        torch.autograd.grad(gone, inputs)


def test_another_backward_pass_computes_the_logits_again() -> None:
    logp, inputs = layer_pass(20, KeptLogits(1 << 30))
    both = [torch.autograd.grad(logp, inputs, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


def test_logits_are_kept_with_a_gradient_and_up_to_a_limit() -> None:
    model = load_model(str(POLICY), device=CPU)
    model.set_attn_implementation(PACKED)
    (part,) = micro_batches(rollouts(), Layout(10_000), CPU)
    exact = kept_rows(len(part.source_N)) * 18 * 4  # what is allocated, which is more than the logits take
    assert len(part.source_N) < kept_rows(len(part.source_N))
    for most_bytes, with_gradient in ((exact, True), (exact - 1, True), (exact, False)):
        kept = KeptLogits(most_bytes)
        with torch.set_grad_enabled(with_gradient):
            response_logp(model, part, kept=kept)
        assert (kept.memory is not None) == (most_bytes == exact and with_gradient)
    assert not KeptLogits(0).fits(0, 18, torch.float32)  # a micro-batch without responses


@pytest.mark.parametrize(("rows_at_once", "keep"), [(1, False), (4, False), (100, False), (11, True)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_output_layer_in_chunks_is_the_plain_one(with_bias: bool, rows_at_once: int, keep: bool) -> None:
    kept = KeptLogits(1 << 30) if keep else None
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape).requires_grad_() for shape in ((11, 6), (30, 6), (30,)))
    target, factor = torch.randint(30, (11,)), torch.randn(11)
    logp = (hidden @ weight.T + (bias if with_bias else 0.0)).log_softmax(dim=1)
    expected = logp.gather(1, target.unsqueeze(1)).squeeze(1)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    wanted = torch.autograd.grad((expected * factor).sum(), inputs, retain_graph=True)
    given = (hidden, weight, bias if with_bias else None, target, rows_at_once, torch.float32, PLAIN_KERNELS, kept)
    found: Any = OutputLayerLogp.apply(*given, False)
    assert not found[1].requires_grad
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], -(logp.exp() * logp).sum(dim=1))
    for one, other in zip(torch.autograd.grad((found[0] * factor).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(one, other)
    # With a gradient of the entropy, too.
    of_entropy = torch.randn(11)
    wanted = torch.autograd.grad((expected * factor - (logp.exp() * logp).sum(dim=1) * of_entropy).sum(), inputs)
    found = OutputLayerLogp.apply(*given, True)
    both = torch.autograd.grad((found[0] * factor + found[1] * of_entropy).sum(), inputs)
    for one, other in zip(both, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_the_entropy_of_tokens_that_a_model_rules_out_has_a_gradient() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).double()
    logits[0, 2:5] = -torch.inf
    lse, _, entropy = chunk_statistics(logits, torch.zeros(3, dtype=torch.long))
    free = logits.clamp(min=-1e4).requires_grad_()  # of −inf torch makes NaN; this is as impossible
    plain = free.log_softmax(dim=1)
    (wanted,) = torch.autograd.grad(-(plain.exp() * plain).sum(), free)
    nothing = torch.zeros(3), (entropy, torch.ones(3))
    found = chunk_gradient(logits, lse, torch.zeros(3, dtype=torch.long), *nothing)
    torch.testing.assert_close(found, torch.where(logits > -torch.inf, wanted, 0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows_at_once", [4, 100])
@pytest.mark.parametrize("logit_map", [LogitMap(0.3), LogitMap(cap=2.0), LogitMap(3.0, 2.5)])
def test_gradients_of_scaled_and_capped_logits_are_those_of_autograd(logit_map: LogitMap, rows_at_once: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape).double().requires_grad_() for shape in ((11, 6), (30, 6), (30,)))
    target, factor = torch.randint(30, (11,)), torch.randn(11)
    product, cap = (hidden @ weight.T + bias) * logit_map.scale, logit_map.cap
    logp = (torch.tanh(product / cap) * cap if cap else product).log_softmax(dim=1)
    expected = logp.gather(1, target.unsqueeze(1)).squeeze(1)
    entropy = -(logp.exp() * logp).sum(dim=1)
    wanted = torch.autograd.grad((expected * factor + entropy).sum(), [hidden, weight, bias])
    inputs = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    given = target, rows_at_once, torch.float32, kernels_for(CPU, logit_map), None, True
    found: Any = OutputLayerLogp.apply(*inputs, *given)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), -(logp.exp() * logp).sum(dim=1), rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad((found[0] * factor + found[1]).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(0.3), LogitMap(3.0, 2.5)])
def test_a_temperature_divides_the_logits(logit_map: LogitMap) -> None:
    torch.manual_seed(0)
    product, target = 3 * torch.randn(5, 30), torch.randint(30, (5,))
    _, logp, _ = chunk_statistics(product, target, logit_map=logit_map.at(1.7))
    expected = (logit_map(product) / 1.7).log_softmax(dim=1).gather(1, target.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logp, expected)
    assert logit_map.at(1.0) == logit_map


def scaled_output(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The model with its logits changed."""
    forward = model.forward

    def changed(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    return model


def test_what_a_model_does_to_its_logits_is_measured() -> None:
    assert measure_logit_map(load_model(str(POLICY), device=CPU)) == LogitMap()
    for low in (torch.float32, torch.bfloat16):
        model = load_model(str(POLICY), device=CPU, dtype=low)
        assert measure_logit_map(scaled_output(model, lambda x: x / 3)) == LogitMap(1 / 3)
        found = measure_logit_map(scaled_output(model, lambda x: 30 * torch.tanh(x / 30)))  # on top of that
        assert (found.scale, found.cap) == (pytest.approx(1 / 3, rel=1e-12), 30)


@pytest.mark.parametrize(
    "change", [lambda x: x + 1, lambda x: x.clamp(max=100), lambda x: x.softmax(-1), lambda x: x[..., :-1]]
)
def test_other_changes_of_logits_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    model = scaled_output(load_model(str(POLICY), device=CPU), change)
    with pytest.raises(ModelError, match="changes its logits by more than a factor and a soft cap"):
        measure_logit_map(model)


def test_an_output_layer_behind_another_is_refused() -> None:
    config = BertConfig(vocab_size=18, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, is_decoder=True)
    with pytest.raises(ModelError, match="BertLMHeadModel has an output layer that reads something else"):
        measure_logit_map(BertLMHeadModel(config).eval())


# Settings of small models, and what they make of the output layer's product.
CHANGED: dict[str, tuple[dict[str, Any], LogitMap]] = {
    "gemma2": ({"final_logit_softcapping": 3.0}, LogitMap(1.0, 3.0)),
    "gemma3n_text": (
        {
            "final_logit_softcapping": 3.0,
            "vocab_size_per_layer_input": 18,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"],
        },
        LogitMap(1.0, 3.0),
    ),
    "cohere": ({"logit_scale": 0.25}, LogitMap(0.25)),
    "cohere2": ({"logit_scale": 0.25}, LogitMap(0.25)),
    "granite": ({"logits_scaling": 3.0, "embedding_multiplier": 2.0}, LogitMap(1 / 3)),
    "granitemoe": ({"logits_scaling": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2}, LogitMap(1 / 3)),
    "hyperclovax": ({"logits_scaling": 0.5}, LogitMap(0.5)),  # multiplies by what Granite divides by
    # Not named a `base_model` by transformers.
    "llama4_text": ({"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64}, LogitMap()),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_models_that_change_their_logits_are_trained_as_they_are_sampled(kind: str, tmp_path: Path) -> None:
    settings, expected_map = CHANGED[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZE | {"head_dim": 8}, **settings)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40.0)  # so that a cap shows
    assert measure_logit_map(model) == expected_map
    model.save_pretrained(tmp_path)
    load_tokenizer(str(POLICY)).save_pretrained(tmp_path)
    trainer = Trainer(config(), tmp_path)
    rows = rollouts()
    for part in micro_batches(rows, trainer._layout(), CPU):
        logp_BT, _ = trainer.execution.forward(part)
        weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        found = torch.autograd.grad(logp_BT[part.mask_BT].sum(), weights, allow_unused=True)
        alone = [own_logp(model, rows, int(row)) for row in part.rows]
        torch.testing.assert_close(logp_BT[part.mask_BT], torch.cat(alone), rtol=0, atol=1e-5)
        wanted = torch.autograd.grad(torch.cat(alone).sum(), list(model.parameters()), allow_unused=True)
        names = [name for name, _ in model.named_parameters()]
        for name, one, other in zip(names, found, wanted, strict=True):
            if other is not None:
                assert one is not None, name
                assert (one - other).norm() <= 1e-4 * other.norm() + 1e-5, name


def own_logp(model: Any, rows: Any, row: int) -> Tensor:
    ids = torch.tensor([*rows.prompt(row), *rows.response(row)])
    first = len(rows.prompt(row))
    logp_TV = model(input_ids=ids[None], use_cache=False).logits[0, first - 1 : -1].log_softmax(dim=1)
    return logp_TV.gather(1, ids[first:, None]).squeeze(1)


def most_bytes(action: Callable[[], object]) -> int:
    """How much memory an action has at a time, beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    profiler: Any = seen.profiler
    events = profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


def test_tokens_times_vocabulary_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 4096
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    load_tokenizer(str(POLICY)).save_pretrained(tmp_path)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 32 * vocabulary)
    found: list[int] = []
    trainer = Trainer(config(learner={"tokens_per_micro_batch": 512}), tmp_path)
    for count in (128, 512):
        rows = of_lengths(np.full(count, 8), prompt=4, size=4)
        trainer.gradient(rows)  # what is had once
        found.append(most_bytes(partial(trainer.gradient, rows)))
    # Neither held (some 450 response tokens of a micro-batch, in float32), nor more for four times as many rollouts but
    # for the numbers that these have themselves.
    assert found[0] < 0.6 * 450 * vocabulary * 4
    assert found[1] - found[0] < (512 - 128) * 1500
