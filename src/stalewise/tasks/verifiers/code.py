"""Scores programs: the response's program runs against a row's tests in a sandbox.

Tests that are Python code run in one process and the program in another. The tests call its functions over a socket,
which transfers arguments and results as plain data. So a program cannot see the tests or the process that judges it: it
cannot end early with success, patch modules that the tests use, or return an object that equals everything.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import json
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stalewise.errors import TaskError
from stalewise.tasks.base import paired
from stalewise.tasks.sandbox import Limits, SandboxResult, isolation, run_python
from stalewise.types import Prompt, Reward

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_OTHER_LANGUAGES = re.compile(r"(?i)(sh|bash|shell|text|txt|output|console|json|toml|yaml)$")


class CodeVerifier:
    """1 if the response's program passes every test of its row, else 0.

    The field `tests_field` of a row holds assert statements (a list of texts, as in MBPP; `test_imports` or
    `test_setup_code` come before them), a text that defines `check` (as in HumanEval, with `entry_point`), or pairs of
    standard input and output (a list of `{"input", "output"}`, or lists `inputs` and `outputs`).

    The program is the last fenced block of the response, or all of it. Parts: `passed` is the share of tests passed,
    `timed_out` is 1 if it hit a time limit, and `parsed` is 0 if it is not Python. A program that never ends scores 0.
    """

    scores_independently = True

    def __init__(
        self,
        *,
        tests_field: str = "tests",
        seconds: float = 5.0,
        memory_mb: int = 512,
        processes: int = 16,
        packages: bool = False,
        workers: int | None = None,
        unsafe_without_sandbox: bool = False,
    ):
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        if self.workers < 1:
            raise TaskError(f"verifier code: workers is {workers}, expected at least 1")
        self.tests_field, self.packages = tests_field, packages
        self.limits = Limits(seconds=seconds, memory_mb=memory_mb, processes=processes)
        self.unsafe_without_sandbox = unsafe_without_sandbox
        isolation(unsafe_without_sandbox=unsafe_without_sandbox)  # refuse before anything is generated

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`; results in the same order."""
        items = paired(prompts, responses)
        with ThreadPoolExecutor(self.workers, thread_name_prefix="stalewise-code") as threads:
            return list(threads.map(lambda item: self._score_one(*item), items))

    def close(self) -> None:
        """Do nothing: a sandbox ends with its program."""

    def _score_one(self, prompt: Prompt, response: str) -> Reward:
        try:
            row = json.loads(prompt.metadata.get("row", "{}"))
            pairs, tests = input_output_pairs(row.get(self.tests_field)), row.get(self.tests_field)
            program = program_in(response)
            if pairs:
                return self._compare_outputs(program, pairs)
            return self._run_tests(program, response, test_code(row, tests), row, prompt)
        except (TaskError, OSError) as problem:
            return Reward(math.nan, error=f"{type(problem).__name__}: {problem}"[:300])

    def _sandbox(self, program: str, **options: Any) -> SandboxResult:
        unsafe = self.unsafe_without_sandbox
        return run_python(program, limits=self.limits, packages=self.packages, unsafe_without_sandbox=unsafe, **options)

    def _compare_outputs(self, program: str, pairs: list[tuple[str, str]]) -> Reward:
        """Run the program once for each input; white space at the ends of lines and of the output does not count."""
        passed = 0
        for given, expected in pairs:
            result = self._sandbox(program, stdin=given)
            if result.timed_out:
                return _reward(passed / len(pairs), timed_out=True)
            if result.status == "failed" and "SyntaxError" in result.stderr.rpartition("\n  ")[2]:
                return _reward(0.0, parsed=False)
            passed += result.status == "ok" and _lines(result.stdout) == _lines(expected)
        return _reward(passed / len(pairs))

    def _run_tests(
        self, program: str, response: str, tests: Mapping[str, Any], row: Mapping[str, Any], prompt: Prompt
    ) -> Reward:
        begun = str(row.get("prompt", prompt.metadata.get("problem", prompt.text))) if tests["entry_point"] else ""
        solution = {"program": program, "response": response, "begun": begun, "entry_point": tests["entry_point"]}
        names = {name for name in re.findall(r"^def (\w+)", prompt.answer, re.MULTILINE) if hasattr(builtins, name)}
        testing = {**tests, "own_names": sorted(names)}
        result = self._sandbox(TESTING, stdin=json.dumps(testing), peer=f"{SOLVING}\nserve({json.dumps(solution)!r})\n")
        if result.timed_out:
            return _reward(0.0, timed_out=True)
        try:
            verdict = json.loads(result.stdout.rpartition("\n{")[2].join(["{", ""]))
            total, passed = int(verdict["total"]), int(verdict["passed"])
        except (ValueError, KeyError, TypeError):
            return _reward(0.0)  # a limit ended it, or the program ended the process of the tests
        if verdict["error"]:
            return Reward(math.nan, error=f"tests: {verdict['error']}"[:300])
        return _reward(passed / total, parsed=verdict["parsed"])


