"""Fingerprints of functions: what changes them and what does not, and how functions are called."""

from __future__ import annotations

import functools
import json
import linecache
import re
import types
from pathlib import Path
from typing import Any

import pytest

from stalewise.errors import TaskError
from stalewise.tasks import make_task
from stalewise.tasks.callables import (
    Fingerprint,
    bind,
    check_parameters,
    combined,
    fingerprint,
    fingerprint_of_task,
    importable_name,
    register,
    registered,
)
from stalewise.tasks.verifiers.judge_process import judged
from stalewise.tasks.verifiers.python import make_judge


def defined(source: str, name: str = "reward", cell: str = "cell", **variables: Any) -> Any:
    """A function as a notebook defines it: its cell is in linecache, and in no file."""
    file = f"<{cell}-{abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(compile(source, file, "exec"), space)
    return space[name]


def digest(source: str, **variables: Any) -> str:
    return fingerprint(defined(source, **variables)).digest


PLAIN = "def reward(response, answer):\n    return float(response == answer)\n"


def test_layout_and_comments_do_not_matter_and_code_does() -> None:
    moved = "\n\n# why\n" + PLAIN.replace("    return", "    # exactly\n    return ")
    assert digest(PLAIN) == digest(moved)
    assert digest(PLAIN) != digest(PLAIN.replace("==", "!="))


def test_a_lambda_is_fingerprinted_without_the_call_around_it() -> None:
    def of(rest: str) -> str:
        return digest(f"reward = dict(reward=lambda r, answer: r == answer, {rest})['reward']\n")

    assert of("updates=3") == of("updates=4")
    found = fingerprint(defined("reward = (lambda a: a)\n"))
    assert (found.name, found.source) == ("lambda", "lambda a: a")
    pair = "first, reward = (lambda a: a + 1), (lambda a: a + 2)\n"
    assert fingerprint(defined(pair)).source == "lambda a: a + 2"
    assert fingerprint(defined(pair, name="first")).source == "lambda a: a + 1"


def test_without_a_source_the_code_counts() -> None:
    def compiled(source: str) -> Any:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, "<nowhere>", "exec"), space)
        return fingerprint(space["reward"])

    one, same, other = compiled(PLAIN), compiled("\n" + PLAIN), compiled(PLAIN.replace("==", "!="))
    assert one.digest == same.digest != other.digest
    assert "not known" in one.source
    assert compiled("reward = lambda r: r > 0.5").digest != compiled("reward = lambda r: r > 0.7").digest


@pytest.mark.parametrize(
    ("before", "after"), [(0.5, 0.7), ("a", "b"), ((1, 2), (1, 3)), (re.compile("a"), re.compile("b"))]
)
def test_constants_that_a_function_uses_count(before: Any, after: Any) -> None:
    uses = "def reward(response):\n    return [used for _ in (1,)]\n"
    assert digest(uses, used=before) == digest(uses, used=before) != digest(uses, used=after)
    default = "def reward(response, bound=used):\n    return bound\n"
    assert digest(default, used=before) != digest(default, used=after)
    closure = (
        "def outer(bound):\n    def inner(response):\n        return bound\n    return inner\nreward = outer(used)\n"
    )
    assert digest(closure, used=before) != digest(closure, used=after)


def test_functions_and_classes_that_a_function_uses_count() -> None:
    uses = "def reward(response):\n    return helper(response)\n"
    one, other = (
        defined("def helper(x):\n    return 1\n", "helper"),
        defined("def helper(x):\n    return 2\n", "helper"),
    )
    assert digest(uses, helper=one) != digest(uses, helper=other)
    text = "class helper:\n    bound = {}\n    def __init__(self, x): ...\n    def __float__(self): return self.bound\n"
    one, other = (defined(text.format(bound), "helper") for bound in (1, 2))
    assert digest(uses, helper=one) != digest(uses, helper=other)


def test_what_may_change_while_a_program_runs_is_listed_instead() -> None:
    uses = "def reward(response):\n    seen.append(response)\n    return len(seen)\n"
    found = fingerprint(defined(uses, seen=[]))
    assert found.digest == digest(uses, seen=["more"])
    assert found.uncovered == ["seen (list)"]
    assert "Not part of the fingerprint: seen (list)." in found.describe()
    counts = "calls = 0\ndef reward(response):\n    global calls\n    calls += 1\n    return calls\n"
    counting = defined(counts)
    before = fingerprint(counting)
    counting("")
    assert (fingerprint(counting), before.uncovered) == (before, [])
    nested = counts.replace("global", "nonlocal").replace("\n", "\n    ")
    counting = defined(f"def outer():\n    {nested}return reward\nreward = outer()\n")
    before = fingerprint(counting)
    counting("")
    assert fingerprint(counting) == before


class Judge:
    def __init__(self, bound: float, client: object = None) -> None:
        self.bound, self.client = bound, client

    def __call__(self, response: str) -> float:
        return float(len(response) > self.bound)

    def score(self, response: str) -> float:
        return self(response)


def test_objects_methods_and_partials() -> None:
    assert fingerprint(Judge(1)).digest == fingerprint(Judge(1)).digest != fingerprint(Judge(2)).digest
    assert fingerprint(Judge(1, object())).uncovered == ["Judge.client (object)"]
    assert fingerprint(Judge(1).score).digest != fingerprint(Judge(2).score).digest
    scaled = defined("def reward(response, scale):\n    return scale\n")
    one, other = (fingerprint(functools.partial(scaled, scale=scale)) for scale in (1, 2))
    assert one.digest != other.digest
    assert fingerprint(len).digest != fingerprint(max).digest


