"""Runs untrusted, model-written Python code and agents with bubblewrap. SECURITY.md lists attacks that it withstands.

The program runs in separate namespaces: it sees only ``/usr``, Python's environment and a private temporary folder. The
program has no network access and inherits no environment variables or capabilities. A seccomp filter blocks attacks
that namespaces do not prevent. Standard input, output and error are anonymous files, so the program can communicate
only through pipes passed to it. Programs started by root run as another user.

The command of an agent (:class:`SandboxedCommand`) differs: it may use sockets, only one of which leads outside, it
sees the folders of its program, its standard streams are pipes, and more processes are allowed.
"""

import errno
import fcntl
import json
import math
import mmap
import os
import platform
import resource
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from verl.config.errors import ConfigError

MAX_PROCESSES = 32
"""Maximum number of processes and threads in a run."""

MAX_FILE_BYTES = 16 << 20
"""Maximum size in bytes of a file written by a program, including standard output and standard error."""

TMP_BYTES = 64 << 20
"""Size in bytes of the program's temporary folder."""

MAX_OPEN_FILES = 64
POLL_MS = 20
"""Milliseconds between checks of a run's memory."""

AGENT_PROCESSES, AGENT_OPEN_FILES, AGENT_POLL_MS = 256, 256, 500
"""The same limits for an agent's command."""

