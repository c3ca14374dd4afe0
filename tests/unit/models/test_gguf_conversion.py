from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from stalewise.models.gguf_conversion import dequantizer

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "BF16", "F16"])
def test_dequantizing_in_pieces_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("stalewise.models.gguf_conversion._PIECE", 256)
    number = gguf.GGMLQuantizationType[kind]
    value = np.random.default_rng(0).normal(size=(37, 96)).astype(np.float32)
    blocks = gguf.quants.quantize(value, number)
    with ThreadPoolExecutor(3) as threads:
        found = dequantizer(gguf.dequantize, threads)(blocks, number)
    assert np.array_equal(found, gguf.dequantize(blocks, number))
