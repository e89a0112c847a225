"""The interface to schedulers and shells: signals, the exit code for another start, and variables of workers."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler reclaims its machines; Slurm sends SIGUSR1 before its time limit with ``--signal``."""

REPEATED_S = 5.0
"""Within this time a signal counts once: Slurm sends it to every process, and scripts/cluster.sh forwards it."""

REQUEUE = os.EX_TEMPFAIL
"""Exit code (75) of processes whose run should be started again with the same command."""

PASSED = ("NCCL_*", "GLOO_*", "UCX_*", "HF_*", "TORCH_*", "CUDA_*", "PYTORCH_*", "VLLM_*", "OMP_*")
"""Patterns of the names of variables that always travel to the workers, on whatever machine they are."""

OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP")
"""Variables of one machine: on the others Ray and the run set them."""

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD|CRED|AUTH", re.IGNORECASE)
"""Names of values that must not be shown. Ray writes a worker's declared environment into its logs."""


def passed_variables(names: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that match ``PASSED`` or ``names``, which may hold ``*``."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in OF_ONE_MACHINE and any(fnmatchcase(name, pattern) for pattern in (*PASSED, *names))
    }


def is_secret(name: str) -> bool:
    """Return whether the variable's value must not be shown."""
    return SECRET.search(name) is not None


@contextmanager
def signals_blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals: processes that start within the block never receive them, this one receives them afterwards."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