FIRST_UID, NUM_UIDS = 61184, 4336
"""User ids for programs started by root. systemd reserves these ids for transient users, so no other user has them."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # makes the order of sets reproducible
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

Ending = Literal["ok", "error", "timeout", "memory", "output"]


class Run(NamedTuple):
    """Outcome of a program run."""

    ending: Ending
    """``error``: nonzero exit status or a signal. ``timeout``, ``memory``: killed at this limit. ``output``: output
    exceeded ``MAX_FILE_BYTES`` and was cut."""
    stdout: str
    stderr: str


def run_python(
    code: str, stdin: str = "", seconds: float = 10.0, memory_mb: int = 1024, descriptors: Sequence[int] = ()
) -> Run:
    """Run ``code`` as a program, wait until all of its processes have ended, and return the outcome.

    ``memory_mb`` limits both the address space of each process and the total resident memory. The program inherits the
    open file or pipe ``descriptors`` under the same numbers. This process then closes them.

    Raises ``RuntimeError`` if bubblewrap cannot create the sandbox (see :func:`require_sandbox`).
    """
    with ExitStack() as files, ExitStack() as handed_over:
        for descriptor in descriptors:
            handed_over.callback(os.close, descriptor)
        script, given = (_file(files, text.encode(errors="replace")) for text in (code, stdin))
        filters = _file(files, _filter())
        stdout, stderr, status = (_file(files) for _ in range(3))
        process = subprocess.Popen(
            _command(script, filters, status, _limits(memory_mb << 20) | {"cpu": int(seconds) + 1}),
            stdin=given,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(script, filters, status, *descriptors),
            env=ENVIRONMENT,  # minimal, because the program can read bubblewrap's environment in /proc
            cwd="/",
        )
        handed_over.close()  # so that a program reading from a pipe sees its end when the writing program ends
        try:
            killed = _watch(process, status, time.monotonic() + seconds, memory_mb << 20)
        finally:
            process.kill()  # needed after KeyboardInterrupt; otherwise a no-op
            process.wait()
            _wait_for(_status(status).get("child-pid"))
        written = [os.pread(file, MAX_FILE_BYTES, 0) for file in (stdout, stderr)]
        ended = _status(status).get("exit-code")
    texts = [data.decode(errors="replace") for data in written]
    if killed is None and ended is None:
        raise RuntimeError(f"bubblewrap: no sandbox: {texts[1].strip() or process.returncode}")
    full = any(len(data) == MAX_FILE_BYTES for data in written)
    return Run(killed or ("output" if full else "ok" if ended == 0 else "error"), *texts)


class SandboxedCommand(subprocess.Popen[bytes]):
    """A running command whose only way out of the sandbox is a Unix socket. Its standard streams are pipes.

    Args:
        script: Source of a Python program that is called with the command ``words`` and runs them.
        environment: Environment variables, in addition to those of every program.
        folders: Absolute paths that the command sees, in addition to those that every program sees.
        endpoint: Path of the Unix socket, and its path in the sandbox.
        max_bytes: Limit of the address space of each process, and of the resident memory of all.
    """

    def __init__(
        self,
        script: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        folders: Sequence[str],
        endpoint: tuple[str, str],
        max_bytes: int,
    ) -> None:
        self._max_bytes, self._files = max_bytes, ExitStack()
        main, filters = (_file(self._files, data) for data in (script.encode(), _filter(sockets=True)))
        self._status_file = _file(self._files)
        limits = _limits(max_bytes) | {"nproc": AGENT_PROCESSES, "nofile": AGENT_OPEN_FILES}
        # Read-only, because its owner could otherwise change its permissions. Clients can connect nevertheless.
        mounts = [*_mounts(tuple(folders)), "--ro-bind", *endpoint]
        super().__init__(
            [*_command(main, filters, self._status_file, limits, mounts), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(main, filters, self._status_file),
            env={**ENVIRONMENT, **environment},
            cwd="/",
            start_new_session=True,
        )

    def finish(self) -> int:
        """Wait for the end of all processes of the command, and return its exit code.

        Raises:
            MemoryError: If they exceeded their limit of memory and were killed.
        """
        with self._files:
            killed = _watch(self, self._status_file, math.inf, self._max_bytes, AGENT_POLL_MS)
            _wait_for(_status(self._status_file).get("child-pid"))
        if killed is not None:
            raise MemoryError(f"the command used more than {self._max_bytes >> 20} MiB")
        return self.wait()


def _file(files: ExitStack, data: bytes | None = None) -> int:
    """Create an anonymous file and return its descriptor. The file is empty, or contains ``data`` and is read-only."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, file)
    if data is not None:
        with open(file, "wb", closefd=False) as stream:
            stream.write(data)
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _watch(
    process: subprocess.Popen[bytes], status: int, deadline: float, max_bytes: int, poll_ms: int = POLL_MS
) -> Ending | None:
    """Wait until a run ends. Return the exceeded limit if the run was killed, or None if it ended by itself."""
    ended, poller = os.pidfd_open(process.pid), select.poll()
    poller.register(ended, select.POLLIN)
    try:
        while not poller.poll(poll_ms):
            first = _status(status).get("child-pid")
            late = time.monotonic() > deadline
            if late or (first is not None and _memory(first) > max_bytes):
                # Killing the first process of a PID namespace kills all others.
                os.kill(first or process.pid, signal.SIGKILL)
                process.wait()
                return "timeout" if late else "memory"
        return None
    finally:
        os.close(ended)


def _wait_for(first: int | None) -> None:
    """Wait until the first process of the namespace has ended, because then all its processes have ended.

    bubblewrap kills the first process but may itself end before it.
    """
    try:
        ended, poller = os.pidfd_open(first or 0), select.poll()
    except (OSError, ValueError):  # it has already ended, or never started
        return
    poller.register(ended, select.POLLIN)
    poller.poll(10_000)
    os.close(ended)


def _status(file: int) -> dict[str, int]:
    """Return the status reported by bubblewrap: ``child-pid`` and, after the run, ``exit-code``."""
    entries: dict[str, int] = {}
    for line in os.pread(file, 4096, 0).split(b"\n")[:-1]:
        entries |= json.loads(line)
    return entries


def _memory(first: int) -> int:
    """Return the private resident bytes of a process tree. Pages shared by forks are counted once per process."""
    pages, family = 0, [first]
    for pid in family:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                family += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            pages += resident - shared
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
    return pages * resource.getpagesize()


# --- the command -----------------------------------------------------------------------------------------------------


