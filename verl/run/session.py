"""The skeleton of a run: what training and evaluation set up alike, and end in the reverse order."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import ray

from verl.checkpoint.folders import latest_checkpoint, remove_unfinished
from verl.checkpoint.resume import Resumption, check_resumable, find_resumption, resume_hint
from verl.checkpoint.run_lock import run_lock
from verl.config.common import ModelConfig
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.run.display import Columns, RunDisplay, share_rows
from verl.run.tracking import Tracker, drop_records, set_aside_records, write_summary
from verl.single_controller import WorkerGroup
from verl.single_controller.cluster import ray_cluster


class RaySession(ExitStack):
    """A context manager for worker groups of one size, on a Ray cluster that starts with the first of them."""

    def __init__(self, nnodes: int, workers_per_node: int, device_type: str) -> None:
        super().__init__()
        self.nnodes = nnodes
        self.workers_per_node = workers_per_node
        self.world_size = nnodes * workers_per_node
        self.device_type = device_type

    def start_workers(
        self, worker: str, config: Any, arguments: tuple[Any, ...], environment: dict[str, str]
    ) -> WorkerGroup:
        """Start a group, to be closed by the caller; raises ``WorkerError`` if a worker fails to start."""
        if not ray.is_initialized():
            self.enter_context(ray_cluster(self.world_size, self.device_type))
        place = (self.nnodes, self.workers_per_node, self.device_type)
        return WorkerGroup(worker, config, arguments, *place, environment)


class TrainingRun(RaySession):
    """A context manager for one run of training, which holds the lock of its folder.

    At the end, the workers and Ray are stopped before unfinished checkpoints are removed. If the run fails or is
    interrupted, a line on stderr says how to resume it.
    """

    def __init__(self, config: PPOConfig | SFTConfig, steps: int, columns: Columns, device_type: str) -> None:
        trainer = config.trainer
        super().__init__(trainer.nnodes, trainer.n_gpus_per_node, device_type)
        self.config = config
        self.steps = steps
        self.folder = Path(trainer.default_local_dir)
        self.display = RunDisplay(trainer.experiment_name, steps, columns)
        self.resumption: Resumption | None = None

    def __enter__(self) -> Self:
        self.enter_context(run_lock(self.folder))
        self.enter_context(resume_hint(self.config.trainer))
        return self

    def find_resumption(self, job: str, num_examples: int, parts: Mapping[str, ModelConfig]) -> Resumption | None:
        """The checkpoint to resume from, checked as by :func:`check_resumable`; None to start from scratch."""
        self.resumption = find_resumption(self.config, self.display.say)
        if self.resumption is not None:
            check_resumable(self.resumption, job, num_examples, parts)
        return self.resumption

    def is_complete(self, resumption: Resumption) -> bool:
        """Whether the last step is done, even if its checkpoint was not saved."""
        summary = self.folder / "summary.json"
        own = resumption.folder.parent == self.folder.resolve() and summary.exists()
        done = json.loads(summary.read_text())["steps"] if own else 0
        return max(resumption.step, done) >= self.steps

    def report_complete(self, resumption: Resumption, summary: Mapping[str, Any]) -> None:
        """Say that the last step is done; write the summary if the run was stopped before it did."""
        if not (self.folder / "summary.json").exists():
            write_summary(self.folder, summary)
        longer = "; raise trainer.total_training_steps to train longer" if self.is_complete(resumption) else ""
        step = max(resumption.step, self.steps) if longer else resumption.step
        self.display.say(f"the run is complete: step {step} was its last{longer}")

    def start(
        self, worker: str, arguments: tuple[Any, ...], environment: dict[str, str]
    ) -> tuple[Tracker, WorkerGroup]:
        """Drop the records of steps that will be repeated, open the tracker and start the workers."""
        trainer = self.config.trainer
        workers = f"{self.world_size} {self.device_type} workers"
        self.display.say(f"{trainer.experiment_name}: {self.steps} steps on {workers}, into {self.folder}")
        if trainer.saves_nothing(self.steps):
            self.display.say(
                "warning: trainer.save_freq=-1: the model is lost when the run ends; set it to 0 to keep it"
            )
        last_step = None if self.resumption is None else self.resumption.step
        if self.resumption is None or self.resumption.folder.parent != self.folder.resolve():
            set_aside_records(self.folder)
        drop_records(self.folder, last_step)
        names = (trainer.project_name, trainer.experiment_name)
        tracker = Tracker(self.folder, trainer.logger, *names, self.config, last_step)
        self.callback(tracker.close)
        # After Ray has ended: until then, workers may still be writing.
        self.callback(remove_unfinished, self.folder)
        group = self.start_workers(worker, self.config, arguments, environment)
        self.callback(group.close)
        self.enter_context(self.display)
        return tracker, group

    def report(self, seconds_by_phase: Mapping[str, float]) -> None:
        """Show the time by phase, and where the model and the metrics are."""
        self.display.table("Time by phase", ["phase", "seconds", "share"], share_rows(seconds_by_phase))
        checkpoint = latest_checkpoint(self.folder)
        if checkpoint is not None:
            exported = checkpoint / "actor" / "huggingface"
            self.display.say(f"model: {exported if exported.is_dir() else checkpoint}")
        self.display.say(f"metrics: {self.folder}/metrics.jsonl")
