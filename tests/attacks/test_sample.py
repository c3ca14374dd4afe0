"""A small sample of `make attack`, with a fixed seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from attacks import damage, inputs, kills, memory
from stalewise.api import run as train
from stalewise.config import RunConfig, make_config
from tiny import tiny_record


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = make_config(tiny_record(tmp_path_factory.mktemp("runs")))
    train(config)
    return config


def test_no_damage_goes_unnoticed(tiny_run: RunConfig, tmp_path: Path) -> None:
    run = shutil.copytree(tiny_run.directory, tmp_path / "run")
    found = damage.attack(run, 15, seed=7)
    assert found["wrong"] == [] and found["noticed"] > 10
    assert damage.outcome(run, json.dumps(damage.figures(run), default=repr)) == "harmless"  # all was put back


@pytest.mark.nightly
def test_a_damaged_run_of_an_earlier_release_ends_in_words(tiny_run: RunConfig, tmp_path: Path) -> None:
    run = shutil.copytree(tiny_run.directory, tmp_path / "run")
    damage.without_checksums(run)
    found = damage.attack(run, 40, seed=8)
    assert [text for text in found["wrong"] if "FOREIGN" in text] == []


@pytest.mark.parametrize("attack", [inputs.attack_configs, inputs.attack_rows, inputs.attack_options])
def test_random_inputs_are_taken_or_refused_in_words(attack: inputs.Attack, tmp_path: Path) -> None:
    found = attack(60, 3, tmp_path)
    assert found["wrong"] == [] and found["refused"] > 0


def test_an_interrupt_within_an_import_is_no_traceback(tmp_path: Path) -> None:
    found = kills.attack_commands(3, 1, tmp_path, longest=1.5)
    assert found["wrong"] == [] and found["ended_by_them"] > 0


def test_verbs_are_measured_on_a_store_of_many_rollouts(tmp_path: Path) -> None:
    run = memory.make_store(tmp_path, 4000)
    megabytes, _, told = memory.peak(memory.verbs(run, tmp_path)["difficulty"], tmp_path)
    assert told == "" and 20 < megabytes < 400
    table = json.loads((tmp_path / "table.json").read_text())
    assert sum(total for _, total in table["prompts"].values()) == 4000 + 64
