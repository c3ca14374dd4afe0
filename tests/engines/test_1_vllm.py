"""The engine vllm with real vLLM: exact log-probabilities, seeds, and weights that follow the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import VllmServer

from policies import furthest, long_requests, requests, tokens_of
from stalewise.config.sections import VllmSection
from stalewise.rollout.engines.vllm import VllmSampler
from stalewise.rollout.sampler import Request
from stalewise.types import SamplerSettings

PLAIN = SamplerSettings(name="vllm")
CUT = SamplerSettings(name="vllm", temperature=0.7, top_p=0.9, top_k=5)


@pytest.fixture(scope="module")
def sampler(starting: VllmServer) -> Iterator[VllmSampler]:
    starting.wait()  # where nothing is compiled yet, two that import vLLM at once would both compile it
    section = VllmSection(max_model_len=96, options={"enforce_eager": True, "block_size": 32})
    made = VllmSampler(PLAIN, max_new_tokens=8, options=section)
    yield made
    made.close()


@pytest.mark.parametrize("settings", [PLAIN, CUT])
def test_log_probabilities_are_those_of_a_plain_forward_pass(
    sampler: VllmSampler, untied: Path, settings: SamplerSettings
) -> None:
    sampler.load(untied)
    asked = requests(64)
    responses = sampler.sample(asked, settings)
    difference = furthest(asked, responses, untied, settings)
    print(f"{settings}: {difference:.2g} over {sum(len(r.token_ids) for r in responses)} tokens")
    assert difference < 1e-5


def test_the_same_seeds_give_the_same_responses(sampler: VllmSampler, untied: Path) -> None:
    sampler.load(untied)
    asked = requests(32)
    responses = sampler.sample(asked)
    assert sampler.sample(asked) == responses
    turned = sampler.sample(asked[::-1])[::-1]
    assert tokens_of(turned) == tokens_of(responses)
    others = sampler.sample([Request(request.prompt_ids, request.seed + 1000) for request in asked])
    assert tokens_of(others) != tokens_of(responses)


def test_a_later_checkpoint_replaces_the_weights_in_place(
    sampler: VllmSampler, untied: Path, untied_moved: Path
) -> None:
    sampler.load(untied)
    asked = [*requests(16), *long_requests(16)]
    process = sampler._replicas[0].process.pid
    assert furthest(asked, sampler.sample(asked), untied, PLAIN) < 1e-5
    sampler.load(untied_moved)
    assert sampler._replicas[0].process.pid == process
    after = sampler.sample(asked)
    assert furthest(asked, after, untied_moved, PLAIN) < 1e-5
    assert furthest(asked, after, untied, PLAIN) > 0.01
