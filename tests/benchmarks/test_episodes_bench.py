"""The benchmarks of episodes: their small forms, and vLLM's engine with turns that are added between steps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import episodes, tool_gsm8k
from stalewise.models import EMBEDDED
from stalewise.models.loading import load_tokenizer
from stalewise.rollout.episodes import encode_first
from stalewise.rollout.sampler import Request
from stalewise.tasks import make_task


@pytest.mark.nightly
def test_gsm8k_with_a_tool_and_without_in_small_and_not_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--smoke", "--out", str(tmp_path / "out.json"), "--work", str(tmp_path / "work")]
    tool_gsm8k.main(tool_gsm8k.parsed([*words, "--arms", "tool"]))
    assert [job["arm"] for job in json.loads((tmp_path / "out.json").read_text())["jobs"]] == ["tool"]
    tool_gsm8k.main(tool_gsm8k.parsed([*words, "--set", "optimizer.learning_rate=0.125"]))
    jobs = json.loads((tmp_path / "out.json").read_text())["jobs"]
    assert [(job["arm"], job["seed"]) for job in jobs] == [("tool", 0), ("one_turn", 0)]
    assert all(len(job["stages"]) == 2 and job["stages"][0]["unscored"] == 0 for job in jobs)
    assert jobs[0]["config"]["task"]["options"]["environment"] == "python"
    assert "environment" not in jobs[1]["config"]["task"]["options"]
    assert [job["config"]["optimizer"]["learning_rate"] for job in jobs] == [2e-6, 0.125]
    assert not list((tmp_path / "work").glob("*-s0"))  # its figures are kept, its checkpoints are not
    assert "mean of 1" in capsys.readouterr().out
    monkeypatch.setattr(tool_gsm8k, "run_job", lambda *_: pytest.fail("it was done before"))
    tool_gsm8k.main(tool_gsm8k.parsed(words))


def test_ours_plays_and_counts_episodes() -> None:
    found = episodes.ours(episodes.parsed(["--episodes", "20"]))
    assert found["episodes"] == 20 and found["errors"] == 0
    assert found["turns_per_episode"] > 1 and found["episodes_per_second"] > 0


class StepEngine:
    """As vLLM's engine: some requests end in each step. Every turn is "12" and the end token."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.waiting, self.contexts = ids, list[tuple[str, int]](), dict[str, list[int]]()

    def add_request(self, name: str, prompt: dict[str, Any], tokens: int) -> None:
        self.contexts[name] = prompt["prompt_token_ids"]
        self.waiting.append((name, tokens))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        ended, self.waiting = self.waiting[:3], self.waiting[3:]
        outputs = list[Any]()
        for name, tokens in ended:
            ids = self.ids[:tokens]
            logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
            reason = "stop" if len(ids) == len(self.ids) else "length"
            made = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
            outputs.append(SimpleNamespace(finished=True, request_id=name, outputs=[made]))
        return outputs


def test_turns_are_added_to_vllms_engine_between_steps() -> None:
    tokenizer, task = load_tokenizer(str(EMBEDDED / "arithmetic")), make_task("arithmetic", environment="sums")
    pool: Any = task.environment  # pyright: ignore[reportAttributeAccessIssue]
    prompts, ids = encode_first(pool, task.prompts(0, 8), tokenizer)
    engine = StepEngine([*tokenizer("12")["input_ids"], tokenizer.eos_token_id])
    requests = [Request(one, seed) for seed, one in enumerate(ids)]
    made = episodes.drive(engine, lambda tokens: tokens, tokenizer, 22, prompts, requests, pool)
    # Turns of 3 tokens, answers of 6: three rounds are 21 tokens, which fit.
    assert [len(one.token_ids) for one in made] == [21] * 8
    assert all(len(one.episode.segments) == 5 for one in made)
    longest = [context for name, context in engine.contexts.items() if name.startswith("0-")][-1]
    assert longest == [*ids[0], *made[0].token_ids[:18].tolist()]  # what was sampled and said, token by token
    assert np.allclose(made[0].logp[:3], -0.5) and not made[0].logp[3:9].any()
    assert isinstance(episodes.parsed([]), argparse.Namespace)