def _limits(max_bytes: int) -> dict[str, int]:
    """Return the limits of each process, keyed by options of ``prlimit``."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    address_space = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    limits = {"as": address_space, "nproc": MAX_PROCESSES, "nofile": MAX_OPEN_FILES}
    return limits | {"fsize": MAX_FILE_BYTES, "core": 0, "msgqueue": 0, "memlock": 0}


def _command(
    script: int, filters: int, status: int, limits: Mapping[str, int], mounts: Sequence[str] | None = None
) -> list[str]:
    command = [*(_mounts() if mounts is None else mounts), "--perms", "0444"]
    command += ["--ro-bind-data", str(script), "/main.py", "--remount-ro", "/"]
    command += ["--chdir", "/tmp", "--seccomp", str(filters), "--json-status-fd", str(status), "--"]
    if uses_another_user():
        # A separate user id, because root is exempt from the process limit and owns files that others cannot read.
        user = str(FIRST_UID + secrets.randbelow(NUM_UIDS))
        command += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
    return [*command, "prlimit", *(f"--{name}={value}" for name, value in limits.items()), sys.executable, "/main.py"]


@cache
def uses_another_user() -> bool:
    """Return whether this process can assume any user id, and programs run as another user.

    Root in a user namespace often cannot.
    """
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return os.geteuid() == 0 and mapped >= FIRST_UID + NUM_UIDS


@cache
def _mounts(folders: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the first part of bubblewrap's command line: namespaces, and all mounts except for the program.

    Args:
        folders: Further folders, which are mounted read-only.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError("bubblewrap is missing: apt-get install bubblewrap, or dnf install bubblewrap")
    command = [bwrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    if uses_another_user():
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        # Otherwise, bubblewrap's first process, which has no filter, would belong to the program's user.
        command += ["--unshare-user", "--as-pid-1"]
    command += ["--ro-bind", "/usr", "/usr", "--dir", "/etc"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", name, name]
    # Mounted first, because the Python environment may be below it.
    command += _tmpfs("/tmp")
    prefixes = {Path(prefix) for prefix in (sys.prefix, sys.base_prefix, *folders)}
    for prefix in sorted(prefixes | {prefix.resolve() for prefix in prefixes}):
        if not prefix.is_relative_to("/usr"):
            for parent in list(prefix.parents)[-2::-1]:  # otherwise, only bubblewrap itself could read them
                command += ["--dir", str(parent)]
            command += ["--ro-bind", str(prefix), str(prefix)]
    command += ["--proc", "/proc", "--dev", "/dev"]
    # A shared mapping of /dev/zero is memory that no process is charged for.
    command += ["--dev-bind", "/dev/null", "/dev/zero"]
    return (*command, *_tmpfs("/dev/shm"), "--remount-ro", "/dev")


def _tmpfs(folder: str) -> list[str]:
    return ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", folder]


# --- the filter ------------------------------------------------------------------------------------------------------

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Maps each machine type to its column in the tables below and its number in the Linux audit interface."""

REFUSED = {
    # Calls that create namespaces, in which a program would have capabilities again.
    **{"unshare": (272, 97), "setns": (308, 268)},
    # Network and Unix sockets, but not socket pairs.
    "socket": (41, 198),
    # Memory that no process is charged for.
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186)},
    **{"semget": (64, 190), "io_setup": (206, 0), "io_uring_setup": (425, 425), "vmsplice": (278, 75)},
    # Resources shared with the rest of the machine: keys and the kernel log.
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "syslog": (103, 116)},
    # Calls that programs rarely need and that have exposed kernel vulnerabilities.
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "ptrace": (101, 117)},
}
"""Maps each forbidden system call, which fails with EPERM, to its number on each architecture."""

