"""Prompts by index, and tasks by name."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts import ids
from stalewise.errors import TaskError
from stalewise.tasks import make_task
from stalewise.tasks.arithmetic import Addition, AdditionChat, Steps
from stalewise.tasks.base import content_id, first_distinct, fraction_of, load, read_text
from stalewise.types import Prompt

BUILT_IN = [Addition, AdditionChat, Steps]


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic-chat", "arithmetic-steps"])
@given(seed=st.integers(0, 2**40), start=st.integers(0, 20_000), count=st.integers(0, 40))
def test_prompt_number_i_depends_on_seed_and_i_alone(name: str, seed: int, start: int, count: int) -> None:
    whole = make_task(name, seed=seed).prompts(start, count)
    task = make_task(name, seed=seed)
    assert [task.prompts(index, 1)[0] for index in reversed(range(start, start + count))] == whole[::-1]


def test_finite_tasks_go_through_all_prompts_once_per_epoch_in_another_order() -> None:
    task = Addition(seed=5)
    first, second = (ids(task.prompts(epoch * task.size, task.size)) for epoch in range(2))
    assert len(set(first)) == task.size
    assert sorted(first) == sorted(second)
    assert first != second
    assert ids(task.prompts(task.size - 3, 6)) == first[-3:] + second[:3]


def test_negative_indices_are_refused() -> None:
    for task in BUILT_IN:
        with pytest.raises(ValueError, match="must not be negative"):
            task().prompts(-1, 1)
        with pytest.raises(ValueError, match="must not be negative"):
            task().evaluation_prompts(-1)


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


def test_ids_and_fractions_are_the_same_for_ever() -> None:
    # The first 6 of the 32 bytes of SHA-256("a") are ca978112ca1b.
    assert fraction_of("a") == 0xCA978112CA1B / 2**48
    assert content_id("1+1", "2") != content_id("1+1", "3")
    assert load("stalewise.tasks.base:fraction_of") is fraction_of


def test_repeated_prompts_count_once() -> None:
    drawn = iter([Prompt(name, name, "") for name in "aabac"])
    assert [prompt.prompt_id for prompt in first_distinct(drawn, 2)] == ["a", "b"]
    assert [prompt.prompt_id for prompt in drawn] == ["a", "c"]  # no more were drawn than needed


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it has more than 1,000 bytes"):
        read_text(Path("/dev/zero"), most=1000)
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(tmp_path / "a", most=6) == "abc"
