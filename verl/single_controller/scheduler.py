"""Signals and the exit code by which a scheduler and a run communicate."""

import os
import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a scheduler reclaims its machines; Slurm sends SIGUSR1 before its time limit with ``--signal``."""

REPEATED_S = 5.0
"""Within this time a signal counts once: Slurm sends it to every process, and scripts/cluster.sh forwards it."""

REQUEUE = os.EX_TEMPFAIL
"""Exit code (75) of processes whose run should be started again with the same command."""
