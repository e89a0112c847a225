"""The signals by which a scheduler asks for its machines back."""

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is what Slurm sends before its time limit with ``--signal``."""

REPEATED_S = 5.0
"""Within this time a signal counts once: Slurm sends it to every process, and scripts/cluster.sh hands it on."""
