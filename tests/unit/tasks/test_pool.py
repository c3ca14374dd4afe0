"""Verifiers against real processes: what hangs, raises, dies or lies is an error of that one response."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalewise.errors import TaskError
from stalewise.tasks import Verifier, count_errors, make_verifier
from stalewise.tasks.verifiers.judge_process import reward_of
from stalewise.tasks.verifiers.math import MathVerifier
from stalewise.tasks.verifiers.number import number_in
from stalewise.tasks.verifiers.pool import ProcessVerifier
from stalewise.types import Prompt, Reward

JUDGES = """
import os, signal, sys, time

def judge(prompt, response):
    print("printed by a judge")
    match response:
        case "hang": time.sleep(60)
        case "spin":
            while True: pass
        case "raise": raise ValueError("bad\\nresponse")
        case "exit": sys.exit(3)
        case "die": os._exit(3)
        case "crash": os.kill(os.getpid(), signal.SIGSEGV)
        case "nan": return float("nan")
        case "inf": return {"reward": 1, "bonus": float("inf")}
        case "none": return None
        case "text": return "1.0"
        case "parts": return {"reward": 0.5, "length": 3, "correct": True}
        case "headless": return {"length": 3}
        case "torch": return "torch" in sys.modules
        case "pid": return os.getpid()
        case "interrupt": raise KeyboardInterrupt
        case "children":
            import subprocess
            print(subprocess.Popen(["sleep", "61.25"]).pid, file=open(prompt.answer, "w"), flush=True)
            time.sleep(60)
    return float(response == prompt.answer)

