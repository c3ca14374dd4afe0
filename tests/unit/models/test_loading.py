"""What a chat template makes of a prompt: every part of it reaches the policy."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from stalewise.errors import ModelError
from stalewise.models.loading import EMBEDDED, encode_prompts, load_tokenizer, resolve_model
from stalewise.tasks import make_task
from stalewise.types import Prompt

# The embedded policy has a token for each of these letters: "#" before what a system says, ";" after each turn, and "="
# where the reply begins.
TEMPLATE = (
    "{% for m in messages %}{{ '#' if m['role'] == 'system' else '' }}{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
CHAT = {"format": "chat"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    shutil.copytree(EMBEDDED / "arithmetic", tmp_path / "policy")
    (tmp_path / "policy" / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(str(tmp_path / "policy"))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "3+4"),
        (CHAT, "3+4;="),
        ({**CHAT, "system": "12"}, "#12;3+4;="),
        ({**CHAT, "prefill": "89"}, "3+4;=89"),
        ({**CHAT, "system": "12", "prefill": "89"}, "#12;3+4;=89"),
    ],
)
def test_system_text_and_the_beginning_of_the_reply_are_tokens(
    tokenizer: Any, metadata: dict[str, str], text: str
) -> None:
    prompts = [Prompt("a", "3+4", "7", metadata), Prompt("b", "3+4", "7", metadata)]
    assert encode_prompts(prompts, tokenizer) == [[tokenizer.get_vocab()[letter] for letter in text]] * 2


def test_the_options_of_tasks_reach_the_tokens(tokenizer: Any, tmp_path: Path) -> None:
    lines = [f'{{"problem": "3+{term}", "answer": "{3 + term}"}}\n' for term in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    rows = make_task("jsonl", path=str(tmp_path / "rows.jsonl"), chat=True, system="12")
    (prompt,) = encode_prompts(rows.prompts(0, 1), tokenizer)
    assert tokenizer.decode(prompt).replace(" ", "").startswith("#12;3+")
    begun = make_task("arithmetic-chat", prefill=True).evaluation_prompts(1)
    ((plain,), (prefilled,)) = (
        encode_prompts(prompts, tokenizer) for prompts in (make_task("arithmetic-chat").evaluation_prompts(1), begun)
    )
    assert prefilled == plain + tokenizer(begun[0].metadata["prefill"])["input_ids"]


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(ModelError, match=rf"no hub provides it \({endpoint} does not answer within 5 s\)"):
            resolve_model("nobody/has-this")
    # Without a network, what is in the cache of the hub's library is used.
    monkeypatch.setattr("stalewise.models.loading.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert resolve_model("nobody/has-this") == "nobody/has-this"
