"""Tasks from Hugging Face datasets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from stalewise.errors import TaskError
from stalewise.tasks import hf_datasets, make_task
from stalewise.tasks.hf_datasets import FORMATS, read_dataset, rows_of


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
    with pytest.raises(TaskError, match=r"notes\.md is not a dataset: name a directory, or a file that ends in"):
        make_task("hf", path=str(tmp_path / "notes.md"))


def test_a_dataset_that_only_a_hub_has_is_one_message_without_network(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = "from stalewise.tasks import make_task; make_task('hf', path='owner/sums')"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("stalewise.errors.TaskError: cannot load the split 'train' of owner/sums: ConnectionError: ")
    assert "`hf download owner/sums --repo-type dataset" in last and "$STALEWISE_DATASETS" in last


def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = "from stalewise.tasks import make_task; make_task('hf', path='owner/sums')"
    nobody = {key: value for key, value in os.environ.items() if not key.lower().endswith(("proxy", "offline"))}
    nobody |= {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=nobody, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "stalewise.errors.TaskError: cannot load the split 'train' of owner/sums: ConnectionError: "
        "http://127.0.0.1:1 does not answer within 5 s; without network, download it elsewhere (`hf download owner/sums"
    )
    assert "Retry" not in done.stderr


def test_a_file_has_one_split_and_a_known_format(tmp_path: Path) -> None:
    for suffix in (".csv", ".txt"):
        (tmp_path / f"a{suffix}").write_text("problem,answer\n1+1,2\n")
    with pytest.raises(TaskError, match="is a single file and has no split 'test'"):
        next(read_dataset(str(tmp_path / "a.csv"), None, "test"))
    with pytest.raises(TaskError, match=r"is not a dataset: name a directory, or a file that ends in .*csv") as caught:
        next(read_dataset(str(tmp_path / "a.txt"), None, "train"))
    assert all(suffix in str(caught.value) for suffix in FORMATS)


def test_a_data_frame_is_told_how_it_becomes_rows() -> None:
    with pytest.raises(TaskError, match=r"is a DataFrame: pass its rows, as in dataset\.to_dict\('records'\)"):
        rows_of(pandas.DataFrame([{"prompt": "1+1=", "answer": "2"}]))


def test_caches_of_other_datasets_do_not_count_for_one_without_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    asked: list[str] = []
    monkeypatch.setattr(hf_datasets, "check_answers", asked.append)
    (tmp_path / "owner___sums").mkdir()
    for path in ("sums", "owner/others", "owner/sums"):
        hf_datasets._check_hub(path)
    assert len(asked) == 2  # the last one is there
