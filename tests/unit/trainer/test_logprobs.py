"""Log-probabilities in chunks are those of a plain forward pass."""

from __future__ import annotations

import math
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
    LlamaConfig,
    LlamaForCausalLM,
)

from stalewise.models.attention import PACKED
from stalewise.models.loading import load_model, load_tokenizer
from stalewise.trainer.logprobs import (
    CHUNK_ELEMENTS,
    PLAIN_KERNELS,
    OutputLayerLogp,
    output_layer_is_plain,
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


@pytest.mark.parametrize("token_budget", [1, 60, 10_000])
@pytest.mark.parametrize("chunk_elements", [18, 100, 1 << 24])
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


def test_chunked_logits_change_gradients_only_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = gradient_after_update("grpo", 100_000)
    monkeypatch.setattr("stalewise.trainer.logprobs.response_logp.__kwdefaults__", {"chunk_elements": 90})
    chunked, _ = gradient_after_update("grpo", 100_000)
    assert (chunked - whole).norm() <= 2e-4 * whole.norm()


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_output_layer_in_chunks_is_the_plain_one(with_bias: bool, rows_at_once: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape).requires_grad_() for shape in ((11, 6), (30, 6), (30,)))
    target, factor = torch.randint(30, (11,)), torch.randn(11)
    logp = (hidden @ weight.T + (bias if with_bias else 0.0)).log_softmax(dim=1)
    expected = logp.gather(1, target.unsqueeze(1)).squeeze(1)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    wanted = torch.autograd.grad((expected * factor).sum(), inputs)
    given = (hidden, weight, bias if with_bias else None, target, rows_at_once, torch.float32, PLAIN_KERNELS)
    found: Any = OutputLayerLogp.apply(*given)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], -(logp.exp() * logp).sum(dim=1))
    for one, other in zip(torch.autograd.grad((found[0] * factor).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_models_that_change_their_logits_are_recognised() -> None:
    model = load_model(str(POLICY), device=CPU)
    assert output_layer_is_plain(model)
    forward = model.forward

    def scaled(*arguments: Any, **named: Any) -> Any:
        output = forward(*arguments, **named)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    assert not output_layer_is_plain(model)


def test_squashed_logits_are_refused_by_their_settings(tmp_path: Path) -> None:
    model = load_model(str(POLICY), device=CPU)
    model.config.final_logit_softcapping = 30.0
    assert not output_layer_is_plain(model)


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
    for count in (256, 1024):
        rows = of_lengths(np.full(count, 8), prompt=4, size=4)
        trainer.gradient(rows)  # what is had once
        found.append(most_bytes(partial(trainer.gradient, rows)))
    # Neither held (some 450 response tokens of a micro-batch, in float32), nor more for four times as many rollouts but
    # for the numbers that these have themselves.
    assert found[0] < 0.6 * 450 * vocabulary * 4
    assert found[1] - found[0] < (1024 - 256) * 1500
