"""The growing cache holds what the one of transformers holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from families import build, plain_logp
from stalewise.rollout.engines.dynamic_decode import PreallocatedLayer, decode_dynamic, takes_state
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