def test_a_function_of_a_module_has_a_name_that_others_can_import(judges: str) -> None:
    assert importable_name(defined(PLAIN)) == ""
    assert importable_name(lambda: 0) == ""
    assert importable_name(re.escape) == "re:escape"
    assert importable_name(Judge(1).score) == ""
    made_up = types.ModuleType("made_up")
    assert importable_name(getattr(made_up, "nothing", made_up)) == ""


def test_a_reference_finds_its_function_or_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = defined(PLAIN)
    assert registered(register(own, fingerprint(own)), "reward function") is own
    with pytest.raises(TaskError, match=r"exists only in the program that called .*: run that program again"):
        registered("lambda@000000000000", "reward function")
    (tmp_path / "rewards_of_the_test.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    import rewards_of_the_test  # type: ignore[import-not-found]

    found = fingerprint(rewards_of_the_test.reward)
    assert found.name == "rewards_of_the_test:reward"
    assert registered(found.reference, "reward function") is rewards_of_the_test.reward
    with pytest.raises(TaskError, match="was changed since the run began"):
        registered("rewards_of_the_test:reward@000000000000", "reward function")
    with pytest.raises(TaskError, match="cannot be imported"):
        registered("rewards_of_the_test:gone@000000000000", "reward function")


def test_a_task_object_is_fingerprinted_with_its_prompts() -> None:
    one, same, other = make_task("arithmetic", seed=1), make_task("arithmetic", seed=1), make_task("arithmetic", seed=2)
    assert fingerprint_of_task(one).digest == fingerprint_of_task(same).digest != fingerprint_of_task(other).digest


VALUES = {"prompt": "p", "response": "r", "answer": "a", "level": 3}


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda prompt, response, answer: prompt + response + answer, "pra"),
        (lambda response, answer: response + answer, "ra"),
        (lambda x, y, z: x + y + z, "pra"),
        (lambda completion, level: f"{completion}{level}", "r3"),
        (lambda response, **row: (response, sorted(row)), ("r", ["answer", "level", "prompt"])),
        (lambda completions, level, **row: [completions[0] + str(level[0])], "r3"),
        (lambda completions, prompts: [completions[0] + prompts[0]], "rp"),
        (lambda response, *, level=0: level, 3),
    ],
)
def test_a_function_gets_what_it_names(function: Any, result: Any) -> None:
    check_parameters(function, {"level": 3})
    assert bind(function)(VALUES) == result


def test_an_argument_that_no_row_gives_is_refused() -> None:
    with pytest.raises(TaskError, match=r"lambda asks for 'gold'.*: it may name answer, level, prompt, response"):
        check_parameters(lambda response, gold: 0, {"level": 3})
    with pytest.raises(TaskError, match="asks for 'a'"):
        check_parameters(lambda a, response, b: 0, {})


def test_an_answer_that_no_row_has_is_refused_where_a_function_names_it() -> None:
    fields = {"prompt": "p", "solution": "s"}
    message = r"lambda asks for 'answer', and no row has it; answer_field names its field: known: prompt, solution"
    for function in (lambda response, answer: 0, lambda completions, answer, **row: [0]):
        check_parameters(function, fields)
        with pytest.raises(TaskError, match=message):
            check_parameters(function, fields, has_answer=False)
    for other in (lambda response, answer="": 0, lambda response, **row: 0, lambda a, b, c: 0, lambda response: 0):
        check_parameters(other, fields, has_answer=False)


def test_a_function_of_trl_gets_messages_where_the_row_holds_them(tmp_path: Path) -> None:
    def of_trl(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        assert prompts == [[{"role": "system", "content": "Add."}, {"role": "user", "content": "3+5"}]]
        texts = [completion[0]["content"] for completion in completions]
        return [float(text == answer) for text, answer in zip(texts, columns["answer"], strict=True)]

    def of_texts(prompt: str, response: str, answer: str, **row: Any) -> float:
        return float((prompt, response) == ("3+5", answer))

    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+5"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": "8"}))
    for number, function in enumerate((of_trl, of_texts, combined([of_trl, of_texts]))):
        reference = register(function, Fingerprint(f"f{number}", f"{number}" * 12, "", ""))
        options = {"verifier": "function", "verifier_options": {"function": reference}, "held_out": 0.0}
        (prompt,) = make_task("jsonl", path=path, problem_field="prompt", **options).prompts(0, 1)
        right, wrong = (judged(make_judge(function), prompt, text) for text in ("8", "9"))
        assert (right.error, wrong.error, wrong.value) == ("", "", 0.0)
        assert right.value >= 1


def test_functions_of_a_list_that_share_a_name_or_fail() -> None:
    total = combined([lambda response: 1, lambda response: {"reward": 2, "a": 3}])
    found = total(prompt="p", response="r", answer="x")
    assert (found.value, found.parts) == (3.0, {"lambda": 1.0, "lambda-2": 2.0, "lambda-2.a": 3.0})
    failing = combined([lambda response: 1, lambda response: float("nan")])
    assert failing(prompt="p", response="r", answer="x").error == "not a finite number: reward is nan (in lambda-2)"


def test_a_function_of_a_list_that_returns_none_does_not_apply() -> None:
    def of_trl(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if completion == "r" else 2.0 for completion in completions]

    total = combined([lambda response: 1 if response else None, of_trl])
    found = [total(prompt="p", response=response, answer="x") for response in ("r", "s", "")]
    assert [(reward.value, dict(reward.parts)) for reward in found] == [
        (1.0, {"lambda": 1.0}),
        (3.0, {"lambda": 1.0, "of_trl": 2.0}),
        (2.0, {"of_trl": 2.0}),
    ]
    nothing = combined([lambda response: None, lambda answer: None])(prompt="p", response="r", answer="x")
    assert nothing.error == "every reward function returned None"
