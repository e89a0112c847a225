"""The worker of training with a clock on the hidden-state plugin, for ``bench_shaping.py``."""

import functools
import time
from typing import Any

from verl.workers.hybrid import HybridWorker
from vllm_patches import capture, frontend, worker


class TimedWorker(HybridWorker):
    """Counts the seconds that the plugin's code takes on the host, and the CPU time of its process."""

    def __init__(self, *arguments: Any) -> None:
        self._spent = {"capture": 0.0, "reduce": 0.0}
        self._computed = time.process_time()
        self._time(worker, "read_step", "capture")
        self._time(capture.HiddenStateCapture, "record", "capture")
        self._time(frontend.StateCollector, "_collect", "reduce")
        super().__init__(*arguments)

    def take_spent(self) -> dict[str, float]:
        """Seconds since the last call: ``capture`` and ``reduce`` of the plugin, ``cpu`` of the process."""
        computed = time.process_time()
        spent = {**self._spent, "cpu": computed - self._computed}
        self._spent, self._computed = dict.fromkeys(self._spent, 0.0), computed
        return spent

    def _time(self, owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def measure(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._spent[key] += time.perf_counter() - start

        setattr(owner, name, measure)