def _reward(passed: float, *, timed_out: bool = False, parsed: bool = True) -> Reward:
    parts = {"passed": passed, "timed_out": float(timed_out), "parsed": float(parsed)}
    return Reward(float(passed == 1.0 and not timed_out), parts)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def program_in(response: str) -> str:
    r"""The last fenced block of a response that can be Python, or the response if there is none.

    >>> program_in("Here:\n```python\nx = 1\n```\nIt prints\n```text\n1\n```")
    'x = 1\n'
    """
    blocks = [block for language, block in _FENCE.findall(response) if not _OTHER_LANGUAGES.match(language)]
    return blocks[-1] if blocks else response


def input_output_pairs(tests: object) -> list[tuple[str, str]]:
    """Pairs of standard input and output, if the tests are such pairs; else an empty list."""
    if isinstance(tests, Mapping) and isinstance(tests.get("inputs"), list) and isinstance(tests.get("outputs"), list):
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise TaskError(f"tests have {len(tests['inputs'])} inputs but {len(tests['outputs'])} outputs")
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        return [(_joined(stdin), _joined(stdout)) for stdin, stdout in pairs]
    if isinstance(tests, list) and tests and all(isinstance(test, Mapping) for test in tests):
        if missing := [test for test in tests if not {"input", "output"} <= set(test)]:
            raise TaskError(f"a test has the fields {sorted(missing[0])}, expected input and output")
        return [(_joined(test["input"]), _joined(test["output"])) for test in tests]
    return []


def _joined(text: object) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def test_code(row: Mapping[str, Any], tests: object) -> dict[str, Any]:
    """The tests of a row as statements to run in order, the code before them, and the name of the tested function."""
    before = row.get("test_imports", row.get("test_setup_code", ""))
    before = "\n".join(map(str, before)) if isinstance(before, list) else str(before or "")
    entry_point = row.get("entry_point", "")
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return {"before": before, "tests": tests, "entry_point": str(entry_point)}
    if isinstance(tests, str) and "def check(" in tests and entry_point:
        return {"before": f"{before}\n{tests}", "tests": [f"check({entry_point})"], "entry_point": str(entry_point)}
    if isinstance(tests, str) and tests.strip():
        return {"before": before, "tests": [tests], "entry_point": str(entry_point)}
    raise TaskError(
        "a row for the verifier code needs tests: a list of assert statements, a text that defines check (with "
        "entry_point), or pairs of input and output"
    )


test_code.__test__ = False  # type: ignore[attr-defined]  # pytest collects by name


# What follows runs in the sandbox: the source of these functions is sent there.


def encode(value: Any) -> Any:
    """Plain data as JSON that keeps its types; for any other object, only its truth value."""
    if value is None or isinstance(value, bool | str):
        return value if type(value) in (bool, str, type(None)) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return ["float", repr(float(value))]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__ if type(value) in (bytes, bytearray) else "bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(item) for item in value]]
    if hasattr(value, "__next__") or isinstance(value, range) or type(value).__name__ in ("dict_keys", "dict_values"):
        return ["iterator", [encode(item) for item in value]]
    return ["other", bool(value)]


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind in ("float", "complex"):
        return {"float": float, "complex": complex}[kind](*map(float, rest))
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind].fromhex(rest[0])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in rest[0]}
    if kind == "other":
        return type("NoPlainData", (), {"__bool__": lambda self: rest[0]})()  # equal to nothing
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}
    return kinds[kind]([decode(item) for item in rest[0]])


