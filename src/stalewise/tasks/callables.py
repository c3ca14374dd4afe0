"""Fingerprints and registration of functions and classes of the user's program.

A config is data, so it names a function as `name@fingerprint`, or `module:name@fingerprint` if it can be imported. The
program registers the function under that name. So a resumed run notices that a function was changed.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import hashlib
import inspect
import json
import linecache
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import is_importable, load
from stalewise.tasks.verifiers.judge_process import reward_of
from stalewise.types import Reward

DIGITS = 12  # length of a fingerprint
_REGISTERED: dict[str, Any] = {}


class OnlyInProgramError(TaskError):
    """A function or class that exists only in the program that began the run."""


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a function or class, and the values it uses that the fingerprint does not cover."""

    name: str
    digest: str
    where: str  # file and line
    source: str  # as far as it is known
    uncovered: list[str] = field(default_factory=list)

    @property
    def reference(self) -> str:
        """How a config names it."""
        return f"{self.name}@{self.digest}"

    def describe(self) -> str:
        """The source, with a comment on what the fingerprint covers; a run directory keeps it for readers."""
        rest = ", ".join(self.uncovered) or "what it reads from files, the network or the clock"
        head = [f"{self.reference}, from {self.where}", f"Not part of the fingerprint: {rest}."]
        return "".join(f"# {line}\n" for line in head) + "\n" + self.source.rstrip() + "\n"


