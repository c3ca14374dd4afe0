"""The process that isolates and watches a program; `stalewise.tasks.sandbox` starts it as a script.

It runs in a bare interpreter (`-I -S`) and imports the standard library only. It forks, isolates the child, and waits
for the child's end, for a limit, or for SIGTERM. The kernel also sends SIGTERM when the parent dies. Then it kills all
processes that the program left and reports. It is the subreaper of its descendants, so `setsid` does not help them.

In a PID namespace the chain is: this process, a process that builds the namespaces, their init, the program. Each is
killed when its parent dies, and the kernel kills all of a PID namespace when its init dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

WORK = "/program"  # the program's folder where it has a root of its own
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
PEER_FD = 3  # where two programs run, the socket between them
INSIDE, NOBODY = 1000, 65534  # user and group inside and, if we are root, outside
POLL_S = 0.025

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
READ_ONLY = 0x1 | 0x2 | 0x4  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
NEW_NS = 0x20000 | 0x4000000 | 0x8000000 | 0x40000000 | 0x2000000  # mount, UTS, IPC, network, cgroup
NEW_USER, NEW_PID, CLONE_THREAD = 0x10000000, 0x20000000, 0x10000

# System calls by (number on x86_64, number on aarch64); -1: there is none.
# Refused wherever there is a filter: sockets, other processes' memory, mounts, memory that no limit counts, kernel.
REFUSED = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "fsopen": (430, 430), "fsmount": (432, 432), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "open_by_handle_at": (304, 265), "iopl": (172, -1), "ioperm": (173, -1),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "personality": (135, 92), "fanotify_init": (300, 262),
}  # fmt: skip
# Also refused where only Landlock confines a program: new processes, and acts on other processes and files.
REFUSED_ALONE = {
    "fork": (57, -1), "vfork": (58, -1), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "chmod": (90, -1), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1), "lchown": (94, -1),
    "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "removexattr": (197, 14), "lremovexattr": (198, 15), "setxattrat": (463, 463),
    "removexattrat": (466, 466), "truncate": (76, 45), "inotify_add_watch": (254, 27),
}  # fmt: skip
CALLS = REFUSED | REFUSED_ALONE | {
    "kill": (62, 129), "tgkill": (234, 131), "sched_setaffinity": (203, 122), "prlimit64": (302, 261),
    "utimensat": (280, 88), "clone": (56, 220), "clone3": (435, 435), "prctl": (157, 167), "capset": (126, 91),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library that returns -1 on failure; raise OSError then."""
    result = getattr(libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def number_of(name: str) -> int:
    """The number of a system call on this machine; -1 if it has none or the machine is unknown."""
    column = ARCHITECTURES.get(platform.machine(), (None, 0))[0]
    return -1 if column is None else CALLS[name][column]


def syscall(name: str, *arguments: Any) -> int:
    """Make a system call of `CALLS`."""
    number = number_of(name)
    if number < 0:
        raise OSError(errno.ENOSYS, f"{name}: no such system call on {platform.machine()}")
    return call("syscall", ctypes.c_long(number), *arguments)


_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 2, 4, 8
_OF_FILES = _EXECUTE | _WRITE | _READ | 1 << 14 | 1 << 15  # truncate, ioctl


def landlock_version() -> int:
    """The kernel's Landlock ABI, 0 if it has none or it is switched off."""
    return max(0, libc.syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def restrict_files(readable: list[str], folder: str) -> None:
    """Let this process and its children read the paths `readable`, write in `folder`, and open nothing else."""
    version = landlock_version()
    if version < 1:
        raise OSError(errno.ENOSYS, "Landlock: not in this kernel, or switched off")
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    ruleset = _ruleset(everything, 3, 3, version)  # TCP's bind and connect; abstract sockets and signals
    for path in [*readable, *DEVICES]:
        _allow(ruleset, path, _READ | _WRITE if path in DEVICES else _EXECUTE | _READ | _READ_DIR)
    _allow(ruleset, folder, everything & ~_EXECUTE)
    call("syscall", ctypes.c_long(446), ctypes.c_int(ruleset), ctypes.c_uint(0))


def restrict_signals() -> None:
    """Keep this process and its children from signalling other processes, if the kernel can (ABI 6)."""
    if (version := landlock_version()) >= 6:
        call("syscall", ctypes.c_long(446), ctypes.c_int(_ruleset(0, 0, 2, version)), ctypes.c_uint(0))


def _ruleset(files: int, network: int, scoped: int, version: int) -> int:
    """A new ruleset's descriptor, which is closed when the program starts."""
    attributes = struct.pack("QQQ", files, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    return call("syscall", ctypes.c_long(444), attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rights &= -1 if stat.S_ISDIR(os.fstat(descriptor).st_mode) else _OF_FILES
    rule = struct.pack("=Qi", rights, descriptor)
    call("syscall", ctypes.c_long(445), ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
    os.close(descriptor)


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _rule(name: str, *body: bytes) -> bytes:
    """Instructions for one system call; the body must return. Nothing where the machine has no such call."""
    number = number_of(name)
    return b"" if number < 0 else _instruction(_EQUAL, number, 0, len(body)) + b"".join(body)


def _only_if(name: str, argument: int, *allowed: int) -> bytes:
    """A rule that allows a call if the argument has one of these values."""
    body = [_instruction(_LOAD, _ARGUMENTS + 8 * argument)]  # the low half: both machines are little-endian
    for left, value in enumerate(reversed(allowed)):
        body.insert(1, _instruction(_EQUAL, value, left + 1))
    return _rule(name, *body, _instruction(_RETURN, _ERROR | errno.EPERM), _instruction(_RETURN, _ALLOW))


def seccomp_filter(*, alone: bool, pid: int) -> bytes:
    """The filter's program. `alone`: it also refuses new processes and acts on processes other than `pid`."""
    refuse = _instruction(_RETURN, _ERROR | errno.EPERM)
    allow = _instruction(_RETURN, _ALLOW)
    program = _instruction(_LOAD, _ARCHITECTURE)
    program += _instruction(_EQUAL, ARCHITECTURES[platform.machine()][1], 1) + _instruction(_RETURN, _KILL)
    program += _instruction(_LOAD, _NUMBER)
    program += _instruction(_AT_LEAST, 1 << 30, 0, 1) + _instruction(_RETURN, _ERROR | errno.ENOSYS)  # x32
    for name in [*REFUSED, *(REFUSED_ALONE if alone else ())]:
        program += _rule(name, refuse)
    program += _rule("clone3", _instruction(_RETURN, _ERROR | errno.ENOSYS))  # its flags are out of reach: use clone
    flags = _instruction(_LOAD, _ARGUMENTS)
    if alone:
        program += _rule("clone", flags, _instruction(_ANY_BIT, CLONE_THREAD, 1), refuse, allow)
        program += b"".join(_only_if(name, 0, pid) for name in ("kill", "tgkill"))
        program += b"".join(_only_if(name, 0, 0, pid) for name in ("prlimit64", "sched_setaffinity"))
        program += _only_if("utimensat", 1, 0)  # of an open file
        body = _instruction(_LOAD, _ARGUMENTS), _instruction(_EQUAL, PR_SET_PDEATHSIG, 1), allow, refuse
        program += _rule("prctl", *body)
    else:
        program += _rule("clone", flags, _instruction(_ANY_BIT, NEW_NS | NEW_USER | NEW_PID, 1), allow, refuse)
    return program + allow


def restrict_calls(*, alone: bool) -> None:
    """Install the filter in this process; its children inherit it."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"seccomp: system calls of {platform.machine()} are not known here")
    program = seccomp_filter(alone=alone, pid=os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, 2, described, 0, 0)


def map_users(pid: int) -> None:
    """Map users of a child's new user namespace: root's programs become nobody, whose processes are counted."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            for name in ("gid_map", "uid_map"):
                _write(f"/proc/{pid}/{name}", f"0 0 1\n{INSIDE} {NOBODY} 1")
            return
        except OSError:
            pass  # root of a container without these users
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", f"{INSIDE} {gid} 1")
    _write(f"/proc/{pid}/uid_map", f"{INSIDE} {uid} 1")


def build_root(root: str, readable: list[str], limits: dict[str, Any]) -> None:
    """Make a root directory with the readable paths, four devices and an empty folder, and move into it."""
    call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    _mount_tmpfs(root, "size=1m,mode=755")
    for path in [*readable, *DEVICES]:
        _bind(path, root + path)
    os.mkdir(root + WORK)
    _mount_tmpfs(root + WORK, f"size={limits['disk_bytes']},nr_inodes={limits['files']},mode=777")
    os.chdir(root)
    syscall("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    _set_attributes("/", READ_ONLY, 0)
    os.chdir(WORK)


def _bind(source: str, target: str) -> None:
    """Show a file or directory at `target`, read-only with all mounts below it; a link stays a link."""
    if not os.path.lexists(source) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(MS_BIND | MS_REC), None)
    if source not in DEVICES:
        _set_attributes(target, READ_ONLY, AT_RECURSIVE)


def _mount_tmpfs(target: str, options: str) -> None:
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    call("mount", b"tmpfs", os.fsencode(target), b"tmpfs", flags, options.encode())


def _set_attributes(path: str, attributes: int, flags: int) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    arguments = ctypes.c_int(AT_FDCWD), os.fsencode(path), ctypes.c_uint(flags), wanted
    syscall("mount_setattr", *arguments, ctypes.c_size_t(len(wanted)))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def start(spec: dict[str, Any], events: int) -> int:
    """Fork the process that isolates itself and starts the program; return its id. Errors arrive as events."""
    ready_r, ready_w = os.pipe()
    mapped_r, mapped_w = os.pipe()
    if (pid := os.fork()) == 0:
        _guarded(lambda: _isolate(spec, events, ready_w, mapped_r), events)
    os.close(ready_w)
    os.close(mapped_r)
    if os.read(ready_r, 1):  # the child waits in a new user namespace
        map_users(pid)
        os.write(mapped_w, b"x")
    os.close(ready_r)
    os.close(mapped_w)
    return pid


def _isolate(spec: dict[str, Any], events: int, ready_w: int, mapped_r: int) -> None:
    """Isolate this process as the spec's mechanism says, then run the programs in it or in a child."""
    die_with_parent(signal.SIGKILL)
    os.setpgid(0, 0)
    if spec["mechanism"] == "bubblewrap":
        os.close(ready_w)
        _exec_bubblewrap(spec, events)
    if spec["mechanism"] != "namespaces":
        os.close(ready_w)
        os.chdir(spec["folder"])
        run_programs(spec, events)
    call("unshare", NEW_USER | NEW_PID | NEW_NS)
    os.write(ready_w, b"x")
    os.close(ready_w)
    if not os.read(mapped_r, 1):
        raise OSError(errno.EPERM, "the user namespace could not be mapped")
    build_root(spec["folder"], spec["readable"], spec["limits"])
    if (pid := os.fork()) == 0:
        die_with_parent(signal.SIGKILL)
        _guarded(lambda: run_programs(spec, events), events)
    os.close(events)
    os.waitpid(pid, 0)
    os._exit(0)


def run_programs(spec: dict[str, Any], events: int) -> None:
    """Run the programs, two with a socket between them, reap all, and end with the first one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # in a PID namespace, the program could send what init handles
    for name, text in spec["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    peers = socket.socketpair() if len(spec["commands"]) > 1 else ()
    first = 0
    for place, command in enumerate(spec["commands"]):
        if (pid := os.fork()) == 0:
            _guarded(lambda: _exec(spec, command, peers[place].fileno() if peers else -1, place), events)  # noqa: B023
        first = first or pid
    for peer in peers:
        peer.close()
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == first:
            os.write(events, json.dumps({"status": status}).encode() + b"\n")
            os._exit(0)


def _exec(spec: dict[str, Any], command: list[str], peer: int, place: int) -> None:
    """Give up the remaining rights of this process and become the program."""
    mechanism, limits = spec["mechanism"], spec["limits"]
    die_with_parent(signal.SIGKILL)
    if place:  # only the first one speaks and listens
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
    if peer >= 0:
        os.dup2(peer, PEER_FD)
    for descriptor in spec["descriptors"]:
        os.set_inheritable(descriptor, True)
    alone = mechanism == "landlock" or (spec["root"] and os.getuid() != 0)  # nothing counts processes of root's
    if mechanism == "namespaces" and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    set_limits(limits, count_processes=mechanism in ("namespaces", "bubblewrap"))
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if mechanism == "landlock":
        restrict_files(spec["readable"], spec["folder"])
    elif mechanism == "tree":
        restrict_signals()
    if mechanism not in ("tree", "none"):
        syscall("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        if alone or platform.machine() in ARCHITECTURES:
            restrict_calls(alone=alone)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execve(command[0], command, spec["environment"])


def set_limits(limits: dict[str, Any], *, count_processes: bool) -> None:
    """Set the limits that the kernel keeps for each process; 0 is no limit. The others are watched from outside."""
    wanted = {
        resource.RLIMIT_CORE: -1,  # none at all
        resource.RLIMIT_AS: limits["memory_bytes"] if limits["address_space"] else 0,
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CPU: int(limits["seconds"]) + 1 if limits["seconds"] else 0,
        resource.RLIMIT_NPROC: limits["processes"] if count_processes else 0,
    }
    for which, value in wanted.items():
        if value:
            hard = resource.getrlimit(which)[1]
            value = max(0, value) if hard == resource.RLIM_INFINITY else min(max(0, value), hard)
            resource.setrlimit(which, (value, value))


def _exec_bubblewrap(spec: dict[str, Any], events: int) -> None:
    """Become bubblewrap, which builds the namespaces and starts this file again inside."""
    here = "/sandbox_process.py"
    arguments = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--uid", str(INSIDE), "--gid", str(INSIDE)]
    for path in spec["readable"]:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.lexists(path):
            arguments += ["--ro-bind", path, path]
    arguments += [part for path in DEVICES for part in ("--dev-bind", path, path)]
    arguments += ["--ro-bind", os.path.abspath(__file__), here]
    arguments += ["--size", str(spec["limits"]["disk_bytes"]), "--tmpfs", WORK, "--remount-ro", "/", "--chdir", WORK]
    for descriptor in (events, spec["self"]):
        os.set_inheritable(descriptor, True)
    inner = [spec["interpreter"], "-I", "-S", here, "inside", str(spec["self"]), str(events)]
    os.execve(spec["bubblewrap"], [spec["bubblewrap"], *arguments, *inner], {})


def inside(spec_fd: int, events: int) -> None:
    """Run the programs in what bubblewrap has built."""
    for descriptor in (spec_fd, events):
        os.set_inheritable(descriptor, False)
    _guarded(lambda: run_programs(read_spec(spec_fd), events), events)


def _guarded(work: Any, events: int) -> None:
    """Call a function that should not return; report the error if it does, and exit."""
    try:
        work()
    except BaseException as problem:
        os.write(events, json.dumps({"error": f"{type(problem).__name__}: {problem}"[:300]}).encode() + b"\n")
    finally:
        os._exit(70)


def die_with_parent(number: int) -> None:
    """Ask the kernel for a signal when the parent dies."""
    call("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)


def supervise(spec_fd: int, report_fd: int) -> int:
    """Run the spec, end everything that it started, and write the report. Returns the program's wait status."""
    for descriptor in (spec_fd, report_fd):
        os.set_inheritable(descriptor, False)
    spec: dict[str, Any] = {**read_spec(spec_fd), "self": spec_fd}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    call("prctl", PR_SET_SUBREAPER, 1, 0, 0, 0)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != spec["parent"]:
        return 0  # the parent died before this line
    heard, events = os.pipe()
    report: dict[str, Any] = {"end": "", "status": 0, "error": ""}
    child = 0
    try:
        child = start(spec, events)
        report["end"] = watch(child, spec)
    except OSError as problem:
        report["error"] = str(problem)
    end_tree(child)
    os.close(events)
    with os.fdopen(heard, "rb") as lines:
        for line in lines:
            report |= json.loads(line)
    report["seconds"] = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # user and system
    if spec["mechanism"] in ("landlock", "none"):
        empty_folder(spec["folder"])
    with contextlib.suppress(BrokenPipeError):  # the caller was killed
        os.write(report_fd, json.dumps(report).encode())
    return int(report["status"])


def watch(child: int, spec: dict[str, Any]) -> str:
    """Wait until the child ends (""), a limit is exceeded (its name), or this process shall stop ("stopped")."""
    began, limits = time.monotonic(), spec["limits"]
    measured = spec["folder"] if spec["mechanism"] in ("landlock", "none") else ""
    while True:
        caught = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, limits["poll_s"])
        if caught is not None and caught.si_signo == signal.SIGTERM:
            return "stopped"
        if child in reap():
            return ""
        if limits["wall_seconds"] and time.monotonic() - began > limits["wall_seconds"]:
            return "time"
        if why := excess(limits, measured):
            return why


def excess(limits: dict[str, Any], folder: str) -> str:
    """Which limit this process's descendants exceed together, or an empty string."""
    seconds, tasks, memory = 0.0, 0, 0
    most = limits["processes"] + 4  # and those that lead to the program
    pids = descendants(os.getpid(), most)
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        tasks += int(fields[17])
        memory += int(fields[21]) * resource.getpagesize()
    if limits["seconds"] and seconds > limits["seconds"]:
        return "time"
    if limits["memory_bytes"] and memory > limits["memory_bytes"] + len(pids) * (16 << 20):  # bare interpreters
        return "memory"
    if len(pids) > most or (limits["count_threads"] and tasks > most):
        return "processes"
    return "disk" if folder and not _fits(folder, limits["disk_bytes"], limits["files"]) else ""


def _fits(folder: str, size: int, number: int) -> bool:
    """Whether a folder holds at most so many bytes and files."""
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    number -= 1
                    size -= entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if number < 0 or size < 0:
                        return False
        except FileNotFoundError:
            continue
        except OSError:
            return False  # a path that is too long, or a folder that may not be read
    return True


def descendants(pid: int, most: int = 1 << 22) -> list[int]:
    """Children of a process, their children, and so on; zombies too. Not many more than `most`: they may be forking."""
    found, waiting = list[int](), [pid]
    while waiting and len(found) <= most:
        new = list(_children(waiting.pop()))
        found += new
        waiting += new
    return found


def _children(pid: int) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                yield from map(int, file.read().split())
    except OSError:
        return


def reap() -> list[int]:
    """Children that have ended, and are now gone."""
    ended: list[int] = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.append(pid)
    return ended


def end_tree(group: int) -> None:
    """Kill all descendants: first the group, in one call so that no fork is missed, then those that left the group.

    The latter may be forking: they are stopped until no new ones are found, and then killed.
    """
    stopped: set[int] = set()
    if group:
        _kill(os.killpg, group, signal.SIGKILL)
    while pids := descendants(os.getpid()):
        new = set(pids) - stopped
        for pid in new or pids:
            _kill(os.kill, pid, signal.SIGSTOP if new else signal.SIGKILL)
        stopped |= new
        reap()
        time.sleep(0 if new else 0.001)


def _kill(how: Any, pid: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        how(pid, number)


def empty_folder(folder: str) -> None:
    """Delete the content of a folder of any depth: the content of a subfolder moves up first, so paths stay short."""
    number = 0
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                for inner in os.listdir(path):
                    number += 1
                    os.rename(os.path.join(path, inner), os.path.join(folder, f".{number}.{os.getpid()}"))
                os.rmdir(path)
            except OSError:
                return  # it stays where temporary files are


def read_spec(descriptor: int) -> dict[str, Any]:
    """Read the spec from the beginning of an open file."""
    return json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))


def main(arguments: list[str]) -> None:
    """Arguments: `inside SPEC EVENTS` within bubblewrap, otherwise `SPEC REPORT`. Ends as the program did."""
    if arguments[0] == "inside":
        inside(int(arguments[1]), int(arguments[2]))
    status = supervise(int(arguments[0]), int(arguments[1]))
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1:])
