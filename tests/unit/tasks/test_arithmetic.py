"""Built-in arithmetic: held-out questions, gold responses and spoiled ones."""

import random
import re
from collections import Counter
from typing import Any

import pytest

from prompts import ids
from stalewise.errors import TaskError
from stalewise.tasks import make_task
from stalewise.tasks.arithmetic import CHARACTERS, Addition, AdditionChat, Steps
from stalewise.types import Prompt

BUILT_IN = [Addition, AdditionChat, Steps]


def test_prompts_are_the_same_for_ever() -> None:
    # Written down once. If this fails, runs that were begun before cannot be resumed.
    assert [task(seed=7).prompts(9_000, 1)[0].text for task in BUILT_IN] == [
        "74+29=",
        "What is 6+9?",
        "1+8+8-8+4-1=",
    ]
    assert [task().evaluation_prompts(1)[0].text for task in BUILT_IN] == [
        "31+50=",
        "What is 5+9?",
        "2-1+6-4+7-5=",
    ]


def test_seeds_differ() -> None:
    for task in BUILT_IN:
        assert ids(task(seed=1).prompts(0, 50)) != ids(task(seed=2).prompts(0, 50))


@pytest.mark.parametrize("task", BUILT_IN)
def test_training_and_evaluation_are_apart(task: type[Addition | Steps]) -> None:
    evaluation = task(seed=1).evaluation_prompts(500)
    assert evaluation == task(seed=2).evaluation_prompts(500)
    assert evaluation[:5] == task().evaluation_prompts(5)
    assert len(set(ids(evaluation))) == len(evaluation)
    for seed in range(3):
        training = task(seed=seed).prompts(0, 8_000)
        assert not {prompt.text for prompt in training} & {prompt.text for prompt in evaluation}


def test_the_id_names_the_question() -> None:
    assert Addition().prompts(0, 1)[0].prompt_id == "arithmetic/" + Addition().prompts(0, 1)[0].text[:-1]
    by_id = {prompt.prompt_id: prompt.text for prompt in Steps(seed=1).prompts(0, 5_000)}
    assert len(set(by_id.values())) == len(by_id)


def test_a_mirrored_sum_does_not_give_the_held_out_one_away() -> None:
    training = {prompt.text for prompt in Addition().prompts(0, Addition().size)}
    for prompt in Addition().evaluation_prompts(10_000):
        left, right = prompt.text.removesuffix("=").split("+")
        assert f"{right}+{left}=" not in training


def test_sizes() -> None:
    assert Addition().size + len(Addition().evaluation_prompts(10_000)) == 90 * 90
    assert AdditionChat().size + len(AdditionChat().evaluation_prompts(10_000)) == 10 * 10
    assert Steps().size is None


@pytest.mark.parametrize("task", [task(seed=3) for task in BUILT_IN], ids=lambda task: task.name)
def test_gold_responses_are_right_and_spoiled_ones_wrong(task: Addition | Steps) -> None:
    prompts = task.prompts(0, 3_000) + task.evaluation_prompts(500)
    rng = random.Random(0)
    gold = task.verifier.score(prompts, [task.solution(prompt) for prompt in prompts])
    assert {(reward.value, reward.error, *reward.parts.values()) for reward in gold} <= {
        (1.0, "", 1.0, 1.0),
        (1.0, "", 1.0),
    }
    spoiled = task.verifier.score(prompts, [task.spoiled_solution(prompt, rng) for prompt in prompts])
    assert {(reward.value, reward.error) for reward in spoiled} == {(0.0, "")}
    assert all(reward.parts.get("format", 1.0) == 1.0 for reward in spoiled), (
        "a spoiled response looks like a right one"
    )


def test_answers_are_those_of_python() -> None:
    for prompt in Addition().prompts(0, 500) + Steps().prompts(0, 500):
        assert int(prompt.answer) == eval(prompt.text.removesuffix("="))


def test_every_worked_out_response_has_30_to_60_characters() -> None:
    task, rng = Steps(seed=1), random.Random(1)
    prompts = task.prompts(0, 5_000)
    lengths = Counter(len(task.solution(prompt)) for prompt in prompts)
    spoiled = Counter(len(task.spoiled_solution(prompt, rng)) for prompt in prompts)
    # By hand: 5 steps such as 1+1=2; and #2 make 5·6 + 2 = 32; 6 steps, all totals of two digits, 7 + 5·8 + 3 = 50.
    assert (min(lengths), max(lengths)) == (32, 50)
    assert min(spoiled) >= 32 and max(spoiled) <= 50


