"""Mathematics through math-verify."""

import pytest

from stalewise.tasks import make_verifier
from stalewise.tasks.verifiers.math import MathVerifier
from stalewise.tasks.verifiers.pool import ProcessVerifier
from stalewise.types import Prompt
from verifying import score


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
    with ProcessVerifier("stalewise.tasks.verifiers.math:load_judge", workers=1, limit_s=200) as verifier:
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
    rewards = score(verifier, "$" + "(" * 400 + "8" + ")" * 400 + "$", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{8}")
    verifier.close()  # without a limit it would not come to this
    assert all(reward.error == "timeout after 1.0 s" or reward.value in (0, 1) for reward in rewards)
    assert rewards[2].value == 1.0
