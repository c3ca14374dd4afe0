"""A dozen families: what they record is what a plain forward pass computes, or they are refused by name.

`make test-architectures` does this for all families.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from families import DOZEN, build, differences, settings
from stalewise.api import run
from stalewise.config import make_config
from stalewise.errors import ModelError

ALIKE = ("mistral", "opt")  # to llama and to gpt2
REFUSED = {"rwkv": "RwkvForCausalLM", "bart": "BartForCausalLM"}  # states and positions that their forward passes lose


@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.nightly) if one in ALIKE else one for one in DOZEN]
)
def test_a_family_is_right_or_refused(family: str, tmp_path: Path) -> None:
    build(family, tmp_path / "model")
    config = make_config(settings(tmp_path / "model", tmp_path, "one"))
    if family in REFUSED:
        with pytest.raises(ModelError, match=f"{REFUSED[family]} would have wrong log-probabilities"):
            run(config)
        return
    run(config)
    assert max(differences(tmp_path / "model", tmp_path / "one")) < 1e-3
