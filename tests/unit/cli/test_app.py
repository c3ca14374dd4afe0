"""The app: help, versions, errors and interrupts."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

import stalewise.store.writer
from stalewise.cli.app import (
    PANELS,
    TASK_NAMES,
    VERIFIER_NAMES,
    app,
    complete_setting,
    complete_verifier,
    overrides,
    placeholder,
    print_json,
)
from stalewise.config import RunConfig
from stalewise.config.sections import OBJECTIVE_NAMES
from stalewise.objectives import OBJECTIVES
from stalewise.store.checkpoints import versions
from stalewise.tasks import TASKS
from stalewise.tasks.verifiers import VERIFIERS
from tiny import call, tiny_record, write_config

COMMANDS = [
    "demo",
    "init",
    "train",
    "fork",
    "rescore",
    "generate",
    "learn",
    "eval",
    "inspect",
    "verify",
    "report",
    "watch",
    "serve",
    "compare",
    "flips",
    "export",
    "push",
    "probe",
    "sweep",
    "plan",
    "difficulty",
    "doctor",
]


def test_help_is_quick_and_brings_no_torch_along() -> None:
    code = "import sys, stalewise.cli; print(*{'torch', 'transformers', 'pyarrow', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    result = call("--help")
    assert all(command in result.stdout for command in COMMANDS) and "reproduce" not in result.stdout
    assert "<bool>" not in result.stdout


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("<bool>", ""), ("<list[Path]>", "PATH"), ("<int range>", "INTEGER"), ("<list[str]>", "TEXT"), ("<a|b>", "a|b")],
)
def test_placeholders_are_words_or_choices(shown: str, expected: str) -> None:
    assert placeholder(shown) == expected


def test_choices_and_defaults_are_shown_and_checked() -> None:
    shown = call("difficulty", "--help").stdout
    assert "all|first|last" in shown and "[default: all]" in shown
    own = [name for name, place in TASKS.items() if place.startswith("stalewise.")]  # tests of benchmarks add others
    assert ", ".join(own) == TASK_NAMES
    assert ", ".join(OBJECTIVES) == OBJECTIVE_NAMES
    assert [*VERIFIER_NAMES.split(", "), "function"] == sorted(VERIFIERS, key=lambda name: (name == "function", name))
    assert complete_verifier("m") == ["math"]
    shown = call("rescore", "--help").stdout
    assert all(name in shown for name in VERIFIER_NAMES.split(", "))
    wrong = call("difficulty", "--stage", "middle")
    assert wrong.exit_code == 2 and all(f"'{choice}'" in wrong.stderr for choice in ("all", "first", "last"))


def test_every_command_is_in_one_panel_of_the_help_and_demo_comes_first() -> None:
    assert sorted(name for names in PANELS.values() for name in names) == sorted(COMMANDS)
    shown = call("--help").stdout
    titles = [shown.index(f" {title} ") for title in PANELS]
    assert titles == sorted(titles) and titles[0] < shown.index("demo") < shown.index("probe")
    assert "model_or_run" not in call("eval", "--help").stdout, "arguments stand in capitals, as in `train CONFIG`"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--learning-rate", "--set optimizer.learning_rate=VALUE"),
        ("--schedule.updates", "--set schedule.updates=VALUE"),
        ("--lr", "Settings are given with --set, as in --set optimizer.learning_rate=1e-5"),
        ("--jsn", "Possible options: --json"),
    ],
)
def test_an_unknown_option_is_answered_with_the_setting_it_means(option: str, expected: str) -> None:
    result = call("train", "some.toml", option, "3")
    assert result.exit_code == 2
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert expected in shown and "--help)" not in shown
    assert "--set" not in call("report", "somewhere", option).stderr, "a command without settings does not offer them"


@pytest.mark.parametrize(
    ("command", "option", "expected"),
    [
        ("eval", "--version", ". A version is named by its checkpoint in place of the run: stalewise eval RUN/c"),
        ("eval", "--checkpoint", ". A version is named by its checkpoint in place of the run: stalewise eval RUN/c"),
        ("flips", "--version", ". Versions are chosen with --before and --after"),
        ("fork", "--checkpoint", ". The checkpoint is chosen with --at"),
        ("inspect", "--version", ""),
        ("train", "--vesion", ". Settings are given with --set, as in --set optimizer.learning_rate=1e-5"),
        ("export", "--vesion", " (Possible options: --version)"),
        ("eval", "--promts", " (Possible options: --prompts)"),
        ("eval", "--temp", " (Possible options: --temperature)"),
    ],
)
def test_an_unknown_option_is_answered_with_what_is_meant_or_with_nothing(
    command: str, option: str, expected: str
) -> None:
    result = call(command, "some", option, "3")
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert f"No such option: {option}{expected}" in shown
    assert "--json" not in shown and (expected or f"No such option: {option} ╰" in shown)


@pytest.mark.parametrize(
    ("shell", "how"),
    [
        ("bash", "COMPREPLY"),
        pytest.param("zsh", "#compdef", marks=pytest.mark.nightly),
        pytest.param("fish", "complete --command", marks=pytest.mark.nightly),
    ],
)
def test_shells_complete_commands_and_settings(shell: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the option then takes a shell's name
    asked = {**os.environ, "_STALEWISE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for words, expected in (
        ("stalewise ev", "eval"),
        ("stalewise train --set optimizer.l", "optimizer.learning_rate="),
    ):
        asked |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_ARGS": words}
        done = subprocess.run(
            [sys.executable, "-m", "stalewise"], env=asked, capture_output=True, text=True, timeout=60, check=False
        )
        assert expected in done.stdout, (done.stdout, done.stderr)
    command = [sys.executable, "-m", "stalewise", "--show-completion", shell]
    assert how in subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize(
    ("incomplete", "expected"),
    [
        ("optimizer.w", ["optimizer.warmup_updates=", "optimizer.weight_decay="]),
        ("optimizer.l", ["optimizer.learning_rate=", "optimizer.learning_rate=0.0001"]),
        ("optimizer.sch", [f"optimizer.schedule={value}" for value in ("", "constant", "cosine", "linear")]),
        ("optimizer.schedule=co", ["optimizer.schedule=constant", "optimizer.schedule=cosine"]),
        ("batch.prompts=", ["batch.prompts=", "batch.prompts=32"]),
        ("learner.gradient_c", [f"learner.gradient_checkpointing={value}" for value in ("", "true", "false")]),
        ("schedule.stag", ["schedule.stages="]),  # None by default
        ("objective.name=p3", ["objective.name=p3o", "objective.name=p3o_two_anchor"]),
        ("task.name=arithmetic-", ["task.name=arithmetic-chat", "task.name=arithmetic-steps"]),
        ("nothing", []),
    ],
)
def test_settings_are_completed_with_their_values(incomplete: str, expected: list[str]) -> None:
    assert complete_setting(incomplete) == expected


# Called for a completion it is stalewise; otherwise it writes down its arguments.
IN_ITS_PLACE = f"""#!/bin/sh
if [ -n "$_STALEWISE_COMPLETE" ]; then exec {sys.executable} -m stalewise "$@"; fi
printf '[%s]' "$@" > "$HOME/arguments"
mv "$HOME/arguments" "$HOME/done"
"""
# Started in a session of its own, it makes its input the terminal of that session and becomes the shell.
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
TYPED = ["echo be''gin\r", "stalewise tra\t", "confs/a\t", "--set optimizer.lear\t", "1e-5 --js\t", "\r"]
SHOWN = ["begin", "stalewise train ", "confs/a.toml ", "optimizer.learning_rate=", "--json ", ""]


def screen(terminal: int, shown: bytes, wanted: str, seconds: float) -> bytes:
    """What has been shown so far, read until a text is there or the time is over."""
    end = time.monotonic() + seconds
    while wanted.encode() not in shown and (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            with contextlib.suppress(OSError):  # the shell has ended
                shown += os.read(terminal, 65536).replace(b"\a", b"")  # a bell rings where there is a choice
    return shown


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("zsh", "fish"))]
)
def test_tab_completes_in_a_real_shell(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types a command with tabs; the shell must run it with whole words, and none that a stray space made."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for name in ("ZDOTDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "INPUTRC"):
        monkeypatch.delenv(name, raising=False)
    there = tmp_path / "bin/stalewise"
    there.parent.mkdir()
    there.write_text(IN_ITS_PLACE)
    there.chmod(0o755)
    (tmp_path / "confs").mkdir()
    (tmp_path / "confs/a.toml").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{there.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "dumb")
    detection = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    install = [sys.executable, "-c", "import stalewise.cli; stalewise.cli.main()", "--install-completion", shell]
    subprocess.run(install, env={**os.environ, **detection}, check=True, capture_output=True, timeout=60)
    terminal, inner = pty.openpty()
    termios.tcsetwinsize(terminal, (50, 200))
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, shell, "-i"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(inner)
    try:
        for keys, wanted in zip(TYPED, SHOWN, strict=True):
            os.write(terminal, keys.encode())
            shown = screen(terminal, b"", wanted, 10.0)
            if wanted.encode() not in shown and shell == "zsh":  # its first tab loads the completion
                os.write(terminal, b"\t")
                shown = screen(terminal, shown, wanted, 30.0)
            assert wanted.encode() in shown, shown
        end = time.monotonic() + 30
        while not (tmp_path / "done").exists() and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert (tmp_path / "done").read_text() == "[train][confs/a.toml][--set][optimizer.learning_rate=1e-5][--json]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"stalewise {command}" in result.stdout
    assert not re.search(r"<[a-z\[]", result.stdout), "a help shows types of Python"
    assert "--json" in result.stdout or command in ("init", "report", "serve")


def test_version_and_unknown_commands() -> None:
    assert call("--version").stdout == f"stalewise {stalewise.__version__}\n"
    unknown = call("trian", "x.toml")
    assert unknown.exit_code == 2
    assert (unknown.stdout, "train" in unknown.stderr) == ("", True)


@pytest.mark.parametrize("command", ["train", "inspect"])
def test_ctrl_c_says_how_to_go_on_where_one_can(
    command: str, tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    config = write_config(tmp_path / "a b.toml", tiny_record(tmp_path))
    monkeypatch.setattr("stalewise.store.write_shard", interrupt)
    monkeypatch.setattr("stalewise.reporting.inspection.inspect_run", interrupt)
    target = config if command == "train" else tiny_run.directory
    result = call(command, target)
    assert (result.exit_code, result.stdout) == (130, "")
    if command == "train":
        *_, said, again = result.stderr.splitlines()
        assert said == "interrupted: committed work is kept; the same command resumes:"
        assert again == f"  stalewise train '{config}'"
        assert versions(tmp_path / "tiny") == [0]
    else:
        assert result.stderr == "interrupted\n"


def test_ctrl_c_within_a_destructor_is_not_forgotten(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def inspect(*arguments: Any, **options: Any) -> None:
        Interrupted()
        time.sleep(20)
        raise AssertionError("nobody has noticed")

    monkeypatch.setattr("stalewise.reporting.inspection.inspect_run", inspect)
    result = call("inspect", tiny_run.directory)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EFBIG])
def test_a_file_that_cannot_be_read_or_written_is_one_message(
    number: int, tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    monkeypatch.setattr("stalewise.reporting.inspection.inspect_run", fail)
    result = call("inspect", tiny_run.directory)
    assert (result.exit_code, result.stderr) == (2, f"error: some/file: {os.strerror(number)}\n")


def test_an_output_that_is_full_is_one_message(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a stream does, which has no name

    monkeypatch.setattr("stalewise.reporting.inspection.inspect_run", fail)
    result = call("inspect", tiny_run.directory)
    assert (result.exit_code, result.stderr) == (2, f"error: the output: {os.strerror(errno.ENOSPC)}\n")


def test_other_exceptions_keep_their_traceback(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("stalewise.reporting.inspection.inspect_run", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        call("inspect", tiny_run.directory)


def test_the_list_of_commands_is_complete() -> None:
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    assert sorted(names) == sorted([*COMMANDS, "reproduce"])


def test_settings_are_toml_or_bare_words() -> None:
    assert overrides(["a.b=1e-5", "c=word", "d=[1, 2]"]) == {"a.b": 1e-5, "c": "word", "d": [1, 2]}
    assert overrides(None) == {}


def test_json_has_null_for_numbers_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [1.5, math.inf], "c": {"d": (0.5,)}})
    assert capsys.readouterr().out == '{"a": null, "b": [1.5, null], "c": {"d": [0.5]}}\n'
