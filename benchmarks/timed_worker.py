"""The training worker with a clock on the hidden-state plugin, for ``bench_shaping.py``."""

import time
from typing import Any

from plugin_clock import time_plugin

from verl.workers.hybrid import HybridWorker


class TimedWorker(HybridWorker):
    """Counts the seconds that the plugin's code takes on the host, and the CPU time of its process."""

    def __init__(self, *arguments: Any) -> None:
        self._plugin = time_plugin()
        self._cpu_at_reset = time.process_time()
        super().__init__(*arguments)

    def take_spent(self) -> dict[str, float]:
        """Seconds since the last call: ``capture`` and ``reduce`` of the plugin, ``cpu`` of the process."""
        now = time.process_time()
        spent = {**self._plugin, "cpu": now - self._cpu_at_reset}
        self._plugin.update(dict.fromkeys(self._plugin, 0.0))
        self._cpu_at_reset = now
        return spent
