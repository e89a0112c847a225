"""Runs a job in a child process, and reports failures that the child cannot report itself.

Ray silently kills processes that have lost their node manager (the raylet), and the system kills processes that use too
much memory. The parent then prints an error and how to resume the run, and sets the exit code.
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
"""Signals that the parent forwards to the child."""

SI_KERNEL = 0x80
"""Linux code for signals sent by terminal keys, which the child also receives directly."""

PR_SET_PDEATHSIG = 1
"""Linux ``prctl`` option that sets the signal sent to a process when its parent ends."""


def run_in_child(run: Callable[[], None], trainer: RunConfig) -> None:
    """Call ``run`` in a child process, and exit with the child's code unless it is 0.

    Call this function before large imports, so that this process stays small. On systems other than Linux, ``run`` is
    called in this process instead.

    Raises:
        SystemExit: With the child's exit code, 75 if Ray killed the child, or 128 + N if signal N did.
    """
    if sys.platform != "linux":
        run()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})
    reader, writer = os.pipe()
    # A debugger in the child needs the terminal.
    alone = not sys.stdin.isatty()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(run, writer, alone, mask)
    os.close(writer)
    code = os.waitstatus_to_exitcode(_forward_signals_until_end(child, alone))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.set_blocking(reader, False)  # other processes that survive may hold the write end
    with suppress(BlockingIOError), open(reader, "rb") as pipe:
        if not pipe.read(1):
            code = _report(code, trainer)
    if code:
        sys.exit(code if code > 0 else 128 - code)  # a signal may also end a child that has reported its end


def _work(run: Callable[[], None], writer: int, alone: bool, mask: set[int]) -> NoReturn:
    """Call ``run`` in the child, which is killed if its parent ends, and write to ``writer`` when ``run`` ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has just been killed
    if alone:
        os.setpgid(0, 0)  # so that a signal to the group reaches the child only once, by forwarding
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # If this process is killed, a multiprocessing helper cleans up; its warning would follow the last line of output.
    quiet = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), quiet]))
    try:
        run()
    finally:
        os.write(writer, b".")
    sys.exit(0)


def _forward_signals_until_end(child: int, alone: bool) -> int:
    """Forward signals to the child until it ends, and return its exit status."""
    while True:
        info = signal.sigwaitinfo({signal.SIGCHLD, *FORWARDED})
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif alone or info.si_code != SI_KERNEL:
            os.kill(child, info.si_signo)


def _report(code: int, trainer: RunConfig) -> int:
    """Print an error for a child that ended without reporting one, and return the exit code."""
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
