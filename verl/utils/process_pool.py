"""Pool of killable processes for code that may hang, crash or exhaust memory.

Verifiers, environments and tools run in such pools.
"""

import ctypes
import logging
import multiprocessing
import os
import pickle
import resource
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
from pebble import ProcessExpired, ProcessPool

from verl.utils.process import available_cores, restore_umask
from verl.utils.user_code import raised

logger = logging.getLogger(__name__)

STALL_S = 120.0
"""Number of seconds, beyond the time limit, to wait for progress before the pool restarts. Starting a process takes
less time than this, even on a loaded machine."""

FAILURES = {
    TimeoutError: "timeout",
    MemoryError: "memory",
    RecursionError: "crash",
    pickle.PicklingError: "crash",
    ProcessExpired: "crash",
}
"""Maps exceptions that end a task without a result to the verdict's reason."""

ENDED = (TimeoutError, ProcessExpired)
"""Exceptions that a future raises if its process was killed or died."""

MOST_PROCESSES = 32
"""Upper limit of the default number of processes. Each process needs about 200 MB."""

MAX_STARTS = 3
"""Maximum number of times that the processes are started for one batch of tasks."""

PR_SET_PDEATHSIG = 1
"""Linux ``prctl`` option for the signal that this process receives when its parent thread ends."""

PR_SET_NAME = 15
"""Linux ``prctl`` option that sets the name of this process."""

NAME_BYTES = 15
"""Maximum length of a Linux process name."""

MARK_VARIABLE = "VERL_POOL_PROCESS"
"""Environment variable that marks the processes of a pool and their children."""

SCANS = 20
"""Maximum number of scans for orphaned processes. Orphans may start new processes between two scans."""


def spare_cores(busy: int) -> int:
    """Return the number of pool processes to start if other processes occupy ``busy`` cores."""
    return min(MOST_PROCESSES, max(1, available_cores() - busy))


def failure_reason(error: BaseException) -> str | None:
    """Return the reason for a failure that the task itself caused, or None for any other exception."""
    return next((reason for kind, reason in FAILURES.items() if isinstance(error, kind)), None)


class KillablePool:
    """A pool of processes, with a thread that starts them and runs batches of tasks one after another.

    Pool processes are spawned instead of forked, because the main process has threads and uses accelerators. Pool
    processes end with the main process, even if it is killed.
    """

    def __init__(
        self,
        what: str,
        options: str,
        num_processes: int,
        timeout_s: float,
        memory_limit_mb: int,
        prepare: Callable[..., None],
        *arguments: Any,
        users_code: bool,
    ) -> None:
        """Set up the pool. The processes are started for the first batch.

        Args:
            what: Name of the processes, for messages.
            options: Name of the config group with ``num_workers`` and ``memory_limit_mb``, for messages.
            timeout_s: Time limit per task in seconds.
            memory_limit_mb: Memory that a process may allocate after ``prepare``.
            prepare: Function that every process calls with ``arguments`` when it starts.
            users_code: Whether tasks may start processes, which are killed if the task's process dies.
        """
        self.num_processes, self._timeout_s = num_processes, timeout_s
        self._what, self._options, self._users_code = what, options, users_code
        self._mark = f"verl-{secrets.token_hex(8)}"
        self._arguments = (memory_limit_mb, self._mark, prepare, arguments)
        self._max_bytes = memory_limit_mb * 2**20 // 4  # received, unpickled, and as objects
        self._closed = False
        self._processes: ProcessPool | None = None
        self._started = set[int]()
        """Ids of the pool processes started so far."""
        self._dispatcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix=what.replace(" ", "-"))

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call ``work``, which may call :meth:`run`, in the pool's thread."""
        self.check_open()
        return self._dispatcher.submit(work, *arguments)

    def close(self) -> None:
        """Stop the processes, even during a batch. Repeated calls are allowed."""
        if not self._closed:
            self._closed = True
            # The dispatching thread must stop the processes, because they end with the thread that started them.
            self._dispatcher.submit(self._stop_processes)
            self._dispatcher.shutdown(wait=True)

    def run(
        self,
        function: Callable[[Any], Any],
        arguments: Sequence[Any],
        on_lost: Callable[[int, BaseException], None] | None = None,
    ) -> list[Any]:
        """Call a function in the pool once per argument, and return the results or the exceptions that it raised.

        If an argument, result or exception cannot be sent between processes, only the corresponding task fails.

        Args:
            on_lost: Called with a task's index and exception, in another thread, when its process was killed or died.
        """
        outcomes: list[Any] = [None] * len(arguments)
        unfinished = list(range(len(arguments)))
        for _ in range(MAX_STARTS):
            if not unfinished:
                return outcomes
            self.check_open()
            processes = self._running_processes()
            futures = {}
            for index in unfinished:
                # Pebble's threads end if they cannot pickle or unpickle a message, so they are given bytes only.
                packed = _attempt(pickle.dumps, arguments[index])
                if isinstance(packed, BaseException):
                    outcomes[index] = packed
                elif len(packed) > self._max_bytes:
                    outcomes[index] = MemoryError("the message to the process is larger than its memory")
                else:
                    future = processes.schedule(_call, args=(function, packed), timeout=self._timeout_s)
                    futures[future] = index
                    if on_lost is not None:
                        future.add_done_callback(partial(_tell_loss, on_lost, index))
            self._wait(list(futures))
            unfinished = []
            for future, index in futures.items():
                if not future.done() or isinstance(future.exception(), BrokenProcessPool):
                    unfinished.append(index)
                else:
                    outcomes[index] = future.exception() or _received(future.result())
            if unfinished:
                logger.warning("%ses lost %d tasks; restarting the processes", self._what, len(unfinished))
                self._stop_processes()
        if unfinished:
            raise RuntimeError(
                f"{self._options}.num_workers={self.num_processes}: {self._what}es stopped {MAX_STARTS} times "
                f"without a result; see their errors above, or raise {self._options}.memory_limit_mb"
            )
        return outcomes

    def _wait(self, futures: list[Future[Any]]) -> None:
        """Wait until all futures are done or there has been no progress for too long.

        If a process dies while holding the pool's lock, it blocks all other processes, and progress stops.
        """
        progress, num_done, lost = time.monotonic(), 0, 0
        while True:
            self._started |= _pool_processes()
            done, pending = wait(futures, timeout=0.5)
            ended = sum(not future.cancelled() and isinstance(future.exception(), ENDED) for future in done)
            if ended > lost:
                lost = ended
                self._kill_orphans()
            if not pending:
                return
            self.check_open()
            if len(done) > num_done:
                progress, num_done = time.monotonic(), len(done)
            if time.monotonic() - progress > self._timeout_s + STALL_S:
                return

    def _kill_orphans(self) -> None:
        """Kill marked processes that have no living pool process as an ancestor. Built-in code starts no processes."""
        for _ in range(SCANS if self._users_code and sys.platform == "linux" else 0):
            alive = _pool_processes()
            orphans = [p for p in psutil.process_iter() if _is_orphan(p, self._mark, self._started - alive, alive)]
            for process in orphans:
                with suppress(psutil.Error):
                    process.kill()
            if not orphans:
                break
        # The id of a session without processes may be reused, possibly for a session of the user.
        self._started &= _pool_processes()

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the pool of {self._what}es is closed; collect results inside its with block")

    def _running_processes(self) -> ProcessPool:
        if self._processes is not None and not self._processes.active:
            self._stop_processes()
        if self._processes is None:
            # A fork server lives as long as its children, so a hanging child would keep both running forever.
            self._processes = ProcessPool(
                max_workers=self.num_processes,
                initializer=_prepare_process,
                initargs=self._arguments,
                context=multiprocessing.get_context("spawn"),
            )
        return self._processes

    def _stop_processes(self) -> None:
        if self._processes is not None:
            self._processes.stop()  # type: ignore[no-untyped-call]  # pebble leaves it untyped
            self._processes.join()
            self._processes = None
            self._kill_orphans()


