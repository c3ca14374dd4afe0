"""What commands print as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies import POLICY
from stalewise.cli.tables import make_table, print_lines
from stalewise.config import RunConfig, make_config
from stalewise.store import write_shard
from tiny import call, called_json, refused, tiny_record


def test_eval_prints_a_table_or_json(tiny_run: RunConfig) -> None:
    table = call("eval", tiny_run.directory, "--prompts", 4, "--samples", 2)
    assert table.exit_code == 0
    for words in ("arithmetic, version 4: 4 prompts, 2 samples each", "avg@2", "pass@1", "pass@2", "95% interval"):
        assert words in table.stdout
    record = called_json("eval", "arithmetic", "--prompts", 2, "--samples", 1, "--max-new-tokens", 8)
    assert (record["prompts"], list(record["pass_at"])) == (2, ["1"])
    assert "expected key=value" in refused("eval", tiny_run.directory, "--option", "path")
    assert "has no config.json" in refused("eval", tiny_run.directory.parent)
    assert "name the task" in refused("eval", POLICY)


def test_inspect_shows_what_is_in_a_run(tiny_run: RunConfig) -> None:
    record = called_json("inspect", tiny_run.directory, "--verify")
    assert (record["updates"], record["updates_done"], record["updates_not_committed"]) == (4, 4, 0)
    assert record["checkpoints"] == [0, 2, 4]
    batches = record["batches"]
    assert [(b["generation_batch"], b["version"], b["rows"], b["shards"]) for b in batches] == [
        (0, 0, 32, 2),
        (1, 2, 32, 2),
    ]
    assert [(b["updates"], b["ages"], b["verifier_errors"], b["truncated"]) for b in batches] == [(2, [0, 1], 0, 0)] * 2
    assert all(b["tokens"] > 64 and 0 < b["reward"] < 1 and b["verified"] for b in batches)
    assert [e["version"] for e in record["evaluations"]] == [0, 4]
    text = call("inspect", tiny_run.directory).stdout
    for words in ("4 of 4 updates", "checkpoints: 0, 2, 4", "version 4: accuracy", "switch", "verifier errors"):
        assert words in text


def test_inspect_shows_a_rollout_token_by_token(tiny_run: RunConfig) -> None:
    record = called_json("inspect", tiny_run.directory, "--rollout", 37)
    assert (record["rollout_id"], record["group"], record["version_first"]) == (37, 9, 2)
    assert record["prompt"] == record["prompt_id"].removeprefix("arithmetic/") + "="
    assert "".join(token["text"] for token in record["tokens"]) == record["text"] + "<eos>"
    assert all(token["logp"] <= 0 for token in record["tokens"])
    (update,) = record["consumed_at"]
    assert update in (2, 3)
    text = call("inspect", tiny_run.directory, "--rollout", 37).stdout
    assert f"{record['tokens'][0]['logp']:.4f}" in text
    group = called_json("inspect", tiny_run.directory, "--group", 9)
    assert [member["rollout_id"] for member in group] == [36, 37, 38, 39]
    assert record["prompt_id"] in call("inspect", tiny_run.directory, "--group", 9).stdout
    assert "rollout ids are 0 to 63" in refused("inspect", tiny_run.directory, "--rollout", 64)
    assert "has no committed group 99" in refused("inspect", tiny_run.directory, "--group", 99)
    assert "is not a run directory" in refused("inspect", tiny_run.directory.parent)


def test_inspect_shows_control_characters_as_escapes(tmp_path: Path) -> None:
    from stalewise.config import write_resolved
    from stalewise.store import commit_batch
    from stalewise.types import FinishReason, Rollout, SamplerSettings

    config = make_config(tiny_record(tmp_path))
    write_resolved(config, config.directory / "config.resolved.json")
    batch = config.directory / "rollouts" / "g000000-v000000"
    evil = "\x1b]0;owned\x07[red]\r\n\u202e7"
    rollout = Rollout(
        rollout_id=0,
        prompt_id="a\x1bb",
        group=0,
        prompt_ids=(1,),
        response_ids=(2, 3),
        behaviour_logp=(-0.5, -0.25),
        reward=float("nan"),
        reward_parts={},
        reward_error="ValueError: \x1b[2J",
        finish_reason=FinishReason.LENGTH,
        version_first=0,
        version_last=0,
        sampler=SamplerSettings(),
        seed=1,
        text=evil,
    )
    write_shard(batch, 0, [rollout])
    assert "nothing is committed yet" in refused("inspect", config.directory, "--rollout", 0)
    assert "not committed: 1 shards" in call("inspect", config.directory).stdout
    commit_batch(batch, shards=1, task="t")
    for words in (["--rollout", "0"], ["--group", "0"]):
        shown = call("inspect", config.directory, *words)
        assert shown.exit_code == 0
        assert r"\x1b]0;owned\x07[red]\r\n\u202e7" in shown.stdout
        assert not {"\x1b", "\x07", "\r", "\u202e"} & set(shown.stdout)
    shown = call("inspect", config.directory, "--rollout", 0)
    assert r"unknown: the verifier failed: ValueError: \x1b[2J" in shown.stdout
    assert called_json("inspect", config.directory, "--rollout", 0)["text"] == evil


def test_long_lines_and_tables_are_whole_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table(("name", "value"), left=("name",))
    table.add_row("a" * 150, "1")
    print_lines("[bold]" + "b" * 300, table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[bold]" + "b" * 300  # neither wrapped nor taken for markup
    assert any("a" * 150 in line for line in lines)
