"""The supervised start of runs with SmolLM2, on the embedded policy, which knows none of these letters."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # experiments/ is no part of the package

from experiments.lab import warm_start

from stalewise.errors import TaskError
from stalewise.models import EMBEDDED
from stalewise.models.loading import load_tokenizer
from stalewise.tasks import make_task

CPU = torch.device("cpu")


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (("CHECKED", 4), ("BATCH", 4), ("NEW_TOKENS", 4), ("RATE", 3e-3)):
        monkeypatch.setattr(warm_start, name, value)
    shutil.copytree(EMBEDDED / "arithmetic-steps", tmp_path / "policy")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "policy" / "chat_template.jinja").write_text(template)
    return tmp_path / "policy"


def test_answers_alone_have_labels_and_are_learned(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(str(policy))
    task = make_task(warm_start.TASK, seed=0, **warm_start.OPTIONS)
    examples = warm_start._examples(tokenizer, task, 0, CPU)
    for prompt, ids, mask, labels in zip(
        task.prompts(0, 4), examples["input_ids"], examples["attention_mask"], examples["labels"], strict=True
    ):
        answer = labels[labels != warm_start.IGNORED].tolist()
        assert answer == [*tokenizer(warm_start.worked_out(prompt.text))["input_ids"], tokenizer.eos_token_id]
        assert ids[mask == 1].tolist()[-len(answer) :] == answer
        assert warm_start.worked_out(prompt.text).endswith(f" = {prompt.answer}")
    losses: list[float] = []
    with monkeypatch.context() as there, pytest.raises(TaskError, match=r"6 steps were not enough: 0\.00"):
        there.setattr(warm_start, "_sampled_accuracy", lambda model, *_: losses.append(loss(model, examples)) or 0.0)
        warm_start.warm_start(policy.parent / "never", model=str(policy), target=0.1, steps=6)
    assert len(set(losses)) == 4 and losses == sorted(losses, reverse=True)
    assert not (policy.parent / "never").exists()


@torch.no_grad()
def loss(model: Any, examples: dict[str, torch.Tensor]) -> float:
    return float(model(**examples).loss)


def test_a_policy_that_is_good_enough_is_written_as_it_is(policy: Path) -> None:
    found = warm_start.warm_start(policy.parent / "made", model=str(policy), target=0.0)
    assert found["curve"] == [(0, 0.0)]
    before, after = (load_file(path / "model.safetensors") for path in (policy, policy.parent / "made"))
    assert all(torch.equal(weight, after[name].to(weight.dtype)) for name, weight in before.items())
    assert load_tokenizer(str(policy.parent / "made")).chat_template


class Answers:
    """Answers the first questions rightly and the others with a number that no sum has."""

    def __init__(self, right: int, tokenizer: Any, task: Any) -> None:
        texts = [prompt.answer if place < right else "999" for place, prompt in enumerate(task.prompts(0, 4))]
        self.ids = [tokenizer(f"={text:0>3}")["input_ids"] for text in texts]

    def eval(self) -> None:
        pass

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([input_ids, torch.tensor(self.ids)], dim=1)


@pytest.mark.parametrize("right", [0, 1, 4])
def test_accuracy_is_the_share_of_right_answers(policy: Path, right: int) -> None:
    tokenizer, task = load_tokenizer(str(policy)), make_task(warm_start.TASK, seed=0, **warm_start.OPTIONS)
    answers = Answers(right, tokenizer, task)
    assert warm_start._sampled_accuracy(answers, tokenizer, task, CPU) == right / 4


def test_only_sums_are_worked_out() -> None:
    with pytest.raises(TaskError, match="is not a sum of two numbers"):
        warm_start.worked_out("What is 7*8?")
