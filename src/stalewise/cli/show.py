"""What the commands print for a person. On stdout, and in full when that is a file or a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stalewise.config import RunConfig
from stalewise.inspection import visible
from stalewise.rundirectory import RunResult

WIDE = 200  # columns for what is not a terminal: a script must not meet cut cells


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def _table(columns: Iterable[str], *, left: Iterable[str] = ()) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in set(left) else "right")
    return table


def _interval(interval: dict[str, float]) -> str:
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def print_result(result: RunResult, as_json: bool) -> None:
    """What a run came to."""
    record = {
        "directory": str(result.directory),
        "updates": result.updates,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
    }
    if as_json:
        print(json.dumps(record))
        return
    console = _console()
    for evaluation in result.evaluations:
        console.print(f"version {evaluation['version']}: accuracy {_interval(evaluation['accuracy'])}", markup=False)
    console.print(_seconds(result.seconds))
    console.print(str(result.directory), markup=False, soft_wrap=True)


def _seconds(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    parts = (f"{name} {value:.1f} s ({_percent(value, total)})" for name, value in seconds.items())
    return f"{total:.1f} s: {', '.join(parts)}"


def print_evaluation(result: Any) -> None:
    """avg@k and pass@k of one policy."""
    record = asdict(result)
    table = _table(("measure", "value", "95% interval"), left=("measure",))
    rows = {f"avg@{result.samples}": record["accuracy"]}
    rows |= {f"pass@{k}": interval for k, interval in record["pass_at"].items()}
    for name, interval in rows.items():
        table.add_row(name, f"{interval['value']:.3f}", f"{interval['low']:.3f} – {interval['high']:.3f}")
    console = _console()
    name = f"{result.task}, version {result.version}"
    console.print(f"{name}: {result.prompts} prompts, {result.samples} samples each", markup=False)
    console.print(table)
    console.print(
        f"{result.response_length:.1f} tokens per response, {result.truncated_fraction:.1%} truncated, "
        f"{result.seconds:.1f} s",
        markup=False,
    )
    if result.excluded:
        console.print(f"{result.excluded} prompts left out: training has seen them, or their ids are excluded")
    for kind, count in result.verifier_error_kinds.items():
        names = ", ".join(map(visible, result.verifier_error_prompts.get(kind, ())))
        console.print(f"{count} responses without a score: {visible(kind)}, at {names}", markup=False, soft_wrap=True)
    if result.unmatched:
        names = ", ".join(map(visible, result.unmatched_prompts))
        line = (
            f"{result.unmatched} gold answer(s) not right when given as an answer, since only a part is read: {names}"
        )
        console.print(line, markup=False, soft_wrap=True)
    _print_unparsed(console, result.unparsed, result.unparsed_examples)


def _print_unparsed(console: Console, count: int, examples: Sequence[Mapping[str, str]]) -> None:
    if count:
        console.print(f"no answer found in {count} responses, which count as wrong; for example:")
    for example in examples[:3]:
        line = f"  {visible(example['prompt_id'])}: {visible(example['response'])}"
        console.print(line, markup=False, soft_wrap=True)


def print_run(record: dict[str, Any]) -> None:
    """Batches, checkpoints and times of a run."""
    console = _console()
    console.print(record["directory"], markup=False, soft_wrap=True)
    console.print(
        f"{record['objective']} on {record['task']}, model {record['model']}, {record['schedule']}", markup=False
    )
    more = record["updates_not_committed"]
    lost = f"; {more} more since the last checkpoint would be taken again" if more else ""
    console.print(f"{record['updates_done']} of {record['updates']} updates{lost}")
    console.print(f"checkpoints: {', '.join(map(str, record['checkpoints'])) or 'none'}")
    console.print(_batches(record["batches"]))
    known = [batch for batch in record["batches"] if batch["committed"]]
    examples = [example for batch in known for example in batch["unparsed_examples"]]
    _print_unparsed(console, sum(batch["unparsed"] for batch in known), examples)
    for evaluation in record["evaluations"]:
        console.print(f"version {evaluation['version']}: accuracy {_interval(evaluation['accuracy'])}", markup=False)
    console.print(_seconds(record["seconds"]))


def _batches(batches: list[dict[str, Any]]) -> Table:
    columns = (
        "batch",
        "version",
        "rollouts",
        "tokens",
        "reward",
        "truncated",
        "verifier errors",
        "updates",
        "age",
        "tokens/s",
    )
    table = _table(columns)
    for batch in batches:
        name = str(batch["generation_batch"])
        if not batch["committed"]:
            table.add_row(name, str(batch["version"]), f"{batch['rows']:,}", f"not committed: {batch['shards']} shards")
            continue
        ages = "–" if batch["ages"] is None else "–".join(str(age) for age in dict.fromkeys(batch["ages"]))
        table.add_row(
            name,
            str(batch["version"]),
            f"{batch['rows']:,}",
            f"{batch['tokens']:,}",
            "unknown" if batch["reward"] is None else f"{batch['reward']:.3f}",
            _percent(batch["truncated"], batch["rows"]),
            _percent(batch["verifier_errors"], batch["rows"]),
            str(batch["updates"]),
            ages,
            f"{batch['tokens'] / batch['seconds']:,.0f}" if batch["seconds"] else "–",
        )
    return table


def print_rollout(record: dict[str, Any]) -> None:
    """One rollout, token by token."""
    console = _console()
    consumed = ", ".join(map(str, record["consumed_at"])) or "no update yet"
    lines = {
        "rollout": f"{record['rollout_id']} of group {record['group']}, in {record['batch']}",
        "prompt": f"{record['prompt_id']}  {_shown(record['prompt'])}",
        "response": _shown(record["text"]),
        "reward": _reward(record),
        "finished": f"{record['finish_reason']}, versions {record['version_first']} to {record['version_last']}",
        "sampler": ", ".join(
            f"{key} {value}" for key, value in [*record["sampler"].items(), ("seed", record["seed"])] if value != ""
        ),
        "consumed": f"at {consumed}",
    }
    for name, value in lines.items():
        console.print(f"{name:<9} {visible(value)}", markup=False, soft_wrap=True)
    table = _table(("place", "token", "text", "log-probability"), left=("text",))
    for place, token in enumerate(record["tokens"]):
        table.add_row(str(place), str(token["id"]), Text(_shown(token["text"])), f"{token['logp']:.4f}")
    console.print(table)


def _shown(text: str | None) -> str:
    return "(no tokenizer to read it with)" if text is None else visible(text)


def _reward(record: dict[str, Any]) -> str:
    if record["reward_error"]:
        return f"unknown: the verifier failed: {record['reward_error']}"
    parts = ", ".join(f"{name} {value:g}" for name, value in record["reward_parts"].items())
    return f"{record['reward']:g}" + (f" ({parts})" if parts else "")


def print_group(records: list[dict[str, Any]]) -> None:
    """The rollouts of a group side by side."""
    first = records[0]
    title = visible(f"group {first['group']}: {first['prompt_id']}  {_shown(first['prompt'])}")
    table = _table(("rollout", "reward", "tokens", "log-probability", "response"), left=("response",))
    for record in records:
        reward = "unknown" if record["reward_error"] else f"{record['reward']:g}"
        logp = sum(token["logp"] for token in record["tokens"])
        text = Text(_shown(record["text"]))
        table.add_row(str(record["rollout_id"]), reward, str(len(record["tokens"])), f"{logp:.3f}", text)
    console = _console()
    console.print(title, markup=False, soft_wrap=True)
    console.print(table)


def print_checks(config: RunConfig, problem: str, as_json: bool) -> bool:
    """Print checks as they are done, or all of them as JSON; say whether all is well."""
    from stalewise.doctor import Check, examine, installation

    checks = [*installation(), Check("config", "bad", problem)] if problem else examine(config)
    console = _console()
    done: list[Check] = []
    for check in checks:
        done.append(check)
        if not as_json:
            style = {"ok": "green", "warning": "yellow", "bad": "bold red"}[check.status]
            line = Text.assemble((f"{check.status:<8}", style), f"{check.name:<16}{visible(check.detail)}")
            console.print(line, soft_wrap=True)
    good = not any(check.status == "bad" for check in done)
    if as_json:
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in done]}))
    return good
