"""A stopwatch around the hidden-state plugin's own code, for the benchmarks."""

import functools
import time
from typing import Any

from vllm_patches import capture, frontend, worker


def time_plugin() -> dict[str, float]:
    """Seconds on the host that the plugin spends from now on; the dictionary is updated after each call.

    ``capture`` keeps the hidden states of a step, ``reduce`` hands out those of a finished response.
    """
    seconds = {"capture": 0.0, "reduce": 0.0}

    def measure(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[key] += time.perf_counter() - start

        setattr(owner, name, timed)

    measure(worker, "read_step", "capture")
    measure(capture.HiddenStateCapture, "record", "capture")
    measure(frontend.StateCollector, "_collect", "reduce")
    return seconds
