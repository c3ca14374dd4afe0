"""The token log: what the learner saw of each token, written with the checkpoints and read without loading all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batches import random_batch
from stalewise.config import RunConfig, make_config
from stalewise.config.run_directory import check_identity
from stalewise.errors import StoreError
from stalewise.objectives import evaluate
from stalewise.store import (
    RolloutColumns,
    TokenLog,
    TokenRecord,
    batch_directories,
    ledger_path,
    open_batch,
    read_ledger,
    read_tokens,
    token_files,
    token_log_directory,
)
from stalewise.store.token_log import LIGHT_COLUMNS, SCHEMA, read_light
from stalewise.trainer.trainer import Trainer
from stalewise.types import TokenFlag
from tiny import tiny_record


def record(first: int = 0, rollouts: int = 4, seed: int = 0) -> TokenRecord:
    """Made-up rollouts of 1 to 6 tokens, seen in another order than they lie in."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, rollouts)
    tokens = int(lengths.sum())
    behaviour = rng.normal(size=tokens).astype(np.float32)
    rows = RolloutColumns(
        rollout_id=np.arange(first, first + rollouts),
        group=np.zeros(rollouts, dtype=np.int64),
        reward=np.zeros(rollouts),
        truncated=np.zeros(rollouts, dtype=np.bool_),
        version_first=np.zeros(rollouts, dtype=np.int32),
        version_last=np.zeros(rollouts, dtype=np.int32),
        prompt_ids=np.ones(rollouts, dtype=np.int32),
        prompt_offsets=np.arange(rollouts + 1),
        response_ids=np.ones(tokens, dtype=np.int32),
        behaviour_logp=behaviour,
        response_offsets=np.r_[0, lengths.cumsum()],
    )
    order = rng.permutation(rollouts)
    flags = rng.integers(0, 8, tokens).astype(np.uint8)
    advantage = rng.normal(size=rollouts).astype(np.float32)
    return TokenRecord(rows, order, advantage, -rng.random(tokens, np.float32), flags)


def expected(update: int, seen: TokenRecord) -> list[dict[str, Any]]:
    """Row by row, by rollout id: the slow way."""
    found: list[dict[str, Any]] = []
    place = 0
    for row in seen.order:
        length = int(seen.rows.response_lengths[row])
        logp, flags = seen.logp[place : place + length], seen.flags[place : place + length]
        log_ratio = logp - seen.rows.logp(row)
        found.append(
            {
                "rollout_id": int(seen.rows.rollout_id[row]),
                "update": update,
                "advantage": float(seen.advantage[row]),
                "worst_log_ratio": float(log_ratio[np.abs(log_ratio).argmax()]),
                "clipped": int(((flags & TokenFlag.CLIPPED) > 0).sum()),
                "vetoed": int(((flags & TokenFlag.VETOED) > 0).sum()),
                "logp": logp.tolist(),
                "flags": flags.tolist(),
            }
        )
        place += length
    return sorted(found, key=lambda one: one["rollout_id"])


def names(run: Path) -> list[str]:
    return [path.name for path in token_files(token_log_directory(run))]


def write(run: Path, updates: range, rollouts: int = 4) -> dict[int, TokenRecord]:
    log = TokenLog(run)
    seen = {update: record(update * rollouts, rollouts, seed=update) for update in updates}
    for update, one in seen.items():
        log.add(update, one)
    log.commit(updates.stop)
    return seen


def test_rows_come_back_as_they_were_seen(tmp_path: Path) -> None:
    seen = write(tmp_path, range(3))
    assert names(tmp_path) == ["u000000-u000002.parquet"]
    for update, one in seen.items():
        assert read_tokens(token_log_directory(tmp_path), update).to_pylist() == expected(update, one)
    some = read_tokens(token_log_directory(tmp_path), 1, [5, 7, 99]).to_pylist()
    assert some == [row for row in expected(1, seen[1]) if row["rollout_id"] in (5, 7)]
    light = read_light(token_files(token_log_directory(tmp_path))[0])
    assert light.column_names == list(LIGHT_COLUMNS) and light.num_rows == 12


def test_only_row_groups_that_can_hold_a_row_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, range(2), rollouts=600)
    decoded: list[int] = []
    from stalewise.store import token_log

    plain = token_log._read

    def counting(path: Path, file: Any, row_groups: Any, columns: Any) -> Any:
        decoded.extend(row_groups)
        return plain(path, file, row_groups, columns)

    monkeypatch.setattr(token_log, "_read", counting)
    assert read_tokens(token_log_directory(tmp_path), 1, [1199]).num_rows == 1
    assert decoded == [4]


