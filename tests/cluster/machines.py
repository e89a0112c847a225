"""Machines for tests: namespaces on a bridge, each with its own processes, /tmp, home, /dev/shm, name and address.

    with cluster(2, shared=[outputs]) as (one, two):
        one.start(["ray", "start", "--head", ...], log=outputs / "one.log")
        two.cut(); two.heal(); two.kill(); two.boot()

They share the checkout, the environment of the tests and the ``shared`` folders. Nothing has a name outside the
namespaces, so nothing outlives the tests: each machine ends when its standard input does.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Literal

import psutil
import pytest
from conftest import ROOT, unavailable

NETWORKS = [f"{start}.{number}" for start in ("10.77", "172.27", "192.168") for number in range(256)]


def free_network(used: Iterable[str]) -> str:
    """The first of ``NETWORKS`` that overlaps none of the used ones, such as 10.0.0.0/8; empty if all do."""
    taken = [IPv4Network(each, strict=False) for each in used]
    free = (start for start in NETWORKS if not any(IPv4Network(f"{start}.0/24").overlaps(each) for each in taken))
    return next(free, "")


def used_networks() -> list[str]:
    addresses = [address for each in psutil.net_if_addrs().values() for address in each]
    return [f"{each.address}/{each.netmask or 32}" for each in addresses if each.family == socket.AF_INET]


NETWORK = free_network(used_networks())
"""Start of the machines' addresses; this computer's own may be on the same network."""
HEAD = f"{NETWORK}.1"
HOME = "/tmp/home"

Names = Literal["bridge", "loopback"]
"""What a machine's own name resolves to: its address, or 127.0.1.1 as on Debian. Other names resolve only with
``bridge``."""

KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "VERL_TEST_DATA", "VERL_PYTHON", "LD_LIBRARY_PATH")
"""Of the tests' environment; what belongs to another cluster must not reach the machines."""

IN_USER_NAMESPACE = os.geteuid() != 0
"""Others than root become root of a user namespace first."""

INIT = r"""
set -eu
read -r pid _ </proc/self/stat            # as the tests see this process
mount --make-rprivate /
mkdir -p "$DISK"
mount -t tmpfs -o size=4g,mode=1777 tmpfs "$DISK"
mkdir -p "$DISK/home"
for folder in $SHARED; do                 # what lies below /tmp stays where it is
  case $folder in
    /tmp/*)
      mkdir -p "$DISK/${folder#/tmp/}"
      mount --bind "$folder" "$DISK/${folder#/tmp/}"
      ;;
  esac
done
mount --bind "$HOSTS" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
mount --rbind "$DISK" /tmp
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
mount -t proc proc /proc
hostname "$NAME"
echo "$pid"
read -r _ || true                         # bash collects its orphans meanwhile
"""


