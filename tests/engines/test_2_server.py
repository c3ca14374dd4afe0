"""The engine server with vLLM's own: exact log-probabilities, seeds, weights that follow, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers import VllmServer

from policies import furthest, long_requests, requests, tokens_of
from stalewise.config.sections import ServerSection
from stalewise.errors import EngineError, TaskError
from stalewise.rollout.engines.server import ServerSampler
from stalewise.tasks import make_verifier
from stalewise.types import Prompt, SamplerSettings

PLAIN = SamplerSettings(name="server")
CUT = SamplerSettings(name="server", temperature=0.7, top_p=0.9, top_k=5)


def make(server: VllmServer, settings: SamplerSettings = PLAIN, **options: Any) -> ServerSampler:
    section = ServerSection(urls=[server.url], precision="float32", **{"retries": 1, **options})
    return ServerSampler(settings, max_new_tokens=8, options=section)


@pytest.mark.parametrize("settings", [PLAIN, CUT])
def test_log_probabilities_are_those_of_a_plain_forward_pass(
    server: VllmServer, untied: Path, settings: SamplerSettings
) -> None:
    sampler = make(server, settings)
    sampler.load(untied)
    asked = requests(64)
    responses = sampler.sample(asked)
    difference = furthest(asked, responses, untied, settings)
    print(f"server {settings}: {difference:.2g} over {sum(len(r.token_ids) for r in responses)} tokens")
    assert difference < 1e-5
    again = sampler.sample(asked)
    assert tokens_of(again) == tokens_of(responses)


def test_a_later_checkpoint_replaces_the_weights(server: VllmServer, untied: Path, untied_moved: Path) -> None:
    sampler = make(server)
    sampler.load(untied)
    asked = [*requests(8), *long_requests(8)]
    assert furthest(asked, sampler.sample(asked), untied, PLAIN) < 1e-5
    sampler.load(untied_moved)
    after = sampler.sample(asked)
    assert furthest(asked, after, untied_moved, PLAIN) < 1e-5
    assert furthest(asked, after, untied, PLAIN) > 0.01


def test_other_weights_than_the_checkpoints_are_refused(server: VllmServer, untied: Path, untied_moved: Path) -> None:
    make(server).load(untied)
    with pytest.raises(EngineError, match=r"does not have the policy of .*untied-moved: .* are off by .* in float32"):
        make(server, reload="none").load(untied_moved)
    make(server, reload="none").load(untied)


def test_another_run_that_takes_the_server_is_noticed(server: VllmServer, untied: Path, untied_moved: Path) -> None:
    ours, theirs, asked = make(server), make(server), requests(8)
    ours.load(untied)
    theirs.load(untied_moved)
    assert furthest(asked, ours.sample(asked), untied, PLAIN) < 1e-5  # taken back, and sampled again


def test_a_checkpoint_that_the_server_does_not_see_is_named(server: VllmServer, untied: Path) -> None:
    with pytest.raises(EngineError, match=r"answered \d+: .*sampler\.server\.paths"):
        make(server, retries=0, paths={str(untied.parent): "/not/there"}).load(untied)
    make(server).load(untied)  # and the server is none the worse


def test_a_request_that_takes_too_long_is_one_message(server: VllmServer, untied: Path) -> None:
    sampler = make(server)
    sampler.load(untied)
    sampler._servers[0].endpoint.timeout_s = 0.002
    with pytest.raises(EngineError, match=r"took longer than 0\.002 s, 2 times"):
        sampler.sample(requests(4))


def test_a_judge_asks_vllm(server: VllmServer, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(server).load(untied)
    for name in ("http_proxy", "HTTP_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def judge(model: str = "policy", **options: Any) -> Any:
        given = {"rubric": "{problem}{response}", "pattern": r"^(\d+)", "scale": [0, 200], "max_tokens": 4, **options}
        return make_verifier("judge", url=f"{server.url}/v1", model=model, cache=str(tmp_path), retries=0, **given)

    # The policy of the server adds: what is "problem" and "response" together is a sum.
    prompts = [Prompt(f"q{first}", f"{first}+", "") for first in (12, 50, 10, 61)]
    rewards = judge().score(prompts, ["34=", "13=", "20=", "73="])
    assert [reward.error for reward in rewards] == [""] * 4
    assert [reward.parts["score"] for reward in rewards] == [46, 63, 30, 134]
    assert [reward.value for reward in rewards] == [0.23, 0.315, 0.15, 0.67]
    kept = judge().kept(prompts[1], "13=")
    assert kept is not None and kept["answer"] == "63"
    with pytest.raises(TaskError, match=r"answers 404: .*model 'another'"):
        judge("another").score(prompts[:1], ["35="])
    # One question that is longer than the judge's context has no score; the others have theirs.
    long, short = judge().score(prompts[1:3], ["1" * 200, "22="])
    assert "answers 400" in long.error and long.value != long.value
    assert short.parts["score"] > 0


def test_raw_log_probabilities_would_be_noticed(server: VllmServer, untied: Path) -> None:
    sampler = make(server)
    sampler.load(untied)
    one, token_ids = sampler._servers[0], list(range(3, 13))
    hot = one._spread(sampler.policy, SamplerSettings(temperature=2.0), token_ids)
    assert hot == pytest.approx(one._spread(sampler.policy, SamplerSettings(), token_ids) / 2, rel=1e-4)
    with pytest.raises(EngineError, match=r"temperature must be in \[0, 2\]"):
        sampler.sample(requests(1), SamplerSettings(temperature=2.5))
