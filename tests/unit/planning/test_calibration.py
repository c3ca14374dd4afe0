"""Calibrations: what they belong to, what a probe reads from a run, and what a plan says of a config."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from calibrations import ENVIRONMENT, PROBE, SWEEP, config_at, stable_and_not
from stalewise.config import RunConfig, make_config, set_dotted
from stalewise.config.run import _keys
from stalewise.config.run_directory import identity_differences
from stalewise.errors import CalibrationError
from stalewise.models import EMBEDDED
from stalewise.planning.calibration import (
    Calibration,
    CalibrationIdentity,
    CollapseRule,
    MeasuredOn,
    calibration_path,
    find_calibration,
    fingerprint_of_files,
    identity_of_config,
    read_calibration,
    save_calibration,
)
from stalewise.planning.sweep import fit_sweep
from stalewise.store.atomic import read_json, write_json_atomic
from stalewise.tasks.difficulty import DifficultyTable, PassCounts

# ---------------------------------------------------------------- identity and file


# All settings when calibrations and runs of the first releases were made, by table.
FIRST_SETTINGS = {
    "": "name runs seed recipe trackers",
    "model.": "path adapter precision device threads lora.rank lora.alpha lora.targets",
    "task.": "name",
    "schedule.": "kind updates stages updates_per_generation lag generator_device end spent_ess",
    "batch.": "prompts group_size",
    "sampler.": "engine temperature top_p top_k weights max_new_tokens rollouts_per_shard foreign.path foreign.share",
    "sampler.vllm.": "gpu_memory_utilization max_model_len tensor_parallel copies while_learning",
    "sampler.server.": "urls model precision reload command concurrency timeout_s retries wait_s api_key_env",
    "objective.": "name advantage truncated proximal_every",
    "optimizer.": "learning_rate schedule warmup_updates betas epsilon weight_decay max_grad_norm step_control",
    "learner.": "tokens_per_micro_batch gradient_checkpointing compile keep_activations parallel record_tokens",
    "checkpoints.": "every keep",
    "evaluation.": "every prompts samples",
    "guard.": "action rollbacks fraction window",
    "plan.": "calibration learning_rate risk strict",
    "workers.": "learner lost_after_s",
    "storage.": "url",
}
# Each setting that was added since, with another value than its default and what that value needs; and whether a run,
# or a calibration, is then another one: where the numbers of training change.
ADDED: dict[str, tuple[Any, dict[str, Any], bool, bool]] = {
    "model.check": ("warn", {}, False, False),
    "task.difficulty": ("TABLE", {}, True, True),
    "task.pass_rates": ([0.2, 0.8], {"task.difficulty": "TABLE"}, True, True),
    "task.by_pass_rate": ("sample", {"task.difficulty": "TABLE"}, True, True),
    "task.max_unscored": (0.5, {}, False, False),
    "batch.without_variance": ("drop", {}, True, True),
    "batch.refill_limit": (3.0, {"batch.without_variance": "refill"}, True, True),
    "objective.kl": (0.1, {}, True, True),
    "objective.kl_estimator": ("k2", {"objective.kl": 0.1}, True, True),
    "objective.kl_in": ("reward", {"objective.kl": 0.1}, True, True),
    "objective.reference": ("POLICY", {"objective.kl": 0.1}, True, True),
    "objective.entropy_bonus": (0.1, {}, True, True),
    "objective.reward_weights": ({"correct": 2.0}, {}, True, True),
    "objective.overlong_tokens": (2, {}, True, True),
    "objective.policy_temperature": (1.2, {}, True, True),
    "objective.overlong_penalty": (0.5, {"objective.overlong_tokens": 2}, True, True),
    "optimizer.moments": ("int8", {}, True, True),
    "learner.offload": ("always", {}, False, False),
    "evaluation.suite": ([{"task": "arithmetic"}], {}, False, False),
}


def test_every_setting_is_of_the_first_releases_or_known_as_added() -> None:
    first = {f"{table}{key}" for table, keys in FIRST_SETTINGS.items() for key in keys.split()}
    now = {key for key, is_table in _keys(RunConfig) if not is_table}
    free = {"task.options", "objective.params", "storage.options", "sampler.server.paths", "sampler.vllm.options"}
    assert now == first | set(ADDED) | free


def test_defaults_of_added_settings_leave_calibrations_and_runs_as_they_were() -> None:
    # The names as the release before the first of these settings made them.
    assert identity_of_config(RunConfig()).file_name == "arithmetic-mu_grpo-bc51bfd1.json"
    adapted = make_config({"model": {"lora": {"rank": 4}}, "objective": {"name": "grpo"}})
    assert identity_of_config(adapted).file_name == "arithmetic-grpo-676840c3.json"
    for config in (RunConfig(), adapted):
        recorded = config.model_dump(mode="json")
        for key in ADDED:
            table, _, name = key.rpartition(".")
            del recorded[table][name]
        assert identity_differences(config, recorded) == []


@pytest.mark.parametrize("key", ADDED)
def test_other_values_of_added_settings_are_another_run_where_numbers_change(key: str, tmp_path: Path) -> None:
    value, needs, other_run, other_calibration = ADDED[key]
    (tmp_path / "table.json").write_text(json.dumps(DifficultyTable({"a": PassCounts(1, 2)}).record()))
    places = {"TABLE": str(tmp_path / "table.json"), "POLICY": "arithmetic-steps"}

    def config(settings: dict[str, Any]) -> RunConfig:
        record: dict[str, Any] = {"runs": str(tmp_path)}
        for name, given in settings.items():
            set_dotted(record, name, places.get(given, given) if isinstance(given, str) else given)
        return make_config(record)

    before, after = config(needs), config({**needs, key: value})
    assert before != after
    assert bool(identity_differences(after, before.model_dump(mode="json"))) is other_run
    one, other = identity_of_config(before), identity_of_config(after)
    assert (one.file_name != other.file_name) is bool(one.differences(other)) is other_calibration


def test_tables_and_references_are_identified_by_their_content(tmp_path: Path) -> None:
    table, reference = tmp_path / "table.json", shutil.copytree(EMBEDDED / "arithmetic", tmp_path / "reference")
    table.write_text(json.dumps(DifficultyTable({"a": PassCounts(1, 2)}).record()))
    record = {"task": {"difficulty": str(table)}, "objective": {"kl": 0.1, "reference": str(reference)}}
    config = make_config(record)
    before = identity_of_config(config)
    table.write_text(json.dumps(DifficultyTable({"a": PassCounts(2, 2)}).record()))
    shutil.copy(EMBEDDED / "arithmetic-steps" / "model.safetensors", reference)
    found = [text.partition(" ")[0] for text in before.differences(identity_of_config(config))]
    assert found == ["task.difficulty", "objective.reference"]


def test_what_a_calibration_belongs_to(runs: Path) -> None:
    config = config_at(runs)
    mine = identity_of_config(config)
    other = config_at(runs, schedule={"updates": 7, "stages": 7}, optimizer={"learning_rate": 1.0})
    same = make_config({**other.model_dump(mode="json"), "name": "other", "seed": 5})
    assert mine.differences(identity_of_config(same)) == []
    assert mine.file_name == identity_of_config(same).file_name
    assert re.fullmatch(r"arithmetic-mu_grpo-[0-9a-f]{8}\.json", mine.file_name)
    for section, key, value in (
        ("batch", "prompts", 5),
        ("batch", "group_size", 8),
        ("objective", "name", "grpo"),
        ("optimizer", "weight_decay", 0.1),
        ("optimizer", "betas", [0.9, 0.95]),
        ("optimizer", "max_grad_norm", 2.0),
        ("optimizer", "schedule", "cosine"),
        ("optimizer", "warmup_updates", 3),
        ("optimizer", "step_control", "vcpo"),
        ("sampler", "temperature", 0.5),
        ("sampler", "max_new_tokens", 9),
        ("model", "precision", "bfloat16-only"),
    ):
        other = identity_of_config(config_at(runs, **{section: {key: value}}))
        (difference,) = mine.differences(other)
        assert difference.startswith(f"{section}.{key} is ")
        assert other.file_name != mine.file_name
    lora = identity_of_config(config_at(runs, model={"lora": {"rank": 4}}))
    assert mine.differences(lora) == ["model.lora.rank is 0 and not 4"]


def test_another_model_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    for place in ("here", "there"):
        shutil.copytree(EMBEDDED / "arithmetic", tmp_path / place / "policy")
    here, there = (config_at(tmp_path, model={"path": str(tmp_path / p / "policy")}) for p in ("here", "there"))
    assert identity_of_config(here) == identity_of_config(there)
    weights = tmp_path / "there" / "policy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (difference,) = identity_of_config(here).differences(identity_of_config(there))
    assert difference.startswith("model.fingerprint is ")


def test_a_fingerprint_reads_files_that_are_shorter_than_a_piece(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint_of_files(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert fingerprint_of_files(tmp_path) != first


def test_probe_and_sweep_share_a_file_and_come_back_as_they_were(runs: Path) -> None:
    config = config_at(runs)
    assert find_calibration(config) is None
    path = save_calibration(config, ENVIRONMENT, probe=PROBE)
    assert path.parent == runs / "calibrations"
    assert path.name == identity_of_config(config).file_name
    assert save_calibration(config, {**ENVIRONMENT, "stalewise": "1"}, sweep=SWEEP) == path
    found = find_calibration(config)
    assert found is not None and found.sweep is not None and found.sweep.fit is not None and SWEEP.fit is not None
    places: dict[str, MeasuredOn] = {part: MeasuredOn("cpu", "hf", 1) for part in ("probe", "sweep")}
    expected = Calibration(identity_of_config(config), {**ENVIRONMENT, "stalewise": "1"}, PROBE, places=places)
    assert replace(found, sweep=None) == expected
    assert (found.sweep.runs, found.sweep.rule) == (SWEEP.runs, SWEEP.rule)
    assert found.sweep.fit.batch_radius == SWEEP.fit.batch_radius
    assert found.sweep.fit.domain == SWEEP.fit.domain
    assert read_json(path)["format"] == "stalewise.calibration/1"
    assert find_calibration(config_at(runs, batch={"prompts": 5})) is None


def test_what_the_runs_do_not_determine_comes_back_too(runs: Path) -> None:
    nothing = fit_sweep([replace(run, collapsed_at=None) for run in stable_and_not()], CollapseRule(), resamples=0)
    assert nothing.fit is not None and math.isnan(nothing.fit.batch_radius.value)
    found = read_calibration(save_calibration(config_at(runs), ENVIRONMENT, sweep=nothing)).sweep
    assert found is not None and found.fit is not None
    assert found.fit.batch_radius.low == nothing.fit.batch_radius.low
    assert (math.isnan(found.fit.batch_radius.value), found.fit.batch_radius.high) == (True, math.inf)


def test_a_named_calibration_of_something_else_is_refused_by_what_differs(runs: Path, tmp_path: Path) -> None:
    path = save_calibration(config_at(runs), ENVIRONMENT, probe=PROBE)
    named = {"plan": {"calibration": str(path)}}
    assert find_calibration(config_at(tmp_path / "elsewhere", **named)) is not None
    with pytest.raises(
        CalibrationError, match=r"is for other settings \(batch.prompts is 5 and not 4\): name a calibration"
    ):
        find_calibration(config_at(runs, **named, batch={"prompts": 5}))
    with pytest.raises(CalibrationError, match=r"nowhere.json does not exist: `stalewise sweep` makes one"):
        find_calibration(config_at(runs, plan={"calibration": "nowhere.json"}))


def test_a_damaged_calibration_is_refused_by_its_name(runs: Path) -> None:
    config = config_at(runs)
    path = save_calibration(config, ENVIRONMENT, probe=PROBE)
    record = read_json(path)
    del record["probe"]["seconds_per_update"]
    write_json_atomic(path, record)
    with pytest.raises(CalibrationError, match=r"\.json is corrupt: probe\.seconds_per_update: Field required; delete"):
        find_calibration(config)
    write_json_atomic(path, {**record, "format": "stalewise.calibration/9"})
    with pytest.raises(CalibrationError, match=r"has format stalewise.calibration/9; this release reads"):
        find_calibration(config)


# ---------------------------------------------------------------- costs and plans


def test_identities_are_told_apart_by_what_one_of_them_lacks() -> None:
    mine, theirs = CalibrationIdentity({"a": 1}), CalibrationIdentity({"b": 2})
    assert mine.differences(theirs) == ["a is 1 and not None", "b is None and not 2"]


def test_a_calibration_is_a_record_of_plain_values(runs: Path) -> None:
    path = save_calibration(config_at(runs), ENVIRONMENT, probe=PROBE)
    assert read_json(path)["probe"] == {**asdict(PROBE), "generation_sizes": [64, 320]}
    assert calibration_path(str(runs), identity_of_config(config_at(runs))) == path
