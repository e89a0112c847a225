"""When a vLLM engine holds memory: its weights and KV cache go while the models learn (vLLM's sleep mode)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm import LLM

WEIGHTS, KV_CACHE = ["weights"], ["kv_cache"]
"""vLLM's tags of the two kinds of memory."""


class EngineSleep:
    """Whether an engine is awake, with weights and KV cache, or asleep, with neither.

    Asleep it has forgotten its weights (level 2): it wakes by being given new ones. While they stream in, the KV cache
    is not there yet, which leaves its room to what gathers them.
    """

    def __init__(self, engine: LLM, enabled: bool) -> None:
        """``enabled``: whether the engine was made with ``enable_sleep_mode``; without, it is always awake."""
        self.engine = engine
        self.enabled = enabled
        self.asleep = False

    def sleep(self) -> None:
        """Let go of the memory; no request may be running. Nothing happens if that was done before."""
        if self.enabled and not self.asleep:
            self.engine.sleep(level=2)
            self.asleep = True

    @contextmanager
    def new_weights(self) -> Iterator[None]:
        """For the block that loads weights: it finds memory for them, and after it the engine is awake."""
        if self.asleep:
            self._take(WEIGHTS)
        yield
        if self.asleep:
            self._take(KV_CACHE)
            self.asleep = False

    def _take(self, tags: list[str]) -> None:
        # vLLM maps memory of the device itself: what torch keeps for later is in its way.
        torch.cuda.empty_cache()
        self.engine.wake_up(tags=tags)