@cache
def why_not() -> str:
    """Why this computer cannot have machines; empty if it can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "taskset", "hostname") if shutil.which(name) is None]
    if missing:
        return f"machines need {', '.join(missing)}"
    if not NETWORK:
        return "machines need a network of 256 addresses, and this computer uses all that the tests know"
    user = ["--user", "--map-root-user"] if IN_USER_NAMESPACE else []
    script = "mount -t tmpfs tmpfs /dev/shm && mount -t proc proc /proc && ip link add bridge0 type bridge"
    command = ["unshare", *user, "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c", script]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"machines need namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def require_machines() -> None:
    """Skip the test where there can be no machines; in continuous integration it fails."""
    if reason := why_not():
        unavailable(reason)


class Process:
    """A command on a machine."""

    def __init__(self, popen: "subprocess.Popen[bytes]", log: Path) -> None:
        self.popen = popen
        self.log = log

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def running(self) -> bool:
        return self.popen.poll() is None

    def wait(self, timeout_s: float = 240) -> int:
        """Its exit code; below 0 if a signal ended it."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s:\n{self.text}")

    def wait_for_line(self, text: str, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            assert self.running(), f"ended with {self.popen.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {text!r}:\n{self.text}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        # nsenter waits for its only child, which is what the command was replaced by.
        (child,) = psutil.Process(self.popen.pid).children()
        child.send_signal(number)


class Machine:
    """One machine; made by :func:`cluster`, which boots it.

    Args:
        core: the core that its processes are pinned to.
    """

    def __init__(self, number: int, switch: int, folder: Path, shared: Sequence[Path], core: int) -> None:
        self.number = number
        self.name = f"machine{number}"
        self.address = f"{NETWORK}.{number}"
        self.core = core
        self._switch = switch
        self._folder = folder
        self._shared = shared
        self._init: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def boot(self) -> None:
        """Start it, or start it again after :meth:`kill`: same name and address, and an empty disk."""
        assert self._init is None, f"{self.name} is up"
        user = _enter(self._switch, "user") if IN_USER_NAMESPACE else []
        environment = os.environ | {
            "NAME": self.name,
            "DISK": str(self._folder / f"{self.name}.disk"),
            "HOSTS": str(self._folder / f"{self.name}.hosts"),
            "SHARED": " ".join(map(str, self._shared)),
        }
        command = [*user, "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        self._init = subprocess.Popen(
            [*command, "bash", "-c", INIT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._init.stdout is not None
        self.pid = int(self._init.stdout.readline())
        _ip(self._switch, f"link add port{self.number} type veth peer name eth0 netns {self.pid}")
        _ip(self._switch, f"link set port{self.number} master bridge0 up")
        _ip(self.pid, f"addr add {self.address}/24 dev eth0")
        _ip(self.pid, "link set lo up")
        _ip(self.pid, "link set eth0 up")
        _ip(self.pid, "route add default dev eth0")

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL, as the kernel does when a container is removed; connections close."""
        if self._init is None:
            return
        os.kill(self.pid, signal.SIGKILL)
        self._init.communicate()
        self._init = None
        # The kernel removes it too, but later, and the next boot would find the name taken.
        _ip(self._switch, f"link del port{self.number}", check=False)

    def power_off(self) -> None:
        """End it so that nobody hears of it: the connections of the others do not close."""
        self.cut()
        self.kill()

    def cut(self) -> None:
        """Unplug its cable: it runs on, alone."""
        _ip(self._switch, f"link set port{self.number} down")

    def heal(self) -> None:
        _ip(self._switch, f"link set port{self.number} up")

    def start(self, command: Sequence[str], log: Path, **variables: str) -> Process:
        """Start a command in the checkout, with ``variables`` on top of the machine's environment; output: ``log``."""
        assert self._init is not None, f"{self.name} is down"
        spaces = [*(["user"] if IN_USER_NAMESPACE else []), "net", "mnt", "uts", "ipc", "pid"]
        script = ["bash", "-c", 'cd "$1" && shift && exec "$@"', "bash", str(ROOT), *command]
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [*_enter(self.pid, *spaces), "taskset", "-c", str(self.core), *script],
                env=machine_environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Process(popen, log)

    def run(self, command: Sequence[str], timeout_s: float = 240, **variables: str) -> tuple[int, str]:
        """Run a command to its end: exit code and output."""
        log = self._folder / f"{self.name}.{time.monotonic_ns()}.log"
        process = self.start(command, log, **variables)
        return process.wait(timeout_s), process.text

    def processes(self) -> dict[int, str]:
        """Its living processes but for its init: id as the tests see it -> command line."""
        if self._init is None:
            return {}
        space, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for process in psutil.process_iter(["cmdline", "status"]):
            try:
                own = os.readlink(f"/proc/{process.pid}/ns/pid") == space
            except OSError:
                continue
            if own and process.pid != self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.info["cmdline"] or [])
        return found

    def survivors(self, timeout_s: float = 30) -> list[str]:
        """Command lines of the processes that live on after a while."""
        deadline = time.monotonic() + timeout_s
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return sorted(found.values())


def machine_environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    return kept | {
        "PATH": path,
        "HOME": HOME,
        "VERL_ENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextmanager
def cluster(
    count: int, folder: Path, shared: Sequence[Path] = (), names: Names = "bridge"
) -> Iterator[tuple[Machine, ...]]:
    """``count`` machines that are up, each on a core of its own as long as there are enough.

    Args:
        folder: where the machines' files go; it is none of theirs unless it is ``shared``.
        shared: folders that all of them see, besides the checkout and the environment.
    """
    require_machines()
    folder.mkdir(parents=True, exist_ok=True)
    seen = [path.resolve() for path in (ROOT, Path(sys.prefix), *shared)]
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        switch = stack.enter_context(_switch())
        machines = tuple(
            Machine(number, switch, folder, seen, cores[(number - 1) % len(cores)]) for number in range(1, count + 1)
        )
        for machine in machines:
            (folder / f"{machine.name}.hosts").write_text(_hosts(machine, machines, names))
            stack.callback(machine.kill)
            machine.boot()
        yield machines


@contextmanager
def _switch() -> Iterator[int]:
    """A network namespace with the bridge; the id of the process that keeps it."""
    user = ["--user", "--map-root-user"] if IN_USER_NAMESPACE else []
    command = ["unshare", *user, "--net", "bash", "-c", "echo ready; read -r _ || true"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        _ip(process.pid, "link add bridge0 type bridge")
        _ip(process.pid, "link set bridge0 up")
        yield process.pid
        process.stdin.close()


def _hosts(machine: Machine, machines: Sequence[Machine], names: Names) -> str:
    lines = ["127.0.0.1 localhost"]
    if names == "loopback":
        lines.append(f"127.0.1.1 {machine.name}")
    if names == "bridge":
        lines += [f"{other.address} {other.name}" for other in machines]
    return "\n".join(lines) + "\n"


def _enter(pid: int, *spaces: str) -> list[str]:
    flags = {"user": "--user", "net": "--net", "mnt": "--mount", "uts": "--uts", "ipc": "--ipc", "pid": "--pid"}
    keep = ["--preserve-credentials"] if "user" in spaces else []
    return ["nsenter", "--target", str(pid), *keep, *(flags[space] for space in spaces)]


def _ip(pid: int, words: str, check: bool = True) -> None:
    spaces = ("user", "net") if IN_USER_NAMESPACE else ("net",)
    subprocess.run([*_enter(pid, *spaces), "ip", *words.split()], check=check, capture_output=not check)