not_callable = 3
"""


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "judges_of_the_test.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(tmp_path)
    return "judges_of_the_test:judge"


def question(answer: str = "8") -> Prompt:
    return Prompt("q", "3+5=", answer)


def score(verifier: Verifier, *responses: str, answer: str = "8") -> list[Reward]:
    return verifier.score([question(answer)] * len(responses), responses)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie of somebody else's does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


# --- in this process


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 85", "85"),
        ("47+38=85.", "85"),
        ("1,250 apples", "1250"),
        ("1,234,567.50", "2469135/2"),
        ("3,4", "4"),
        ("1,2345", "2345"),
        ("-7", "-7"),
        ("\N{MINUS SIGN}7", "-7"),
        ("x=-7", "-7"),
        ("10-7", "7"),
        ("(4)-7", "7"),
        ("+.5", "1/2"),
        ("-0", "0"),
        ("3/4", "3/4"),
        ("it is 3/45.", "1/15"),
        ("3/4.5", "9/2"),
        ("on 1/2/2024", "2024"),
        ("1e3", "1000"),
        ("2E-2", "1/50"),
        ("#### 42", "42"),
        ("007", "7"),
    ],
)
def test_last_number_of_a_text(text: str, number: str) -> None:
    assert number_in(text) == Fraction(number)


@pytest.mark.parametrize(
    "text", ["", "none", "٣", "-", ".", ",", "1/0", "9" * 5000, "1" + ",234" * 50_000, "-" * 50_000]
)
def test_no_number_in_hostile_text(text: str) -> None:
    assert number_in(text) is None


def test_numbers_compare_exactly_and_not_as_floats() -> None:
    verifier = make_verifier("number")
    assert [reward.value for reward in score(verifier, "0.1", "0.10", "1/10", answer="0.1")] == [1, 1, 1]
    # As floats these two are equal: 2**53 + 1 rounds to 2**53.
    assert score(verifier, "9007199254740993", answer="9007199254740992")[0].value == 0
    assert score(verifier, "no idea")[0] == Reward(0.0, {"parsed": 0.0})
    assert [reward.value for reward in score(make_verifier("number", which="first"), "8 or 9", "9 or 8")] == [1, 0]


def test_gold_without_a_number_is_an_error_and_not_zero() -> None:
    reward = score(make_verifier("number"), "8", answer="eight")[0]
    assert math.isnan(reward.value)
    assert reward.error == "answer is not a number: 'eight'"


@given(st.text())
def test_any_text_can_be_scored(text: str) -> None:
    assert score(make_verifier("number"), text)[0].value in (0.0, 1.0)
    assert score(make_verifier("exact"), text, answer=text)[0].value == 1.0


def test_exact_ignores_only_white_space_around() -> None:
    assert [r.value for r in score(make_verifier("exact"), "8", " 8\n", "8.", "", "8 8")] == [1, 1, 0, 0, 0]


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="1 prompts but 2 responses"):
        make_verifier("exact").score([question()], ["8", "9"])


def test_unknown_verifier_or_option_names_the_nearest() -> None:
    with pytest.raises(TaskError, match="unknown verifier 'maths'; did you mean math"):
        make_verifier("maths")
    with pytest.raises(TaskError, match="verifier number has no option 'whic'; did you mean which"):
        make_verifier("number", whic="last")
    with pytest.raises(TaskError, match="verifier exact has no option 'x'; it takes none"):
        make_verifier("exact", x=1)
    with pytest.raises(TaskError, match="verifier python needs the option 'function'"):
        make_verifier("python")
    with pytest.raises(TaskError, match='must be "first" or "last"'):
        make_verifier("number", which="middle")
    with pytest.raises(TaskError, match="workers ≥ 1"):
        make_verifier("math", workers=0)


@pytest.mark.parametrize("function", ["judge", ":judge", "module:", "module:two words"])
def test_function_of_the_wrong_form(function: str) -> None:
    with pytest.raises(TaskError, match="must look like 'module:function'"):
        make_verifier("python", function=function)


def test_scalars_of_numpy_are_numbers() -> None:
    import numpy as np

    assert reward_of(np.float32(0.5)) == Reward(0.5)
    assert reward_of({"reward": np.bool_(True), "length": np.int64(3)}) == Reward(1.0, {"length": 3.0})


# --- in worker processes


def test_everything_that_can_go_wrong_is_an_error_of_its_own_response(
    judges: str, capfd: pytest.CaptureFixture[str]
) -> None:
    responses = ["8", "raise", "exit", "die", "crash", "nan", "inf", "none", "text", "headless", "interrupt", "9"]
    with ProcessVerifier(
        "stalewise.tasks.verifiers.python:load_judge", {"function": judges}, workers=2, limit_s=5
    ) as verifier:
        rewards = score(verifier, *responses, "parts", "torch")
    assert {response: reward.error for response, reward in zip(responses, rewards, strict=False)} == {
        "8": "",
        "raise": "ValueError: bad response",
        "exit": "SystemExit: 3",
        "die": "worker died: exit code 3",
        "crash": "worker died: Segmentation fault",
        "nan": "not a finite number: reward is nan",
        "inf": "not a finite number: bonus is inf",
        "none": "not a finite number: reward is NoneType",
        "text": "not a finite number: reward is str",
        "headless": 'no reward: a dict from a verifier must have the key "reward"',
        "interrupt": "KeyboardInterrupt: ",
        "9": "",
    }
    assert all(math.isnan(reward.value) for reward in rewards if reward.error)
    assert [rewards[0].value, rewards[11].value] == [1.0, 0.0]
    assert rewards[12] == Reward(0.5, {"length": 3.0, "correct": 1.0})
    assert rewards[13].value == 0.0, "a worker imported torch"
    assert capfd.readouterr().out == "", "what a judge prints must not reach standard output"


def test_hanging_judges_are_killed_and_replaced_and_order_is_kept(judges: str) -> None:
    verifier = make_verifier("python", function=judges, workers=2, limit_s=0.4)
    score(verifier, "8", "8")  # both have started
    began = time.monotonic()
    rewards = score(verifier, "8", "hang", "9", "spin", "8", "9")
    took = time.monotonic() - began
    verifier.close()
    assert [reward.error for reward in rewards] == ["", "timeout after 0.4 s", "", "timeout after 0.4 s", "", ""]
    assert [rewards[place].value for place in (0, 2, 4, 5)] == [1.0, 0.0, 1.0, 0.0]
    # Six items on two workers may take 3 × 0.4 s and the start of two interpreters, slow as the machine may be.
    assert took < 3 * 0.4 + 5


def test_what_a_killed_judge_started_is_killed_too(judges: str, tmp_path: Path) -> None:
    note = tmp_path / "child"
    with ProcessVerifier(
        "stalewise.tasks.verifiers.python:load_judge", {"function": judges}, workers=1, limit_s=1
    ) as verifier:
        assert score(verifier, "children", answer=str(note))[0].error == "timeout after 1.0 s"
    assert gone(int(note.read_text()), within_s=2)


def test_workers_live_on_between_batches_and_end_with_close(judges: str) -> None:
    verifier = make_verifier("python", function=judges, workers=1)
    first, again = (int(score(verifier, "pid")[0].value) for _ in range(2))
    assert first == again
    os.kill(first, signal.SIGKILL)  # as the kernel does when memory is short
    time.sleep(0.1)
    replaced = score(verifier, "pid")[0]
    assert replaced.error == "", "a worker that died while idle must not cost a response"
    verifier.close()
    verifier.close()
    with pytest.raises(ProcessLookupError):  # neither running nor a zombie
        os.kill(int(replaced.value), 0)
    assert score(verifier, "8")[0].value == 1.0, "a closed verifier starts again"
    verifier.close()


def test_nothing_starts_before_the_first_response(judges: str) -> None:
    verifier = ProcessVerifier("no.such.module:judge")
    assert verifier.score([], []) == []
    with pytest.raises(TaskError, match=r"cannot load no\.such\.module:judge: ModuleNotFoundError"):
        score(verifier, "8")


def test_function_that_cannot_be_loaded(judges: str) -> None:
    with pytest.raises(TaskError, match="there is no module 'no_such_module'"):
        make_verifier("python", function="no_such_module:judge")
    module = judges.partition(":")[0]
    with pytest.raises(TaskError, match=f"cannot load {module}:jugde: AttributeError"):
        score(make_verifier("python", function=f"{module}:jugde"), "8")
    with pytest.raises(TaskError, match=f"cannot load {module}:not_callable: TypeError"):
        score(make_verifier("python", function=f"{module}:not_callable"), "8")


PARENT = """
import sys
from stalewise.tasks import make_verifier
from stalewise.types import Prompt

