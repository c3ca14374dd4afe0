"""The conductor on small real runs: what it leaves on disk, in which order, and that the policy learns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stalewise
from callbacks import StopAt
from stalewise.api import run
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import read_result
from stalewise.errors import StoreError, TaskError
from stalewise.models.loading import load_tokenizer
from stalewise.orchestrator import orchestrator, rollout_source
from stalewise.orchestrator.checkpoint_writer import CheckpointWriter
from stalewise.orchestrator.orchestrator import Orchestrator
from stalewise.rollout.engines.embedded import HFSampler
from stalewise.store import batch_directories, consumed, ledger_path, open_batch, read_ledger
from stalewise.store.atomic import RunLock, read_json, write_json_atomic
from stalewise.store.checkpoints import checkpoint_directory, read_state, versions
from stalewise.store.json_lines import read_jsonl
from stalewise.trainer.execution import Execution
from stalewise.trainer.trainer import NonFiniteUpdate, Trainer
from stalewise.types import NullCallback

UNCHECKED = {"check": "off"}  # test_model_check.py has runs with the check, as these that make way for it


def config(runs: Path, **sections: Any) -> RunConfig:
    small: dict[str, Any] = {
        "name": "small",
        "runs": str(runs),
        "schedule": {"kind": "staged", "updates": 6, "stages": 2},
        "batch": {"prompts": 4, "group_size": 4},
        "sampler": {"max_new_tokens": 6, "rollouts_per_shard": 32},
        "checkpoints": {"every": 2, "keep": 2},
        "evaluation": {"every": 3, "prompts": 8, "samples": 2},
        "model": UNCHECKED,
    }
    return make_config(small | sections)


KEPT = {"every": 2, "keep": 9}


class Recorder(NullCallback):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.said: list[str] = []

    def begin(self, what: str, total: int) -> None:
        self.events.append(f"{what} {total}")

    def log(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Recorder]:
    settings, recorder = config(tmp_path_factory.mktemp("runs")), Recorder()
    run(settings, recorder)
    return settings, recorder


def test_the_order_of_things(finished: tuple[RunConfig, Recorder]) -> None:
    # Two stages of 3 updates × 16 rollouts; checkpoints at multiples of 2, at evaluations (3) and at stage ends.
    assert finished[1].events == [
        "evaluate 16",
        "generate 48",
        "learn 2",
        "learn 1",
        "evaluate 16",
        "generate 48",
        "learn 1",
        "learn 2",
        "evaluate 16",
    ]
    assert [line.split(":")[0] for line in finished[1].said] == ["version 0", "version 3", "version 6"]


class Places:
    """Lets trainer and sampler make way for each other, and notes who is there, and with which weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.samplers, self.loads = set[HFSampler](), list[int]()
        self.policies = list[tuple[Path, dict[str, torch.Tensor]]]()
        load_policy = Orchestrator._load
        monkeypatch.setattr(
            Orchestrator,
            "_load",
            lambda one, path: (load_policy(one, path), self.policies.append((path, self.weights(one.sampler))))[0],
        )
        self.sleeps, self.while_learning = list[int](), list[tuple[int, int]]()
        self.copied_frozen = list[int]()
        monkeypatch.setattr("stalewise.orchestrator.orchestrator.offloads", lambda config, source: True)
        monkeypatch.setattr("stalewise.orchestrator.model_check.offloads", lambda config, source: True)
        load, sleep, enqueue, keep = HFSampler.load, Trainer.sleep, Trainer.enqueue, Trainer.copy_frozen
        monkeypatch.setattr(HFSampler, "load", lambda one, path: (self.loaded(one, path), load(one, path))[1])
        monkeypatch.setattr(Trainer, "sleep", lambda one: (self.sleeps.append(one.version), sleep(one))[1])
        monkeypatch.setattr(
            Trainer, "enqueue", lambda one, rows: (self.while_learning.append(self.sampler()), enqueue(one, rows))[1]
        )
        monkeypatch.setattr(Trainer, "copy_frozen", lambda one: (self.copied_frozen.append(one.version), keep(one))[1])

    def loaded(self, sampler: HFSampler, checkpoint: Path) -> None:
        self.samplers.add(sampler)
        version = versions(checkpoint.parents[1])[-1]
        self.loads += [version] if [version] != self.loads[-1:] else []

    def weights(self, sampler: Any) -> dict[str, torch.Tensor]:
        """What it samples from now."""
        assert not sampler._offload.is_away
        state = sampler._model.state_dict()
        return {name: state[name].clone() for name in sampler._replaceable}

    def check_policies(self) -> None:
        """The sampler always held what the checkpoint holds."""
        assert self.policies
        for checkpoint, weights in self.policies:
            stored = load_file(checkpoint / "model.safetensors")
            assert stored.keys() == weights.keys()
            assert all(torch.equal(stored[name], weight) for name, weight in weights.items()), checkpoint.name

    def sampler(self) -> tuple[int, int]:
        """Bytes of the sampler's matrices on the device, and of their copies on the host."""
        models = [one._model for one in self.samplers if one._model is not None]
        weights = [weight for model in models for weight in model.parameters() if weight.ndim > 1]
        assert weights or not models
        copies = [copy for one in self.samplers for *_, copy in one._offload._away if copy is not None]
        return sum(weight.untyped_storage().nbytes() for weight in weights), sum(copy.nbytes for copy in copies)


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 2}}])
def test_trainer_and_sampler_that_wait_for_each_other_learn_the_same(
    model: dict[str, Any], finished: tuple[RunConfig, Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config(tmp_path / "plain", model=model | UNCHECKED) if model else finished[0]
    if model:
        run(plain)
    places, waiting = Places(monkeypatch), config(tmp_path, model=model, checkpoints=KEPT)
    run(waiting)
    places.check_policies()
    assert places.sleeps == [3, 6]  # before an evaluation; it sleeps still when the next stage is generated
    assert places.while_learning == [(0, 0)] * 6  # nor a copy: the next policy replaces them
    assert places.copied_frozen == [0]
    assert places.loads == [0]  # later policies are taken from the copies that checkpoints are written of
    names = ["model.safetensors", *(["adapter/adapter_model.safetensors"] if model else [])]
    for name in (*names, "optimizer_exp_avg_sq.safetensors"):
        ours, theirs = (checkpoint_directory(one.directory, 6) / name for one in (waiting, plain))
        assert ours.read_bytes() == theirs.read_bytes()
    switches = [one["reason"] for one in read_jsonl(waiting.directory / "journal.jsonl") if one["event"] == "switch"]
    assert switches.count("offload") == 2


def test_without_a_copy_the_sampler_loads_the_checkpoint(
    finished: tuple[RunConfig, Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, waiting = Places(monkeypatch), config(tmp_path, checkpoints=KEPT)
    monkeypatch.setattr(CheckpointWriter, "copy", lambda writer, trainer: None)  # host memory is short
    run(waiting)
    places.check_policies()
    assert places.loads == [0, 3, 6]
    ours, theirs = (checkpoint_directory(one.directory, 6) / "model.safetensors" for one in (waiting, finished[0]))
    assert ours.read_bytes() == theirs.read_bytes()


def test_batches_are_laid_out_for_a_trainer_that_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Places(monkeypatch)
    away, layout = list[bool](), Execution.layout
    monkeypatch.setattr(
        Execution, "layout", lambda one, *options: (away.append(bool(one.offload.away)), layout(one, *options))[1]
    )
    run(config(tmp_path))
    assert away and not any(away)  # it has no graphs while it is away


@pytest.mark.parametrize("model", [{}, pytest.param({"lora": {"rank": 2}}, marks=pytest.mark.nightly)])
def test_they_make_way_where_a_copy_or_a_commit_fails(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"schedule": {"kind": "staged", "updates": 8, "stages": 4}, "checkpoints": {"every": 1, "keep": 9}}
    settings = config(tmp_path, model=model | UNCHECKED, **sections)
    places, copy, write, calls = Places(monkeypatch), CheckpointWriter.copy, orchestrator.write_checkpoint, [0, 0]

    def short(writer: CheckpointWriter, trainer: Trainer) -> Any:
        calls[0] += 1
        return copy(writer, trainer) if calls[0] % 3 else None

    def fail_once(*arguments: Any, **options: Any) -> None:
        calls[1] += 1
        if calls[1] == 5:
            raise OSError("bad disk")
        write(*arguments, **options)

    monkeypatch.setattr(CheckpointWriter, "copy", short)
    monkeypatch.setattr(orchestrator, "write_checkpoint", fail_once)
    with pytest.raises(StoreError, match="bad disk"):
        run(settings)
    places.policies = [one for one in places.policies if one[0].is_dir()]
    run(settings)
    places.check_policies()
    assert calls[1] > 8 and versions(settings.directory)[-1] == 8


def test_neither_is_there_while_a_reference_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, there, compute = Places(monkeypatch), list[tuple[bool, bool, bool]](), rollout_source.compute_reference
    settings = config(tmp_path, objective={"kl": 0.1}, checkpoints=KEPT)

    def noted(*arguments: Any) -> Any:
        on_device, copied = places.sampler()
        there.append((bool(on_device), bool(copied), bool(places.sleeps)))
        return compute(*arguments)

    monkeypatch.setattr(rollout_source, "compute_reference", noted)
    run(settings)
    assert there == [(False, True, False), (False, True, True)]  # no trainer before the first stage
    places.check_policies()


def test_the_metrics_of_a_run_are_those_of_the_documents(finished: tuple[RunConfig, Recorder]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE))
    records = read_jsonl(finished[0].directory / "metrics.jsonl")
    found = {key for record in records for key in record}
    assert found - {"part/correct", "part/format"} == documented - {"kl_reference"}  # which needs a reference
    assert "`part/NAME`" in page


def test_every_rollout_is_used_once_and_at_the_age_of_the_schedule(finished: tuple[RunConfig, Recorder]) -> None:
    directory = finished[0].directory
    ledger = read_ledger(ledger_path(directory))
    assert [(e.update, e.generation_batch, e.version, e.age) for e in ledger] == [
        (0, 0, 0, 0),
        (1, 0, 0, 1),
        (2, 0, 0, 2),
        (3, 1, 3, 0),
        (4, 1, 3, 1),
        (5, 1, 3, 2),
    ]
    used = [last - first + 1 for entry in ledger for first, last in entry.rollout_ids]
    assert sum(used) == 96
    assert consumed(ledger) == ((0, 95),)
    metrics = read_jsonl(directory / "metrics.jsonl")
    assert [record["update"] for record in metrics] == list(range(6))
    assert [record["age_max"] for record in metrics] == [0, 1, 2, 0, 1, 2]
    assert all(record["rollouts"] == 16 for record in metrics)


def test_the_store_holds_what_was_sampled(finished: tuple[RunConfig, Recorder]) -> None:
    directories = batch_directories(finished[0].directory / "rollouts")
    assert [directory.name for directory in directories] == ["g000000-v000000", "g000001-v000003"]
    batch = open_batch(directories[1])
    assert [shard.rows for shard in batch.manifest.shards] == [32, 16]
    rollouts = list(batch.iter_rollouts())
    assert [rollout.rollout_id for rollout in rollouts] == list(range(48, 96))
    assert {rollout.group for rollout in rollouts} == set(range(12, 24))
    assert all(rollout.version_first == rollout.version_last == 3 for rollout in rollouts)
    assert len({rollout.seed for rollout in rollouts}) == 48
    tokenizer = load_tokenizer(str(checkpoint_directory(finished[0].directory, 6)))
    for rollout in rollouts:
        assert tokenizer.decode(rollout.prompt_ids) == rollout.prompt_id.removeprefix("arithmetic/") + "="
        assert tokenizer.decode(rollout.response_ids, skip_special_tokens=True) == rollout.text
        left, right = map(int, rollout.prompt_id.removeprefix("arithmetic/").split("+"))
        assert rollout.reward == float(rollout.text == str(left + right))


def test_old_checkpoints_go_and_needed_ones_stay(finished: tuple[RunConfig, Recorder]) -> None:
    assert versions(finished[0].directory) == [4, 6]
    state = read_state(checkpoint_directory(finished[0].directory, 6))
    metrics = read_jsonl(finished[0].directory / "metrics.jsonl")
    assert (state["version"], state["steps"]) == (6, int(sum(record["taken"] for record in metrics)))
    assert state["drift"] == pytest.approx(metrics[-1]["drift"])


def test_a_finished_run_is_not_run_again(finished: tuple[RunConfig, Recorder]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished[0].directory.rglob("*.parquet")}
    recorder = Recorder()
    result = run(finished[0], recorder)
    assert recorder.events == []
    assert before == {path: path.stat().st_mtime_ns for path in finished[0].directory.rglob("*.parquet")}
    assert result.accuracy == result.evaluations[-1]["accuracy"]["value"]
    assert set(result.seconds) == {"generate", "learn", "switch", "evaluate"}
    assert min(result.seconds.values()) > 0
    assert result == read_result(finished[0].directory, 6)


def test_the_orchestrator_reads_from_disk_what_is_next(finished: tuple[RunConfig, Recorder], tmp_path: Path) -> None:
    settings = finished[0]
    done, new = Orchestrator(settings, NullCallback()), Orchestrator(config(tmp_path), NullCallback())
    try:
        assert done.newest_policy() == str(checkpoint_directory(settings.directory, 6)) and not done.step()
        assert done.batch_directory(1) in batch_directories(settings.directory / "rollouts")
        new.check_directory()
        assert versions(new.directory) == [] and new.batch_directory(1).name == "g000001-v000003"
    finally:
        done.close()
        new.close()


def test_the_run_directory_explains_itself(finished: tuple[RunConfig, Recorder]) -> None:
    directory = finished[0].directory
    resolved = json.loads((directory / "config.resolved.json").read_text())
    assert resolved["format"] == "stalewise.run/1"
    assert resolved["objective"]["name"] == "mu_grpo"
    assert json.loads((directory / "environment.json").read_text())["device"] == "cpu"
    assert [record["version"] for record in read_jsonl(directory / "eval.jsonl")] == [0, 3, 6]


def test_another_config_or_format_does_not_get_the_directory(finished: tuple[RunConfig, Recorder]) -> None:
    runs = finished[0].directory.parent
    with pytest.raises(StoreError, match=r"another config \(optimizer.learning_rate was 0.0001 and is 0.5\)"):
        run(config(runs, optimizer={"learning_rate": 0.5}))
    path = runs / "small" / "config.resolved.json"
    good = path.read_text()
    write_json_atomic(path, {**read_json(path), "format": "stalewise.run/9"}, sealed=True)
    try:
        with pytest.raises(StoreError, match=r"has format stalewise.run/9; this release reads stalewise.run/1"):
            run(finished[0])
    finally:
        path.write_text(good)


def test_trackers_and_place_are_not_part_of_a_runs_identity(finished: tuple[RunConfig, Recorder]) -> None:
    other = finished[0].model_copy(update={"trackers": ["tensorboard"]})
    assert other.identity() == finished[0].identity()


def test_two_processes_cannot_share_a_run(finished: tuple[RunConfig, Recorder]) -> None:
    with RunLock(finished[0].directory), pytest.raises(StoreError, match="is in use by process"):
        run(finished[0])


def test_a_damaged_shard_stops_the_run_and_comes_again_from_its_seeds(tmp_path: Path) -> None:
    schedule = {"kind": "staged", "updates": 4, "stages": 2}
    whole = config(tmp_path / "whole", schedule=schedule)
    run(whole)
    settings = config(tmp_path / "damaged", schedule=schedule)

    class Stop(NullCallback):
        def begin(self, what: str, total: int) -> None:
            if what == "learn":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, Stop())
    shard = next(settings.directory.glob("rollouts/*/shard-00000.parquet"))
    original = shard.read_bytes()
    shard.write_bytes(original[:100] + bytes([original[100] ^ 1]) + original[101:])
    with pytest.raises(StoreError, match=r"shard-00000.parquet is damaged: .* move the shard away"):
        run(settings)
    shard.unlink()
    run(settings)
    assert shard.read_bytes() == original
    final = [checkpoint_directory(c.directory, 4) / "model.safetensors" for c in (whole, settings)]
    assert final[0].read_bytes() == final[1].read_bytes()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"sampler": {"max_new_tokens": 1, "rollouts_per_shard": 32}},
            r"all 48 responses are truncated \(fraction 1.0\)",
        ),
        (
            {"sampler": {"max_new_tokens": 6, "rollouts_per_shard": 32, "temperature": 0.01}},
            r"none of 12 groups has variance; the mean reward is 1.000",
        ),
    ],
)
def test_rollouts_that_teach_nothing_stop_the_run_and_are_kept(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    settings = config(tmp_path, **sections)
    with pytest.raises(TaskError, match=message):
        run(settings)
    assert len(open_batch(batch_directories(settings.directory / "rollouts")[0])) == 48


def test_the_policy_of_the_current_stage_stays_so_that_a_lost_shard_can_be_made_again(tmp_path: Path) -> None:
    settings = config(tmp_path, checkpoints={"every": 1, "keep": 1}, evaluation={"prompts": 8})

    with pytest.raises(KeyboardInterrupt):
        run(settings, StopAt(2))
    assert versions(settings.directory) == [0, 2]
    shard = next(settings.directory.glob("rollouts/*/shard-00001.parquet"))
    original = shard.read_bytes()
    shard.unlink()
    run(settings)
    assert shard.read_bytes() == original
    assert versions(settings.directory) == [6]


def test_nothing_is_made_or_measured_by_a_damaged_policy(tmp_path: Path) -> None:
    settings = config(tmp_path, schedule={"kind": "staged", "updates": 4, "stages": 2}, evaluation={"prompts": 8})

    class Stop(NullCallback):
        batches = 0

        def begin(self, what: str, total: int) -> None:
            self.batches += what == "generate"
            if self.batches == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, Stop())
    weights = checkpoint_directory(settings.directory, 2) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 64
    weights.write_bytes(content)
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged or missing"):
        run(settings)
    assert len(batch_directories(settings.directory / "rollouts")) == 1
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged or missing"):
        stalewise.evaluate(settings.directory)


