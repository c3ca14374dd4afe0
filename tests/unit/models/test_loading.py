"""What a chat template makes of a prompt: every part of it reaches the policy."""

from __future__ import annotations

import gc
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig, MambaConfig

from stalewise.errors import ModelError, TaskError
from stalewise.models import EMBEDDED, import_packages, loading, resolve_model
from stalewise.models.loading import context_length, describe_prompt, encode_prompts, load_tokenizer
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
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert resolve_model("nobody/has-this") == "nobody/has-this"


def seen(tokenizer: Any, task: Any) -> str:
    """What the policy sees of the first prompt, without the spaces between the tokens of this tokenizer."""
    (ids,) = encode_prompts(task.prompts(0, 1), tokenizer)
    return tokenizer.decode(ids).replace(" ", "")


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    lines = [f'{{"problem": "5+{term}", "answer": "{5 + term}"}}\n' for term in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    return {"path": str(tmp_path / "rows.jsonl")}


def test_few_shot_rows_are_turns_of_the_chat_or_text_before_the_problem(
    tokenizer: Any, tmp_path: Path, rows: dict[str, Any]
) -> None:
    shots = [{"problem": "1+1", "answer": "2"}, {"problem": "2+2", "answer": "4", "response": "2+2=4"}]
    chat = make_task("jsonl", **rows, chat=True, few_shot=shots, system="9", prefill="8")
    assert seen(tokenizer, chat).startswith("#9;1+1;2;2+2;2+2=4;5+")
    assert seen(tokenizer, chat).endswith(";=8")
    (tmp_path / "shots.jsonl").write_text("".join(json.dumps(shot) + "\n" for shot in shots))
    same = make_task("jsonl", **rows, chat=True, few_shot=str(tmp_path / "shots.jsonl"), system="9", prefill="8")
    assert same.prompts(0, 3) == chat.prompts(0, 3)
    plain = make_task("jsonl", **rows, few_shot=shots[:1], template="{problem}=")
    assert plain.prompts(0, 1)[0].text.startswith("1+1=2\n\n5+")
    assert plain.prompts(0, 1)[0].metadata["problem"].startswith("5+")  # what is compared with other files
    shown = make_task("jsonl", **rows, few_shot=[{"problem": "5 + 3", "answer": "8"}])
    assert shown.size == 17  # of 20: one is shown, two are held out
    assert "5+3" not in {prompt.metadata["problem"] for prompt in shown.prompts(0, 17)}


def test_variables_of_the_template_reach_it_and_an_unknown_one_is_refused(
    tokenizer: Any, tmp_path: Path, rows: dict[str, Any]
) -> None:
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking %}#{% endif %}"
    on, off = (
        make_task("jsonl", **rows, chat=True, chat_template_kwargs={"enable_thinking": value})
        for value in (True, False)
    )
    assert seen(tokenizer, on) == seen(tokenizer, off) + "#"
    wrong = make_task("jsonl", **rows, chat=True, chat_template_kwargs={"enable_thinkng": True})
    with pytest.raises(ModelError, match="has no variable enable_thinkng, so chat_template_kwargs would change"):
        seen(tokenizer, wrong)


def test_a_prompt_may_be_a_list_of_messages(tokenizer: Any, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    system = {"role": "system", "content": "9"}

    def task(prompts: list[Any], **options: Any) -> Any:
        lines = (json.dumps({"problem": prompt, "answer": str(number)}) for number, prompt in enumerate(prompts))
        (tmp_path / "chats.jsonl").write_text("\n".join(lines))
        return make_task("jsonl", path=str(tmp_path / "chats.jsonl"), held_out=0.0, **options)

    assert seen(tokenizer, task([turns])) == "1;2;3;="
    assert seen(tokenizer, task([turns[-1:]])) == "3;="
    assert seen(tokenizer, task([[system, *turns]], chat=True, system="8", template="{problem}+")) == "#9;1;2;3+;="
    assert seen(tokenizer, task([turns], chat=True, system="8")) == "#8;1;2;3;="
    assert task([turns, turns[-1:], [system, *turns]]).size == 3
    for wrong in ([], turns[:2], [{"role": "user"}], ["text"]):
        with pytest.raises(TaskError, match="expected messages with role and content, the last one the user's"):
            task([wrong])


def test_special_tokens_are_visible(tokenizer: Any) -> None:
    special = tokenizer.eos_token
    ids = [*tokenizer("3+4")["input_ids"], tokenizer.eos_token_id, *tokenizer("7")["input_ids"]]
    assert describe_prompt(ids, tokenizer).replace(" ", "") == f"3+4«{special}»7"
    assert describe_prompt([], tokenizer) == ""


def test_what_needs_a_chat_says_so(rows: dict[str, Any]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prefill": "a"}, "a prefill text needs chat=true"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs need chat=true"),
        ({"few_shot": [3]}, r"few_shot is \[3\], expected text or expected a table"),
        ({"few_shot": [{"problem": "1"}]}, "few_shot, row 0: there is no field 'answer'"),
        ({"few_shot": "missing.jsonl"}, "there is no file missing.jsonl"),
    ]
    for options, message in cases:
        with pytest.raises(TaskError, match=message):
            make_task("jsonl", **rows, **options)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_importing_packages_freezes_them_and_leaves_the_collector_as_it_was(is_enabled: bool):
    before = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        import_packages()
        assert gc.isenabled() == is_enabled
        assert gc.get_freeze_count() > 100_000  # torch alone leaves more
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_the_context_of_a_model_with_images_is_that_of_its_text() -> None:
    text: dict[str, Any] = {"max_position_embeddings": 96}
    assert context_length(Gemma3TextConfig(**text)) == context_length(Gemma3Config(text_config=text)) == 96
    assert context_length(MambaConfig()) is None


def test_memory_of_a_gpu_grows_in_place_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    for name in loading.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    loading.let_memory_grow(torch.device("cpu"))
    assert said == []
    loading.let_memory_grow(torch.device("cuda"))
    assert said == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    loading.let_memory_grow(torch.device("cuda"))
    assert len(said) == 1