def test_worked_out_steps_by_hand() -> None:
    task = Steps()
    prompt = Prompt("p", "7+8-5+6-2+3=", "17")
    assert task.solution(prompt) == "7+8=15;15-5=10;10+6=16;16-2=14;14+3=17;#17"
    assert task.verifier.score([prompt], ["#17"])[0].parts == {"correct": 1.0, "format": 0.0}


def test_spoiled_steps_hold_one_error_and_are_consistent_after_it() -> None:
    task, rng = Steps(), random.Random(2)
    places = Counter[int]()
    for prompt in task.prompts(0, 1_000):
        *steps, final = task.spoiled_solution(prompt, rng).split(";")
        wrong = [place for place, step in enumerate(steps) if eval(step.replace("=", "=="), {}) is False]
        assert len(wrong) == 1
        places[wrong[0]] += 1
        totals = [int(step.partition("=")[2]) for step in steps]
        assert all(0 <= total <= task.largest_total for total in totals)
        assert final == f"#{totals[-1]}"
    assert set(places) == set(range(6)), "errors are made at every step"


def test_characters_are_all_and_only_those_used() -> None:
    used = set()
    for task in (Addition(), Steps()):
        rng = random.Random(3)
        for prompt in task.prompts(0, 500):
            used |= set(prompt.text + task.solution(prompt) + task.spoiled_solution(prompt, rng))
    assert used == set(CHARACTERS)
    assert len(CHARACTERS) == len(used)


@pytest.mark.parametrize(
    ("response", "value", "form"),
    [
        ("#17", 1, 0),
        ("7+8=15;#17", 1, 1),
        ("#99#17", 1, 0),
        ("#17#99", 0, 0),
        ("17", 0, 0),
        ("#17;", 0, 0),
        ("#1 7", 0, 0),
        ("#017", 0, 0),
        ("#١٧", 0, 0),
        ("", 0, 0),
        ("#", 0, 0),
        ("#" * 100_000, 0, 0),
        ("7+8=15;" * 20_000, 0, 0),
        ("\ud800\x00#17", 1, 0),
    ],
)
def test_steps_verifier_looks_only_behind_the_last_marker(response: str, value: float, form: float) -> None:
    reward = Steps().verifier.score([Prompt("p", "7+8-5+6-2+3=", "17")], [response])[0]
    assert (reward.value, reward.parts["format"]) == (value, form)


def test_chat_prompts_are_marked_and_the_last_number_counts() -> None:
    task = AdditionChat()
    prompt = next(prompt for prompt in task.prompts(0, 100) if prompt.answer == "8")
    assert prompt.metadata == {"format": "chat"}
    responses = ["8", "3 + 5 = 8.", "It is 8, no, 9", "eight", "8.0", "-8"]
    assert [r.value for r in task.verifier.score([prompt] * 6, responses)] == [1, 1, 0, 0, 1, 0]


def test_chat_prompts_with_the_beginning_of_the_reply() -> None:
    task = AdditionChat(prefill=True)
    (prompt,) = task.evaluation_prompts(1)
    assert (prompt.text, prompt.answer) == ("What is 5+9?", "14")
    assert prompt.metadata == {"format": "chat", "prefill": "5 + 9 ="}
    # What comes after the "=" is the first number.
    assert [r.value for r in task.verifier.score([prompt] * 2, [" 14\n5 + 9", " 5 + 9 = 14"])] == [1, 0]
    assert ids(task.prompts(0, 86)) == ids(AdditionChat().prompts(0, 86))


def test_chat_prompts_with_other_terms_and_operations() -> None:
    task = AdditionChat(largest=12, operations="+-*")
    training, held_out = task.prompts(0, task.size), task.evaluation_prompts(10_000)
    assert len(training) + len(held_out) == 3 * 13 * 13
    assert not set(ids(training)) & set(ids(held_out))
    for prompt in training + held_out:
        left, operation, right = re.fullmatch(r"What is (\d+)([-+*])(\d+)\?", prompt.text).groups()  # type: ignore[union-attr]
        value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operation]
        assert prompt.answer == str(value)
    # 3*5 and 5*3 go to the same side, as 3+5 and 5+3 do; 3-5 gives 5-3 not away.
    names = set(ids(held_out))
    for operation in "+*":
        assert all(
            (f"arithmetic-chat/{a}{operation}{b}" in names) == (f"arithmetic-chat/{b}{operation}{a}" in names)
            for a in range(13)
            for b in range(13)
        )
    # What is held out does not depend on the options: a model trained on one set is not judged on it in another.
    assert set(ids(AdditionChat().evaluation_prompts(99))) <= names
    wrong: list[dict[str, Any]] = [{"largest": 0}, {"operations": ""}, {"operations": "++"}, {"operations": "/"}]
    for options in wrong:
        with pytest.raises(TaskError, match="must"):
            make_task("arithmetic-chat", **options)
