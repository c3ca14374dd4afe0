"""Statistics of logits and their gradient in one pass."""

from __future__ import annotations

import os

import pytest
import torch

from stalewise.trainer.logprobs import LogitMap, chunk_gradient, chunk_statistics

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and no TRITON_INTERPRET=1", allow_module_level=True)

from stalewise.models.kernels.logits import gradient_on_device, statistics_on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# A vocabulary of 9000 takes several blocks, and seconds in the interpreter.
@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(100, torch.float32), (100, torch.bfloat16), (4096, torch.float32), (9000, torch.bfloat16)],
)
def test_logits_are_read_in_one_pass_as_in_many(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_CV = (5 * torch.randn(4, vocabulary, device=DEVICE)).to(dtype)
    logits_CV[0, : vocabulary // 2] = -torch.inf  # tokens that the model rules out: with 9000 the whole first block
    logits_CV[1, 20] = 80.0
    logits_CV[2] = 0.5
    target_C = torch.tensor([vocabulary - 1, 20, 0, 7], device=DEVICE)
    gradient_C = torch.tensor([1.0, -0.5, 2.0, 0.0], device=DEVICE)
    expected = chunk_statistics(logits_CV, target_C)
    for found, other in zip(statistics_on_device(logits_CV, target_C), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)
    arguments = (logits_CV, expected[0], target_C, gradient_C)
    of_entropy = expected[2], torch.tensor([0.5, 2.0, -1.0, 1.0], device=DEVICE)
    with_entropy_CV = gradient_on_device(logits_CV.clone(), *arguments[1:], of_entropy)
    torch.testing.assert_close(with_entropy_CV, chunk_gradient(*arguments, of_entropy))
    assert not torch.equal(with_entropy_CV, chunk_gradient(*arguments))
    expected_CV = chunk_gradient(*arguments)
    found_CV = gradient_on_device(*arguments)
    torch.testing.assert_close(found_CV, expected_CV)
    assert found_CV.data_ptr() == logits_CV.data_ptr()


@pytest.mark.parametrize(
    ("scale", "cap", "vocabulary"), [(0.25, 0.0, 100), (1.0, 30.0, 100), (3.0, 15.0, 100), (3.0, 15.0, 9000)]
)
def test_scaled_and_capped_logits_are_those_of_torch(scale: float, cap: float, vocabulary: int) -> None:
    torch.manual_seed(0)
    product_CV = 10 * torch.randn(3, vocabulary, device=DEVICE)
    product_CV[0, 3], product_CV[1, 4] = 1e4, -1e4  # beyond every cap
    product_CV[2] *= 1e-3
    target_C, gradient_C = (
        torch.tensor([3, vocabulary - 1, 7], device=DEVICE),
        torch.tensor([1.0, -0.5, 2.0]).to(DEVICE),
    )
    numbers, logit_map = {"scale": scale, "cap": cap}, LogitMap(scale, cap)
    expected = chunk_statistics(product_CV, target_C, logit_map=logit_map)
    for found, other in zip(statistics_on_device(product_CV, target_C, **numbers), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)
    arguments = product_CV, expected[0], target_C, gradient_C, (expected[2], gradient_C)
    expected_CV = chunk_gradient(*arguments, logit_map=logit_map)
    found_CV = gradient_on_device(*arguments, **numbers)
    torch.testing.assert_close(found_CV, expected_CV, rtol=1e-4, atol=1e-6)


def test_what_is_not_finite_stays_so() -> None:
    logits_CV = torch.randn(3, 300, device=DEVICE)
    logits_CV[0, 5], logits_CV[1, 7] = torch.nan, torch.inf
    lse_C, logp_C, _ = statistics_on_device(logits_CV, torch.tensor([1, 2, 3], device=DEVICE))
    assert lse_C.isfinite().tolist() == logp_C.isfinite().tolist() == [False, False, True]


def test_no_rows_are_no_work() -> None:
    logits_CV, nothing = torch.empty(0, 300, device=DEVICE), torch.empty(0, device=DEVICE)
    assert all(len(found) == 0 for found in statistics_on_device(logits_CV, nothing.long()))
    assert gradient_on_device(logits_CV, nothing, nothing.long(), nothing).shape == (0, 300)
