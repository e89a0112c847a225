"""Attacks on the sandbox, as root and as an ordinary user."""

import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verl.utils import sandbox
from verl.utils.sandbox import Run, run_python

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sandbox")]

ROOT = Path(__file__).resolve().parents[2]


def running(mark: str) -> list[int]:
    """Processes on this machine with ``mark`` in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


NUMBERS = {"x86_64": [29, 248, 249, 250, 103, 321, 298, 323, 206, 425, 278, 0x40000000 + 39], "aarch64": [425, 280, 75]}
"""System calls without a function in the C library that must be refused: shmget, keys, the kernel's log, bpf, ..."""

PRELUDE = f"""
import ctypes, errno, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {NUMBERS[platform.machine()]}
def tried(f, *args):
    try: return f(*args)
    except OSError as error: return errno.errorcode[error.errno]
    except MemoryError: return 'MemoryError'
def call(name, *args):
    return errno.errorcode[ctypes.get_errno()] if getattr(libc, name)(*args) == -1 else 'done'
"""
"""Before each attack: ``tried`` is the value of a call, or the name of its error."""


def attack(lines: str, **limits: Any) -> tuple[str, str]:
    """How a program ended, and what it printed."""
    ended = run_python(PRELUDE + lines, **limits)
    assert ended.ending != "error", ended.stderr
    return ended.ending, ended.stdout


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param("print(sum(p.isdigit() for p in os.listdir('/proc')) - os.getpid())", "0", id="processes"),
        pytest.param("print(sorted(os.listdir('/proc/self/fd')))", "['0', '1', '2', '3']", id="descriptors"),
        pytest.param(
            "print(sorted(os.environ))",
            "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'PWD', 'PYTHONDONTWRITEBYTECODE', "
            "'PYTHONHASHSEED']",
            id="environment variables",
        ),
        pytest.param("print(sum(1 for _ in open('/proc/net/dev')) - 2)", "1", id="network devices"),
        pytest.param(
            "print({tried(socket.socket, family, kind) for family in range(46) for kind in (1, 2, 3, 5)})",
            "{'EPERM'}",
            id="sockets",
        ),
        pytest.param(
            "paths = '/ /usr /usr/bin /etc /dev /proc /proc/sys/kernel /sys /home /root /var /run'.split()\n"
            "paths += [sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)]\n"
            "print({path for path in paths if tried(open, path + '/x', 'w') not in ('EROFS', 'ENOENT', 'EACCES')})\n"
            "print(tried(open, '/main.py', 'r+'), tried(os.unlink, '/main.py'), tried(os.chmod, '/usr', 0o777))",
            "set()\nEACCES EROFS EROFS",
            id="writes outside",
        ),
        pytest.param(
            "for target in ('/etc/shadow', '/etc/passwd', '/proc/self/root/etc/passwd', '/tmp/../root/.ssh'):\n"
            "    os.symlink(target, 'link')\n"
            "    print(tried(open, 'link'), tried(os.link, '/usr/bin/env', 'hard'))\n"
            "    os.unlink('link')",
            "ENOENT EXDEV\n" * 4,
            id="links",
        ),
        pytest.param(
            "print({tried(os.kill, pid, 9) for pid in range(os.getpid() + 1, 100000)}, os.getppid() < 2)\n"
            "print({tried(os.kill, pid, 9) for pid in range(-1, 2) if pid} <= {'EPERM', 'ESRCH', None})",
            "{'ESRCH'} True\nTrue",
            id="signals",
        ),
        pytest.param(
            "print(tried(open, '/dev/tty'), call('setuid', 0) == 'done', call('mount', b'', b'/tmp', b'tmpfs', 0, 0))\n"
            "refused = [('unshare', 0x10000000), ('setns', 0, 0), ('ptrace', 0, 0, 0, 0), ('memfd_create', b'x', 0)]\n"
            "refused += [('shmget', 0, 4096, 0o600), ('msgget', 0, 0o600), ('semget', 0, 1, 0o600), ('prctl', 1, 0)]\n"
            "refused += [('syscall', number, 0, 0, 0, 0, 0) for number in NUMBERS]\n"
            "print({call(*one) for one in refused}, call('prctl', 1, 9), call('syscall', 435, 0, 0))",
            "ENXIO False EPERM\n{'EPERM'} done ENOSYS",
            id="system calls",
        ),
        pytest.param(
            "import resource\n"
            "for name in ('AS', 'CPU', 'FSIZE', 'NPROC', 'NOFILE'):\n"
            "    kind = getattr(resource, 'RLIMIT_' + name)\n"
            "    try: resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2); print(name)\n"
            "    except ValueError: pass",
            "",
            id="limits raised",
        ),
        pytest.param(
            "n = 0\nwhile isinstance(tried(lambda: os.fork() or os._exit(time.sleep(9))), int): n += 1\nprint(n)",
            "31",
            id="processes counted",
        ),
        pytest.param("print(tried(bytearray, 10 << 30))", "MemoryError", id="10 GB"),
        pytest.param(
            # Of shared memory, all pages stay as long as one is mapped. Private memory and files can be mapped.
            "import mmap\n"
            "zero, file = os.open('/dev/zero', os.O_RDWR), os.open('file', os.O_RDWR | os.O_CREAT)\n"
            "os.truncate(file, 4096)\n"
            "for one in (-1, 4096), (zero, 4096), (-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), (file, 4096):\n"
            "    print(tried(lambda: len(mmap.mmap(*one))))",
            "EPERM\nENODEV\n4096\n4096",
            id="shared memory",
        ),
        pytest.param(
            "print(tried(lambda: open('big', 'wb').write(bytes(1 << 26))), os.path.getsize('big') >> 20)\n"
            "def fill(folder): return [open(f'{folder}/{i}', 'wb', 0).write(bytes(1 << 24)) for i in range(9)]\n"
            "print(tried(fill, '/tmp'), tried(fill, '/dev/shm'))",
            "EFBIG 16\nENOSPC ENOSPC",
            id="huge files",
        ),
        pytest.param(
            """print('{"exit-code": 0}\\n{"child-pid": 1}')""", '{"exit-code": 0}\n{"child-pid": 1}', id="reports"
        ),
    ],
)
def test_attack(program: str, printed: str):
    assert attack(program) == ("ok", printed.strip() + "\n" if printed else "")