def test_a_step_to_infinity_is_never_committed(tmp_path: Path) -> None:
    settings = config(tmp_path, optimizer={"learning_rate": 1e38, "weight_decay": 10.0})
    with pytest.raises(NonFiniteUpdate, match=r"update 0 at learning rate 1e\+38 made weights that are not finite"):
        run(settings)
    assert versions(settings.directory) == [0]
    assert not (settings.directory / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "schedule"),
    [
        pytest.param("grpo", {"kind": "synchronous", "updates": 24}, marks=pytest.mark.nightly),
        ("mu_grpo", {"kind": "staged", "updates": 24, "stages": 2}),
        pytest.param("p3o", {"kind": "staged", "updates": 24, "stages": 2}, marks=pytest.mark.nightly),
    ],
)
def test_the_embedded_policy_learns(tmp_path: Path, objective: str, schedule: dict[str, Any]) -> None:
    settings = make_config(
        {
            "name": objective,
            "runs": str(tmp_path),
            "schedule": schedule,
            "objective": {"name": objective},
            "batch": {"prompts": 16, "group_size": 8},
            "sampler": {"max_new_tokens": 6},
            "optimizer": {"learning_rate": 1e-3},
            "evaluation": {"prompts": 128, "samples": 4},
        }
    )
    before, after = run(settings).evaluations
    assert after["accuracy"]["low"] > before["accuracy"]["high"] + 0.1
