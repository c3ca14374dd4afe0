"""Tasks from reasoning-gym."""

from typing import Any

import pytest

from stalewise.errors import TaskError
from stalewise.tasks import make_task
from stalewise.types import Prompt


def test_gym_task() -> None:
    options = {"dataset": "chain_sum", "parameters": {"max_terms": 3, "max_digits": 1}, "workers": 1}
    task = make_task("gym", seed=1, chat=True, **options)
    training, evaluation = task.prompts(490, 20), task.evaluation_prompts(10)
    assert task.prompts(505, 1) == training[15:16]
    assert evaluation == make_task("gym", seed=2, chat=True, **options).evaluation_prompts(10)
    assert not {prompt.text for prompt in task.prompts(0, 600)} & {prompt.text for prompt in evaluation}
    assert training[0].metadata["format"] == "chat"
    gold = [training[0].answer, f"hm <answer>1</answer> no <answer> {training[1].answer} </answer>"]
    rewards = task.verifier.score(training[:3], [*gold, training[2].answer + "0"])
    task.verifier.close()
    assert [reward.value for reward in rewards] == [1.0, 1.0, 0.0]
    assert 0 < rewards[2].parts["score"] < 0.99, "reasoning-gym gives credit for substrings; the reward does not"


def test_gym_scorer_that_raises_is_an_error() -> None:
    task = make_task("gym", dataset="prime_factorization", workers=1)
    prompts = task.prompts(0, 1) * 2
    rewards = task.verifier.score(prompts, [prompts[0].answer, "junk"])
    task.verifier.close()
    assert rewards[0].value == 1.0
    assert rewards[1].error.startswith("ValueError: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sun"}, "no dataset 'chain_sun'; did you mean chain_sum"),
        ({"dataset": "chain_sum", "parameters": {"max_term": 3}}, "no parameter 'max_term'; did you mean max_terms"),
        ({"dataset": "chain_sum", "parameters": {"seed": 3}}, "seed cannot stand in parameters"),
        ({"dataset": "chain_sum", "parameters": {"max_terms": 1}}, "refuses these parameters of chain_sum: Asser"),
    ],
)
def test_gym_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_task("gym", **options)


def test_a_judge_scores_the_last_tagged_answer() -> None:
    pytest.importorskip("reasoning_gym")
    from stalewise.tasks.gym import load_judge

    task = make_task("gym", dataset="chain_sum", seed=1)
    [prompt] = task.prompts(0, 1)
    judge = load_judge("chain_sum", {})
    right = f"<answer>no</answer> so <answer> {prompt.answer} </answer>"
    assert [judge(prompt, response).value for response in (right, "no")] == [1.0, 0.0]  # type: ignore[attr-defined]
    other = Prompt("gym-chain_sum/0", prompt.text, prompt.answer, prompt.metadata)
    with pytest.raises(RuntimeError, match="made another question"):
        judge(other, right)