CLONE, CLONE3, MMAP, PRCTL = (56, 220), (435, 435), (9, 222), (157, 167)
NEW_NAMESPACES = 0x7E020080
"""Union of all ``CLONE_NEW*`` flags."""
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Families of sockets that a command may use. Others, such as AF_VSOCK, may lead out of the network namespace."""
SHARED_ANONYMOUS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
PR_SET_PDEATHSIG = 1
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
"""Opcodes of classic BPF: load a word of the call, apply a mask, jump on a condition, and return."""
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``. Each argument has 8 bytes, with the low word first."""


@cache
def _filter(sockets: bool = False) -> bytes:
    """Return the seccomp filter as ``struct sock_filter`` entries (code, jump if true, jump if false, operand).

    Args:
        sockets: Whether to allow the families of sockets that the network namespace confines.
    """
    column, audit = ARCHITECTURES[platform.machine()]
    denied = (RETURN, 0, 0, FAIL | errno.EPERM)
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    # x86-64 has a second range of numbers for the x32 ABI.
    program += [(AT_LEAST, 0, 1, 0x40000000), denied]
    for name, numbers in REFUSED.items():
        if name == "socket" and sockets:
            unix, ipv4, ipv6 = FAMILIES
            program += [(EQUAL, 0, 6, numbers[column]), (LOAD, 0, 0, ARGUMENTS), (EQUAL, 3, 0, unix)]
            program += [(EQUAL, 2, 0, ipv4), (EQUAL, 1, 0, ipv6), denied, (LOAD, 0, 0, NUMBER)]
        else:
            program += [(EQUAL, 0, 1, numbers[column]), denied]
    # The filter cannot read clone3's flags, which are in memory; if clone3 is missing, callers fall back to clone.
    program += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    program += [(EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, ARGUMENTS), (ANY_BIT, 0, 1, NEW_NAMESPACES), denied]
    # Shared memory without a file lives until its last page is unmapped, and may not be charged to any process. From
    # here on, the accumulator may hold an argument instead of the number.
    program += [(LOAD, 0, 0, NUMBER), (EQUAL, 0, 4, MMAP[column]), (LOAD, 0, 0, ARGUMENTS + 24)]
    program += [(AND, 0, 0, SHARED_ANONYMOUS), (EQUAL, 0, 1, SHARED_ANONYMOUS), denied]
    # Programs must not disable the signal that kills them with their parent.
    program += [(LOAD, 0, 0, NUMBER), (EQUAL, 0, 5, PRCTL[column]), (LOAD, 0, 0, ARGUMENTS)]
    program += [(EQUAL, 0, 3, PR_SET_PDEATHSIG), (LOAD, 0, 0, ARGUMENTS + 8), (EQUAL, 1, 0, signal.SIGKILL), denied]
    program += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


# --- checking that the sandbox works ---------------------------------------------------------------------------------

SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile with userns",
    ),
    "user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
}
"""Kernel settings that can disable user namespaces. Maps each file in /proc/sys to the value that disables namespaces
and to instructions for enabling them."""


@cache
def require_sandbox() -> None:
    """Raise a one-line ``ConfigError`` that states what to install or configure if :func:`run_python` does not work."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise ConfigError(f"the sandbox for programs needs Linux on {' or '.join(ARCHITECTURES)}")
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise ConfigError("the sandbox for programs needs a Linux kernel with CONFIG_PROC_CHILDREN")
    try:
        trial = run_python("import json; print(json.dumps(42))", seconds=60)
    except RuntimeError as error:
        raise ConfigError(f"{error}; {_remedy(str(error))}") from error
    if trial[:2] != ("ok", "42\n"):
        raise ConfigError(f"the sandbox for programs does not run {sys.executable}: {trial.stderr.strip()[-200:]}")


def _remedy(error: str) -> str:
    if "Unknown option" in error:
        return "bubblewrap 0.7 or newer is needed"
    for name, (value, remedy) in SWITCHES.items():
        file = Path("/proc/sys") / name
        if not uses_another_user() and file.exists() and file.read_text().strip() == value:
            return remedy
    return (
        "in a container, start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined and, for root, --cap-add SYS_ADMIN"
    )
