"""Sampling one step ahead: engines with devices of their own sample while the models learn from the previous step.

They use the newest weights at the time they begin, held until they end, so nothing depends on which of the two is
faster. The background thread runs between the start of a step and its end, where the loop waits for it; the loop uses
nothing that the thread reads or writes meanwhile.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from verl.batch.state import batch_from_state, batch_state
from verl.data.prompt_rows import PromptRecord
from verl.single_controller.engine_pool import EnginePool
from verl.trainer.logging.speed import PhaseTimer, StepRecord
from verl.trainer.ppo.rollout_scheduler import RolloutScheduler, SampledStep


class StepAhead:
    """The step that ``pool`` samples beside the one in progress."""

    def __init__(self, scheduler: RolloutScheduler, pool: EnginePool) -> None:
        self.scheduler, self.pool = scheduler, pool
        self.running: Future[tuple[SampledStep, StepRecord]] | None = None
        self._next: SampledStep | None = None
        self._step = 0

    def take(self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer) -> SampledStep:
        """Return what was sampled ahead, and begin to sample the next step."""
        scheduler = self.scheduler
        # Nothing was sampled ahead of the first step, which has the newest weights.
        sampled = self._next or self._sample(prompts, step, step - 1, timer)
        self._next, self._step = None, step
        if step < scheduler.total_steps:
            timer.add_beside(StepRecord({"engine_wait": scheduler.take_idle_s()}, {}, {}, {}))
            scheduler.policy.hold_weights()
            self.running = self.pool.background.submit(self._sample_beside, prompts, step + 1)
        return sampled

    def finish(self, timer: PhaseTimer) -> None:
        """Wait for the next step's responses. Raises what sampling them raised."""
        if self.running is None:
            return
        with timer.phase("trainer_wait"):
            self._next, record = self.running.result()
        self.running = None
        self.scheduler.policy.release_weights()
        timer.add_beside(record)
        self.scheduler.method.begin_step(self._step)

    def _sample_beside(self, prompts: Iterator[list[PromptRecord]], step: int) -> tuple[SampledStep, StepRecord]:
        """Sample ``step``, in the background; return its record of time too."""
        timer = PhaseTimer(lambda name: None, self.pool.take_peak_memory)
        if self.scheduler.method.overrides("choose_prompts"):
            self.scheduler.method.begin_step(step)
        # The update in progress makes the weights of version step - 1.
        return self._sample(prompts, step, step - 2, timer), timer.take_step()

    def _sample(self, prompts: Iterator[list[PromptRecord]], step: int, version: int, timer: PhaseTimer) -> SampledStep:
        """Sample ``step`` and wait for its verdicts."""
        scheduler = self.scheduler
        sampled = scheduler.sample(prompts, step, timer, version)
        with timer.phase("reward"):
            sampled.collect_verdicts()
        more = step < scheduler.total_steps
        outstanding = {"async/outstanding": float(scheduler.config.data.train_batch_size if more else 0)}
        return sampled._replace(metrics=outstanding | sampled.metrics, verifications=())

    def state(self) -> dict[str, Any]:
        """Return the responses of the next step, as JSON and tensors."""
        assert self.running is None, "a checkpoint waits for what is sampled ahead"
        if self._next is None:
            return {}
        batch, metrics, dropped_scores, *_ = self._next
        saved = batch_state(batch, self.scheduler.prompts)
        return {"next": {"batch": saved, "metrics": metrics, "dropped_scores": dropped_scores}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        if "next" in state:
            batch = batch_from_state(state["next"]["batch"], self.scheduler.prompts)
            self._next = SampledStep(batch, state["next"]["metrics"], state["next"]["dropped_scores"])
