"""The judge against a server of ours: scores, cache, retries, concurrency, and what goes wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from judge_server import judge_server
from stalewise.errors import TaskError
from stalewise.tasks import make_task, make_verifier
from stalewise.tasks.verifiers import judge
from stalewise.types import Prompt, Reward


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_LONGEST_WAIT_S", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def made(url: str, folder: Path, **options: Any) -> Any:
    return make_verifier("judge", url=url, model="grader", cache=str(folder / "cache"), **options)


PROMPT = Prompt("q1", "Template: 3+5?", "8", {"problem": "3+5?", "row": json.dumps({"level": "easy"})})


def test_a_score_becomes_a_reward_and_the_answer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with judge_server(lambda text, number: "Score: 1? No.\nIt is right. **Score: 7.5**") as server:
        verifier = made(server.url, tmp_path, key_variable="MY_KEY", system="Be strict.")
        (reward,) = verifier.score([PROMPT], ["It is 8 {answer}."])
        assert reward == Reward(0.75, {"score": 7.5})
        (asked,) = server.asked
        assert (asked["model"], asked["temperature"], server.keys) == ("grader", 0.0, ["Bearer secret"])
        assert asked["messages"][0] == {"role": "system", "content": "Be strict."}
        text = asked["messages"][1]["content"]
        assert "<problem>\n3+5?\n</problem>" in text and "<reference>\n8\n</reference>" in text
        assert "<response>\nIt is 8 {answer}.\n</response>" in text, "what was inserted is not looked at again"
        assert "from 0 (wrong) to 10 (right)" in text
        kept = verifier.kept(PROMPT, "It is 8 {answer}.")
        assert kept["answer"].endswith("**Score: 7.5**") and kept["prompt_id"] == "q1"
        assert "secret" not in json.dumps(kept)
        assert verifier.kept(PROMPT, "another") is None


def test_the_cache_answers_and_a_damaged_file_is_asked_again(tmp_path: Path) -> None:
    with judge_server(lambda text, number: f"Score: {number}") as server:
        first = made(server.url, tmp_path).score([PROMPT] * 3, ["a", "a", "b"])
        assert len(server.asked) == 2, "the same question of one batch is asked once"
        assert first[0] == first[1]
        assert made(server.url, tmp_path).score([PROMPT], ["a"]) == [first[0]]
        assert len(server.asked) == 2
        for path in (tmp_path / "cache").rglob("*.json"):
            path.write_text(path.read_text()[:-30])
        assert made(server.url, tmp_path).score([PROMPT], ["a"])[0].parts["score"] == 3
        assert made(server.url, tmp_path, temperature=0.5).score([PROMPT], ["a"])[0].parts["score"] == 4
    assert made(server.url, tmp_path).score([PROMPT], ["a"])[0].parts["score"] == 3, "without a server"


def test_an_answer_that_was_changed_in_the_cache_is_asked_again(tmp_path: Path) -> None:
    with judge_server(lambda text, number: f"Score: {number}") as server:
        assert made(server.url, tmp_path).score([PROMPT], ["a"])[0].parts["score"] == 1
        (path,) = (tmp_path / "cache").rglob("*.json")
        kept = path.read_text()
        for changed in (
            kept.replace('"Score: 1"', '"Score: 9"'),
            kept.replace('"Score: 1"', '"Score: 9"').replace('"sha256"', '"sha255"'),
            kept.replace("grader", "graber"),
            "[]",
        ):
            assert changed != kept
            path.write_text(changed)
            asked = len(server.asked)
            assert made(server.url, tmp_path).score([PROMPT], ["a"])[0].parts["score"] == asked + 1
        record = {**json.loads(kept), "answer": "Score: 7"}
        del record["sha256"]  # as an earlier release wrote it
        path.write_text(json.dumps(record))
        assert made(server.url, tmp_path).score([PROMPT], ["a"])[0].parts["score"] == 7


def test_what_is_temporary_is_tried_again(tmp_path: Path) -> None:
    said: list[Any] = [503, 429, b"no JSON", b'{"choices": []}', "Score: 10"]
    with judge_server(lambda text, number: said[number - 1]) as server:
        assert made(server.url, tmp_path).score([PROMPT], ["a"]) == [Reward(1.0, {"score": 10.0})]
        assert len(server.asked) == 5


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("I like it.", "no score in its answer, which ends 'I like it.'"),
        ("Score: 11", "its score 11 is outside of 0 to 10"),
        (500, "answers 500: busy (3 attempts)"),
        (b"x", "JSONDecodeError"),
        (b"x" * 5_000_000, "too long"),
    ],
)
def test_no_score_is_an_error_and_not_zero(said: Any, error: str, tmp_path: Path) -> None:
    with judge_server(lambda text, number: said) as server:
        (reward,) = made(server.url, tmp_path, retries=2).score([PROMPT], ["a"])
    assert math.isnan(reward.value) and error in reward.error and reward.error.startswith("judge: ")
    assert not list(tmp_path.rglob("*.json")), "nothing is kept that is no judgement"


def test_a_server_that_is_not_there_or_hangs(tmp_path: Path) -> None:
    (gone,) = made("http://127.0.0.1:9/v1", tmp_path, retries=1).score([PROMPT], ["a"])
    assert "refused" in gone.error and "(2 attempts)" in gone.error
    with judge_server(lambda text, number: "Score: 1", delay_s=1.5) as server:
        (late,) = made(server.url, tmp_path, retries=0, limit_s=0.2).score([PROMPT], ["a"])
    assert "TimeoutError" in late.error


def test_a_wrong_key_or_model_stops_at_once(tmp_path: Path) -> None:
    with (
        judge_server(lambda text, number: 401) as server,
        pytest.raises(TaskError, match=r"answers 401: busy: it wants a key \(model 'grader', key from \$OPENAI_API"),
    ):
        made(server.url, tmp_path).score([PROMPT] * 4, list("abcd"))
    with judge_server(lambda text, number: "Score: 1") as server, pytest.raises(TaskError, match="404"):
        made(server.url + "/wrong", tmp_path).score([PROMPT], ["a"])


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_question_that_is_refused_costs_its_own_response_only(tmp_path: Path, status: int) -> None:
    with judge_server(lambda text, number: status if "long" in text else "Score: 5") as server:
        long, short = made(server.url, tmp_path, workers=1).score([PROMPT] * 2, ["long", "short"])
        assert f"answers {status}: busy" in long.error and math.isnan(long.value)
        assert short == Reward(0.5, {"score": 5.0})
        assert len(server.asked) == 2  # it is not asked again


def test_questions_are_asked_at_once_and_results_keep_their_order(tmp_path: Path) -> None:
    with judge_server(lambda text, number: "Score: " + text.split("number ")[1][0], delay_s=0.2) as server:
        rewards = made(server.url, tmp_path, workers=4).score([PROMPT] * 8, [f"number {n}" for n in range(8)])
        assert [reward.parts["score"] for reward in rewards] == list(range(8))
        assert 2 <= server.most_open <= 4


def test_a_rubric_of_ones_own_with_fields_of_the_row(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("An {level} one, {unknown}: {response} Grade: good or bad?")
    with judge_server(lambda text, number: f"[{text}] => 3") as server:
        options = {"rubric": str(rubric), "pattern": r"=> (\d)", "scale": [1, 5]}
        verifier = made(server.url, tmp_path, **options)
        assert verifier.score([PROMPT], ["yes"]) == [Reward(0.5, {"score": 3.0})]
        assert server.asked[0]["messages"][0]["content"] == "An easy one, {unknown}: yes Grade: good or bad?"


def test_rows_of_a_file_reach_the_judge(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "a", "level": "hard"}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"problem": f"p{n}"}) for n in range(10)))
    with judge_server(lambda text, number: "Score: 10" if "hard" in text else "Score: 0") as server:
        options = {"url": server.url, "model": "m", "rubric": "{level}: {response}", "cache": str(tmp_path / "cache")}
        task = make_task("jsonl", path=str(tmp_path / "rows.jsonl"), verifier="judge", verifier_options=options)
        assert task.verifier.score(task.prompts(0, 1), ["x"])[0].value == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "expected the server's base"),
        ({"scale": [1, 1]}, "lowest and the highest"),
        ({"scale": [1]}, "lowest and the highest"),
        ({"workers": 0}, "workers ≥ 1"),
        ({"limit_s": math.inf}, "finite limit_s"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "x"}, "one group"),
        ({"rubric": "none.txt"}, "cannot be read"),
        ({"rubric": "{problem}\n"}, r"must contain \{response\}"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        made(**({"url": "http://x/v1", "folder": tmp_path} | options))


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with judge_server(lambda text, number: "Score: 1") as server, pytest.raises(TaskError, match="cannot be written"):
        made(server.url, tmp_path).score([PROMPT], ["a"])
