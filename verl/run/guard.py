"""The process that a run's command is. It starts the one that works, and says how that ended if that could not.

Ray ends a process that has lost its node manager (the raylet) at once and without a word, and the system one that takes
too much memory. There should be a line, the command that resumes the run, and an exit code all the same.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from verl.checkpoint.requeue import resume_line
from verl.cluster.environment import REQUEUE
from verl.config.common import RunConfig

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""Signals to this process that are meant for the one that works."""

SI_KERNEL = 0x80
"""Linux: the signal is a key of the terminal, which sends it to the process that works as well."""

PR_SET_PDEATHSIG = 1
"""Linux ``prctl`` option: the signal that a process gets when its parent ends."""


def guarded(run: Callable[[], None], trainer: RunConfig) -> None:
    """Call ``run`` in a process of its own, and exit as that does; return if it ends well.

    To be called before anything large is imported, so that this process stays small. Elsewhere than on Linux, ``run``
    is called in this one.

    Raises:
        SystemExit: with the code of the process that works: 75 if Ray ended it, 128 + N if signal N did.
    """
    if sys.platform != "linux":
        run()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})
    heard, told = os.pipe()
    # A debugger in the process that works needs the terminal.
    alone = not sys.stdin.isatty()
    child = os.fork()
    if child == 0:
        os.close(heard)
        _work(run, told, alone, mask)
    os.close(told)
    code = os.waitstatus_to_exitcode(_forward_signals_until_end(child, alone))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.set_blocking(heard, False)  # processes that live on may hold its other end
    with suppress(BlockingIOError), open(heard, "rb") as pipe:
        if not pipe.read(1):
            code = _report(code, trainer)
    if code:
        sys.exit(code)


def _work(run: Callable[[], None], told: int, alone: bool, mask: set[int]) -> NoReturn:
    """Run the work in the forked process, which ends with its parent and reports its own end."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was killed just now
    if alone:
        os.setpgid(0, 0)  # so that a signal to the group is not one to both, of which the other is forwarded
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # If this process is killed, a helper of multiprocessing cleans up, and would say so after the last line.
    quiet = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), quiet]))
    try:
        run()
    finally:
        os.write(told, b".")
    sys.exit(0)


def _forward_signals_until_end(child: int, alone: bool) -> int:
    """Return the exit status of the process."""
    while True:
        info = signal.sigwaitinfo({signal.SIGCHLD, *FORWARDED})
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif alone or info.si_code != SI_KERNEL:
            os.kill(child, info.si_signo)


def _report(code: int, trainer: RunConfig) -> int:
    """Print what a process that could not has to say; the exit code."""
    if code < 0:
        memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        print(f"error: the run was ended by {signal.Signals(-code).name}{memory}", file=sys.stderr)
        code = 128 - code
    elif code != REQUEUE:
        lost = "Ray's processes on this machine (raylet, GCS) are gone, and Ray ended the run with them"
        print(f"error: {lost}; exit code {REQUEUE}: start it again", file=sys.stderr)
        code = REQUEUE
    print(resume_line(trainer), file=sys.stderr, flush=True)
    return code
