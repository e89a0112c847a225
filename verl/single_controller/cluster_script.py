"""The steps of ``scripts/cluster.sh`` that ask Ray; results go to stdout.

python -m verl.single_controller.cluster_script COMMAND ...

The exit code of a run travels through the cluster itself, so that the machines need no folder in common for it.
"""

import os
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RpcError

from verl.config.errors import ConfigError
from verl.single_controller.environment import REPEATED_S, REQUEUE, SIGNALS
from verl.single_controller.network import address_towards, own_addresses, reachable
from verl.single_controller.ray_head import check_head

NAMESPACE = b"verl"
EXIT_CODE = b"exit code"
PATIENCE_S = 20.0
"""Seconds that a token may be wrong: a folder may show what an earlier cluster left, and a network folder is slow."""
LOST_S = 30.0
"""Seconds without an answer of the head after which a machine gives up."""
FAILED_S = 15.0
"""Age in seconds at which the mark of a machine 0 that gave up counts no more; it removes it after 10 itself."""
STOP_S = 5.0
"""Seconds that killed processes have to be gone."""
GOODBYE_S = 15.0
"""Seconds that the head waits for the others to have read the exit code."""


def say(text: str) -> None:
    print(f"cluster.sh: {text}", file=sys.stderr, flush=True)


def address(host: str) -> str:
    """This machine's address on the way to ``host``."""
    try:
        return address_towards(host)
    except OSError as error:
        raise ConfigError(f"{host}: {error.strerror or error}; name machine 0 by its address") from None


def lead(host: str, port: str, folder: str) -> str:
    """The address of machine 0, which this is, once it is clear that there is no other.

    Raises:
        ConfigError: another cluster has the port, or the folder; others may write into the folder.
    """
    _require_private(folder)
    own, deadline = address(host), time.monotonic() + GOODBYE_S
    head = f"{own}:{port}"
    with suppress(OSError):
        other = (Path(folder) / "address").read_text()
        if other != head and reachable(other):
            raise ConfigError(
                f"NODE_RANK=0: machine 0 is at {other} already; number the machines from 0, or name another "
                f"VERL_CLUSTER_DIR than {folder}"
            )
    # The cluster of a run that was stopped may just be ending.
    while reachable(head):
        if time.monotonic() > deadline:
            raise ConfigError(f"MASTER_PORT={port}: {head} is in use, by another run's cluster?; set another port")
        time.sleep(0.5)
    return own


def wait(host: str, port: str, folder: str, limit_s: str) -> str:
    """Wait until the head answers and takes the token; returns its ``address:port``.

    Raises:
        ConfigError: it did not come, or gave up; others may write into the folder.
    """
    deadline, announced = time.monotonic() + float(limit_s), False
    problem, parent = "unknown", os.getppid()
    mark = Path(folder) / "failed"
    before = _time_of(mark)
    while time.monotonic() < deadline and os.getppid() == parent:
        _require_private(folder)
        # One that was there before is an earlier start's, unless it is new: the machines' clocks may differ.
        made = _time_of(mark)
        if made and (made != before or time.time() - made < FAILED_S):
            with suppress(OSError):
                failure = mark.read_text()
                raise ConfigError(f"machine 0 at {host}:{port} gave up: {failure}")
        head, problem = _head(host, port, Path(folder))
        if not problem:
            check_head(head, PATIENCE_S)
            return head
        if not announced:
            say(f"waiting for machine 0 at {host}:{port}")
            announced = True
        time.sleep(0.5)
    raise ConfigError(f"machine 0 at {host}:{port} was not there within {float(limit_s):g} s: {problem}")


def _require_private(folder: str) -> None:
    """Raise ``ConfigError`` if other accounts may write into the folder: token and address could be theirs, and so the
    code that the cluster runs."""
    with suppress(FileNotFoundError):
        status = os.stat(folder)
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise ConfigError(
                f"VERL_CLUSTER_DIR={folder}: other accounts can write there ({stat.filemode(status.st_mode)}, owner "
                f"{status.st_uid}); chmod go-w it, or name a folder of your own"
            )


