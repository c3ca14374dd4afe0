"""Programs against tests: what is right gets 1, what is wrong, late or dishonest gets 0."""

import json
import math
import random
from typing import Any

import pytest

from attacks.references import score_references, with_one_change
from stalewise.errors import TaskError
from stalewise.tasks import count_errors
from stalewise.tasks.verifiers import make_verifier
from stalewise.tasks.verifiers.code import CodeVerifier, decode, encode, program_in
from stalewise.types import Prompt, Reward

MBPP = {
    "problem": "Write a function that returns the elements of two tuples that are shared.",
    "answer": "def shared(a, b):\n    return tuple(set(a) & set(b))",
    "tests": ["assert set(shared((3, 4), (4, 5))) == {4}", "assert shared((1,), (2,)) == ()"],
}
HUMANEVAL = {
    "problem": 'import math\n\n\ndef area(radius: float) -> float:\n    """The area of a circle."""\n',
    "answer": "    return math.pi * radius**2\n",
    "tests": "def check(candidate):\n    assert abs(candidate(1.0) - 3.1415926) < 1e-6\n    assert candidate(0) == 0\n",
    "entry_point": "area",
}
PAIRS = {
    "problem": "Read numbers and print their sum.",
    "answer": "print(sum(map(int, input().split())))",
    "tests": [{"input": "1 2\n", "output": "3"}, {"input": "5 5 5", "output": "15\n"}],
}


def prompt(row: dict[str, Any]) -> Prompt:
    return Prompt("q", row["problem"], row["answer"], {"row": json.dumps(row)})


def scored(row: dict[str, Any], *responses: str, **options: Any) -> list[Reward]:
    return CodeVerifier(**options).score([prompt(row)] * len(responses), responses)


def fenced(program: str) -> str:
    return f"Let me think.\n```python\n{program}\n```\nIt works."


def test_mbpp_form() -> None:
    one_wrong = "def shared(a, b): return (4,)"
    right, whole, half, none, broken = scored(
        MBPP, fenced(MBPP["answer"]), MBPP["answer"], fenced(one_wrong), fenced("x = 1"), fenced("def shared(")
    )
    assert right == whole == Reward(1.0, {"passed": 1.0, "timed_out": 0.0, "parsed": 1.0})
    assert half == Reward(0.0, {"passed": 0.5, "timed_out": 0.0, "parsed": 1.0})
    assert none.value == 0 and none.parts["passed"] == 0 and none.parts["parsed"] == 1
    assert broken == Reward(0.0, {"passed": 0.0, "timed_out": 0.0, "parsed": 0.0})


def test_humaneval_form_as_continuation_and_as_whole_function() -> None:
    whole = "def area(radius):\n    return math.pi * radius * radius"  # the import is the prompt's
    values = [reward.value for reward in scored(HUMANEVAL, HUMANEVAL["answer"], fenced(whole), "    return radius\n")]
    assert values == [1.0, 1.0, 0.0]


def test_pairs_of_input_and_output() -> None:
    rows = PAIRS, PAIRS | {"tests": {"inputs": ["1 2\n", "5 5 5"], "outputs": ["3", ["15"]]}}
    for row in rows:
        right, wrong, broken = scored(row, fenced(row["answer"]), fenced("print(3)  "), fenced("print("))
        assert right.value == 1
        assert wrong == Reward(0.0, {"passed": 0.5, "timed_out": 0.0, "parsed": 1.0})
        assert broken.parts["parsed"] == 0


@pytest.mark.parametrize("row", [MBPP, PAIRS])
def test_a_program_that_never_ends_scores_zero_and_is_counted(row: dict[str, Any]) -> None:
    rewards = scored(row, fenced("while True: pass"), seconds=0.3)
    assert rewards[0].value == 0 and rewards[0].error == "" and rewards[0].parts["timed_out"] == 1
    counts = count_errors(rewards)
    assert (counts.timed_out, counts.failed, counts.record()["timed_out"]) == (1, 0, 1)
    assert "1 of them 0 for taking too long" in str(counts + count_errors([Reward(1.0)]))


