"""Tasks from reasoning-gym: some hundred generators of puzzles, each with its own scoring.

Its scores give partial credit for substrings and, in some datasets, for junk; so the reward is 1 from 0.99 on and 0
below, and the raw score is a part. Some scorers raise or hang on odd answers: they run in worker processes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count as count_from
from itertools import islice
from typing import Any

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import check_range, first_distinct, fraction_of, need
from stalewise.tasks.rows import PromptForm
from stalewise.tasks.verifiers.judge_process import Judge, describe
from stalewise.tasks.verifiers.pool import ProcessVerifier
from stalewise.types import Prompt, Reward

FULL_SCORE = 0.99
_CHUNK = (
    500  # reasoning-gym's own: some datasets make all of their items at once, and some have no item beyond their size
)
_ATTEMPTS = 200
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymTask:
    """The reasoning-gym dataset `dataset` with the configuration `parameters`.

    Every prompt number has a seed of its own, so the prompts have no end. A question is held out when a hash of
    its text says so. What stands in the last <answer>…</answer> of a response is scored, or all of it where
    there is none. Answers of some datasets are not scored as right by reasoning-gym itself: look at evaluation.
    """

    size = None
    held_out = 1 / 4  # of the questions; finding held-out ones costs the inverse in questions made

    def __init__(
        self,
        dataset: str,
        *,
        seed: int = 0,
        parameters: Mapping[str, Any] | None = None,
        template: str = "{problem}",
        chat: bool = False,
        system: str = "",
        workers: int | None = None,
        limit_s: float = 5.0,
    ):
        need("reasoning_gym", "gym", "the task gym")
        self.name, self.seed = f"gym-{dataset}", seed
        self._form = PromptForm(template=template, chat=chat, system=system)
        options = {"dataset": dataset, "parameters": dict(parameters or {})}
        _check(**options)
        self._source = _Source(**options)
        self.verifier = ProcessVerifier(f"{__name__}:load_judge", options, workers=workers, limit_s=limit_s)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`."""
        check_range(start, count)
        return [self._training_prompt(index) for index in range(start, start + count)]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, the same for every seed; fewer where the dataset has fewer."""
        check_range(0, count)
        drawn: Iterator[Prompt | None] = (self._prompt("evaluation", index, True) for index in count_from())
        return first_distinct((prompt for prompt in islice(drawn, 50 * count) if prompt), count)

    def _training_prompt(self, index: int) -> Prompt:
        for attempt in range(_ATTEMPTS):
            if prompt := self._prompt(f"training/{self.seed}/{attempt}", index, False):
                return prompt
        raise TaskError(f"{self.name}: its questions are so few that all of them are held out; widen parameters")

    def _prompt(self, stream: str, index: int, held_out: bool) -> Prompt | None:
        """Make a prompt, unless it belongs to the other side."""
        chunk, place = divmod(index, _CHUNK)
        seed = int(fraction_of(f"{self.name}/{stream}/{chunk}") * 2**30)
        try:
            entry = self._source.entry(seed, place)
        except Exception as problem:
            raise TaskError(f"{self.name} could not make a question: {describe(problem)}") from problem
        question = str(entry["question"])
        if (fraction_of(f"{self.name}/{question}") < self.held_out) is not held_out:
            return None
        origin = {"gym_seed": str(seed), "gym_index": str(place)}
        return Prompt(
            f"{self.name}/{_digest(entry)}",
            self._form.apply(question),
            str(entry["answer"] or ""),  # None in datasets that accept several answers
            {**self._form.metadata, **origin},
        )


class _Source:
    """Makes entries from a seed and an index. The worker makes them again, since not all of them can travel."""

    def __init__(self, dataset: str, parameters: Mapping[str, Any]):
        import reasoning_gym  # imported here: it takes two seconds, and it is optional

        self.of_seed = lru_cache(maxsize=16)(
            lambda seed: reasoning_gym.create_dataset(dataset, seed=seed, size=_CHUNK, **parameters)
        )

    def entry(self, seed: int, place: int) -> dict[str, Any]:
        return self.of_seed(seed)[place]


def _check(dataset: str, parameters: Mapping[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise TaskError(f"reasoning-gym has no dataset {dataset!r}; {nearest(dataset, DATASETS)}")
    if reserved := {"seed", "size"} & set(parameters):
        raise TaskError(f"gym: {' and '.join(sorted(reserved))} cannot stand in parameters; seed is the task's")
    known = [name for name in DATASETS[dataset][1].__dataclass_fields__ if name not in ("seed", "size")]
    for name in parameters:
        if name not in known:
            raise TaskError(f"reasoning-gym's {dataset} has no parameter {name!r}; {nearest(name, known)}")
    try:
        _Source(dataset, parameters).of_seed(0)
    except Exception as problem:  # its checks are assertions
        raise TaskError(f"reasoning-gym refuses these parameters of {dataset}: {describe(problem)}") from None


def _digest(entry: Mapping[str, Any]) -> str:
    content = f"{entry['question']}\0{entry['answer']}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:16]


def load_judge(dataset: str, parameters: Mapping[str, Any]) -> Judge:
    """Make the judge; runs in a worker."""
    source = _Source(dataset, parameters)
    entry_of = lru_cache(maxsize=256)(source.entry)  # the responses of a group share their question

    def judge(prompt: Prompt, response: str) -> Reward:
        seed = int(prompt.metadata["gym_seed"])
        entry = entry_of(seed, int(prompt.metadata["gym_index"]))
        if not prompt.prompt_id.endswith(_digest(entry)):
            raise RuntimeError(f"reasoning-gym made another question from the seed of {prompt.prompt_id}")
        tagged = _ANSWER.findall(response)
        answer = (tagged[-1] if tagged else response).strip()
        score = float(source.of_seed(seed).score_answer(answer, entry))
        return Reward(float(score >= FULL_SCORE), {"score": score})

    return judge
