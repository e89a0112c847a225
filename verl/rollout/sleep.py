"""vLLM's sleep mode, in which the engine frees its weights and KV cache while the models are trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm import LLM

WEIGHTS, KV_CACHE = ["weights"], ["kv_cache"]
"""vLLM's tags for the two kinds of memory that sleep mode frees."""


@dataclass(eq=False)
class EngineSleep:
    """Sleep state of an engine.

    A sleeping engine keeps neither weights nor KV cache in memory (level 2). Loading new weights wakes it. The KV cache
    is allocated after the weights arrive, so its memory is available to the collectives that gather them.
    """

    engine: LLM
    enabled: bool
    """Whether the engine was created with ``enable_sleep_mode``. Otherwise, it is always awake."""
    asleep: bool = False

    def sleep(self) -> None:
        """Free the memory, assuming that no request is running. Does nothing if the engine is already asleep."""
        if self.enabled and not self.asleep:
            if torch.cuda.is_initialized():
                # With asynchronous scheduling, a step of finished requests may still be running on the GPU. Older
                # versions of vLLM unmap its memory without waiting for it.
                torch.cuda.synchronize()
            self.engine.sleep(level=2)
            self.asleep = True

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """Allocate memory for new weights, which must be loaded within this block, and then wake the engine."""
        if self.asleep:
            self._take(WEIGHTS)
        yield
        if self.asleep:
            self._take(KV_CACHE)
            self.asleep = False

    def _take(self, tags: list[str]) -> None:
        # vLLM maps device memory itself and cannot use memory that torch's allocator has cached.
        torch.cuda.empty_cache()
        self.engine.wake_up(tags=tags)
