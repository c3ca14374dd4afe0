"""Tasks: prompts by index, training and evaluation apart, gold responses right and spoiled ones wrong."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalewise.errors import TaskError
from stalewise.tasks import Task, make_task
from stalewise.tasks.arithmetic import CHARACTERS, Addition, AdditionChat, Steps
from stalewise.types import Prompt

BUILT_IN = [Addition, AdditionChat, Steps]


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", [{"problem": f"{n}+1", "answer": n + 1} for n in range(50)])


# --- numbering


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic-chat", "arithmetic-steps"])
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**40), start=st.integers(0, 20_000), count=st.integers(0, 40))
def test_prompt_number_i_depends_on_seed_and_i_alone(name: str, seed: int, start: int, count: int) -> None:
    whole = make_task(name, seed=seed).prompts(start, count)
    task = make_task(name, seed=seed)
    assert [task.prompts(index, 1)[0] for index in reversed(range(start, start + count))] == whole[::-1]


def test_prompts_are_the_same_for_ever() -> None:
    # Written down once. If this fails, runs that were begun before cannot be resumed.
    assert [task(seed=7).prompts(9_000, 1)[0].text for task in BUILT_IN] == [
        "74+29=",
        "What is 6+9?",
        "1+8+8-8+4-1=",
    ]
    assert [task().evaluation_prompts(1)[0].text for task in BUILT_IN] == [
        "31+50=",
        "What is 5+9?",
        "2-1+6-4+7-5=",
    ]


def test_seeds_differ() -> None:
    for task in BUILT_IN:
        assert ids(task(seed=1).prompts(0, 50)) != ids(task(seed=2).prompts(0, 50))


def test_finite_tasks_go_through_all_prompts_once_per_epoch_in_another_order() -> None:
    task = Addition(seed=5)
    first, second = (ids(task.prompts(epoch * task.size, task.size)) for epoch in range(2))
    assert len(set(first)) == task.size
    assert sorted(first) == sorted(second)
    assert first != second
    assert ids(task.prompts(task.size - 3, 6)) == first[-3:] + second[:3]


@pytest.mark.parametrize("task", BUILT_IN)
def test_training_and_evaluation_are_apart(task: type[Addition | Steps]) -> None:
    evaluation = task(seed=1).evaluation_prompts(500)
    assert evaluation == task(seed=2).evaluation_prompts(500)
    assert evaluation[:5] == task().evaluation_prompts(5)
    assert len(set(ids(evaluation))) == len(evaluation)
    for seed in range(3):
        training = task(seed=seed).prompts(0, 8_000)
        assert not {prompt.text for prompt in training} & {prompt.text for prompt in evaluation}


def test_the_id_names_the_question() -> None:
    assert Addition().prompts(0, 1)[0].prompt_id == "arithmetic/" + Addition().prompts(0, 1)[0].text[:-1]
    by_id = {prompt.prompt_id: prompt.text for prompt in Steps(seed=1).prompts(0, 5_000)}
    assert len(set(by_id.values())) == len(by_id)


def test_a_mirrored_sum_does_not_give_the_held_out_one_away() -> None:
    training = {prompt.text for prompt in Addition().prompts(0, Addition().size)}
    for prompt in Addition().evaluation_prompts(10_000):
        left, right = prompt.text.removesuffix("=").split("+")
        assert f"{right}+{left}=" not in training


def test_sizes() -> None:
    assert Addition().size + len(Addition().evaluation_prompts(10_000)) == 90 * 90
    assert AdditionChat().size + len(AdditionChat().evaluation_prompts(10_000)) == 10 * 10
    assert Steps().size is None


def test_negative_indices_are_refused() -> None:
    for task in BUILT_IN:
        with pytest.raises(ValueError, match="must not be negative"):
            task().prompts(-1, 1)
        with pytest.raises(ValueError, match="must not be negative"):
            task().evaluation_prompts(-1)


# --- arithmetic


@pytest.mark.parametrize("task", [task(seed=3) for task in BUILT_IN], ids=lambda task: task.name)
def test_gold_responses_are_right_and_spoiled_ones_wrong(task: Addition | Steps) -> None:
    prompts = task.prompts(0, 3_000) + task.evaluation_prompts(500)
    rng = random.Random(0)
    gold = task.verifier.score(prompts, [task.solution(prompt) for prompt in prompts])
    assert {(reward.value, reward.error, *reward.parts.values()) for reward in gold} <= {
        (1.0, "", 1.0, 1.0),
        (1.0, "", 1.0),
    }
    spoiled = task.verifier.score(prompts, [task.spoiled_solution(prompt, rng) for prompt in prompts])
    assert {(reward.value, reward.error) for reward in spoiled} == {(0.0, "")}
    assert all(reward.parts.get("format", 1.0) == 1.0 for reward in spoiled), (
        "a spoiled response looks like a right one"
    )


def test_answers_are_those_of_python() -> None:
    for prompt in Addition().prompts(0, 500) + Steps().prompts(0, 500):
        assert int(prompt.answer) == eval(prompt.text.removesuffix("="))


def test_every_worked_out_response_has_30_to_60_characters() -> None:
    task, rng = Steps(seed=1), random.Random(1)
    prompts = task.prompts(0, 5_000)
    lengths = Counter(len(task.solution(prompt)) for prompt in prompts)
    spoiled = Counter(len(task.spoiled_solution(prompt, rng)) for prompt in prompts)
    # By hand: 5 steps such as 1+1=2; and #2 make 5·6 + 2 = 32; 6 steps, all totals of two digits, 7 + 5·8 + 3 = 50.
    assert (min(lengths), max(lengths)) == (32, 50)
    assert min(spoiled) >= 32 and max(spoiled) <= 50


def test_worked_out_steps_by_hand() -> None:
    task = Steps()
    prompt = Prompt("p", "7+8-5+6-2+3=", "17")
    assert task.solution(prompt) == "7+8=15;15-5=10;10+6=16;16-2=14;14+3=17;#17"
    assert task.verifier.score([prompt], ["#17"])[0].parts == {"correct": 1.0, "format": 0.0}


def test_spoiled_steps_hold_one_error_and_are_consistent_after_it() -> None:
    task, rng = Steps(), random.Random(2)
    places = Counter[int]()
    for prompt in task.prompts(0, 1_000):
        *steps, final = task.spoiled_solution(prompt, rng).split(";")
        wrong = [place for place, step in enumerate(steps) if eval(step.replace("=", "=="), {}) is False]
        assert len(wrong) == 1
        places[wrong[0]] += 1
        totals = [int(step.partition("=")[2]) for step in steps]
        assert all(0 <= total <= task.largest_total for total in totals)
        assert final == f"#{totals[-1]}"
    assert set(places) == set(range(6)), "errors are made at every step"


def test_characters_are_all_and_only_those_used() -> None:
    used = set()
    for task in (Addition(), Steps()):
        rng = random.Random(3)
        for prompt in task.prompts(0, 500):
            used |= set(prompt.text + task.solution(prompt) + task.spoiled_solution(prompt, rng))
    assert used == set(CHARACTERS)
    assert len(CHARACTERS) == len(used)


@pytest.mark.parametrize(
    ("response", "value", "form"),
    [
        ("#17", 1, 0),
        ("7+8=15;#17", 1, 1),
        ("#99#17", 1, 0),
        ("#17#99", 0, 0),
        ("17", 0, 0),
        ("#17;", 0, 0),
        ("#1 7", 0, 0),
        ("#017", 0, 0),
        ("#١٧", 0, 0),
        ("", 0, 0),
        ("#", 0, 0),
        ("#" * 100_000, 0, 0),
        ("7+8=15;" * 20_000, 0, 0),
        ("\ud800\x00#17", 1, 0),
    ],
)
def test_steps_verifier_looks_only_behind_the_last_marker(response: str, value: float, form: float) -> None:
    reward = Steps().verifier.score([Prompt("p", "7+8-5+6-2+3=", "17")], [response])[0]
    assert (reward.value, reward.parts["format"]) == (value, form)


def test_chat_prompts_are_marked_and_the_last_number_counts() -> None:
    task = AdditionChat()
    prompt = next(prompt for prompt in task.prompts(0, 100) if prompt.answer == "8")
    assert prompt.metadata == {"format": "chat"}
    responses = ["8", "3 + 5 = 8.", "It is 8, no, 9", "eight", "8.0", "-8"]
    assert [r.value for r in task.verifier.score([prompt] * 6, responses)] == [1, 1, 0, 0, 1, 0]


def test_chat_prompts_with_the_beginning_of_the_reply() -> None:
    task = AdditionChat(prefill=True)
    (prompt,) = task.evaluation_prompts(1)
    assert (prompt.text, prompt.answer) == ("What is 5+9?", "14")
    assert prompt.metadata == {"format": "chat", "prefill": "5 + 9 ="}
    # What comes after the "=" is the first number.
    assert [r.value for r in task.verifier.score([prompt] * 2, [" 14\n5 + 9", " 5 + 9 = 14"])] == [1, 0]
    assert ids(task.prompts(0, 86)) == ids(AdditionChat().prompts(0, 86))


def test_chat_prompts_with_other_terms_and_operations() -> None:
    task = AdditionChat(largest=12, operations="+-*")
    training, held_out = task.prompts(0, task.size), task.evaluation_prompts(10_000)
    assert len(training) + len(held_out) == 3 * 13 * 13
    assert not set(ids(training)) & set(ids(held_out))
    for prompt in training + held_out:
        left, operation, right = re.fullmatch(r"What is (\d+)([-+*])(\d+)\?", prompt.text).groups()  # type: ignore[union-attr]
        value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operation]
        assert prompt.answer == str(value)
    # 3*5 and 5*3 go to the same side, as 3+5 and 5+3 do; 3-5 gives 5-3 not away.
    names = set(ids(held_out))
    for operation in "+*":
        assert all(
            (f"arithmetic-chat/{a}{operation}{b}" in names) == (f"arithmetic-chat/{b}{operation}{a}" in names)
            for a in range(13)
            for b in range(13)
        )
    # What is held out does not depend on the options: a model trained on one set is not judged on it in another.
    assert set(ids(AdditionChat().evaluation_prompts(99))) <= names
    wrong: list[dict[str, Any]] = [{"largest": 0}, {"operations": ""}, {"operations": "++"}, {"operations": "/"}]
    for options in wrong:
        with pytest.raises(TaskError, match="must"):
            make_task("arithmetic-chat", **options)


# --- rows


def test_jsonl_task(sums: Path) -> None:
    task = make_task("jsonl", path=sums, seed=1, held_out=0.2)
    training, evaluation = task.prompts(0, 40), task.evaluation_prompts(100)
    assert (task.name, task.size, len(evaluation)) == ("sums", 40, 10)
    assert len(set(ids(training)) | set(ids(evaluation))) == 50
    assert isinstance(task, Task)
    assert task.verifier.score(training[:1], [f"it is {training[0].answer}"])[0].value == 1.0
    assert make_task("jsonl", path=sums, seed=2, held_out=0.2).evaluation_prompts(100) == evaluation


def test_held_out_rows_do_not_depend_on_the_order_of_the_file(sums: Path, tmp_path: Path) -> None:
    lines = sums.read_text().splitlines(keepends=True)
    (tmp_path / "turned.jsonl").write_text("".join(reversed(lines)))
    turned = make_task("jsonl", path=tmp_path / "turned.jsonl")
    assert turned.evaluation_prompts(5) == make_task("jsonl", path=sums).evaluation_prompts(5)


def test_templates_and_field_names(tmp_path: Path) -> None:
    rows = [{"q": r"\frac{1}{2} {problem}", "a": 0.5, "n": number} for number in range(3)]
    path = write(tmp_path / "t.jsonl", rows)
    fields = {"problem_field": "q", "answer_field": "a", "id_field": "n", "held_out": 0, "verifier": "exact"}
    plain = make_task("jsonl", path=path, template="Q: {problem}\nA:", **fields).prompts(0, 3)
    assert sorted(ids(plain)) == ["0", "1", "2"]
    assert plain[0].text == "Q: \\frac{1}{2} {problem}\nA:"
    assert (plain[0].answer, plain[0].metadata) == ("0.5", {"problem": r"\frac{1}{2} {problem}"})
    chat = make_task("jsonl", path=path, chat=True, system="Be brief.", **fields).prompts(0, 1)[0]
    assert chat.metadata == {"format": "chat", "system": "Be brief."}


def test_separate_evaluation_file_and_overlap(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [{"id": n, "problem": f"{n}+1", "answer": n + 1} for n in range(10)])
    held = write(tmp_path / "b.jsonl", [{"id": n, "problem": f"{n}+1 ", "answer": n + 1} for n in range(8, 12)])
    task = make_task("jsonl", path=train, evaluation_path=held)
    assert (task.size, task.overlapping) == (8, 2)  # type: ignore[attr-defined]
    assert sorted(ids(task.evaluation_prompts(9))) == sorted(f"evaluation/{n}" for n in range(8, 12))
    with pytest.raises(TaskError, match="every training problem is also an evaluation problem"):
        make_task("jsonl", path=train, evaluation_path=train)


def test_excluded_ids_and_repeated_rows(sums: Path) -> None:
    sums.write_text(sums.read_text() * 2)
    everything = ids(make_task("jsonl", path=sums, held_out=0).prompts(0, 50))
    assert len(set(everything)) == 50
    fewer = make_task("jsonl", path=sums, held_out=0, exclude_ids=[*everything[:4], "unknown"])
    assert (fewer.size, set(everything[:4]) & set(ids(fewer.prompts(0, 46)))) == (46, set())
    with pytest.raises(TaskError, match="exclude_ids leaves none of its 50 rows"):
        make_task("jsonl", path=sums, exclude_ids=everything)
    with pytest.raises(TaskError, match="holds nothing out"):
        fewer.evaluation_prompts(1)


GOOD = b'{"problem": "1+1", "answer": 2, "id": 7}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: write one JSON object per line"),
        (b"\n  \n", "is empty"),
        (GOOD + b'{"problem": \n', "line 2: not JSON: Expecting value"),
        (b"[" * 100_000, "line 1: not JSON: "),
        (GOOD + b"\n[1]\n", "line 3: must be a JSON object, not list"),
        (b'{"problm": "1+1", "answer": 2}', "line 1: there is no field 'problem'; did you mean problm"),
        (b'{"problem": "1+1"}', "line 1: there is no field 'answer'; known: problem"),
        (b'{"problem": "1+1", "answer": null}', "field 'answer' must be text or a number, not NoneType"),
        (b'{"problem": "1+1", "answer": true}', "field 'answer' must be text or a number, not bool"),
        (b'{"problem": "1+1", "answer": NaN}', "field 'answer' is nan"),
        (b'{"problem": " ", "answer": 2}', "field 'problem' is empty"),
        (GOOD + b"\n" + GOOD, "line 3: id '7' was already used by .*line 1"),
        (GOOD, r"1 row\(s\) are too few to hold 1 out"),
        (b'{"problem": "\xff"}', "is not UTF-8 text: invalid start byte at byte 13"),
    ],
)
def test_bad_files_give_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=message) as caught:
        make_task("jsonl", path=path)
    assert "\n" not in str(caught.value)


def test_bad_paths_and_settings(tmp_path: Path, sums: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no file .*missing\.jsonl"):
        make_task("jsonl", path=tmp_path / "missing.jsonl")
    with pytest.raises(TaskError, match="cannot be read: Is a directory"):
        make_task("jsonl", path=tmp_path)
    with pytest.raises(TaskError, match=r"must contain \{problem\}"):
        make_task("jsonl", path=sums, template="Q: {question}")
    with pytest.raises(TaskError, match="needs chat=true"):
        make_task("jsonl", path=sums, system="Be brief.")
    with pytest.raises(TaskError, match=r"held_out=1\.0 must be"):
        make_task("jsonl", path=sums, held_out=1.0)


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"))
    assert make_task("jsonl", path=path, held_out=0).prompts(0, 1)[0] == Prompt("7", "1+1", "2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_hugging_face_datasets_from_disk(tmp_path: Path, sums: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    train = datasets.Dataset.from_list(rows)
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": train, "test": train.select(range(5))}).save_to_disk(str(tmp_path / "two"))
    one = make_task("hf", path=str(tmp_path / "one"), seed=1)
    same = make_task("jsonl", path=sums, seed=1)
    assert one.evaluation_prompts(9) == same.evaluation_prompts(9), "rows become prompts in the same way"
    two = make_task("hf", path=str(tmp_path / "two"), evaluation_split="test")
    assert (two.size, len(two.evaluation_prompts(9))) == (45, 5)
    with pytest.raises(TaskError, match="has no split 'tests'; did you mean test"):
        make_task("hf", path=str(tmp_path / "two"), evaluation_split="tests")
    with pytest.raises(TaskError, match=r"there is no file or directory .*nowhere: correct path, or name a dataset"):
        make_task("hf", path=str(tmp_path / "nowhere"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_hugging_face_datasets_from_files(tmp_path: Path, sums: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    train = datasets.Dataset.from_list([json.loads(line) for line in sums.read_text().splitlines()])
    downloaded = tmp_path / "copies" / "owner" / "sums"  # as a hub has it, with the splits in its card
    downloaded.mkdir(parents=True)
    train.to_parquet(str(downloaded / "a.parquet"))
    splits = "- split: train\n    path: a.parquet\n  - split: test\n    path: a.parquet"
    (downloaded / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n  {splits}\n---\n")
    expected = make_task("jsonl", path=sums).evaluation_prompts(9)
    for path in (downloaded, downloaded / "a.parquet", sums):
        assert make_task("hf", path=str(path)).evaluation_prompts(9) == expected
    assert len(make_task("hf", path=str(downloaded), split="test").evaluation_prompts(9)) == len(expected)
    monkeypatch.setenv("STALEWISE_DATASETS", str(tmp_path / "copies"))
    assert make_task("hf", path="owner/sums").evaluation_prompts(9) == expected
    with pytest.raises(TaskError, match="is a single file and has no split 'test'"):
        make_task("hf", path=str(sums), split="test")
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(TaskError, match=r"notes\.md is no dataset: name a directory, or a file that ends in \.parquet"):
        make_task("hf", path=str(tmp_path / "notes.md"))


def test_a_dataset_that_only_a_hub_has_is_one_message_without_network(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = "from stalewise.tasks import make_task; make_task('hf', path='owner/sums')"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("stalewise.errors.TaskError: cannot load the split 'train' of owner/sums: ConnectionError: ")
    assert "`hf download owner/sums --repo-type dataset" in last and "$STALEWISE_DATASETS" in last


# --- reasoning-gym


def test_gym_task() -> None:
    options = {"dataset": "chain_sum", "parameters": {"max_terms": 3, "max_digits": 1}, "workers": 1}
    task = make_task("gym", seed=1, chat=True, **options)
    training, evaluation = task.prompts(490, 20), task.evaluation_prompts(10)
    assert task.prompts(505, 1) == training[15:16]
    assert evaluation == make_task("gym", seed=2, chat=True, **options).evaluation_prompts(10)
    assert not {prompt.text for prompt in task.prompts(0, 600)} & {prompt.text for prompt in evaluation}
    assert training[0].metadata["format"] == "chat"
    gold = [training[0].answer, f"hm <answer>1</answer> no <answer> {training[1].answer} </answer>"]
    rewards = task.verifier.score(training[:3], [*gold, training[2].answer + "0"])
    task.verifier.close()
    assert [reward.value for reward in rewards] == [1.0, 1.0, 0.0]
    assert 0 < rewards[2].parts["score"] < 0.99, "reasoning-gym gives credit for substrings; the reward does not"


def test_gym_scorer_that_raises_is_an_error() -> None:
    task = make_task("gym", dataset="prime_factorization", workers=1)
    prompts = task.prompts(0, 1) * 2
    rewards = task.verifier.score(prompts, [prompts[0].answer, "junk"])
    task.verifier.close()
    assert rewards[0].value == 1.0
    assert rewards[1].error.startswith("ValueError: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sun"}, "no dataset 'chain_sun'; did you mean chain_sum"),
        ({"dataset": "chain_sum", "parameters": {"max_term": 3}}, "no parameter 'max_term'; did you mean max_terms"),
        ({"dataset": "chain_sum", "parameters": {"seed": 3}}, "seed cannot stand in parameters"),
        ({"dataset": "chain_sum", "parameters": {"max_terms": 1}}, "refuses these parameters of chain_sum: Asser"),
    ],
)
def test_gym_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_task("gym", **options)


# --- the registry


def test_unknown_tasks_and_options_name_the_nearest() -> None:
    with pytest.raises(TaskError, match="unknown task 'arithmetics'; did you mean arithmetic"):
        make_task("arithmetics")
    with pytest.raises(TaskError, match="task arithmetic-steps has no option 'most_term'; did you mean most_terms"):
        make_task("arithmetic-steps", most_term=3)
    with pytest.raises(TaskError, match="task jsonl needs the option 'path'"):
        make_task("jsonl")
    with pytest.raises(TaskError, match="2 ≤ fewest ≤ most"):
        make_task("arithmetic-steps", fewest_terms=8)
    with pytest.raises(TaskError, match=r"must lie in 9\.\.99"):
        make_task("arithmetic-steps", largest_total=100)


def test_missing_extras_say_what_to_install(monkeypatch: pytest.MonkeyPatch, sums: Path) -> None:
    # A None in sys.modules is how Python itself marks a module as not importable.
    for module, extra, make in [
        ("datasets", "datasets", lambda: make_task("hf", path="gsm8k")),
        ("reasoning_gym", "gym", lambda: make_task("gym", dataset="chain_sum")),
        ("math_verify", "math", lambda: make_task("jsonl", path=sums, verifier="math")),
    ]:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(TaskError, match=rf"pip install 'stalewise\[{extra}\]'"):
            make()


def test_tasks_import_neither_torch_nor_the_extras(sums: Path) -> None:
    program = """if True:
        import sys
        from stalewise.tasks import make_task
        make_task("arithmetic").prompts(0, 1)
        make_task("jsonl", path=sys.argv[1], verifier="math")
        print(*sorted({"torch", "transformers", "datasets", "math_verify", "reasoning_gym"} & set(sys.modules)))
    """
    run = subprocess.run([sys.executable, "-c", program, str(sums)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
