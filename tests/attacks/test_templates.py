"""Hostile chat templates end in one error, within limits, and reach nothing."""

import time
from pathlib import Path

import pytest

from attacks.templates import HARMLESS, REFUSED, with_template
from stalewise.errors import ModelError
from stalewise.models import loading
from stalewise.models.loading import encode_prompts
from stalewise.tasks.base import CHAT
from stalewise.types import Prompt

PROMPTS = [Prompt(str(number), "3+4", "7", CHAT) for number in range(2)]
# The limit of time is for these. The others must fail by themselves: it would hide that nothing else stops them.
LONG = {"loops without end", "a large power", "a power and its digits", "a text that is replaced again and again"}
assert set(REFUSED) > LONG


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LONGEST_CHAT", 1 << 20)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_template_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "TEMPLATE_S", 0.3 if name in LONG else 60.0)
    tokenizer = with_template(tmp_path / "model", REFUSED[name])
    began = time.monotonic()
    with pytest.raises(ModelError, match="chat template") as error:
        encode_prompts(PROMPTS, tokenizer)
    assert time.monotonic() - began < 60
    assert name in LONG or "it took more than" not in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert not (tmp_path / "ESCAPED").exists()


@pytest.mark.parametrize("name", HARMLESS)
def test_a_curious_template_sees_nothing(name: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path / "model", HARMLESS[name])
    try:
        texts = loading._chat_texts(PROMPTS, tokenizer)
    except ModelError:
        return
    assert not any(word in text for text in texts for word in ("<class", "<bound", "environ", "module"))


def test_a_template_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path / "model", "{# " + "x" * loading.LONGEST_TEMPLATE + " #}")
    with pytest.raises(ModelError, match="longer than 262,144 characters"):
        encode_prompts(PROMPTS, tokenizer)


def test_enough_templates_are_hostile() -> None:
    assert len(REFUSED) >= 15
