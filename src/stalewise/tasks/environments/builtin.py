"""Built-in environments: calculator, Python tool, running sums that continue the policy's answers, and retries."""

from __future__ import annotations

import ast
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.base import stream
from stalewise.tasks.environments import ChatMessage, Episode, first_messages
from stalewise.tasks.environments.play import TaskScore
from stalewise.types import Prompt

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
LONGEST_EXPRESSION = 200  # characters
CALCULATOR = (
    "You can use a calculator: write an expression between <calc> and </calc> and end your message. The result is sent "
    "to you. When you know the answer, give it without a call."
)
PYTHON = (
    "You can run Python: write a program between ```python and ``` and end your message. What it prints is sent back. "
    "When you know the answer, give it without a program."
)
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_PROGRAM = re.compile(r"```python\s*\n(.*?)```", re.DOTALL)


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or an error message.

    >>> calculate("12*(3+4)"), calculate("7/2"), calculate("1/0"), calculate("import os")
    ('84', '3.5', 'error: division by zero', 'error: not an expression of numbers and + - * / // %')
    """
    try:
        if len(expression) > LONGEST_EXPRESSION:
            raise ValueError("the expression is too long")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as problem:
        known = str(problem) if isinstance(problem, ValueError) else "not an expression of numbers and + - * / // %"
        return f"error: {known}"
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an expression of numbers and + - * / // %")


class _Tool(ABC):
    """Answers turns that call the tool. A turn without a call is the final answer, which the task's verifier scores."""

    name = "tool"
    instructions = ""

    def __init__(self, role: str = "tool", instructions: str | None = None) -> None:
        if role not in ("tool", "user"):
            raise TaskError(f'the option role of an environment is {role!r}: expected "tool" or "user"')
        self.role = role
        if instructions is not None:
            self.instructions = instructions
        self.calls = self.errors = 0

    def reset(self, row: Prompt) -> list[ChatMessage]:
        """The prompt, and how to use the tool."""
        is_chat = row.metadata.get("format") == "chat"
        return first_messages(row, self.instructions if is_chat else "")

    @abstractmethod
    def call(self, response: str) -> str | None:
        """The tool's answer; None if the turn is not a call."""

    def step(self, response: str) -> list[ChatMessage] | None:
        """Answer a call."""
        answer = self.call(response)
        if answer is None:
            return None
        self.calls += 1
        self.errors += answer.startswith("error")
        return [{"role": self.role, "content": answer}]

    def score(self, episode: Episode) -> TaskScore:
        """The verifier's score of the last turn, with the numbers of calls and errors as parts."""
        return TaskScore({"calls": float(self.calls), "call_errors": float(self.errors)})


class Calculator(_Tool):
    """Answers `<calc>12*7</calc>`; without a chat a turn that ends in "=" is a call: "12*7=" is answered by "84;"."""

    local = True
    instructions = CALCULATOR

    def __init__(self, role: str = "tool", instructions: str | None = None) -> None:
        super().__init__(role, instructions)
        self.is_chat = False

    def reset(self, row: Prompt) -> list[ChatMessage]:
        """The prompt, and how to use the calculator."""
        self.is_chat = row.metadata.get("format") == "chat"
        return super().reset(row)

    def call(self, response: str) -> str | None:
        """The value of the last expression."""
        if self.is_chat:
            expressions = _CALL.findall(response)
            return calculate(expressions[-1]) if expressions else None
        text = response.strip()
        if not text.endswith("="):
            return None
        value = calculate(text[:-1].rpartition(";")[2])
        return f"{'' if value.startswith('error') else value};"


class PythonTool(_Tool):
    """Runs programs between ```python and ``` in the sandbox, and answers with what they print.

    `seconds` of CPU time and `memory_mb` limit a program; `most_characters` of what it prints are kept.
    """

    instructions = PYTHON

    def __init__(
        self,
        role: str = "tool",
        instructions: str | None = None,
        seconds: float = 2.0,
        memory_mb: int = 256,
        most_characters: int = 400,
        unsafe_without_sandbox: bool = False,
    ) -> None:
        super().__init__(role, instructions)
        from stalewise.tasks.sandbox import Limits, isolation, run_python  # here: other environments need no sandbox

        isolation(unsafe_without_sandbox=unsafe_without_sandbox)  # raises if there is none
        self._run = run_python
        self._limits = Limits(seconds=seconds, memory_mb=memory_mb)
        self._most = most_characters
        self._unsafe = unsafe_without_sandbox

    def call(self, response: str) -> str | None:
        """The output of the last program, or the last line of its error."""
        programs = _PROGRAM.findall(response)
        if not programs:
            return None
        result = self._run(programs[-1], limits=self._limits, unsafe_without_sandbox=self._unsafe)
        if result.status == "ok":
            printed = result.stdout.strip() or "(nothing was printed)"
        else:
            last = (result.stderr.strip() or result.status).splitlines()[-1]
            printed = f"error: {last if result.status == 'failed' else result.status}"
        return printed if len(printed) <= self._most else printed[: self._most] + " …"


