from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from stalewise.store.checkpoints import versions

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_loop.py"


@pytest.mark.nightly
def test_the_whole_method_fits_into_one_file_and_learns(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
    train = runpy.run_path(str(EXAMPLE))["train"]
    before, after = train(tmp_path, updates=48, stages=1)
    assert after > before + 0.1
    assert versions(tmp_path) == [48]
