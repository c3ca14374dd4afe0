"""The engine server against a server with faults on demand: real HTTP, a real small policy, no vLLM."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from policies import POLICY, furthest, moved, requests
from serving import FakeServer, serving
from stalewise.api import run
from stalewise.config import make_config
from stalewise.config.sections import ServerSection
from stalewise.errors import ConfigError, EngineError, ModelError
from stalewise.rollout.engines import http as endpoint
from stalewise.rollout.engines.http import ServerSlow, ServerUnavailable
from stalewise.rollout.engines.server import AWAY_S, ServerSampler, path_on_server
from stalewise.rollout.sampler import Request
from stalewise.store import open_batch
from stalewise.store.ledger import read_ledger
from stalewise.types import SamplerSettings
from tiny import tiny_record

NEVER_S = 600.0  # longer than a test may take


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(POLICY, tmp_path_factory.mktemp("other") / "v000004", by=0.003)


def make(*servers: FakeServer, settings: SamplerSettings | None = None, **options: Any) -> ServerSampler:
    chosen: dict[str, Any] = {"precision": "float32", "retries": 2, "wait_s": 5.0, "timeout_s": 10.0, **options}
    section = ServerSection(urls=[server.url for server in servers], **chosen)
    return ServerSampler(settings or SamplerSettings(name="server"), max_new_tokens=6, options=section)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint, "POLL_S", 0.02)


@pytest.mark.parametrize("settings", [SamplerSettings(), SamplerSettings(temperature=0.7, top_p=0.9, top_k=5)])
def test_responses_come_in_order_with_the_log_probabilities_of_what_was_sampled(settings: SamplerSettings) -> None:
    asked = requests(12)
    told: list[int] = []
    with serving() as fake:
        sampler = make(fake, settings=settings)
        sampler.on_tokens = told.append
        sampler.load(POLICY)
        responses = sampler.sample(asked)
        assert furthest(asked, responses, POLICY, settings) < 1e-5
        assert sampler.sample(asked) == responses
        assert sampler.sample(asked[::-1]) == responses[::-1]
        assert sum(told) == 3 * sum(len(response.token_ids) for response in responses)
        body = next(body for body in fake.bodies if body["seed"] == asked[0].seed)
    assert body["prompt"] == list(asked[0].prompt_ids)
    assert (body["temperature"], body["top_p"]) == (settings.temperature, settings.top_p)
    assert body["top_k"] == (settings.top_k or -1)
    assert body["stop_token_ids"] == [1]
    assert (body["min_p"], body["repetition_penalty"], body["presence_penalty"]) == (0, 1, 0)


def test_evaluation_has_settings_of_its_own() -> None:
    with serving(processed=False) as fake:  # its log-probabilities are right at temperature 1 alone
        sampler = make(fake, settings=SamplerSettings(temperature=0.5))
        sampler.load(POLICY)
        asked = requests(2)
        assert furthest(asked, sampler.sample(asked, SamplerSettings()), POLICY, SamplerSettings()) < 1e-5


def test_token_ids_may_come_as_tokens() -> None:
    with serving() as fake:
        sampler = make(fake)
        sampler.load(POLICY)
        expected = sampler.sample(requests(3))
        fake.behaviour.ids_as_tokens = True
        assert sampler.sample(requests(3)) == expected


def test_two_servers_share_the_work_and_the_answer_is_the_same() -> None:
    asked = requests(24)
    with serving(delay_s=0.01) as one, serving(delay_s=0.01) as two:
        alone, both = make(one), make(one, two, concurrency=2)
        alone.load(POLICY)
        both.load(POLICY)
        expected = alone.sample(asked)
        one.bodies.clear()
        assert both.sample(asked) == expected
        assert len(one.bodies) + len(two.bodies) == 24
        assert min(len(one.bodies), len(two.bodies)) >= 4


def test_no_more_requests_are_under_way_than_the_config_allows() -> None:
    with serving(delay_s=0.02) as fake:
        sampler = make(fake, concurrency=3)
        sampler.load(POLICY)
        sampler.sample(requests(20))
        assert fake.most_under_way == 3


def test_a_key_is_sent_and_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "abc")
    with serving() as fake:
        make(fake, api_key_env="SECRET_OF_THE_TEST").load(POLICY)
        assert set(fake.authorization) == {"Bearer abc"}
        with pytest.raises(ConfigError, match="NOT_SET_AT_ALL, which is not set"):
            make(fake, api_key_env="NOT_SET_AT_ALL")


@pytest.mark.parametrize("reload", ["vllm", "sglang"])
def test_a_later_checkpoint_is_sampled_from_once_it_is_loaded(reload: str, other: Path) -> None:
    asked = requests(6)
    with serving() as fake:
        sampler = make(fake, reload=reload)
        sampler.load(POLICY)
        before = sampler.sample(asked)
        sampler.load(other)
        after = sampler.sample(asked)
        assert furthest(asked, before, POLICY, SamplerSettings()) < 1e-5
        assert furthest(asked, after, other, SamplerSettings()) < 1e-5
        assert furthest(asked, after, POLICY, SamplerSettings()) > 1e-3
        salts = {body["cache_salt"] for body in fake.bodies}
        assert len(salts) == 2  # keys and values of the old weights are not read with the new ones


def test_the_same_checkpoint_again_costs_no_reload() -> None:
    with serving() as fake:
        sampler = make(fake)
        sampler.load(POLICY)
        sampler.load(POLICY)
        assert fake.paths.count("/collective_rpc") == 1


def test_a_server_that_lost_its_policy_gets_it_again_at_the_next_load(other: Path) -> None:
    with serving() as fake:
        sampler = make(fake)
        sampler.load(other)
        fake.load(POLICY)
        sampler.load(other)
        assert fake.paths.count("/collective_rpc") == 2


def test_a_server_that_was_restarted_otherwise_is_checked_again(other: Path) -> None:
    with serving() as fake:
        sampler = make(fake, settings=SamplerSettings(temperature=0.7))
        sampler.load(other)
        sampler.sample(requests(2))
        fake.load(POLICY)
        fake.behaviour.processed = False
        with pytest.raises(EngineError, match=r"leaves sampler\.temperature out"):
            sampler.sample(requests(2))


def test_a_command_can_bring_the_weights(other: Path, tmp_path: Path) -> None:
    with serving() as fake:
        script = tmp_path / "bring.py"
        script.write_text(
            "import json, sys, urllib.request\n"
            "body = json.dumps({'kwargs': {'weights_path': sys.argv[1]}}).encode()\n"
            "urllib.request.urlopen(urllib.request.Request(sys.argv[2] + '/collective_rpc', body))\n"
        )
        sampler = make(fake, reload="command", command=["python3", str(script), "{checkpoint}", "{url}"])
        sampler.load(other)
        assert furthest(requests(2), sampler.sample(requests(2)), other, SamplerSettings()) < 1e-5
        broken = make(fake, reload="command", command=["python3", "-c", "raise SystemExit('no such host')"])
        with pytest.raises(EngineError, match="command python3 ended with 1: no such host"):
            broken.load(other)
        with pytest.raises(EngineError, match="command not-a-program"):
            make(fake, reload="command", command=["not-a-program"]).load(other)


@pytest.mark.parametrize(
    ("behaviour", "reload", "message"),
    [
        (
            {"deaf": True},
            "vllm",
            "does not have the policy of .*v000004: .* are off by 0.0.* reload_weights did not do it",
        ),
        ({"reloads": False}, "vllm", "start vLLM with VLLM_SERVER_DEV_MODE=1"),
        ({"cache_is_reset": False}, "vllm", "did not reset its prefix cache"),
        ({"deaf": True}, "sglang", "did not load .*v000004: cannot"),
        ({}, "none", "does not have the policy .* give it that checkpoint, then run the same command again"),
    ],
)
def test_a_server_that_does_not_get_the_weights_is_refused(
    behaviour: dict[str, Any], reload: str, message: str, other: Path
) -> None:
    with serving(**behaviour) as fake:
        with pytest.raises(EngineError, match=message):
            make(fake, reload=reload).load(other)
        assert fake.bodies == []


def test_a_path_that_the_server_does_not_have_is_named(other: Path) -> None:
    with serving() as fake:
        sampler = make(fake, paths={str(other.parent): "/elsewhere"})
        with pytest.raises(EngineError, match=r"/elsewhere/v000004 is not here; .*sampler\.server\.paths"):
            sampler.load(other)
    assert path_on_server(Path("/home/me/runs/v000004"), {"/home/me": "/mnt/me"}) == "/mnt/me/runs/v000004"
    assert path_on_server(Path("/a/b/c"), {"/a": "/x", "/a/b": "/y"}) == "/y/c"
    assert path_on_server(Path("/ab/c"), {"/a": "/x"}).endswith("/ab/c")
    assert path_on_server(Path("owner/name"), {}) == "owner/name"


def test_without_reloading_a_server_that_has_the_checkpoint_will_do(other: Path) -> None:
    with serving(checkpoint=other, reloads=False) as fake:
        sampler = make(fake, reload="none")
        sampler.load(other)
        assert furthest(requests(2), sampler.sample(requests(2)), other, SamplerSettings()) < 1e-5


def test_responses_of_a_server_that_lost_its_policy_are_sampled_again(other: Path) -> None:
    asked = requests(10)
    with serving() as fake:
        sampler = make(fake)
        sampler.load(other)
        fake.behaviour.swap_after = 4  # as if restarted between two requests: no request fails
        responses = sampler.sample(asked)
        assert furthest(asked, responses, other, SamplerSettings()) < 1e-5
        assert fake.paths.count("/collective_rpc") == 2
        assert len(fake.bodies) == 20


def test_a_server_that_loses_its_policy_again_and_again_ends_the_call(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as fake:
        sampler = make(fake)
        sampler.load(other)
        complete = fake.complete

        def restart_always(body: dict[str, Any]) -> dict[str, Any]:
            if body["max_tokens"] > 1:
                fake.load(POLICY)
            return complete(body)

        monkeypatch.setattr(fake, "complete", restart_always)
        with pytest.raises(EngineError, match="lost their policy 5 times while 3 responses"):
            sampler.sample(requests(3))


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"logprobs": False}, "answers without log-probabilities"),
        ({"echo": False}, "gives no log-probabilities of a prompt"),
        ({"token_ids": False}, "answers without token ids"),
        ({"change_prompt": True}, "changed the tokens of a prompt"),
        ({"end_tokens": False}, "none of the end tokens|0 tokens and 0 log-probabilities|answers without"),
        ({"models": ("a", "b")}, r"has the models a, b: name one in sampler\.server\.model"),
        ({"models": ()}, r"name one in sampler\.server\.model"),
        ({"models": None}, "lists no models: is this an OpenAI-compatible server"),
        ({"not_json": True}, "answered with something that is no JSON"),
    ],
)
def test_a_server_that_lacks_what_learning_needs_is_refused(behaviour: dict[str, Any], message: str) -> None:
    with serving(**behaviour) as fake, pytest.raises(EngineError, match=message):
        sampler = make(fake)
        sampler.load(POLICY)
        sampler.sample(requests(12))


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("top_p", 0.9), ("top_k", 5)])
def test_raw_log_probabilities_are_refused_where_they_are_wrong(name: str, value: float) -> None:
    settings = SamplerSettings(**{name: value})  # type: ignore[arg-type]
    with serving(processed=False) as fake:
        sampler = make(fake, settings=settings)
        sampler.load(POLICY)
        with pytest.raises(EngineError, match=rf"leaves sampler\.{name} out .* --logprobs-mode processed_logprobs"):
            sampler.sample(requests(2))
        assert fake.bodies == []
        fake.behaviour.processed = True
        asked = requests(4)
        assert furthest(asked, sampler.sample(asked), POLICY, settings) < 1e-5


def test_prompts_without_room_are_refused_before_anything_is_sent() -> None:
    with serving() as fake:
        sampler = make(fake)
        sampler.load(POLICY)
        with pytest.raises(ModelError, match="longest prompt has 123 tokens"):
            sampler.sample([Request([3] * 123, 0)])
        assert fake.bodies == []


def test_passing_trouble_is_tried_again() -> None:
    with serving() as fake:
        sampler = make(fake, concurrency=1)
        sampler.load(POLICY)
        expected = sampler.sample(requests(4))
        fake.bodies.clear()
        fake.behaviour.fail = [503, 429]
        fake.behaviour.hang_up = 1
        assert sampler.sample(requests(4)) == expected
        assert len(fake.bodies) == 4 + 3


def test_trouble_that_does_not_pass_ends_with_one_message() -> None:
    with serving() as fake:
        sampler = make(fake, retries=1)
        sampler.load(POLICY)
        fake.behaviour.fail = [500] * 99
        with pytest.raises(EngineError, match=r"/v1/completions answered 500: scripted"):
            sampler.sample(requests(1))
        fake.behaviour.fail = [400]
        with pytest.raises(EngineError, match="answered 400: scripted"):
            sampler.sample(requests(1))
        assert fake.behaviour.fail == []  # and was not tried again


def test_a_request_that_takes_too_long_ends_with_one_message() -> None:
    with serving() as fake:
        sampler = make(fake, retries=1)
        sampler.load(POLICY)
        sampler._servers[0].endpoint.timeout_s = 0.5  # from here on: a busy machine may take longer to load
        fake.behaviour.delay_s = NEVER_S
        with pytest.raises(EngineError, match=r"took longer than 0\.5 s, 2 times: raise sampler\.server\.timeout_s"):
            sampler.sample(requests(3))
        assert 2 <= len(fake.bodies) <= 2 * 3 and fake.under_way == len(fake.bodies)  # none was answered


def test_an_error_does_not_wait_for_what_is_under_way_and_leaves_nothing_behind() -> None:
    with serving(delay_s=NEVER_S) as fake:
        sampler = make(fake, concurrency=2, retries=9, timeout_s=NEVER_S)
        sampler.load(POLICY)
        fake.behaviour.fail = [400]
        with pytest.raises(EngineError, match="answered 400"):
            sampler.sample(requests(6))
        time.sleep(0.2)
        assert len(fake.bodies) <= 2  # what was broken off is not tried again, what waited is not sent
        fake.behaviour.delay_s = 0.0
        assert len(sampler.sample(requests(6))) == 6


def test_nobody_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("stalewise.rollout.engines.http.time.sleep", waits.append)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    section = ServerSection(urls=[url], retries=1, wait_s=60.0)
    sampler = ServerSampler(SamplerSettings(), max_new_tokens=6, options=section)
    with pytest.raises(EngineError, match=rf"{url} does not answer \(.*refused.*\): start the server, or correct"):
        sampler.load(POLICY)
    assert waits == []


def test_a_server_that_comes_back_with_its_own_weights_gets_the_checkpoint_again(other: Path) -> None:
    asked = requests(12)
    first = FakeServer(delay_s=0.05)
    sampler = make(first, retries=1, concurrency=2)
    sampler.load(other)
    came: list[FakeServer] = []

    def die_and_come_back() -> None:
        port = first.server_port
        first.stop()
        time.sleep(0.3)
        came.append(FakeServer(port=port))  # with the weights of its command line

    threading.Timer(0.15, die_and_come_back).start()
    try:
        responses = sampler.sample(asked)
        assert furthest(asked, responses, other, SamplerSettings()) < 1e-5
        assert came[0].paths.count("/collective_rpc") == 1
        assert len(came[0].bodies) == 12  # what the first had answered does not count
    finally:
        came[0].stop()


def test_a_server_that_stays_away_ends_the_call(other: Path) -> None:
    fake = FakeServer()
    sampler = make(fake, retries=1, wait_s=0.3)
    sampler.load(other)
    fake.stop()
    with pytest.raises(
        EngineError, match=r"does not answer \(.*\); it did not come back within 0\.3 s: check the server and run the"
    ):
        sampler.sample(requests(3))


def test_of_two_servers_one_finishes_the_work_while_the_other_is_away() -> None:
    asked = requests(16)
    with serving(delay_s=0.02) as stays:
        goes = FakeServer(delay_s=0.02)
        sampler = make(stays, goes, retries=0, concurrency=2)
        sampler.load(POLICY)
        expected = sampler.sample(asked)
        stays.bodies.clear()
        goes.bodies.clear()
        threading.Timer(0.05, goes.stop).start()
        assert sampler.sample(asked) == expected
        assert len(goes.bodies) >= 2
        assert {body["seed"] for body in stays.bodies} == {request.seed for request in asked}
        sampler.load(POLICY)  # the next stage does not need it either


HANGS = pytest.param({"delay_s": 9.0}, id="hangs", marks=pytest.mark.nightly)


@pytest.mark.parametrize("trouble", [pytest.param({"fail": [503] * 999}, id="no time"), HANGS])
def test_of_two_servers_one_finishes_the_work_while_the_other_does_none(trouble: dict[str, Any]) -> None:
    asked = requests(8)
    with serving() as well, serving() as sick:
        sampler = make(sick, well, retries=1, timeout_s=2.0, concurrency=2)
        said: list[str] = []
        sampler.log = said.append
        sampler.load(POLICY)
        expected = sampler.sample(asked)
        for name, value in trouble.items():
            setattr(sick.behaviour, name, value)
        assert sampler.sample(asked) == expected
        asked_in_vain = len(sick.bodies)
        assert sampler.sample(asked) == expected and len(sick.bodies) == asked_in_vain  # it is left out for a while
        assert len(said) == 1 and said[0].startswith(f"{sick.url}/v1/completions")


def test_a_server_that_hangs_with_all_requests_is_not_the_end_where_another_is_idle() -> None:
    with serving() as well, serving() as sick:
        sampler = make(sick, well, retries=0, timeout_s=2.0, concurrency=8)
        said: list[str] = []
        sampler.log = said.append
        sampler.load(POLICY)
        expected = sampler.sample(requests(2))
        sick.behaviour.delay_s = 9.0
        well.behaviour.delay_s = 0.1  # so that the other one has something to do
        for _ in range(3):
            assert sampler.sample(requests(2)) == expected
        assert len(said) == 1 and said[0].endswith("asked again after 40 s")


def test_a_server_that_hangs_is_left_out_for_longer_than_it_took_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as well, serving() as sick:
        sampler = make(sick, well, retries=1, timeout_s=1.0)
        gone, slow = ServerUnavailable("away"), ServerSlow("slow")
        for trouble, seconds in ((gone, AWAY_S), (slow, 2 * 20)):
            now = time.monotonic()
            with monkeypatch.context() as patch:
                patch.setattr("stalewise.rollout.engines.server.time.monotonic", lambda now=now: now)
                sampler._leave_out(sampler._servers[0], trouble)
            assert sampler._servers[0].away_until - now == pytest.approx(seconds)


def test_of_many_servers_all_but_one_may_go_away_at_once() -> None:
    asked = requests(24)
    with serving(delay_s=0.02) as stays:
        others = [FakeServer(delay_s=0.02) for _ in range(5)]
        sampler = make(*others, stays, retries=0, concurrency=2)
        sampler.load(POLICY)
        expected = sampler.sample(asked)
        threading.Timer(0.05, lambda: [server.stop() for server in others]).start()
        assert sampler.sample(asked) == expected


def test_a_server_without_time_is_waited_for() -> None:
    with serving() as fake:
        sampler = make(fake, retries=0, concurrency=1, wait_s=60.0)
        sampler.load(POLICY)
        expected = sampler.sample(requests(2))
        fake.behaviour.fail = [503, 502, 429]  # each is an attempt, and none is left for it
        assert sampler.sample(requests(2)) == expected
        assert fake.behaviour.fail == []
        fake.behaviour.fail = [503] * 999
        impatient = make(fake, retries=0, wait_s=0.2)
        impatient.load(POLICY)
        with pytest.raises(EngineError, match=r"answers 503 \(scripted\); it did not come back within 0\.2 s"):
            impatient.sample(requests(2))


def test_an_address_where_nobody_is_is_left_out_and_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(8)
    away = FakeServer()
    port = away.server_port
    away.stop()
    with serving(delay_s=0.01) as stays:
        sampler = make(away, stays, retries=0, concurrency=2)
        said: list[str] = []
        sampler.log = said.append
        sampler.load(POLICY)
        expected = sampler.sample(asked)
        assert len(said) == 1 and f"{away.url} does not answer" in said[0] and "asked again after 30 s" in said[0]
        came = FakeServer(port=port)
        try:
            assert sampler.sample(asked) == expected and came.paths == []  # not yet
            now = time.monotonic()
            monkeypatch.setattr("stalewise.rollout.engines.server.time.monotonic", lambda: now + AWAY_S)
            assert sampler.sample(asked) == expected
            assert said[1:] == [f"{away.url} is available again"] and len(came.bodies) >= 2
        finally:
            came.stop()
    with pytest.raises(EngineError, match="start the server, or correct"):
        make(stays, away, retries=0).load(POLICY)  # nobody at any of them


def test_a_run_goes_on_with_another_engine_and_records_which_one(runs: Path) -> None:
    from stalewise.api import generate

    with serving() as fake:
        served = {"engine": "server", "server": {"urls": [fake.url], "precision": "float32"}}
        generate(make_config(tiny_record(runs)))  # the first generation batch
        result = run(make_config(tiny_record(runs, sampler=served)))
        assert len(fake.bodies) >= 32
    directory = runs / "tiny"
    assert len(read_ledger(directory / "ledger" / "updates.jsonl")) == 4
    engines = [
        [settings.name for settings in open_batch(path).manifest.samplers]
        for path in sorted((directory / "rollouts").iterdir())
    ]
    assert engines == [["hf"], ["server"]]
    assert len(result.evaluations) == 2


def test_settings_of_the_distribution_still_belong_to_a_run(runs: Path) -> None:
    plain = make_config(tiny_record(runs))
    with_server = {"engine": "server", "server": {"urls": ["http://localhost:1"], "concurrency": 3}}
    assert make_config(tiny_record(runs, sampler=with_server)).identity() == plain.identity()
    with_vllm = {"engine": "vllm", "vllm": {"copies": 2}}
    assert make_config(tiny_record(runs, sampler=with_vllm)).identity() == plain.identity()
    for change in ({"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"max_new_tokens": 9}):
        assert make_config(tiny_record(runs, sampler=change)).identity() != plain.identity()


def test_contradictions_in_the_config_are_named(runs: Path) -> None:
    for change, message in (
        ({"engine": "server"}, 'engine = "server" needs server.urls'),
        ({"server": {"urls": ["localhost:8000"]}}, r"sampler\.server\.urls\.0 is 'localhost:8000': it should be"),
        ({"server": {"urls": ["http://a", "http://a"]}}, "names a server twice"),
        ({"server": {"reload": "command"}}, "command and reload"),
        ({"server": {"reload": "none"}}, 'reload = "none" needs servers in float32'),
        ({"server": {"url": "http://a"}}, "sampler.server.url is not a setting; did you mean urls"),
        ({"vllm": {"options": {"dtype": "half"}}}, "options.dtype follows from other settings"),
        ({"engine": "vllm", "temperature": 0.001}, "no temperature below 0.01"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(tiny_record(runs, sampler=change))