def test_standard_input_is_a_file_that_cannot_be_written():
    program = (
        "print(tried(os.write, 0, b'x'), tried(os.truncate, '/proc/self/fd/0', 0), tried(os.ftruncate, 0, 9))\n"
        "print(sys.stdin.read(), repr(sys.stdin.read()), os.lseek(0, 0, 0), open(0).read(), os.isatty(0))"
    )
    assert attack(program, stdin="1\n2") == ("ok", "EPERM EPERM EPERM\n1\n2 '' 0 1\n2 False\n")


@pytest.mark.parametrize(
    ("program", "ending", "limits"),
    [
        pytest.param("while True: tried(os.fork)", "timeout", {"seconds": 2}, id="fork bomb"),
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)", "timeout", {"seconds": 1}, id="sleep"),
        pytest.param(
            "for _ in range(20): os.fork() or (bytearray(b'x') * (100 << 20), time.sleep(60))\ntime.sleep(60)",
            "memory",
            {"seconds": 60, "memory_mb": 300},
            id="memory of many processes",
        ),
        pytest.param("while True: print('x' * 1000)", "output", {}, id="endless output"),
        pytest.param("while True: tried(os.write, 2, b'x' * 4096)", "timeout", {"seconds": 2}, id="and errors ignored"),
        pytest.param(
            "for i in range(10): tried(lambda: open(f'/tmp/{i}', 'ab').write(bytes(1 << 25)))\n"
            "while True: tried(lambda: open(f'/tmp/{os.urandom(8).hex()}', 'w'))",
            "timeout",
            {"seconds": 2},
            id="many files",
        ),
    ],
)
def test_limits(program: str, ending: str, limits: dict[str, float]):
    mark = f"verl-test-{secrets.token_hex(8)}"
    left = f"subprocess.Popen(['/bin/sh', '-c', 'sleep 600 & wait', '{mark}'], start_new_session=True)\n"
    start = time.monotonic()
    full = run_python(PRELUDE + left + program, **limits)
    assert full.ending == ending
    assert len(full.stdout) <= 16 << 20 and len(full.stderr) <= 16 << 20
    assert not running(mark)
    assert time.monotonic() - start < 50


def test_nothing_of_this_machine_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A secret in a file, in an environment variable, and behind sockets: by address, abstract and as a file."""
    secret = secrets.token_hex(16)
    (tmp_path / "secret").write_text(secret)
    monkeypatch.setenv("WANDB_API_KEY", secret)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{secret}")
        abstract.listen()
        code = f"""