def _prepare_process(memory_limit_mb: int, mark: str, prepare: Callable[..., None], arguments: Sequence[Any]) -> None:
    """Initialize a pool process: set limits and signal handlers, and call ``prepare``."""
    restore_umask()
    os.environ[MARK_VARIABLE] = mark
    if sys.platform == "linux":
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_NAME, mark[:NAME_BYTES].encode())
    # No Python signal handler runs during a long C call, such as an integer power; the default action ends the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare(*arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # Without this, nothing would end a hanging process whose parent was killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            os._exit(1)
        limit = psutil.Process().memory_info().vms + memory_limit_mb * 2**20
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _tell_loss(on_lost: Callable[[int, BaseException], None], index: int, future: Future[Any]) -> None:
    error = None if future.cancelled() else future.exception()
    if isinstance(error, ENDED):
        on_lost(index, error)


def _attempt(convert: Callable[[Any], Any], value: Any) -> Any:
    """Pickle or unpickle ``value`` with ``convert``. Return the result, or an exception if this fails."""
    try:
        return convert(value)
    except (MemoryError, RecursionError) as error:
        return error
    except Exception as error:  # classes define how their objects are pickled
        return pickle.PicklingError(f"cannot be sent between processes: pickle {raised(error)}")


def _call(function: Callable[[Any], Any], packed: bytes) -> tuple[bytes, str]:
    """Call ``function`` with a pickled argument. Return the pickled result or exception, and the exception's text."""
    what = ""
    try:
        outcome = function(pickle.loads(packed))
    except BaseException as error:  # tasks may raise anything, including KeyboardInterrupt
        outcome, what = error, raised(error)
        error.add_note(traceback.format_exc())
    sent = _attempt(pickle.dumps, outcome)
    return (sent if isinstance(sent, bytes) else pickle.dumps(sent)), what


def _received(reply: tuple[bytes, str]) -> Any:
    """Unpickle the result or exception in a reply from :func:`_call`."""
    packed, what = reply
    outcome = _attempt(pickle.loads, packed)
    # An exception class may be unknown here, or be unable to read its pickled objects.
    return RuntimeError(what) if what and isinstance(outcome, pickle.PicklingError) else outcome


# --- Orphans: processes that a task has started and that outlive the task's pool process
#
# A pool process marks itself, and its children inherit the mark: the name through fork, the environment through exec,
# and the session through both. The mark identifies them even in new sessions and after the pool process was killed.


def _pool_processes() -> set[int]:
    """Return the process ids of the living processes of all pools."""
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def _is_orphan(process: psutil.Process, mark: str, ended: Collection[int], alive: Collection[int]) -> bool:
    # An error means that the process belongs to another user or has already ended, so it is not an orphan.
    with suppress(psutil.Error, OSError):
        if process.uids().real != os.getuid() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        marked = process.name() == mark[:NAME_BYTES] or os.getsid(process.pid) in ended
        if marked or process.environ().get(MARK_VARIABLE) == mark:
            family = {process.pid, *(parent.pid for parent in process.parents())}
            return process.pid != os.getpid() and not family & set(alive)
    return False