class RunningSums:
    """A number game for a policy with one token per character: each sum continues the policy's last answer.

    The prompt is a sum, "12+34=". After each answer comes another sum that begins with that answer plus 10, within
    10..99: "46" is followed by "56+21=". The reward is the share of right sums among `rounds`. An answer that is no
    number ends the game.
    """

    local = True

    def __init__(self, rounds: int = 3, largest: int = 20) -> None:
        if rounds < 1 or not 1 <= largest <= 40:
            raise TaskError(f"the environment sums needs rounds ≥ 1 and largest in 1..40, not {rounds=}, {largest=}")
        self.rounds, self.largest = rounds, largest
        self.total = self.played = self.right = 0
        self.row = Prompt("", "", "")

    def reset(self, row: Prompt) -> list[ChatMessage]:
        """The first sum."""
        self.row, self.played, self.right = row, 0, 0
        self.total = sum(map(int, row.text.rstrip("=").split("+")))
        return [{"role": "user", "content": row.text}]

    def step(self, response: str) -> list[ChatMessage] | None:
        """The next sum, from the policy's own answer."""
        text = response.strip()
        self.played += 1
        self.right += text == str(self.total)
        if self.played == self.rounds or not (text.isascii() and text.isdigit() and len(text) <= 3):
            return None
        term = 10 + int(stream("sums", self.row.prompt_id, self.played).random() * self.largest)
        start = 10 + int(text) % 90
        self.total = start + term
        return [{"role": "user", "content": f"{start}+{term}="}]

    def score(self, episode: Episode) -> dict[str, float]:
        """The share of right sums."""
        return {"reward": self.right / self.rounds, "played": float(self.played)}


class Retry:
    """Retries for any task with answers: after a wrong answer the policy is told so, and may answer again.

    Answers are scored by the verifier `verifier` with `verifier_options`; or by reasoning-gym, for prompts of the task
    gym with its `dataset` and `parameters`. The reward of an answer in turn n is its score times `discount`ⁿ⁻¹.
    """

    def __init__(
        self,
        verifier: str = "number",
        verifier_options: dict[str, Any] | None = None,
        dataset: str = "",
        parameters: dict[str, Any] | None = None,
        tries: int = 3,
        discount: float = 0.7,
        message: str = "That is not right. Try again.",
    ) -> None:
        if tries < 1 or not 0 < discount <= 1:
            raise TaskError(f"the environment retry needs tries ≥ 1 and 0 < discount ≤ 1, not {tries=}, {discount=}")
        self.tries, self.discount, self.message = tries, discount, message
        self._judge = _judge(dataset, parameters or {}) if dataset else _verifier(verifier, verifier_options or {})
        self.row, self.turns, self.value, self.first = Prompt("", "", ""), 0, 0.0, 0.0

    def reset(self, row: Prompt) -> list[ChatMessage]:
        """The prompt."""
        self.row, self.turns, self.value = row, 0, 0.0
        return first_messages(row)

    def step(self, response: str) -> list[ChatMessage] | None:
        """None if the answer is right, or was the last."""
        self.turns += 1
        reward = self._judge(self.row, response)
        if reward.error:
            raise RuntimeError(reward.error)
        self.value = reward.value * self.discount ** (self.turns - 1)
        if self.turns == 1:
            self.first = reward.value
        return None if reward.value >= 1 or self.turns == self.tries else [{"role": "user", "content": self.message}]

    def score(self, episode: Episode) -> dict[str, float]:
        """The discounted score of the last answer."""
        return {"reward": self.value, "first": self.first, "turns": float(self.turns)}


_JUDGES: dict[str, Any] = {}  # a cache for this process, since making a judge takes seconds


def _judge(dataset: str, parameters: dict[str, Any]) -> Any:
    key = f"{dataset} {sorted(parameters.items())}"
    if key not in _JUDGES:
        from stalewise.tasks.gym import load_judge

        _JUDGES[key] = load_judge(dataset=dataset, parameters=parameters)
    return _JUDGES[key]


def _verifier(name: str, options: dict[str, Any]) -> Any:
    key = f"verifier {name} {sorted(options.items())}"
    if key not in _JUDGES:
        from stalewise.tasks.verifiers import make_verifier

        verifier = make_verifier(name, **options)
        _JUDGES[key] = lambda row, response: verifier.score([row], [response])[0]
    return _JUDGES[key]