def test_a_stretch_without_records_writes_nothing(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    log.add(0, None)
    assert log.commit(1) is None and names(tmp_path) == []
    log.add(1, None)
    log.add(2, record())
    log.commit(4)
    assert names(tmp_path) == ["u000002-u000003.parquet"]
    assert read_tokens(token_log_directory(tmp_path), 3).schema == SCHEMA


def test_truncate_drops_what_happens_again(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    write(tmp_path, range(4, 8))
    log = TokenLog(tmp_path)
    log.add(8, record())
    assert log.truncate(before=4) == 1
    assert names(tmp_path) == ["u000000-u000003.parquet"]
    assert log.commit(9) is None  # what waited is forgotten, too


def test_truncate_can_keep_what_was_taken_back(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    seen = write(tmp_path, range(4, 8))
    assert TokenLog(tmp_path).truncate(before=4, keep=tmp_path / "r000" / "tokens") == 1
    assert read_tokens(tmp_path / "r000" / "tokens", 5).to_pylist() == expected(5, seen[5])


def test_damage_is_named(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    (path,) = token_files(token_log_directory(tmp_path))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match=r"u000000-u000001\.parquet is damaged"):
        read_tokens(token_log_directory(tmp_path), 0)


# ---------------------------------------------------------------- the learner's side


def test_a_run_records_what_its_objective_says(tiny_run: RunConfig) -> None:
    """Log-probabilities and advantages of the log, put into the objective, give the metrics of the run."""
    from stalewise.store.json_lines import read_jsonl

    metrics = {one["update"]: one for one in read_jsonl(tiny_run.directory / "metrics.jsonl")}
    batches = [open_batch(path) for path in batch_directories(tiny_run.directory / "rollouts")]
    compared = 0
    for entry in read_ledger(ledger_path(tiny_run.directory)):
        rows = read_tokens(token_log_directory(tiny_run.directory), entry.update).to_pylist()
        assert bool(rows) == bool(metrics[entry.update]["taken"])
        if not rows:
            continue
        stored = batches[entry.generation_batch].take([row["rollout_id"] for row in rows])
        T = int(stored.response_lengths.max())
        grid: dict[str, Any] = {name: torch.zeros(len(rows), T) for name in ("logp", "behaviour_logp", "mask")}
        for i, row in enumerate(rows):
            length = len(row["logp"])
            grid["logp"][i, :length] = torch.tensor(row["logp"])
            grid["behaviour_logp"][i, :length] = torch.from_numpy(stored.logp(i))
            grid["mask"][i, :length] = 1
        advantage = torch.tensor([row["advantage"] for row in rows])
        result = evaluate(tiny_run.objective.name, advantage=advantage, **grid)
        for key in ("ess", "log_ratio_max_abs", "clip_fraction", "veto_fraction", "tokens"):
            assert result.stats[key] == pytest.approx(metrics[entry.update][key], rel=1e-4, abs=1e-7), key
        worst = max(abs(row["worst_log_ratio"]) for row in rows)
        assert worst == pytest.approx(metrics[entry.update]["log_ratio_max_abs"], rel=1e-5)
        compared += 1
    assert compared > 0


@pytest.mark.parametrize("scope", ["suffix", "post", "trigger", "sequence"])
def test_flags_are_the_masks_of_the_objective(scope: str) -> None:
    from stalewise.objectives import get_objective, make_tokens, micro_batch_loss, micro_batch_sums

    batch: dict[str, Any] = {**random_batch()}
    objective = get_objective("mu_grpo")
    settings = objective.settings({"kappa": 0.9, "scope": scope, "clip_high": 1.1})
    tokens = make_tokens(**batch)
    _, loss = micro_batch_loss(objective, tokens, None, settings, 1.0)
    stats = micro_batch_sums(tokens, loss).summary()
    assert loss.trigger_BT is not None
    trigger = tokens.mask_BT & (tokens.advantage_BT < 0) & (tokens.log_ratio_BT.exp() < 0.9)
    assert bool(trigger.any()) and torch.equal(loss.trigger_BT, trigger)
    assert loss.vetoed_BT.sum() == pytest.approx(stats["veto_fraction"] * stats["tokens"])


def test_micro_batches_do_not_show_in_the_record(tiny_run: RunConfig) -> None:
    batch = open_batch(batch_directories(tiny_run.directory / "rollouts")[0])
    rows = batch.take(batch.column("rollout_id")[:16])
    checkpoint = tiny_run.directory / "checkpoints" / "v000000"
    tables = []
    for budget in (16384, 40):
        config = make_config(tiny_record(Path("unused"), learner={"tokens_per_micro_batch": budget}))
        seen = Trainer(config, checkpoint).enqueue(rows).tokens()
        assert seen is not None
        tables.append(expected(0, seen))
    whole, split = tables
    assert [row["rollout_id"] for row in whole] == [row["rollout_id"] for row in split]
    for a, b in zip(whole, split, strict=True):
        assert a["logp"] == pytest.approx(b["logp"], abs=1e-5) and a["flags"] == b["flags"]


def test_nothing_is_recorded_where_the_config_says_so(tiny_run: RunConfig) -> None:
    batch = open_batch(batch_directories(tiny_run.directory / "rollouts")[0])
    config = make_config(tiny_record(Path("unused"), learner={"record_tokens": False}))
    pending = Trainer(config, tiny_run.directory / "checkpoints" / "v000000").enqueue(
        batch.take(batch.column("rollout_id")[:16])
    )
    assert pending.tokens() is None


def test_a_run_may_go_on_with_another_word_about_recording(tiny_run: RunConfig) -> None:
    changed = tiny_run.model_copy(update={"learner": tiny_run.learner.model_copy(update={"record_tokens": False})})
    check_identity(changed)
    with pytest.raises(StoreError, match="tokens_per_micro_batch"):
        check_identity(
            tiny_run.model_copy(
                update={"learner": tiny_run.learner.model_copy(update={"tokens_per_micro_batch": 1024})}
            )
        )