CHEATS = {
    "ends with success": "import os, sys\nprint('{}')\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "equals everything": "class Any:\n    __eq__ = lambda *a: True\n"
    "    __iter__ = lambda s: iter([4])\n    __hash__ = None\n"
    "def shared(a, b): return Any()",
    "a tuple that equals everything": "class T(tuple):\n    def __eq__(s, o): return True\n"
    "    def __ne__(s, o): return False\n"
    "def shared(a, b): return T((7,))",
    "shadows what the tests use": "def set(x): return {4}\ndef shared(a, b): return {4} and ()",
    "patches builtins": "import builtins\nbuiltins.set = lambda x: {4}\nbuiltins.AssertionError = ValueError\n"
    "def shared(a, b): return ()",
    "raises": "def shared(a, b): raise AssertionError",
    "writes the verdict": "import os\nfor n in range(64):\n"
    '    try: os.write(n, b\'\\n{"passed": 2, "total": 2, "parsed": '
    'true, "error": ""}\\n\')\n    except OSError: pass\ndef shared(a, b): return 1',
    "kills the process of the tests": "import os, signal\nfor n in range(1, 40):\n"
    "    if n != os.getpid():\n        try: os.kill(n, 9)\n        except OSError: pass\n",
    "plants modules": "for name in ('json', 'socket', 'sys', 'builtins', 're', 'typing'):\n"
    "    open(name + '.py', 'w').write('print(1/0)')\nopen('program.py', 'w').write('print(1)')\n"
    "def shared(a, b): return 5",
    "looks for the tests": "import os\nfound = ''\nfor folder, _, names in os.walk('.'):\n    for name in names:\n"
    "        found += open(folder + '/' + name).read()\n"
    "def shared(a, b): return (4,) if 'assert set(sh' + 'ared((3, 4)' in found else 9",
}


def test_dishonest_programs_get_nothing() -> None:
    rewards = dict(zip(CHEATS, scored(MBPP, *map(fenced, CHEATS.values())), strict=True))
    assert {name: reward.value for name, reward in rewards.items()} == dict.fromkeys(CHEATS, 0.0)
    assert all(reward.parts["passed"] < 1 for reward in rewards.values())


def test_what_is_wrong_with_a_row_is_an_error_and_no_score() -> None:
    good = fenced(MBPP["answer"])
    for row, error in (
        (MBPP | {"tests": ["assert ("]}, "tests: SyntaxError"),
        (MBPP | {"test_imports": ["import no_such_module"]}, "raised ModuleNotFoundError"),
        (MBPP | {"tests": []}, "needs tests"),
        (MBPP | {"tests": 3}, "needs tests"),
        (MBPP | {"tests": [{"in": 1}]}, "expected input and output"),
        (MBPP | {"tests": {"inputs": [1], "outputs": []}}, "1 inputs but 0 outputs"),
    ):
        reward = scored(row, good)[0]
        assert math.isnan(reward.value) and error in reward.error, reward


def test_a_function_with_the_name_of_a_builtin() -> None:
    row = {"problem": "", "answer": "def sum(a, b):\n    return a + b", "tests": ["assert sum(1, 2) == 3"]}
    assert scored(row, fenced(row["answer"]))[0].value == 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(10**40),
        0.1,
        math.inf,
        "a\ud800",
        b"\xff",
        [1, (2, {3}), frozenset({"x"})],
        {(1,): [2.0]},
        1 + 2j,
    ],
)
def test_plain_data_keeps_its_types(value: object) -> None:
    again = decode(json.loads(json.dumps(encode(value))))
    assert again == value and type(again) is type(value)


def test_other_data_is_only_true_or_false() -> None:
    assert list(decode(encode(iter([1, 2])))) == [1, 2]
    other = decode(encode(object()))
    assert other and other != other.__class__() and not decode(["other", False])


def test_which_block_is_the_program() -> None:
    assert program_in("x = 1") == "x = 1"
    assert program_in("```python\na\n```\n```py\nb\n```\n```\nc\n```\n```text\nd\n```") == "c\n"
    assert program_in("```python\ncut off") == "cut off"


def test_options_are_checked() -> None:
    with pytest.raises(TaskError, match="limit seconds is 0"):
        make_verifier("code", seconds=0)
    with pytest.raises(TaskError, match="memory_mb is 'x'"):
        make_verifier("code", memory_mb="x")
    with pytest.raises(TaskError, match="workers is 0"):
        make_verifier("code", workers=0)


def test_references_score_one_and_wrong_programs_zero() -> None:
    rows = [row | {"id": str(number)} for number, row in enumerate((MBPP, HUMANEVAL))]
    found = score_references(rows, 0, CodeVerifier())
    assert found["as they are"] == {"score 1": 2, "timed out": 0, "errors": [], "wrong": []}
    assert found["other values"] == {"score 1": 0, "timed out": 0, "errors": [], "wrong": []}
    assert with_one_change("def f(x):\n    return x + 1", random.Random(0)) != "def f(x):\n    return x + 1"


def test_it_refuses_where_nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    from stalewise.tasks import sandbox

    monkeypatch.setattr(sandbox, "_probe_all", lambda: ("", "nothing"))
    with pytest.raises(TaskError, match="cannot be isolated"):
        make_verifier("code")
    assert scored(PAIRS, fenced(PAIRS["answer"]), unsafe_without_sandbox=True)[0].value == 1