def fingerprint(value: Any) -> Fingerprint:
    """The fingerprint of a callable or a class: of its source without comments and layout, else of its code.

    It also covers defaults and the variables that the code uses from enclosing functions and its module, if they are
    constants (numbers, text, tuples of them, compiled patterns), the user's functions or classes, or modules (by name).
    Lists, dicts and other objects may change while a program runs: they are listed in `uncovered`.
    """
    parts = _Parts()
    parts.add(value)
    digest = hashlib.sha256("\0".join(parts.texts).encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    where, source = _location(value)
    return Fingerprint(importable_name(value) or _name(value), digest, where, source, sorted(parts.uncovered))


def importable_name(value: Any) -> str:
    """`module:name` if another process can import this object under that name, else an empty string."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module in ("__main__", "builtins") or not name.isidentifier():
        return ""
    found = sys.modules.get(module)
    is_file = getattr(found, "__file__", None) is not None  # not a module that a program made up
    return f"{module}:{name}" if is_file and getattr(found, name, None) is value else ""


def register(value: Any, fingerprint: Fingerprint) -> str:
    """Keep a callable under the reference of its fingerprint; returns the reference."""
    _REGISTERED[fingerprint.reference] = value
    return fingerprint.reference


def registered(reference: str, what: str) -> Any:
    """The object with this reference: the one that this program registered, or imported if it is unchanged."""
    if reference in _REGISTERED:
        return _REGISTERED[reference]
    name, _, digest = reference.rpartition("@")
    if ":" not in name:
        raise OnlyInProgramError(
            f"the {what} {name} exists only in the program that called stalewise.train: run that program again, or "
            f"move the {what} into a module that Python finds"
        )
    is_importable(name.partition(":")[0])
    try:
        value = load(name)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"the {what} {name} cannot be imported: {error}; put its directory on PYTHONPATH") from error
    if fingerprint(value).digest != digest:
        raise TaskError(
            f"the {what} {name} was changed since the run began: restore it, or start a run of another name"
        )
    return value


def registered_task(task: str, *, seed: int = 0) -> Any:
    """A task of the user's: the registered object, or an instance of the registered class with this seed."""
    value = registered(task, "task")
    return value(seed=seed) if isinstance(value, type) else value


class _Parts:
    """Collects the texts whose hash is the fingerprint."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.uncovered: set[str] = set()
        self._visited: set[int] = set()

    def add(self, value: Any, name: str = "") -> None:
        """Add a value that the fingerprint covers, or note its name."""
        if (constant := _constant(value)) is not None:
            self.texts.append(f"{name}={constant}")
        elif isinstance(value, ModuleType):
            self.texts.append(f"module {value.__name__}")
        elif id(value) in self._visited:
            self.texts.append(f"again {_name(value)}")
        elif isinstance(value, FunctionType):
            self._visited.add(id(value))
            self._add_function(value)
        elif isinstance(value, MethodType):
            self.add(value.__func__, name)
            self._add_state(value.__self__, name or _name(value.__self__))
        elif isinstance(value, functools.partial):
            self.add(value.func, name)
            for key, item in [*enumerate(value.args), *sorted(value.keywords.items())]:
                self.add(item, f"argument {key}")
        elif isinstance(value, type):
            self._visited.add(id(value))
            self._add_class(value)
        elif callable(value) and not inspect.isbuiltin(value) and not _is_installed(type(value)):
            self._visited.add(id(value))
            self.add(type(value))
            self._add_state(value, name or _name(value))
        elif inspect.isroutine(value) or callable(value):
            self.texts.append(f"{getattr(value, '__module__', '')}.{_name(value)}")
        else:
            self.uncovered.add(f"{name or _name(value)} ({type(value).__name__})")

    def _add_function(self, function: FunctionType) -> None:
        if _is_installed(function):
            self.texts.append(f"{function.__module__}.{function.__qualname__}")
            return
        node = _node_of(function.__code__)
        self.texts.append(_code_text(function.__code__) if node is None else ast.unparse(node))
        for index, default in enumerate(function.__defaults__ or ()):
            self.add(default, f"default {index}")
        for name, default in sorted((function.__kwdefaults__ or {}).items()):
            self.add(default, f"default {name}")
        assigned = _names(function.__code__, "STORE_GLOBAL", "STORE_DEREF")  # counters and the like change
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                if name not in assigned:
                    self.add(cell.cell_contents, name)
            except ValueError:  # not assigned yet
                self.uncovered.add(name)
        for name in sorted(_names(function.__code__, "LOAD_GLOBAL", "LOAD_NAME") - assigned):
            if name in function.__globals__ and not hasattr(builtins, name):
                self.add(function.__globals__[name], name)
        if (wrapped := getattr(function, "__wrapped__", None)) is not None:
            self.add(wrapped)

    def _add_class(self, kind: type) -> None:
        if _is_installed(kind):
            self.texts.append(f"{kind.__module__}.{kind.__qualname__}")
            return
        self.texts.append(f"class {kind.__qualname__}")
        for base in kind.__bases__:
            self.add(base)
        for name, value in sorted(vars(kind).items()):
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            is_covered = isinstance(value, FunctionType | type) or _constant(value) is not None
            if is_covered and name not in ("__module__", "__doc__", "__firstlineno__"):
                self.add(value, name)

    def _add_state(self, instance: Any, name: str) -> None:
        for key, value in sorted(getattr(instance, "__dict__", {}).items()):
            if _constant(value) is not None or isinstance(value, FunctionType):
                self.add(value, key)
            else:
                self.uncovered.add(f"{name}.{key} ({type(value).__name__})")


def _constant(value: Any) -> str | None:
    """A text for a value that cannot change while a program runs; None for any other value."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if isinstance(value, tuple | frozenset):
        items = [_constant(item) for item in value]
        if None in items:
            return None
        return f"{type(value).__name__} {items if isinstance(value, tuple) else sorted(map(str, items))}"
    return None


def _name(value: Any) -> str:
    name = getattr(value, "__name__", None) or type(value).__name__
    return "lambda" if name == "<lambda>" else str(name)


def _is_installed(value: Any) -> bool:
    """Whether a value belongs to Python, stalewise or an installed package: a version number identifies these."""
    module = sys.modules.get(getattr(value, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__":
        return False
    if file is None:
        return module.__name__ in sys.builtin_module_names
    installed = ("site-packages", "dist-packages", "/lib/python")
    return module.__name__.partition(".")[0] == "stalewise" or any(part in file for part in installed)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType, *operations: str) -> set[str]:
    """The names that the given operations use, in the code and in functions within it."""
    steps = (step for part in _codes(code) for step in dis.get_instructions(part))
    return {str(step.argval) for step in steps if step.opname in operations}


def _code_text(code: CodeType) -> str:
    """The code without names of files and numbers of lines; it differs between versions of Python."""
    parts: list[object] = [sys.version_info[:2]]
    for part in _codes(code):
        constants = [constant for constant in part.co_consts if not isinstance(constant, CodeType)]
        parts += [part.co_code.hex(), repr(constants), part.co_names, part.co_varnames, part.co_freevars]
    return repr(parts)


def _node_of(code: CodeType) -> ast.AST | None:
    """The definition of a function or lambda in its file or notebook cell; None where it is not found there."""
    linecache.checkcache(code.co_filename)
    try:
        tree = _parsed("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    if code.co_name == "<lambda>":
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
        if len(nodes) > 1:  # several on one line
            nodes = [node for node in nodes if _code_text(_compiled(node)) == _code_text(code)]
        return nodes[0] if len({ast.unparse(node) for node in nodes}) == 1 else None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _compiled(node: ast.Lambda) -> CodeType:
    code = compile(ast.Expression(node), "<lambda>", "eval")
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    if not text:
        raise ValueError("no source")
    return ast.parse(text)


def _location(value: Any) -> tuple[str, str]:
    """File and line, and source, for people."""
    value = value.func if isinstance(value, functools.partial) else value
    value = value if isinstance(value, FunctionType | MethodType | type) else type(value)
    if isinstance(value, type):
        try:
            lines, number = inspect.getsourcelines(value)
            return f"{inspect.getsourcefile(value)}, line {number}", inspect.cleandoc("".join(lines))
        except (OSError, TypeError):
            return "the program", f"# {_name(value)}: the source is not known"
    code = value.__code__
    node = _node_of(code)
    source = f"# {_name(value)}: the source is not known" if node is None else ast.unparse(node)
    return f"{code.co_filename}, line {code.co_firstlineno}", source


def fingerprint_of_task(task: Any) -> Fingerprint:
    """The fingerprint of a task: that of its class, combined with the first prompts if the task is an object."""
    kind = fingerprint(task if isinstance(task, type) else type(task))
    if isinstance(task, type):
        return kind
    count = min(256, task.size or 256)
    prompts = [*task.prompts(0, count), *task.evaluation_prompts(256)]
    content = json.dumps([[p.prompt_id, p.text, p.answer] for p in prompts], ensure_ascii=False)
    digest = hashlib.sha256(f"{kind.digest}\0{content}".encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
    uncovered = [*kind.uncovered, f"training prompts after the first {count}, held-out ones after the first 256"]
    return Fingerprint(_name(type(task)), digest, kind.where, kind.source, uncovered)


def fingerprint_of_list(functions: Sequence[Callable[..., Any]]) -> Fingerprint:
    """The fingerprint of several functions that together are the reward, in this order."""
    parts = [fingerprint(function) for function in functions]
    digest = hashlib.sha256("\0".join(part.reference for part in parts).encode()).hexdigest()[:DIGITS]
    source = "\n\n".join(f"# from {part.where}\n{part.source}" for part in parts)
    name = "+".join(_name(function) for function in functions)
    return Fingerprint(name, digest, "a list of functions", source, [text for part in parts for text in part.uncovered])


def combined(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Combine reward functions: the reward is the sum of theirs, and each is a part with the function's name.

    Parts that a function returns are called `function.part`. A function that returns None does not apply: it adds
    nothing and has no part. If a function fails, or all return None, the whole reward fails. The answer for majority
    votes is the first that a function returns.
    """
    names: list[str] = []
    for function in functions:
        name = _name(function)
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    calls = [bind(function) for function in functions]

    def total(results: Sequence[Any]) -> Any:
        given = zip(names, results, strict=True)
        rewards = {name: reward_of(result) for name, result in given if result is not None}
        if not rewards:
            return Reward(math.nan, error="every reward function returned None")
        for name, reward in rewards.items():
            if reward.error:
                return Reward(math.nan, error=f"{reward.error} (in {name})")
        parts = {name: reward.value for name, reward in rewards.items()}
        parts |= {f"{name}.{k}": v for name, reward in rewards.items() for k, v in reward.parts.items()}
        answer = next((reward.answer for reward in rewards.values() if reward.answer is not None), None)
        return Reward(math.fsum(reward.value for reward in rewards.values()), parts, answer=answer)

    if not any(map(is_async, functions)):
        return lambda **values: total([call(values) for call in calls])

    async def score(**values: Any) -> Any:
        results = [call(values) for call in calls]
        return total([await result if inspect.isawaitable(result) else result for result in results])

    return score


def is_async(function: Any) -> bool:
    """Whether calls of a function must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


Bound = Callable[[Mapping[str, Any]], Any]


def bind(function: Callable[..., Any]) -> Bound:
    """Bind a function by its parameter names: `prompt`, `response`, `answer`, and fields of the row.

    `completion` is another name for the response. A function with three parameters of other names gets prompt, response
    and answer in this order. A function with the parameter `completions` is called as TRL does: every argument is a
    list (of messages if the prompt is a `ChatText`), and it returns a list.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return lambda values: function(values["prompt"], values["response"], values["answer"])
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if "completions" in names:
        return lambda values: _as_trl(function, values, None if takes_all else names)
    own = {"prompt", "response", "answer", "completion"}
    if len(positional) >= 3 and not own & set(positional[:3]):
        return lambda values: function(values["prompt"], values["response"], values["answer"])

    def call(values: Mapping[str, Any]) -> Any:
        known = {**values, "completion": values["response"]} if "completion" in names else values
        return function(**{key: value for key, value in known.items() if takes_all or key in names})

    return call


def takes_prompt_object(function: Callable[..., Any]) -> bool:
    """Whether a function has the form (prompt, response), for which the verifier python passes a `Prompt`.

    Such a function can be called with two arguments, has no parameter `answer` or `completion`, does not begin with
    `response`, and has no `**row` beside its parameters. Any other function is called by parameter names (`bind`).
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none
        return True
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_row = bool(names) and any(p.kind is p.VAR_KEYWORD for p in parameters)
    if takes_row or {"answer", "completion", "completions"} & set(names) or names[:1] == ["response"]:
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


class ChatText(str):
    """The text of a prompt whose row has a list of `messages` in the field `prompt`, as TRL's conversational data."""

    messages: list[Any]


def _as_trl(function: Callable[..., Any], values: Mapping[str, Any], names: set[str] | None) -> Any:
    prompt, response = values["prompt"], values["response"]
    columns = {"prompts": prompt, "completions": response}
    if isinstance(prompt, ChatText):
        columns = {"prompts": prompt.messages, "completions": [{"role": "assistant", "content": response}]}
    columns |= {key: value for key, value in values.items() if key not in ("prompt", "response")}
    lists = {key: [value] for key, value in columns.items() if names is None or key in names}
    result = function(**lists)
    return result[0] if isinstance(result, list | tuple) and len(result) == 1 else result


def check_parameters(function: Callable[..., Any], fields: Mapping[str, Any], *, has_answer: bool = True) -> None:
    """Raise a TaskError if a function needs an argument that rows with these fields do not have."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    given = {"prompt", "response", "answer", "completion", "prompts", "completions", *fields}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    in_order = len(positional) >= 3 and not given & {p.name for p in positional[:3]}
    missing = [name for name in needed if name not in given]
    if in_order:
        missing = needed[3:]
    if not has_answer and "answer" in needed:
        asks = f"the reward function {_name(function)} asks for 'answer', and no row has it"
        raise TaskError(f"{asks}; answer_field names its field: {nearest('answer', map(str, fields))}")
    if missing:
        known = ", ".join(sorted({"prompt", "response", "answer", *map(str, fields)}))
        raise TaskError(
            f"the reward function {_name(function)} asks for {missing[0]!r}, which it does not get: it may name {known}"
        )
