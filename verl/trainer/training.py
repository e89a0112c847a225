"""Base class of the training loops, with checkpointing and tracking of skipped updates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.checkpoint.resume import Resumption, best_validation, saved_validations
from verl.checkpoint.saver import CheckpointSaver
from verl.config.common import OptimConfig
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.run.session import TrainingRun
from verl.run.tracking import Tracker
from verl.single_controller.profiling import MemoryPeak
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.logging.speed import PhaseTimer, StepProfiler
from verl.utils.json_state import from_json, to_json

BatchT = TypeVar("BatchT")


class Trainer:
    """Base class of trainers. Subclasses define the training step and its metrics."""

    best_by: str
    """Validation metric whose highest value marks the best checkpoint."""

    def __init__(
        self,
        config: PPOConfig | SFTConfig,
        loader: StatefulDataLoader,
        workers: WorkerGroup,
        tracker: Tracker,
        run: TrainingRun,
        except_save: Sequence[int] = (),
    ) -> None:
        """Create a trainer that never deletes the checkpoints of the steps in ``except_save``."""
        trainer = config.trainer
        self.loader = loader
        self.workers = workers
        self.tracker = tracker
        self.display = run.display
        self.digests = run.digests
        self.preemption = run.preemption
        self.timer = PhaseTimer(run.display.phase, self._take_peak)
        self.profiler = StepProfiler(workers, trainer.profile_steps, run.folder, run.display.say)
        self.total_steps = trainer.num_steps(len(loader))
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.validations: dict[int, dict[str, float]] = {}
        newest, background = trainer.max_ckpt_to_keep, trainer.saves_in_background(workers.device_type)
        self.saver = CheckpointSaver(run.attempt, workers, background, trainer.save_hf_model, newest, except_save)

    def fit(self) -> None:
        """Train the remaining steps and finish writing the last checkpoint."""
        with self.preemption.finishing_steps():
            self._train()
        with self.timer.phase("save_checkpoint"):
            self.saver.finish()

    def _train(self) -> None:
        """Train the remaining steps."""
        raise NotImplementedError

    def restore(self, resumption: Resumption) -> None:
        """Restore workers and trainer from a checkpoint."""
        state = resumption.state
        self.workers.run("load", resumption.folder, resumption.step)
        self.step = resumption.step
        self.loader.load_state_dict(from_json(state["loader"]))
        self.validations = saved_validations(state)
        self.timer.totals.update(state["seconds_by_phase"])

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "num_examples": len(self.loader.dataset),
            "digests": dict(self.digests),
            # Dynamic sampling reads a variable number of batches, so the step does not determine this state.
            "loader": to_json(self.loader.state_dict()),
            "best": best_validation(self.validations, self.best_by),
            "validations": self.validations,
            "seconds_by_phase": self.timer.totals,
        }

    def _take_peak(self) -> MemoryPeak | None:
        """Return the workers' peak memory (:meth:`WorkerGroup.take_peak_memory`)."""
        return self.workers.take_peak_memory()

    def _due(self, frequency: int) -> bool:
        return is_due(self.step, self.total_steps, frequency)

    def _save(self) -> None:
        scores = {step: metrics[self.best_by] for step, metrics in self.validations.items()}
        with self.timer.phase("save_checkpoint"):
            self.saver.save(self.step, self._state(), scores)

    def _save_now(self) -> None:
        """Ensure that a complete checkpoint of this step is on disk."""
        self.saver.finish()
        if self.saver.saved_step != self.step:
            self._save()
            self.saver.finish()


def endless(loader: Iterable[BatchT]) -> Iterator[BatchT]:
    """Yield the batches of ``loader``, epoch after epoch."""
    while True:
        yield from loader


def is_due(step: int, last_step: int, frequency: int) -> bool:
    """Return whether validation or a checkpoint is due after ``step``.

    Every ``frequency``-th step and the last step are due. With 0, only the last step is due, and with -1, none is.
    """
    return frequency >= 0 and (step == last_step or (frequency > 0 and step % frequency == 0))


@dataclass
class SkippedUpdates:
    """Counter of a model's optimizer steps that were skipped because the gradient was not finite."""

    prefix: str
    """Prefix of the model's metrics, such as ``actor``."""
    field: str
    """Path of ``config`` within the run's config, such as ``actor.optim``."""
    config: OptimConfig
    in_a_row: int = 0

    @property
    def name(self) -> str:
        """Name of the metric that counts skipped updates."""
        return f"{self.prefix}/skipped_updates"

    def summarise(self, updates: Sequence[Mapping[str, float]], step: int) -> dict[str, float]:
        """Return the mean metrics of the applied ``updates`` and the number of skipped updates.

        Raises ``ConfigError`` if more than ``max_skipped_updates`` consecutive updates were skipped.
        """
        for update in updates:
            self.in_a_row = self.in_a_row + 1 if update[self.name] else 0
            limit = self.config.max_skipped_updates
            if self.in_a_row > limit:
                raise ConfigError(
                    f"{self.field}.max_skipped_updates={limit}: the gradients of {self.in_a_row} optimizer steps in a "
                    f"row were not finite, the last in step {step}; lower {self.field}.lr={self.config.lr:g}, or look "
                    "at the data and the precision of the model (param_dtype)"
                )
        applied = [update for update in updates if not update[self.name]]
        means = {name: sum(u[name] for u in applied) / len(applied) for name in applied[0]} if applied else {}
        return means | ({self.name: float(len(updates) - len(applied))} if updates else {})
