"""Signals sent by schedulers, the exit code that requests a requeue, and the workers' environment variables."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send to reclaim machines. Slurm's option ``--signal`` sends SIGUSR1 before the time limit."""

REPEATED_S = 5.0
"""Seconds during which a repeated signal is ignored, since Slurm and scripts/cluster.sh may both deliver it."""

REQUEUE = os.EX_TEMPFAIL
"""Exit code (75) of a process whose run should be restarted with the same command."""

PASSED = ("NCCL_*", "GLOO_*", "UCX_*", "HF_*", "TORCH_*", "CUDA_*", "PYTORCH_*", "VLLM_*", "OMP_*", "GOMP_*")
"""Name patterns of environment variables that are always passed to the workers on every machine."""

OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP")
"""Variables whose values apply to one machine only. On all other machines, they are set by Ray and the run."""

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CRED|AUTH", re.IGNORECASE)
"""Pattern for names of variables whose values must not be logged. Ray logs the variables declared for a worker."""


def passed_variables(names: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that match ``PASSED`` or ``names``, which may contain ``*``."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in OF_ONE_MACHINE and any(fnmatchcase(name, pattern) for pattern in (*PASSED, *names))
    }


def is_secret(name: str) -> bool:
    """Return whether the value of the variable ``name`` must not be logged."""
    return SECRET.search(name) is not None


@contextmanager
def signals_blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals in processes started inside the block. This process receives the signals after the block."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