def _time_of(path: Path) -> float:
    """When it was written; 0 if it does not exist."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _head(host: str, port: str, folder: Path) -> tuple[str, str]:
    """The head's address and what is wrong with it: the name's, or where names do not resolve what it wrote itself."""
    head = ""
    with suppress(OSError):
        found = socket.gethostbyname(host)
        head = "" if found.startswith("127.") else f"{found}:{port}"
    if not head:
        try:
            head = (folder / "address").read_text()
        except OSError:
            return "", f"MASTER_ADDR={host} has no address here, and {folder}/address does not exist"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not reachable(head):
        return head, "nothing answers there"
    if path and not os.path.exists(path):
        fix = "is the folder shared? Otherwise set RAY_AUTH_TOKEN to the same value everywhere"
        return head, f"{path} does not exist; {fix}"
    return head, ""


def missing(head: str) -> str:
    """Empty if this machine is part of the cluster; otherwise the address that it would join with."""
    check_head(head)
    own = {*own_addresses(), "127.0.0.1"}
    nodes = GcsClient(address=head).get_all_node_info(timeout=10).values()
    alive = {node.node_manager_address for node in nodes if node.state == 0}
    return "" if alive & own else address(head.rpartition(":")[0])


def finish(head: str, code: str, others: str) -> None:
    """Publish the exit code, and wait until all other machines have read it; if the head is gone, they know."""
    if not reachable(head):
        return
    deadline = time.monotonic() + GOODBYE_S
    with suppress(RpcError):
        client = GcsClient(address=head)
        client.internal_kv_put(EXIT_CODE, code.encode(), True, NAMESPACE, timeout=10)
        while len(client.internal_kv_keys(b"left ", NAMESPACE, timeout=10)) < int(others):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)


def follow(head: str, rank: str, ray_process: str) -> int:
    """Wait for the exit code of the run, which becomes this machine's; :data:`REQUEUE` if the head is gone."""
    client, heard = None, time.monotonic()
    _outlast_signals(rank)
    while True:
        # Without an answer, a client would take a minute to be made.
        if reachable(head):
            with suppress(RpcError):
                client = client or GcsClient(address=head)
                found = client.internal_kv_get(EXIT_CODE, NAMESPACE, timeout=5)
                heard = time.monotonic()
                if found is not None:
                    client.internal_kv_put(b"left " + rank.encode(), b"", True, NAMESPACE, timeout=5)
                    return int(found)
        # Ray itself ends a machine that the head has given up.
        gone = not psutil.pid_exists(int(ray_process))
        if gone or time.monotonic() - heard > LOST_S:
            say(f"machine {rank} has lost the head at {head}; exit code {REQUEUE}: start the same command again")
            return REQUEUE
        time.sleep(0.5)


def _outlast_signals(rank: str) -> None:
    """Slurm tells every machine that the job will end; the driver then saves, for which it needs this one."""
    first = 0.0

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not first:
            first = time.monotonic()
            name = signal.Signals(number).name
            say(f"machine {rank}: {name}: waiting for the end of the run; send it again to leave at once")
        elif time.monotonic() - first > REPEATED_S:
            sys.exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, remember)


def stop(ray_process: str) -> None:
    """End ``ray start --block`` and all that it has started, which SIGTERM does not reach (scripts/cluster.sh)."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(ray_process))
        family = [process, *process.children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        deadline = time.monotonic() + STOP_S
        while any(map(_runs, family)) and time.monotonic() < deadline:
            time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    # Nobody may collect what has ended in a container.
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


COMMANDS = (address, lead, wait, missing, finish, follow, stop)


def main() -> None:
    """The command line."""
    try:
        result = {command.__name__: command for command in COMMANDS}[sys.argv[1]](*sys.argv[2:])
    except ConfigError as error:
        raise SystemExit(f"error: {socket.gethostname()}: {error}") from None
    if isinstance(result, int):
        sys.exit(result)
    if result is not None:
        print(result)


if __name__ == "__main__":
    main()
