"""Processes that a user's function started and that outlive the verifier process it ran in.

A verifier process gives itself a mark, and what it starts inherits it: the name of a process by fork, the environment
by exec, and its session by either. So what is left when it is killed can be found, in whatever session it put itself.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

VARIABLE = "VERL_VERIFIER"
PR_SET_NAME = 15
NAME_BYTES = 15
"""Longest name of a Linux process."""
ROUNDS = 20
"""Scans of all processes, of which each may find what the ones before started."""


def mark_process(mark: str) -> None:
    """Mark this process and all that it will start."""
    os.environ[VARIABLE] = mark
    if sys.platform == "linux":
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_NAME, mark[:NAME_BYTES].encode())


def kill_stragglers(mark: str, sessions: Collection[int]) -> int:
    """Kill every marked process below no living verifier process; how many there were.

    Args:
        sessions: ids of the verifier processes that there were.
    """
    killed = 0
    for _ in range(ROUNDS if sys.platform == "linux" else 0):
        verifiers = {process.pid for process in multiprocessing.active_children() if process.pid}
        parents = _parents()
        found = [
            pid
            for pid in parents
            if not _is_below(pid, verifiers, parents) and _is_marked(pid, mark, set(sessions) - verifiers)
        ]
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                continue
    return killed


def _parents() -> dict[int, int]:
    """Process -> its parent, of this user's processes that are no zombies."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            # After the name, which may hold anything: state and parent.
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it has ended
        if state not in (b"Z", b"X"):
            found[int(folder.name)] = int(parent)
    return found


def _is_below(pid: int, verifiers: Collection[int], parents: dict[int, int]) -> bool:
    """Whether the process is this one, a verifier process or has one among its ancestors."""
    if pid == os.getpid():
        return True
    seen = set[int]()
    while pid in parents and pid not in seen:
        if pid in verifiers:
            return True
        seen.add(pid)
        pid = parents[pid]
    return False


def _is_marked(pid: int, mark: str, sessions: Collection[int]) -> bool:
    folder = Path("/proc", str(pid))
    try:
        if (folder / "comm").read_bytes().strip() == mark[:NAME_BYTES].encode() or os.getsid(pid) in sessions:
            return True
        return f"{VARIABLE}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or belongs to another user by now
