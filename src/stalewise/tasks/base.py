"""Protocols of tasks and verifiers, numbered prompts, and construction by name.

Prompt number i depends only on the task's seed and on i. So interrupted generation resumes at its index, and machines
that generate different ranges need not communicate.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from stalewise.errors import TaskError, nearest
from stalewise.types import Prompt, Reward

CHAT: Mapping[str, str] = {"format": "chat"}
"""Metadata of a prompt whose text is a user message: the generator applies the chat template.

Optional keys: "system" (the system message), "history" (the messages between it and the text, as JSON), "prefill" (the
beginning of the reply), "template" (variables of the chat template, as JSON), "problem" (the text that was inserted
into the task's template). The text of a prompt without "format" goes to the tokenizer as it is.
"""

LONGEST_TEXT = 1 << 28  # bytes of a file that is read as a whole

Item = TypeVar("Item")


@runtime_checkable
class Verifier(Protocol):
    """Scores responses. A response that cannot be scored gets the value NaN and an error, never 0.

    Optional: `scores_independently = True`, if the score of a response does not depend on the other responses of a call
    and the work is done outside of this process. Then, on a GPU, responses are scored while others are sampled.
    """

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`; results in the same order."""
        ...

    def close(self) -> None:
        """End the verifier's processes, if any. May be called twice."""


@runtime_checkable
class Task(Protocol):
    """A stream of training prompts, a held-out set, and a verifier."""

    @property
    def name(self) -> str:
        """The task's name in reports and prompt ids."""
        ...

    @property
    def size(self) -> int | None:
        """The number of distinct training prompts; None if unlimited."""
        ...

    @property
    def verifier(self) -> Verifier:
        """The verifier that scores responses."""
        ...

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`, the same at every call.

        A finite task yields all of its prompts once per epoch, each epoch in another order.
        """
        ...

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` distinct held-out prompts, or all if there are fewer; the same for every seed."""
        ...


class LocalVerifier(ABC):
    """Base class of verifiers that are fast and cannot hang, so they run in this process; judges single responses."""

    @abstractmethod
    def judge(self, prompt: Prompt, response: str) -> Reward:
        """Score one response."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Reward]:
        """Score `responses[i]` as an answer to `prompts[i]`."""
        return [self.judge(prompt, response) for prompt, response in paired(prompts, responses)]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""
        return


def close_task(task: Task) -> None:
    """End the processes of a task's verifier, and of its environment if it has one."""
    task.verifier.close()
    environment = getattr(task, "environment", None)
    if environment is not None:
        environment.close()


def paired(prompts: Sequence[Prompt], responses: Sequence[str]) -> list[tuple[Prompt, str]]:
    """Pairs of prompt and response; different lengths are an error."""
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses; pass one prompt per response")
    return list(zip(prompts, responses, strict=True))


def fraction_of(text: str) -> float:
    """Hash a text to [0, 1), the same on every machine and Python version."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:6], "big") / 2**48


def content_id(question: str, answer: str) -> str:
    """An id made from the content of a question and its answer."""
    return hashlib.sha256(f"{question}\0{answer}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def stream(*names: object) -> random.Random:
    """The random stream with this name. Draw from it with `below` and `pick`."""
    return random.Random("/".join(map(str, names)))


def below(rng: random.Random, bound: int) -> int:
    """Draw from 0..bound-1. `random()` is the only method whose sequence Python guarantees."""
    return int(rng.random() * bound)


def pick(rng: random.Random, items: Sequence[Item]) -> Item:
    """Draw one of the items."""
    return items[below(rng, len(items))]


def check_range(start: int, count: int) -> None:
    """Refuse negative indices, which Python would count from the end of a list."""
    if start < 0 or count < 0:
        raise ValueError(f"prompts are numbered from 0: start={start}, count={count} must not be negative")


class FinitePrompts:
    """An unlimited numbering of a finite list of prompts: epoch after epoch, each in its own seeded order."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, name: str):
        if not prompts:
            raise TaskError(f"task {name} has no training prompts")
        self._prompts = list(prompts)
        self._order: Callable[[int], list[int]] = partial(_epoch_order, name, seed, len(prompts))

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        """Prompts number `start` to `start + count - 1`."""
        check_range(start, count)
        positions = (divmod(index, len(self._prompts)) for index in range(start, start + count))
        return [self._prompts[self._order(epoch)[position]] for epoch, position in positions]


# A range that crosses a boundary needs two epochs, and a program has several tasks: for run, doctor and evaluation.
@lru_cache(maxsize=4)
def _epoch_order(name: str, seed: int, length: int, epoch: int) -> list[int]:
    return shuffled(length, stream(name, seed, "epoch", epoch))


def shuffled(length: int, rng: random.Random) -> list[int]:
    """The numbers below `length` in random order."""
    order = list(range(length))
    for last in range(length - 1, 0, -1):
        other = below(rng, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def first_distinct(prompts: Iterator[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts with distinct ids, or fewer if the iterator ends."""
    distinct: dict[str, Prompt] = {}
    while len(distinct) < count and (prompt := next(prompts, None)) is not None:
        distinct.setdefault(prompt.prompt_id, prompt)
    return list(distinct.values())


def used_prompts(task: Task, count: int, most: int) -> list[Prompt]:
    """The distinct prompts among the first `count` training prompts; at most `most` if the task is unlimited."""
    size = most if task.size is None else task.size
    return task.prompts(0, min(count, size)) if size else []


def read_text(path: Path, most: int = LONGEST_TEXT) -> str:
    """The text of a file of at most `most` bytes; a larger file, or an endless device, is an OSError."""
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return content.decode("utf-8-sig")


def is_importable(module: str) -> bool:
    """Whether Python finds the package of a module; does not import it.

    An installed script does not search the working directory, as `python -m` does. If only that directory has the
    module, it is appended to the path, unless Python was told not to (`-P`, PYTHONSAFEPATH).
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return True
    if sys.flags.safe_path or PathFinder.find_spec(package, [str(Path.cwd())]) is None:
        return False
    sys.path.append(str(Path.cwd()))
    return True


def no_module(module: str) -> str:
    """Error message for a module that Python does not find."""
    return f"there is no module {module!r} on the Python path or in {Path.cwd()}: put its directory on PYTHONPATH"


def child_command(module: str, *arguments: str, safe: bool = False) -> list[str]:
    """The command that runs a module in a child process with this process's module path.

    `python -m` would search the working directory first, where a user's `random.py` hides Python's. `safe` is for a
    child that imports nothing of the user's: neither it nor its children search the working directory.
    """
    source = (
        f"import sys; theirs = {[str(entry) for entry in sys.path]!r}; "
        "sys.path[:] = theirs + [entry for entry in sys.path if entry and entry not in theirs]; "
        "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    option = ["-P"] if safe or sys.flags.safe_path else []
    return [sys.executable, *option, "-c", source, module, *arguments]


def load(reference: str) -> Callable[..., Any]:
    """Import the object with the reference "module:name"."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def build(kind: str, name: str, known: Mapping[str, str], options: Mapping[str, Any]) -> Any:
    """Call the class or function that `known[name]` refers to with the options; `kind` is for error messages."""
    if name not in known:
        raise TaskError(f"unknown {kind} {name!r}; {nearest(name, known)}")
    from stalewise.tasks.options import check_options  # pydantic is not needed to name a task

    factory = load(known[name])
    check_options(kind, name, factory, options)
    return factory(**options)


def need(module: str, extra: str, what: str) -> None:
    """Raise an error that says what to install if an optional package is missing; does not import it."""
    try:
        missing = importlib.util.find_spec(module) is None
    except ValueError:  # blocked by a None in sys.modules
        missing = True
    if missing:
        raise TaskError(f"{what} needs the package {module}: pip install 'stalewise[{extra}]'")
