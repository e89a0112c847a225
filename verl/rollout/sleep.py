"""vLLM's sleep mode: the engine frees its weights and KV cache while the models learn."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm import LLM

WEIGHTS, KV_CACHE = ["weights"], ["kv_cache"]
"""vLLM's tags of the two kinds of memory."""


class EngineSleep:
    """Puts an engine to sleep and wakes it.

    A sleeping engine holds neither weights nor KV cache (level 2); new weights wake it. The KV cache is allocated after
    they have arrived, which leaves its memory to the collectives that gather them.
    """

    def __init__(self, engine: LLM, enabled: bool) -> None:
        """Note whether the engine was created with ``enable_sleep_mode``; if not, it is always awake."""
        self.engine = engine
        self.enabled = enabled
        self.asleep = False

    def sleep(self) -> None:
        """Free the memory; no request may be running. Does nothing if the engine already sleeps."""
        if self.enabled and not self.asleep:
            self.engine.sleep(level=2)
            self.asleep = True

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """Load weights within this block: memory for them is allocated, and afterwards the engine is awake."""
        if self.asleep:
            self._take(WEIGHTS)
        yield
        if self.asleep:
            self._take(KV_CACHE)
            self.asleep = False

    def _take(self, tags: list[str]) -> None:
        # vLLM maps device memory itself, and cannot use what torch's allocator holds back.
        torch.cuda.empty_cache()
        self.engine.wake_up(tags=tags)
