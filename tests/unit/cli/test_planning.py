"""`stalewise plan --cluster`, and lists of numbers on the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import Result

from stalewise.cli.planning import _numbers  # pyright: ignore[reportPrivateUsage]
from stalewise.errors import ConfigError
from tiny import call as stalewise

EXAMPLE = Path(__file__).parents[3] / "configs/clusters/mu_grpo.toml"


def call(*words: str) -> Result:
    return stalewise("plan", *words)


def test_the_command_prints_all_schedules() -> None:
    few = ("--set", "schedule.updates=16", "--set", "schedule.stages=2")
    shown = call("--cluster", str(EXAMPLE), "--simulate", *few)
    assert shown.exit_code == 0, shown.output
    for text in ("synchronous", "staged", "pipelined", "streamed", "simulated", "× as fast", "2 + 2"):
        assert text in shown.stdout
    record = json.loads(call("--cluster", str(EXAMPLE), "--json", *few).stdout)
    assert [one["formula"]["name"] for one in record["schedules"]][:3] == ["synchronous", "staged", "pipelined"]
    assert math.isfinite(record["staged_over_synchronous"]) and record["schedules"][0]["simulated"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "plan takes a config, or --cluster"),
        (("x.toml", "--cluster", str(EXAMPLE)), "give one of them"),
        (("x.toml", "--simulate"), "--simulate needs --cluster"),
        (("--cluster", "missing.toml"), "missing.toml does not exist"),
        (("--cluster", str(EXAMPLE), "--set", "lengths.meen=3"), "lengths.meen is not a setting; did you mean mean?"),
        (("--cluster", str(EXAMPLE), "--set", "lengths.mean=9000"), "mean is 9000.0 and most is 8192"),
        (("--cluster", str(EXAMPLE), "--set", "devices=0"), "devices is 0: input should be greater than or equal to 1"),
        (("--cluster", str(EXAMPLE), "--set", "schedule.stages=0"), "schedule.stages is 0: input should be"),
        (("--cluster", str(EXAMPLE), "--set", "generation.tokens_per_second_alone=1"), "the share of one of 256"),
        (
            ("--cluster", str(EXAMPLE), "--set", "transfer.weights_bytes=-1"),
            "transfer.weights_bytes is -1: input should be",
        ),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_lists_of_numbers() -> None:
    assert _numbers("--lr", "1e-4, 3e-4,", float) == [1e-4, 3e-4]
    with pytest.raises(ConfigError, match="--staleness 4;16: expected numbers separated by commas"):
        _numbers("--staleness", "4;16", int)