import glob
print([tried(open, path) for path in ({str(tmp_path / "secret")!r}, '/proc/{os.getpid()}/environ')])
print([tried(lambda: b'WANDB' in open(path, 'rb').read()) for path in glob.glob('/proc/[0-9]*/environ')][-1])
print(tried(socket.create_connection, {server.getsockname()}), tried(os.listdir, {str(ROOT / "verl")!r}))
print(tried(lambda: socket.socket(socket.AF_UNIX).connect({abstract.getsockname()!r})))
print(tried(os.kill, {os.getpid()}, 9))
"""
        assert attack(code) == ("ok", "['ENOENT', 'ENOENT']\nFalse\nEPERM ENOENT\nEPERM\nESRCH\n")
        # Without the filter there is no network either.
        monkeypatch.setattr(sandbox, "REFUSED", {})
        sandbox._filter.cache_clear()
        try:
            assert attack(code) == ("ok", "['ENOENT', 'ENOENT']\nFalse\nECONNREFUSED ENOENT\nECONNREFUSED\nESRCH\n")
        finally:
            sandbox._filter.cache_clear()


def test_the_program_ends_with_whoever_started_it():
    mark = f"verl-test-{secrets.token_hex(8)}"
    code = PRELUDE + f"call('prctl', 1, 0); os.execv('/bin/sh', ['sh', '-c', 'sleep 600 & sleep 600', '{mark}'])"
    start = f"from verl.utils.sandbox import run_python; run_python({code!r}, seconds=600)"
    parent = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT)
    wait_for(lambda: running(mark) and len(running(mark)) > 1)  # the parent's own command line, and the program
    parent.kill()
    parent.wait()
    wait_for(lambda: not running(mark))


MAX_NAMESPACES = "/proc/sys/user/max_user_namespaces"


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_programs_do_not_meet():
    """Runs at once have folders, processes and memory of their own."""
    code = "import os, time; open('x', 'x').close(); time.sleep(0.5); "
    code += "print([name for name in os.listdir() if os.path.isfile(name)], os.listdir('/dev/shm'))"
    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(run_python, [code] * 4))
    assert runs == [Run("ok", "['x'] []\n", "")] * 4


def test_programs_may_use_processes_threads_and_packages():
    code = """
import asyncio, multiprocessing, tempfile, threading
import numpy, sympy
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(abs, [-1, 2]), numpy.linalg.det(numpy.eye(3)), sympy.factorint(91))
    thread = threading.Thread(target=print, args=("thread",))
    thread.start(), thread.join()
    asyncio.run(asyncio.sleep(0))
    print(tempfile.TemporaryFile().write(b"1"), input())
"""
    assert run_python(code, stdin="é\n", seconds=60) == Run("ok", "[1, 2] 1.0 {7: 1, 13: 1}\nthread\n1 é\n", "")


def test_all_of_this_as_an_ordinary_user():
    """These tests once more, by a user who may read Python's folders."""
    if os.geteuid() != 0:
        pytest.skip("this run is one by an ordinary user")
    prefixes = {Path(sys.prefix), Path(sys.base_prefix).resolve(), ROOT}
    command = ["bwrap", "--dev-bind", "/", "/"]
    command += ["--perms", "1777", "--tmpfs", "/tmp", "--perms", "0755", "--tmpfs", "/root"]
    for prefix in sorted(prefixes):
        for parent in list(prefix.parents)[-2::-1]:
            # Bubblewrap makes the folders of a --ro-bind without permissions for others.
            command += ["--dir", str(parent)] if parent.is_relative_to("/root") or parent.is_relative_to("/tmp") else []
        command += ["--ro-bind", str(prefix), str(prefix)]
    command += ["--chdir", str(ROOT), "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command += ["env", "HOME=/tmp", "TMPDIR=/tmp", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    agents = ROOT / "tests" / "rollout" / "agents" / "test_agent_pool.py"
    command += [__file__, f"{agents}::test_a_sandboxed_command_reaches_its_address_alone"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "2 skipped" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (["env", "PATH=/nowhere"], "bubblewrap is missing: apt-get install bubblewrap, or dnf install bubblewrap"),
        (
            ["unshare", "--user", "--map-root-user", "sh", "-c", f'echo 0 >{MAX_NAMESPACES}; exec "$@"', "sh"],
            "sysctl -w user.max_user_namespaces=15000",
        ),
        (
            ["setpriv", "--bounding-set=-all"],
            "--security-opt systempaths=unconfined and, for root, --cap-add SYS_ADMIN",
        ),
    ],
    ids=["bubblewrap", "user namespaces", "capabilities"],
)
def test_what_is_missing_is_named(wrapper: list[str], message: str):
    if wrapper[0] == "setpriv" and os.geteuid() != 0:
        pytest.skip("an ordinary user has no capabilities to lose")
    check = "from verl.utils.sandbox import require_sandbox as check; check()"
    done = subprocess.run([*wrapper, sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("verl.config.errors.ConfigError: bubblewrap")
    assert done.stderr.splitlines()[-1].endswith(message)
