"""The growing cache holds what the one of transformers holds; a batch that memory does not hold is decoded in parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicLayer

from families import build, plain_logp
from stalewise.errors import ModelError
from stalewise.models import EMBEDDED
from stalewise.rollout.engines import dynamic_decode as module
from stalewise.rollout.engines.dynamic_decode import (
    PreallocatedLayer,
    decode_dynamic,
    row_bytes,
    rows_that_fit,
    takes_state,
)
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.rollout.sampler import Request
from stalewise.types import SamplerSettings


def test_a_cache_with_room_holds_what_a_growing_one_holds_and_seldom_moves() -> None:
    torch.manual_seed(0)
    grown, plain = PreallocatedLayer(), DynamicLayer()
    moves, last = 0, 0
    for step in range(200):
        rows = 5 if step < 100 else 3
        key, value = torch.randn(rows, 2, 4 if step == 0 else 1, 8), torch.randn(rows, 2, 4 if step == 0 else 1, 6)
        held = grown.update(key, value)
        assert all(map(torch.equal, held, plain.update(key, value)))
        moves, last = moves + (held[0].data_ptr() != last), held[0].data_ptr()
        if step == 99:  # rows that have ended are dropped
            for layer in (grown, plain):
                layer.batch_select_indices(torch.tensor([0, 2, 4]))
        if step == 150:  # and as many rows may be others
            for layer in (grown, plain):
                layer.batch_select_indices(torch.tensor([2, 0, 0]))
    assert grown.get_seq_length() == plain.get_seq_length() == 203
    assert moves <= 15


@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
@pytest.mark.parametrize(("family", "is_state"), [("llama", False), ("mamba", True), ("falcon_h1", False)])
def test_rows_keep_their_states_when_others_leave_the_batch(family: str, is_state: bool, tmp_path: Path) -> None:
    model = build(family, tmp_path)
    assert takes_state(model) == is_state
    prompts = [[3, 4, 5, 6, 7, 8, 9], [5], [3, 4, 5, 6, 7, 8, 9], [6, 7, 8], [9, 9]]
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]
    options = {"stop_ids": torch.tensor([1, 3, 4, 5, 6, 7]), "pad_id": 0, "on_tokens": lambda count: None}
    ids, logp, lengths = decode_dynamic(model, requests, SamplerSettings(), new_tokens=10, **options)
    assert min(lengths) < max(lengths)  # some leave early
    for prompt, tokens, values, length in zip(prompts, ids, logp, lengths, strict=True):
        expected = plain_logp(model, prompt, tokens[:length].tolist())
        torch.testing.assert_close(torch.from_numpy(values[:length]), expected, rtol=0, atol=1e-4)


def sampler(tokens: list[int]) -> HFSampler:
    made = HFSampler(
        SamplerSettings(),
        max_new_tokens=6,
        device=torch.device("cpu"),
        dtype=torch.float32,
        on_tokens=tokens.append,
    )
    made.load(Path(EMBEDDED / "arithmetic"))
    return made


def test_where_memory_runs_out_half_as_many_rows_are_decoded_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request([3 + i % 7] * (1 + i % 4), seed=i) for i in range(13)]
    tokens, sizes, real = list[int](), list[int](), module.decode_dynamic
    whole = sampler(tokens).sample(requests)
    sampled = sum(tokens)

    def limited(model: Any, part: Any, *arguments: Any, on_tokens: Any, **options: Any) -> Any:
        sizes.append(len(part))
        if len(part) > 4:
            on_tokens(5)  # the device held the first tokens
            raise torch.OutOfMemoryError
        return real(model, part, *arguments, on_tokens=on_tokens, **options)

    monkeypatch.setattr(module, "decode_dynamic", limited)
    tokens.clear()
    found = sampler(tokens).sample(requests)
    assert sizes == [13, 6, 3, 3, 3, 3, 1]
    assert [(list(a.token_ids), a.text) for a in found] == [(list(a.token_ids), a.text) for a in whole]
    assert sum(tokens) == sampled  # those of a batch that failed do not count


def test_one_row_that_does_not_fit_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "decode_dynamic", full)
    with pytest.raises(
        ModelError, match=r"a prompt of 9 tokens with sampler.max_new_tokens = 6 needs about 0\.\d+ GiB"
    ):
        sampler([]).sample([Request([3] * 9, seed=0), Request([3] * 2, seed=1)])


def test_rows_are_bounded_by_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100
    )
    model = SimpleNamespace(config=config, dtype=torch.bfloat16, device=torch.device("cuda"))
    # Cache 2.5 × (10 + 30) × 2 layers × 2 × 2 heads × 16 × 2 bytes; prefill 10 × (10 + 16 × 64 × 2); logits 16 × 100.
    assert row_bytes(model, 10, 30) == 25_600 + 20_580 + 1_600
    for name, value in (("memory_reserved", 900_000), ("memory_allocated", 400_000), ("mem_get_info", (500_000, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    requests = [Request([1] * 10, seed=i) for i in range(100)]
    assert rows_that_fit(model, requests, 30) == 16  # 0.8 × 1,000,000 / 47,780
    assert rows_that_fit(model, requests, 30_000) == 1
    model.device = torch.device("cpu")
    assert rows_that_fit(model, requests, 30_000) == 100
