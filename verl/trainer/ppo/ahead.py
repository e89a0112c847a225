"""Sampling one step ahead: engines on separate devices sample while the trainer updates on the previous step.

The engines keep the same weights throughout a step, so results do not depend on timing.
The training loop waits for the background thread at the end of each step and shares no mutable state with it.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verl.batch.state import batch_from_state, batch_state
from verl.data.prompt_record import PromptRecord
from verl.single_controller.pooled_policy import PooledPolicyWorkers
from verl.trainer.logging.speed import PhaseTimer, StepRecord
from verl.trainer.ppo.rollout_scheduler import RolloutScheduler, SampledStep


@dataclass(eq=False)
class StepAhead:
    """Sampler that generates the next step's responses in the policy's pool during the current step."""

    scheduler: RolloutScheduler
    policy: PooledPolicyWorkers
    running: Future[tuple[SampledStep, StepRecord]] | None = None
    _next: SampledStep | None = None
    _step: int = 0

    def take(self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer) -> SampledStep:
        """Return the responses that were sampled ahead for ``step``, and start sampling for the next step."""
        scheduler = self.scheduler
        # Nothing was sampled ahead for the first step, so sample it now with the newest weights.
        sampled = self._next or self._sample(prompts, step, step - 1, timer).collect_verdicts(timer)
        self._next, self._step = None, step
        if step < scheduler.total_steps:
            timer.add_background(StepRecord({"engine_wait": scheduler.take_idle_s()}, {}, {}, {}))
            self.policy.hold_weights()
            self.running = self.policy.pool.background.submit(self._sample_in_background, prompts, step + 1)
        return sampled

    def finish(self, timer: PhaseTimer) -> None:
        """Wait for the next step's responses and verdicts, and re-raise any exception raised during sampling."""
        if self.running is None:
            return
        with timer.phase("trainer_wait"):
            sampled, record = self.running.result()
        self.running = None
        self.policy.release_weights()
        timer.add_background(record)
        self._next = sampled.collect_verdicts(timer)
        self.scheduler.method.begin_step(self._step)

    def _sample_in_background(self, prompts: Iterator[list[PromptRecord]], step: int) -> tuple[SampledStep, StepRecord]:
        timer = PhaseTimer(lambda name: None, self.policy.pool.take_peak_memory)
        if self.scheduler.method.overrides("choose_prompts"):
            self.scheduler.method.begin_step(step)
        # The update in progress produces version step - 1.
        sampled = self._sample(prompts, step, step - 2, timer)
        # A frozen judge needs the trainer's devices, which are updating the models.
        if not self.scheduler.config.reward_score.judge.is_frozen:
            sampled = sampled.collect_verdicts(timer)
        return sampled, timer.take_step()

    def _sample(self, prompts: Iterator[list[PromptRecord]], step: int, version: int, timer: PhaseTimer) -> SampledStep:
        """Sample the responses for ``step``, whose verification may still be running."""
        scheduler = self.scheduler
        sampled = scheduler.sample(prompts, step, timer, version)
        more = step < scheduler.total_steps
        outstanding = {"async/outstanding": float(scheduler.config.data.train_batch_size if more else 0)}
        return sampled._replace(metrics=outstanding | sampled.metrics)

    def state(self) -> dict[str, Any]:
        """Return the next step's responses as JSON values and tensors."""
        assert self.running is None, "checkpoints are written after finish()"
        if self._next is None:
            return {}
        batch, metrics, dropped_scores, *_ = self._next
        saved = batch_state(batch, self.scheduler.prompts)
        return {"next": {"batch": saved, "metrics": metrics, "dropped_scores": dropped_scores}}

    def load_state(self, state: dict[str, Any]) -> None:
        if "next" in state:
            batch = batch_from_state(state["next"]["batch"], self.scheduler.prompts)
            self._next = SampledStep(batch, state["next"]["metrics"], state["next"]["dropped_scores"])
