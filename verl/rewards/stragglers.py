"""Processes that a user's function started and that outlive the verifier process it ran in.

A verifier process gives itself a mark, and what it starts inherits it: the name of a process by fork, the environment
by exec, and its session by either. So what is left when it is killed can be found, in whatever session it put itself.
"""

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Collection
from contextlib import suppress

import psutil

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
        ended = set(sessions) - verifiers
        stragglers = [p for p in psutil.process_iter() if _is_straggler(p, mark, ended, verifiers)]
        for process in stragglers:
            with suppress(psutil.Error):
                process.kill()
                killed += 1
        if not stragglers:
            break
    return killed


def _is_straggler(process: psutil.Process, mark: str, ended: Collection[int], verifiers: Collection[int]) -> bool:
    # Another user's process, or one that ended meanwhile, raises an error: it is none.
    with suppress(psutil.Error, OSError):
        if process.uids().real != os.getuid() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        marked = process.name() == mark[:NAME_BYTES] or os.getsid(process.pid) in ended
        if marked or process.environ().get(VARIABLE) == mark:
            family = {process.pid, *(parent.pid for parent in process.parents())}
            return process.pid != os.getpid() and not family & set(verifiers)
    return False
