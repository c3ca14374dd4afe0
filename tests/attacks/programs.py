"""Programs that try to get out of a sandbox, to outlive it, to use the machine up, or to deceive what reads them.

Each gets a JSON object on standard input: `outside` is a file that it must not read or change, `port` a server on this
machine that must see no connection, `home` the home directory, `pid` the process that started the sandbox, `mark` a
text that its children carry in their command line. A program that succeeds prints ESCAPED. What grows is bounded by the
program itself: a sandbox that does not hold must cost a test and not the machine.
"""

BEGIN = """
import json, os, signal, socket, subprocess, sys, time
given = json.load(sys.stdin)
outside, port, pid, mark = given["outside"], given["port"], given["pid"], given["mark"]
def escaped(how=""):
    print("ESCAPED", how, flush=True)
def attempt(what):
    try:
        return what()
    except (OSError, MemoryError, ValueError, AttributeError, ImportError) as problem:
        print(type(problem).__name__, problem, file=sys.stderr)
def code(number, *arguments):
    import ctypes
    return ctypes.CDLL(None).syscall(ctypes.c_long(number), *arguments)
"""

# What may be the status of a program's end; anything else is a finding.
ORDINARY = {"ok", "failed", "killed"}

PROGRAMS: dict[str, tuple[str, set[str]]] = {
    # reading
    "reads the run directory": ("if attempt(lambda: open(outside).read()): escaped()", ORDINARY),
    "lists the run directory": ("if attempt(lambda: os.listdir(os.path.dirname(outside))): escaped()", ORDINARY),
    "reads through a link": (
        "attempt(lambda: os.symlink(outside, 'link'))\nif attempt(lambda: open('link').read()): escaped()",
        ORDINARY,
    ),
    "reads through a hard link": (
        "attempt(lambda: os.link(outside, 'link'))\nif attempt(lambda: open('link').read()): escaped()",
        ORDINARY,
    ),
    "reads passwords and keys": (
        "home = given['home']\n"
        "for path in ('/etc/passwd', '/etc/shadow', home + '/.ssh', home + '/.netrc', home + '/.bashrc',\n"
        "             '/run', '/var', '/proc/self/environ'):\n"
        "    if attempt(lambda: os.listdir(path) if os.path.isdir(path) else open(path).read()): escaped(path)",
        ORDINARY,
    ),
    "reads the environment of others": (
        "for who in ('self', str(pid), '1', str(os.getppid())):\n"
        "    read = attempt(lambda: open(f'/proc/{who}/environ', 'rb').read())\n"
        "    if b'STALEWISE_SECRET' in (read or b''): escaped(who)\n"
        "if 'STALEWISE_SECRET' in os.environ: escaped('own')",
        ORDINARY,
    ),
    "reads the memory of others": (
        "for who in (pid, 1, os.getppid()):\n"
        "    if attempt(lambda: open(f'/proc/{who}/mem', 'r+b')): escaped(who)\n"
        "    if code(101, 16, who, 0, 0) == 0: escaped('ptrace')",
        ORDINARY,
    ),
    "looks for open descriptors": (
        "for number in range(3, 256):\n    if attempt(lambda: os.fstat(number)): escaped(number)",
        ORDINARY,
    ),
    # writing
    "writes the run directory": ("if attempt(lambda: open(outside, 'a').write('x')): escaped()", ORDINARY),
    "deletes the run directory": (
        "attempt(lambda: os.unlink(outside))\nattempt(lambda: os.rename(outside, outside + '2'))\n"
        "attempt(lambda: __import__('shutil').rmtree(os.path.dirname(outside), ignore_errors=True))",
        ORDINARY,
    ),
    "changes permissions and times": (
        "for what in (lambda: os.chmod(outside, 0), lambda: os.utime(outside, (1, 1)),\n"
        "             lambda: os.truncate(outside, 0), lambda: os.chown(outside, 12, 12),\n"
        "             lambda: os.setxattr(outside, 'user.x', b'1')):\n"
        "    attempt(what)",
        ORDINARY,
    ),
    "writes everywhere": (
        "for path in ('/tmp', '/var/tmp', '/dev/shm', '/', '/usr/lib', '/lib', '/home', '/root', sys.prefix, '/etc',\n"
        "             os.path.dirname(os.__file__)):\n"
        "    if attempt(lambda: open(path + '/stalewise-escape', 'w')): escaped(path)",
        ORDINARY,
    ),
    "changes the interpreter": (
        "if attempt(lambda: open(os.__file__, 'a')): escaped()\n"
        "if attempt(lambda: open(sys.executable, 'r+b')): escaped()",
        ORDINARY,
    ),
    # network
    "connects by TCP": (
        "def go():\n    socket.create_connection(('127.0.0.1', port), 2).send(b'x')\n    escaped()\nattempt(go)",
        ORDINARY,
    ),
    "sends by UDP": (
        "def go():\n    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))\n"
        "    escaped()\nattempt(go)",
        ORDINARY,
    ),
    "connects to unix sockets": (
        "for path in ('/var/run/docker.sock', '/run/dbus/system_bus_socket', given['unix'], '\\0stalewise'):\n"
        "    def go():\n        socket.socket(socket.AF_UNIX).connect(path)\n        escaped(path)\n    attempt(go)",
        ORDINARY,
    ),
    "opens raw sockets": (
        "for family in (socket.AF_PACKET, socket.AF_INET, socket.AF_NETLINK):\n"
        "    if attempt(lambda: socket.socket(family, socket.SOCK_RAW)): escaped(family)",
        ORDINARY,
    ),
    "makes a socket by io_uring": ("if code(425, 8, bytes(120)) >= 0: escaped()", ORDINARY),
    # other processes
    "kills what started it": (
        "for who in (pid, os.getppid(), 1, -1):\n"
        "    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):\n"
        "        attempt(lambda: os.kill(who, number))",
        ORDINARY,
    ),
    "leaves a child behind": (
        "attempt(lambda: subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', mark]))",
        ORDINARY,
    ),
    "leaves a daemon behind": (
        "def go():\n"
        "    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(300)', mark])\n"
        "        os._exit(0)\n"
        "attempt(go)",
        ORDINARY,
    ),
    "ignores all signals": (
        "for number in range(1, 32):\n"
        "    if number not in (9, 19): signal.signal(number, signal.SIG_IGN)\n"
        "while True: pass",
        {"timeout"},
    ),
    "forks without end": (
        # At most 128 processes, should nothing hold it: a test must not take the machine down.
        "for _ in range(7):\n    try:\n        os.fork()\n    except OSError:\n        break\ntime.sleep(20)",
        {"timeout", "processes", "failed", "memory", "killed"},
    ),
    "starts threads without end": (
        "import threading\nthreading.stack_size(65536)\n"
        "try:\n    for _ in range(500): threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
        "    time.sleep(20)\n"
        "except RuntimeError:\n    os._exit(3)",
        {"processes", "failed", "timeout"},
    ),
    "makes a new user namespace": ("if code(272, 0x10000000) == 0: escaped()", ORDINARY),
    "mounts and changes its root": (
        "if code(165, b'tmpfs', b'.', b'tmpfs', 0, None) == 0: escaped('mount')\n"
        "if code(161, b'.') == 0: escaped('chroot')\nif code(166, b'/work', 2) == 0: escaped('umount')",
        ORDINARY,
    ),
    "becomes root": (
        "attempt(lambda: os.setuid(0))\nif attempt(lambda: open('/etc/shadow').read()): escaped()",
        ORDINARY,
    ),
    # the machine's memory, disk and time
    "takes all memory": (
        "x = []\nfor _ in range(256): x.append(bytearray(1 << 24))\ntime.sleep(20)",
        {"failed", "memory", "killed", "timeout"},
    ),
    "takes memory in many processes": (
        "try:\n    for _ in range(30):\n        if os.fork() == 0: break\n"
        "except OSError: pass\nx = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(60)",
        {"memory", "failed", "timeout", "processes", "killed"},
    ),
    "takes memory that no limit counts": (
        "held = []\n"
        "for _ in range(2000):\n    held.append(os.memfd_create('x'))\n    os.write(held[-1], bytes(1 << 20))\n"
        "time.sleep(20)",
        {"failed", "memory", "timeout"},
    ),
    "fills the disk": (
        "block = bytes(1 << 20)\n"
        "for number in range(20):\n    with open(f'file{number}', 'wb') as file:\n"
        "        for _ in range(100): file.write(block)\ntime.sleep(20)",
        {"failed", "disk", "timeout"},
    ),
    "makes folders without end": (
        "for number in range(100000):\n    os.mkdir('d')\n    os.chdir('d')",
        {"failed", "disk", "timeout"},
    ),
    "makes files without end": (
        "for number in range(1000000): open(f'f{number}', 'w').close()",
        {"failed", "disk", "timeout"},
    ),
    "never ends": ("while True: pass", {"timeout"}),
    "sleeps without end": ("time.sleep(60)", {"timeout"}),
    "compiles a bomb": ("x = (1 << 10**9) ** 10**9", {"timeout", "failed", "memory", "killed"}),
    "floods its output": ("while True: print('x' * 10000)", {"output"}),
    "floods its errors": ("while True: print('x' * 10000, file=sys.stderr)", {"output"}),
    "floods from a child": (
        "def go():\n    subprocess.Popen([sys.executable, '-c', 'while True: print(\"x\" * 10000)', mark])\n"
        "    time.sleep(60)\n"
        "attempt(go)",
        {"output", "ok"},
    ),
    "closes its output and stays": ("os.close(1); os.close(2)\ntime.sleep(60)", {"timeout"}),
    "crashes": ("import ctypes\nctypes.string_at(0)", {"killed"}),
    "overflows its stack": (
        "sys.setrecursionlimit(10**9)\ndef f(x): return f((x,)) + 1\nf(0)",
        {"killed", "failed", "memory", "timeout"},
    ),
    "writes what is not text": ("os.write(1, bytes(range(256)) * 10)", ORDINARY),
}
