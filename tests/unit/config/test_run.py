"""Configs: every one in the repository loads, and a mistake is named with its remedy."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stalewise.config.run import (
    load_config,
    make_config,
    parse_override,
    stages_warning,
    temperature_warning,
    write_resolved,
)
from stalewise.errors import ConfigError
from stalewise.store.atomic import read_json
from stalewise.tasks import TASKS

ROOT = Path(__file__).parents[3]


CONFIGS = sorted(ROOT.glob("configs/*.toml"))


def documented() -> list[Any]:
    """Every piece of a config that stands in the documentation; those of experiments are other files."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        pytest.param(piece, id=f"{page.name}-{number}")
        for page in pages
        if page.name != "experiments.md"
        for number, piece in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL))
    ]


@pytest.mark.parametrize("piece", documented())
def test_what_the_documentation_shows_is_accepted(piece: str) -> None:
    make_config(tomllib.loads(piece), source="documentation")


def test_there_are_examples() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"arithmetic_grpo", "arithmetic_mu_grpo", "arithmetic_p3o", "arithmetic_steps_mu_grpo"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_config_in_the_repository_loads(path: Path) -> None:
    from stalewise.orchestrator.preflight import check_objective

    config = load_config(path)
    assert config.task.name in TASKS
    check_objective(config.objective)
    assert config.schedule.schedule().updates == config.schedule.updates


def test_names_of_the_examples_are_distinct() -> None:
    assert len({load_config(path).directory for path in CONFIGS}) == len(CONFIGS)


MISTAKES = [
    ({"optimiser": {}}, "optimiser is not a setting; did you mean optimizer?"),
    ({"optimizer": {"learning_rat": 1e-4}}, "optimizer.learning_rat is not a setting; did you mean learning_rate?"),
    (
        {"optimizer": {"learning_rate": "1e-4"}},
        "optimizer.learning_rate is '1e-4': input should be a valid number, without quotes",
    ),
    ({"optimizer": {"learning_rate": 0.0}}, "optimizer.learning_rate is 0.0: input should be greater than 0"),
    ({"schedule": {"updates": 2.5}}, "schedule.updates is 2.5: input should be a valid integer"),
    ({"batch": {"group_size": 1}}, "batch.group_size is 1: input should be greater than or equal to 2"),
    (
        {"schedule": {"kind": "stagd"}},
        "schedule.kind is 'stagd': input should be 'staged', 'synchronous' or",
    ),
    ({"schedule": {"lag": 2}}, "schedule: lag has no meaning in a staged schedule: remove it or change kind"),
    (
        {"schedule": {"kind": "pipelined", "updates": 8, "lag": 2}},
        "schedule: lag is 2, but 8 updates have only 2 generation batches: the first policy would make all of them; "
        "lower lag or updates_per_generation, or raise updates",
    ),
    ({"schedule": {"updates": 2, "stages": 3}}, "schedule: stages is 3 but there are only 2 updates"),
    ({"optimizer": {"warmup_updates": 129}}, "optimizer.warmup_updates is 129, more than the 128 updates of the run"),
    ({"sampler": {"rollouts_per_shard": 7}}, "sampler.rollouts_per_shard is 7, less than batch.group_size 8"),
    ({"name": "a/b"}, "name is 'a/b'"),
    ({"trackers": ["wandbb"]}, "trackers.0 is 'wandbb'"),
    ({"trackers": "wandb"}, "trackers is 'wandb': input should be a valid list, as in [\"wandb\"]"),
    ({"objective": {"clip_high": 1.3}}, "; a parameter of the objective is objective.params.clip_high"),
    ({"batch": {"prompts": "8"}}, "batch.prompts is '8': input should be a valid integer, without quotes"),
    ({"sampler": 3}, "sampler is 3"),
]


@pytest.mark.parametrize(("record", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        make_config(record, source="my.toml")
    assert str(caught.value).startswith("my.toml: ")


def test_any_group_size_fits_the_default_shards() -> None:
    config = make_config({"batch": {"group_size": 6}})
    assert config.sampler.rollouts_per_shard % 6


def test_stages_that_do_not_divide_the_updates_are_a_warning() -> None:
    def warning(**schedule: Any) -> str:
        return stages_warning(make_config({"schedule": schedule}).schedule)

    assert warning(updates=4, stages=3).startswith(
        "4 updates make 2 stages of up to 2 updates, not schedule.stages = 3"
    )
    assert [warning(updates=7, stages=2), warning(updates=5), warning(updates=8, stages=4)] == ["", "", ""]


def test_another_temperature_of_training_than_of_sampling_is_a_warning() -> None:
    assert "set objective.policy_temperature = 0.6, as TRL and verl do" in temperature_warning(0.6, 1.0)
    assert [temperature_warning(1.0, 1.0), temperature_warning(0.6, 0.6)] == ["", ""]


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"seed is -1.*; batch.prompts is 0"):
        make_config({"seed": -1, "batch": {"prompts": 0}})


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; `stalewise init .*` writes a commented one"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "yaml.toml").write_text("name: run\n")
    with pytest.raises(ConfigError, match=r"yaml.toml is not TOML: .* \(at line 1"):
        load_config(tmp_path / "yaml.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.toml")


def test_overrides_are_toml_or_bare_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[objective]\nname = 'grpo'\n")
    words = ["objective.name=p3o", "seed=3", "objective.params.clip_high=1.5", "task.options={a=[1, 2]}", "runs=/a b"]
    config = load_config(path, dict(parse_override(word) for word in words))
    assert (config.objective.name, config.seed, config.objective.params) == ("p3o", 3, {"clip_high": 1.5})
    assert (config.task.options, config.runs) == ({"a": [1, 2]}, "/a b")
    for word in ("seed", "=3"):
        with pytest.raises(ConfigError, match="expected key=value"):
            parse_override(word)
    with pytest.raises(ConfigError, match="seed is a value, not a table"):
        load_config(path, {"seed": 1, "seed.x": 2})


def test_the_resolved_config_makes_the_same_config(tmp_path: Path) -> None:
    config = make_config({"optimizer": {"betas": [0.8, 0.9]}, "task": {"options": {"a": 1}}, "seed": 7})
    write_resolved(config, tmp_path / "config.resolved.json")
    record = read_json(tmp_path / "config.resolved.json")
    assert record.pop("format") == "stalewise.run/1"
    assert make_config(record) == config