sys.path.insert(0, sys.argv[1])
verifier = make_verifier("python", function="judges_of_the_test:judge", workers=1, limit_s=float(sys.argv[3]))
print(int(verifier.score([Prompt("q", "", "")], ["pid"])[0].value), flush=True)
verifier.score([Prompt("q", "", "")], [sys.argv[2]])
"""


def parent(judges: str, tmp_path: Path, response: str, limit_s: float) -> tuple[subprocess.Popen[str], int]:
    """Start a script without `if __name__ == "__main__"` that scores; return it and its worker's id."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), response, str(limit_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_workers_end_with_the_interpreter(judges: str, tmp_path: Path) -> None:
    process, worker = parent(judges, tmp_path, "8", limit_s=5)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert gone(worker, within_s=0.5)


def test_interrupting_the_parent_prints_no_traceback_of_a_worker(judges: str, tmp_path: Path) -> None:
    process, worker = parent(judges, tmp_path, "hang", limit_s=30)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    _, errors = process.communicate(timeout=20)
    assert errors.count("Traceback") == 1, "only the parent's own"
    assert "worker.py" not in errors
    assert gone(worker, within_s=0.5)


def test_a_hanging_worker_ends_even_when_its_parent_was_killed(judges: str, tmp_path: Path) -> None:
    process, worker = parent(judges, tmp_path, "spin", limit_s=0.3)
    time.sleep(0.1)
    process.kill()
    process.communicate(timeout=20)
    assert gone(worker, within_s=2 * 0.3 + 1 + 3)


# --- mathematics