def serve(given: str) -> None:
    """Run the solution, and answer calls of its functions until the tests are done."""
    solution = json.loads(given)
    space: dict[str, Any] = {"__name__": "solution"}
    whole, problem = solution["program"], ""
    try:
        try:
            compile(whole, "solution", "exec")
            complete = re.search(rf"^\s*(async )?def {solution['entry_point']}\b", whole, re.MULTILINE)
        except SyntaxError:
            complete = None
        if solution["entry_point"] and solution["begun"]:  # the prompt began it: a stub, or the beginning of the rest
            rest = f"\n{whole}" if complete else solution["response"]
            with contextlib.suppress(SyntaxError):
                compile(solution["begun"], "begun", "exec")
                whole = solution["begun"] + rest
        code = compile(whole, "solution", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        problem, code = "SyntaxError", compile("", "solution", "exec")
    channel = socket.socket(fileno=3).makefile("rw", encoding="utf-8", errors="surrogatepass")
    try:
        exec(code, space)
    except BaseException as error:
        problem = problem or type(error).__name__
    names = [name for name, value in space.items() if callable(value)]
    modules = [name for name, value in space.items() if isinstance(value, type(sys)) and value.__name__ == name]
    channel.write(json.dumps({"names": names, "modules": modules, "problem": problem}) + "\n")
    channel.flush()
    for line in channel:
        call = json.loads(line)
        try:
            keywords = {name: decode(value) for name, value in call["keywords"].items()}
            value = space[call["name"]](*[decode(value) for value in call["arguments"]], **keywords)
            answer = {"value": encode(value)}
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": str(error)[:200]}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


def proxy(channel: Any, name: str) -> Callable[..., Any]:
    """A function that calls the solution's function of that name in the other process."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        named = {key: encode(value) for key, value in keywords.items()}
        request = {"name": name, "arguments": [encode(value) for value in arguments], "keywords": named}
        channel.write(json.dumps(request) + "\n")
        channel.flush()
        answer = json.loads(channel.readline())
        if "raised" in answer:
            kind = getattr(builtins, str(answer["raised"]), RuntimeError)
            usual = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if usual else RuntimeError)(str(answer.get("text")))
        return decode(answer["value"])

    call.__name__ = name
    return call


def test_all(given: str) -> dict[str, Any]:
    """Run the tests one after another; those that raise nothing are passed."""
    told = json.loads(given)
    channel = socket.socket(fileno=3).makefile("rw", encoding="utf-8", errors="surrogatepass")
    verdict = {"passed": 0, "total": len(told["tests"]), "parsed": True, "error": ""}
    try:
        before = compile(told["before"], "before the tests", "exec")
        tests = [compile(test, "test", "exec") for test in told["tests"]]
    except (SyntaxError, ValueError) as problem:
        return verdict | {"error": f"{type(problem).__name__}: {problem}"}
    try:
        solution = json.loads(channel.readline())
        names = [name for name in solution["names"] if name in told["own_names"] or not hasattr(builtins, name)]
        verdict["parsed"] = solution["problem"] != "SyntaxError"
    except (ValueError, KeyError, TypeError):
        return verdict
    space: dict[str, Any] = {"__name__": "tests"}
    for name in solution.get("modules", ()):  # tests may use what the solution imported, by its own name
        with contextlib.suppress(Exception):
            space[str(name)] = importlib.import_module(str(name))
    space |= {str(name): proxy(channel, str(name)) for name in names}
    try:
        exec(before, space)
    except Exception as problem:
        return verdict | {"error": f"what comes before them raised {type(problem).__name__}: {problem}"}
    for test in tests:
        try:
            exec(test, space)
            verdict["passed"] += 1
        except Exception as problem:
            print(f"{type(problem).__name__}: {problem}"[:200], file=sys.stderr)
    return verdict


test_all.__test__ = False  # type: ignore[attr-defined]

_HEAD = """import builtins, contextlib, importlib, json, re, socket, sys
from collections.abc import Callable
from typing import Any

sys.set_int_max_str_digits(0)

"""
SOLVING = _HEAD + "\n\n".join(map(inspect.getsource, (encode, decode, serve)))
TESTING = _HEAD + "\n\n".join(map(inspect.getsource, (encode, decode, proxy, test_all)))
TESTING += "\nprint('\\n' + json.dumps(test_all(sys.stdin.read())))\n"
