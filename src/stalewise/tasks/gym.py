"""Tasks from reasoning-gym: about a hundred generators of puzzles, each with its own scoring.

Its scores give partial credit for substrings and, in some datasets, for junk. So the reward is 1 for scores of at least
0.99 and 0 below, and the raw score is a part. Some scorers raise or hang on odd answers: they run in worker processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from stalewise.errors import TaskError, nearest
from stalewise.tasks.base import check_range, content_id, first_distinct, fraction_of, need
from stalewise.tasks.rows import PromptForm
from stalewise.tasks.verifiers.judge_process import Judge, describe
from stalewise.tasks.verifiers.pool import ProcessVerifier
from stalewise.types import Prompt, Reward

FULL_SCORE = 0.99
_CHUNK = 500  # reasoning-gym's own size: some datasets make all items at once, and some have none beyond their size
_ATTEMPTS = 200
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymTask:
    """The reasoning-gym dataset `dataset` with the configuration `parameters`.

    Every prompt number has its own seed, so prompts are unlimited. A hash of a question's text decides whether it is
    held out. The last <answer>…</answer> of a response is scored, or the whole response if there is none. In some
    datasets reasoning-gym does not score its own answers as right: check the evaluation.
    """

    size = None
    held_out = 1 / 4  # fraction of questions; finding one held-out question takes 1 / held_out generated ones

    def __init__(
        self,
        dataset: str,
        *,
        seed: int = 0,
        parameters: Mapping[str, Any] | None = None,
        template: str = "{problem}",
        chat: bool = False,
        system: str = "",
        prefill: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        workers: int | None = None,
        limit_s: float = 5.0,
    ):
        need("reasoning_gym", "gym", "the task gym")
        self.name, self.seed = f"gym-{dataset}", seed
        self._form = PromptForm(
            template=template, chat=chat, system=system, prefill=prefill, chat_template_kwargs=chat_template_kwargs
        )
        options = {"dataset": dataset, "parameters": dict(parameters or {})}
        _check(**options)
        self._source = _Source(**options)
        self.verifier = ProcessVerifier(f"{__name__}:load_judge", options, workers=workers, limit_s=limit_s)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts number `start` to `start + count - 1`."""
        check_range(start, count)
        return [self._training_prompt(index) for index in range(start, start + count)]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, or all if the dataset has fewer; the same for every seed."""
        check_range(0, count)
        drawn = (self._prompt("evaluation", index, held_out=True) for index in range(50 * count))
        return first_distinct((prompt for prompt in drawn if prompt), count)

    def _training_prompt(self, index: int) -> Prompt:
        for attempt in range(_ATTEMPTS):
            if prompt := self._prompt(f"training/{self.seed}/{attempt}", index, held_out=False):
                return prompt
        raise TaskError(f"{self.name}: its questions are so few that all of them are held out; widen parameters")

    def _prompt(self, stream: str, index: int, *, held_out: bool) -> Prompt | None:
        """Prompt number `index` of a stream; None if its question is held out and it should not be, or vice versa."""
        chunk, position = divmod(index, _CHUNK)
        seed = int(fraction_of(f"{self.name}/{stream}/{chunk}") * 2**30)
        try:
            entry = self._source.entry(seed, position)
        except Exception as problem:
            raise TaskError(f"{self.name} could not make a question: {describe(problem)}") from problem
        question = str(entry["question"])
        if (fraction_of(f"{self.name}/{question}") < self.held_out) is not held_out:
            return None
        return Prompt(
            f"{self.name}/{content_id(entry['question'], entry['answer'])}",
            self._form.apply(question),
            str(entry["answer"] or ""),  # None in datasets that accept several answers
            {**self._form.metadata, "gym_seed": str(seed), "gym_index": str(position)},
        )


class _Source:
    """Makes entries from a seed and an index. Workers make them again, since some entries cannot be sent as JSON."""

    def __init__(self, dataset: str, parameters: Mapping[str, Any]):
        import reasoning_gym  # imported here: it takes two seconds, and it is optional

        self.of_seed = lru_cache(maxsize=16)(
            lambda seed: reasoning_gym.create_dataset(dataset, seed=seed, size=_CHUNK, **parameters)
        )

    def entry(self, seed: int, position: int) -> dict[str, Any]:
        return self.of_seed(seed)[position]


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


def load_judge(dataset: str, parameters: Mapping[str, Any]) -> Judge:
    """Make the judge; runs in a worker."""
    source = _Source(dataset, parameters)
    entry_of = lru_cache(maxsize=256)(source.entry)  # the responses of a group share their question

    def judge(prompt: Prompt, response: str) -> Reward:
        seed = int(prompt.metadata["gym_seed"])
        entry = entry_of(seed, int(prompt.metadata["gym_index"]))
        if not prompt.prompt_id.endswith(content_id(entry["question"], entry["answer"])):
            raise RuntimeError(f"reasoning-gym made another question from the seed of {prompt.prompt_id}")
        tagged = _ANSWER.findall(response)
        answer = (tagged[-1] if tagged else response).strip()
        score = float(source.of_seed(seed).score_answer(answer, entry))
        return Reward(float(score >= FULL_SCORE), {"score": score})

    return judge