def test_math_equalities() -> None:
    cases = [
        (r"\frac{1}{2}", r"so it is $\frac{2}{4}$", 1),
        (r"\frac{1}{2}", "the answer is 0.5", 1),
        (r"$\frac{1}{2}$", r"\boxed{1/2}", 1),
        ("1/2", r"\boxed{\frac12}", 1),
        ("x^2+1", "$1+x^2$", 1),
        ("x^2+1", "$1+y^2$", 0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        ("1,234", r"\boxed{1234}", 1),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
        ("4", r"\boxed{3} or \boxed{4}", 0),  # a set of two is not the four
        ("42", "42", 1),
        ("42", "I got 41", 0),
        ("42", "no idea", 0),
        ("42", "", 0),
        ("42", r"\boxed{", 0),
        ("42", "\ud800 \x00", 0),
        (r"\$36", r"\boxed{36}", 1),  # a price: its dollar begins no formula
        (r"\$32,\!348", r"$\boxed{\$32348}$", 1),
        (r"\$36", r"\boxed{35}", 0),
        ("", "42", None),
    ]
    prompts = [Prompt("q", "", gold) for gold, _, _ in cases]
    with ProcessVerifier("stalewise.tasks.verifiers.math:load_judge", workers=2) as verifier:
        rewards = verifier.score(prompts, [response for _, response, _ in cases])
    found = [None if reward.error else reward.value for reward in rewards]
    assert found == [expected for *_, expected in cases]
    assert rewards[-1].error == "unparseable gold answer: ''"
    assert rewards[0].parts == {"parsed": 1.0}
    assert [dict(rewards[place].parts) for place in (12, 13, 15)] == [{"parsed": 0.0}] * 3


def test_gold_answers_that_are_not_right_when_given_as_an_answer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    golds = {
        "two": "$221,$8$",
        "number": "12",
        "sentence": "When \\(n = 2\\), the number is 7;\nWhen \\(n \\geq  3\\), the number is \\({n}^{2} + 2\\)",
        "interval": r"$[0, \infty)$",
        "unreadable": "?",  # an error of its own
        "again": "$221,$8$",
    }
    prompts = [Prompt(name, "q", gold) for name, gold in golds.items()]
    verifier = MathVerifier(workers=1)
    with verifier:
        assert [prompt.prompt_id for prompt in verifier.unmatched(prompts)] == ["two", "sentence", "again"]
        monkeypatch.setattr(
            verifier, "_score", lambda items: [None for _ in items if pytest.fail("again")]
        )  # nothing is scored a second time
        assert len(verifier.unmatched(prompts)) == 3


def test_hostile_mathematics_costs_at_most_the_limit() -> None:
    verifier = make_verifier("math", workers=2, limit_s=1)
    score(verifier, "8", "8")
    began = time.monotonic()
    rewards = score(verifier, "$" + "(" * 400 + "8" + ")" * 400 + "$", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{8}")
    took = time.monotonic() - began
    verifier.close()
    assert took < 2 * 1 + 5
    assert all(reward.error == "timeout after 1.0 s" or reward.value in (0, 1) for reward in rewards)
    assert rewards[2].value == 1.0


# --- counting


def test_errors_are_counted_by_kind_with_an_example() -> None:
    nan = math.nan
    rewards = [
        Reward(1.0),
        Reward(nan, error="ValueError: first"),
        Reward(nan, error="timeout after 5.0 s"),
        Reward(nan, error="ValueError: second"),
    ]
    counts = count_errors(rewards)
    assert (counts.total, counts.failed) == (4, 3)
    assert counts.kinds == {"ValueError": 2, "timeout after 5.0 s": 1}
    assert counts.examples["ValueError"] == "ValueError: first"
    assert str(counts) == "3 of 4 responses could not be scored: 2 × ValueError (first), 1 × timeout after 5.0 s"
    assert (counts + count_errors(rewards)).kinds == {"ValueError": 4, "timeout after 5.0 s": 2}
    assert str(count_errors([Reward(0.0)])) == "all 1 responses were scored"


def test_what_went_wrong_is_listed_by_prompt() -> None:
    nan = math.nan
    prompts = [Prompt(name, "x", "1") for name in "aabcd"]
    rewards = [
        Reward(nan, error="unparseable gold answer: '?'"),
        Reward(nan, error="unparseable gold answer: '?'"),
        Reward(0.0, {"parsed": 0.0}),
        Reward(0.0, {"parsed": 1.0}),
        Reward(0.0, {"parsed": 0.0}),
    ]
    texts = ["1", "2", "I do not know", "7", "x" * 500 + "end"]
    counts = count_errors(rewards, prompts, texts)
    assert counts.record() == {
        "verifier_error_kinds": {"unparseable gold answer": 2},
        "verifier_error_examples": {"unparseable gold answer": "unparseable gold answer: '?'"},
        "verifier_error_prompts": {"unparseable gold answer": ["a"]},  # each prompt once
        "unparsed": 2,
        "unparsed_examples": [
            {"prompt_id": "b", "response": "I do not know"},
            {"prompt_id": "d", "response": "…" + "x" * 197 + "end"},  # where an answer would have stood
        ],
    }
    twice = counts + count_errors(rewards, [Prompt(name, "x", "1") for name in "eebcd"], texts)
    assert (twice.unparsed, twice.failed, twice.prompts) == (4, 4, {"unparseable gold answer": ("a", "e")})
    assert len(twice.unparsed_examples) == 4
    many = [Prompt(str(number), "x", "1") for number in range(50)]
    listed = count_errors([Reward(0.0, {"parsed": 0.0})] * 50, many, ["?"] * 50)
    assert (listed.unparsed, len(listed.unparsed_examples)) == (50, 20)  # all are counted, some are named
