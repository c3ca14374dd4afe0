"""What the sandbox's first process does, without starting one."""

import os
import platform
import re
import struct
from pathlib import Path

import pytest

from stalewise.tasks import sandbox_process as process

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_system_calls_are_the_kernels(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.is_file():
        pytest.skip(f"no {header}")
    known = {
        name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    }
    column = process.ARCHITECTURES[machine][0]
    for name, numbers in process.CALLS.items():
        if name in known:  # a header may be older than a call
            assert numbers[column] == known[name], name


def allows(program: bytes, number: int, *arguments: int) -> bool:
    """Run a filter as the kernel does, as far as it uses the machine."""
    code = [struct.unpack_from("HBBI", program, place) for place in range(0, len(program), 8)]
    words = {0: number, 4: process.ARCHITECTURES[platform.machine()][1]}
    words |= {16 + 8 * place: value for place, value in enumerate(arguments)}
    place = value = 0
    while True:
        kind, yes, no, operand = code[place]
        place += 1
        if kind == 0x20:
            value = words.get(operand, 0)
        elif kind == 0x06:
            return operand == 0x7FFF0000
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
            place += yes if holds else no


@pytest.mark.skipif(platform.machine() not in process.ARCHITECTURES, reason="no filter for this machine")
def test_the_filter_refuses_by_name_and_by_argument() -> None:
    number = process.number_of
    alone, within = (process.seccomp_filter(alone=alone, pid=77) for alone in (True, False))
    for program in (alone, within):
        assert allows(program, number("prctl"), 22) and allows(program, number("prlimit64"), 0)
        for name in process.REFUSED:
            assert number(name) < 0 or not allows(program, number(name)), name
        assert not allows(program, 1 << 30 | 41), "the x32 form of socket"
        assert allows(program, number("clone"), process.CLONE_THREAD)
        assert not allows(program, number("clone3"))
    assert allows(within, number("clone"), 17) and not allows(alone, number("clone"), 17)
    assert not allows(within, number("clone"), process.NEW_USER)
    for name in ("kill", "tgkill"):
        assert allows(alone, number(name), 77) and not allows(alone, number(name), 78)
        assert allows(within, number(name), 78)
    assert allows(alone, number("prlimit64"), 77) and not allows(alone, number("prlimit64"), 78)
    assert not allows(alone, number("prctl"), process.PR_SET_PDEATHSIG)
    assert not allows(alone, number("utimensat"), 0, 4096) and allows(alone, number("utimensat"), 5, 0)


def test_a_folder_is_emptied_however_deep_it_is(tmp_path: Path) -> None:
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        for depth in range(1500):
            Path(f"file{depth}").touch()
            os.mkdir("a-folder")
            os.chdir("a-folder")
    finally:
        os.chdir(here)
    (tmp_path / "link").symlink_to("/")
    assert not process._fits(str(tmp_path), 1 << 30, 100)
    process.empty_folder(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_fits_by_bytes_and_by_number(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    assert process._fits(str(tmp_path), 200_000, 1)
    assert not process._fits(str(tmp_path), 50_000, 10)
    assert not process._fits(str(tmp_path), 200_000, 0)


def test_a_walk_over_processes_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_children", lambda pid: iter([2 * pid, 2 * pid + 1]))  # a tree without end
    assert 10 < len(process.descendants(1, 10)) < 14
