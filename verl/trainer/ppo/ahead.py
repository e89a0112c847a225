"""Sampling one step ahead: engines with devices of their own sample a step's responses while the models learn from
those of the step before, under the newest weights that there were when that began.

The thread that has them sample runs between the start of a step and its end, where the loop waits for it. Nothing that
it reads or writes is used by the loop meanwhile, and the weights it samples with are held, so that nothing depends on
which of the two is faster.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.batch import Batch
from verl.batch.state import batch_from_state, batch_state
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.rollout.requests import ResponseSettings
from verl.single_controller.engine_pool import EnginePool
from verl.trainer.logging.speed import PhaseTimer, StepRecord
from verl.trainer.ppo.sampling import Sampler


class SampledStep(NamedTuple):
    """What a step begins with."""

    batch: Batch
    metrics: dict[str, float]
    dropped_scores: Tensor


class AheadSampler(Sampler):
    """Has another sampler sample the step after the one in progress; validation samples by itself."""

    def __init__(self, steps: Sampler, pool: EnginePool, *arguments: Any) -> None:
        """
        Args:
            steps: samples the steps.
            pool: its engines.
            arguments: of :class:`Sampler`.
        """
        super().__init__(*arguments)
        self.steps, self.pool = steps, pool
        self._running: Future[tuple[SampledStep, StepRecord]] | None = None
        self._next: SampledStep | None = None
        self._step = 0
        self._idle_since: float | None = None
        """When the engines had last done their work."""
        self._idle_s = 0.0

    def sample_step(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer
    ) -> tuple[Batch, dict[str, float]]:
        """What was sampled ahead; the next step's responses are sampled from now on."""
        sampled = self._next or self._sample_step(prompts, step, timer)
        self._next, self._step, self.dropped_scores = None, step, sampled.dropped_scores
        if step < self.total_steps:
            self._begin_engines()
            timer.add_beside(StepRecord({"engine_wait": self._idle_s}, {}, {}, {}))
            self._idle_s = 0.0
            self.policy.hold_weights()
            self._running = self.pool.background.submit(self._sample_beside, prompts, step + 1)
        return sampled.batch, sampled.metrics

    def finish_ahead(self, timer: PhaseTimer) -> None:
        """Wait for the next step's responses. Raises what sampling them raised."""
        if self._running is None:
            return
        with timer.phase("trainer_wait"):
            self._next, record = self._running.result()
        self._running = None
        self.policy.release_weights()
        timer.add_beside(record)
        self.method.begin_step(self._step)

    def sample(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        step: int,
        settings: ResponseSettings | None = None,
    ) -> Batch:
        """See :meth:`Sampler.sample`; between two steps."""
        self._begin_engines()
        try:
            return super().sample(records, sampling, step, settings)
        finally:
            self._idle_since = time.perf_counter()

    def _sample_beside(self, prompts: Iterator[list[PromptRecord]], step: int) -> tuple[SampledStep, StepRecord]:
        """In the background: the responses of ``step``, and what that took."""
        self.steps.behind = 1
        timer = PhaseTimer(lambda name: None, self.pool.take_peak_memory)
        if self.method.overrides("choose_prompts"):
            self.method.begin_step(step)
        sampled = self._sample_step(prompts, step, timer)
        return sampled, timer.take_step()

    def _sample_step(self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer) -> SampledStep:
        """The responses of ``step`` with their verdicts, and with the version of each token."""
        batch, metrics = self.steps.sample_step(prompts, step, timer)
        self._idle_since = time.perf_counter()
        with timer.phase("reward"):
            self.steps.collect_verdicts()
        if "version" not in batch:
            version, num_tokens = step - 1 - self.steps.behind, int(batch.response_lengths.sum())
            batch.fill(version=torch.full((num_tokens,), version, dtype=torch.int32))
            metrics["async/outstanding"] = float(self.config.data.train_batch_size if step < self.total_steps else 0)
        return SampledStep(batch, metrics, self.steps.dropped_scores)

    def _begin_engines(self) -> None:
        """Count how long the engines have had nothing to do."""
        if self._idle_since is not None:
            self._idle_s += time.perf_counter() - self._idle_since
            self._idle_since = None

    def state(self) -> dict[str, Any]:
        """Between two steps: what the next one begins with, as JSON and tensors."""
        assert self._running is None, "a checkpoint waits for what is sampled ahead"
        state = {"steps": self.steps.state()}
        if self._next is not None:
            state["next"] = self._next._asdict() | {"batch": batch_state(self._next.batch, self.prompts)}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.steps.load_state(state["steps"])
        if "next" in state:
            batch = batch_from_state(state["next"]["batch"], self.prompts)
            self._next = SampledStep(batch, state["next"]["metrics"], state["next"]["dropped_scores"])
