"""Starts the resources of training and evaluation, and releases them in reverse order."""

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError

from verl.checkpoint.attempts import Attempt, run_lock
from verl.checkpoint.folders import checkpoints, latest_checkpoint, remove_unfinished
from verl.checkpoint.resume import Resumption, check_resumable, check_unchanged, find_resumption, resume_hint
from verl.cluster.environment import REQUEUE, passed_variables
from verl.cluster.failures import HeadLost, MachineError, NoRoom, OutOfMemory, RequeueError, WorkerError
from verl.cluster.machines import gather_machines, wait_for_machines, wait_for_room
from verl.cluster.network import LOOPBACK, loopback_interface
from verl.cluster.probe import INTERFACES, survey
from verl.cluster.ray_head import cluster_address
from verl.cluster.start import ray_cluster, store_megabytes
from verl.config.common import MachineOptions, ModelConfig
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.sft import SFTConfig
from verl.models.info import ModelInfo
from verl.rollout.requests import resolve_dtype
from verl.run.display import Columns, RunDisplay, share_rows
from verl.run.exit_codes import Preemption
from verl.run.memory import GB, itemsize_of, memory_warning
from verl.run.page import PageWriter
from verl.run.tracking import Tracker, drop_records, set_aside_records, steps_done, write_summary
from verl.single_controller.engine_pool import EnginePool
from verl.single_controller.supervision import Supervision
from verl.single_controller.worker_group import WorkerGroup, cpu_threads
from verl.utils.process import available_cores

T = TypeVar("T")

MAX_WORKERS_PER_CORE = 3
"""Maximum number of workers per core on a machine without GPUs. veRL's default of 8 workers is for GPU machines."""

JUDGE_SHARE = 0.1
"""Fraction of each GPU that Ray reserves for a frozen judge. An option sets the judge's memory."""

RELEASE_S = 30.0
"""Maximum seconds to wait for Ray to shut down, which may hang if the cluster has lost its head."""


class RaySession(ExitStack):
    """Context manager for worker groups on a Ray cluster. Starting the first group also starts the cluster.

    Args:
        machines: Options for the machines of an existing cluster.
        folder: Output folder, which all machines must share.
        files: Data files that must exist on all machines.
    """

    def __init__(
        self,
        nnodes: int,
        workers_per_node: int,
        device_type: str,
        machines: MachineOptions,
        folder: Path,
        files: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.nnodes, self.workers_per_node, self.device_type = nnodes, workers_per_node, device_type
        self.machines, self.folder, self.files = machines, folder, files
        self.largest_batch = (0, 0)
        """Maximum numbers of episodes per message and of tokens per episode."""
        self.pool = (0, 0)
        """Numbers of machines and of workers per machine for separate engines."""
        self.weight_bytes = 0
        """Size in bytes of the weights sent to the separate engines."""
        self.machines_gathered = False
        """Whether this session has already waited for the machines."""
        self.resources: ExitStack = self
        """Resources to release together with the workers."""

    @property
    def world_size(self) -> int:
        """Number of workers, excluding separate engines."""
        return self.nnodes * self.workers_per_node

    @property
    def busy_cores(self) -> int:
        """Number of this machine's cores that the session's workers use."""
        on_gpu = self.device_type == "cuda"
        return self.workers_per_node * (1 if on_gpu else cpu_threads(self.workers_per_node, available_cores()))

    def start_ray(self, say_stage: Callable[[str], None] = lambda stage: None) -> None:
        """Start Ray or connect to it, unless this session has already done so."""
        if not ray.is_initialized():
            address = cluster_address()
            found = " found on this machine (RAY_ADDRESS=local ignores it)" if not os.environ.get("RAY_ADDRESS") else ""
            say_stage(f"joining the Ray cluster at {address}{found}" if address else "starting Ray")
            store_mb = self.machines.object_store_mb or store_megabytes(*self.largest_batch, self.weight_bytes)
            num_workers = self.world_size + math.prod(self.pool)
            self.resources.enter_context(ray_cluster(num_workers, self.device_type, store_mb))

    def wait_for_pool(self, say: Callable[[str], None], interrupt: Callable[[], None]) -> None:
        """Wait for machines with room for both worker groups if engines are separate, or raise ``NoRoom``."""
        if self.pool[0]:
            groups = [(self.nnodes, self.workers_per_node), self.pool]
            wait_for_room(groups, self.device_type, self.machines.machines_timeout_s, say, interrupt)

    def start_workers(
        self,
        worker: str,
        config: Any,
        arguments: tuple[Any, ...],
        environment: dict[str, str],
        models: Sequence[str] = (),
        supervision: Supervision | None = None,
        check_devices: Callable[[list[int]], None] = lambda sizes: None,
        device: Mapping[str, Any] | None = None,
        **pool: Any,
    ) -> WorkerGroup:
        """Start a worker group that loads ``models``. The caller must close it.

        Args:
            device: Further arguments of :class:`WorkerGroup`, for groups that share devices.
            pool: Additional arguments of :class:`EnginePool` to start separate engines, or none to start the trainers.

        Raises:
            WorkerError: If a worker fails to start.
            ConfigError: If machines are missing or lack a requirement. The message has one line for each.
        """
        self.start_ray(supervision.say_stage if supervision else lambda stage: None)
        place = (*(self.pool if pool else (self.nnodes, self.workers_per_node)), self.device_type)
        watched: dict[str, Any] = {"supervision": supervision, "check_devices": check_devices}
        watched |= {**(device or {}), **pool}
        group = EnginePool if pool else WorkerGroup
        if not cluster_address():
            lo = loopback_interface()
            network = dict.fromkeys(INTERFACES, lo) | {"VLLM_HOST_IP": LOOPBACK}
            environment = {name: os.environ.get(name, value) for name, value in network.items()} | environment
            return group(worker, config, arguments, *place, environment, **watched)
        interrupt = (supervision or Supervision()).interrupt
        if not self.machines_gathered:
            say = partial(print, file=sys.stderr, flush=True)
            wait_for_machines(*place, self.machines.machines_timeout_s, say, interrupt)
            self.wait_for_pool(say, interrupt)
        environment = passed_variables(self.machines.env) | environment
        look = partial(survey, folder=self.folder, models=models, files=self.files, interrupt=interrupt)
        return group(worker, config, arguments, *place, environment, look, **watched)


class TrainingRun(RaySession):
    """Context manager that locks a training run's folder and makes one or more attempts to complete the run.

    At the end of each attempt, the workers and Ray are stopped before unfinished checkpoints are removed. If the run
    fails or is interrupted, the command that resumes it is printed to stderr.
    """

    def __init__(self, config: PPOConfig | SFTConfig, steps: int, columns: Columns, device_type: str) -> None:
        trainer = config.trainer
        files = [name for name in [*config.data.train_files, *config.data.val_files] if Path(name).is_file()]
        place = (trainer.nnodes, trainer.n_gpus_per_node, device_type)
        super().__init__(*place, trainer, Path(trainer.default_local_dir), files)
        self.config = config
        if isinstance(config, PPOConfig):
            training, validation = config.rollout.n, config.rollout.val_kwargs.n
            training *= 1 if config.trainer.method is None else 2
            rows = max(config.data.prompts_per_batch * training, config.data.val_batch_size * validation)
            self.largest_batch = (rows, config.max_sequence_length)
            self.pool = (config.rollout.nnodes, config.rollout.n_gpus_per_node)
            if config.rollout.has_pool:
                itemsize = itemsize_of(resolve_dtype(config.rollout.dtype, device_type == "cpu"))
                parameters = ModelInfo.of(config.model).causal_model.parameters()
                self.weight_bytes = itemsize * sum(parameter.numel() for parameter in parameters)
        self.steps = steps
        self.display = RunDisplay(trainer.experiment_name, steps, columns)
        self.resumption: Resumption | None = None
        self.digests: Mapping[str, str] = {}
        self.preemption = Preemption(trainer.preemption_grace_s)
        self.attempt = Attempt(self.folder, 0)
        self.restarts = 0
        self.tracker: Tracker | None = None
        self.page = PageWriter(self.folder, trainer.report_freq, self.display.say)

    def __enter__(self) -> Self:
        self.enter_context(self.page.even_after_failure())
        self.enter_context(run_lock(self.folder))
        self.attempt = Attempt.claim(self.folder)
        self.enter_context(resume_hint(self.config.trainer))
        self.resources = self.enter_context(ExitStack())
        return self

    def find_resumption(
        self, job: str, num_examples: int, parts: Mapping[str, ModelConfig], digests: Mapping[str, str]
    ) -> Resumption | None:
        """Return the checkpoint to resume from, checked by :func:`check_resumable` and :func:`check_unchanged`.

        Returns None if the run starts from scratch.
        """
        self.resumption, self.digests = find_resumption(self.config, self.display.say), digests
        if self.resumption is not None:
            check_resumable(self.resumption, job, num_examples, parts)
            for line in check_unchanged(self.resumption, digests, self.config.trainer):
                self.display.say(f"warning: {line}")
        return self.resumption

    def is_complete(self, resumption: Resumption) -> bool:
        """Return whether the last step is done, even if its checkpoint was not saved."""
        summary = self.folder / "summary.json"
        done = steps_done(summary) if self._holds(resumption) and summary.exists() else 0
        return max(resumption.step, done) >= self.steps

    def _holds(self, resumption: Resumption | None) -> bool:
        """Return whether the checkpoint is in this run's folder."""
        return resumption is not None and resumption.folder.parent == self.folder.resolve()

    def report_complete(self, resumption: Resumption, summary: Mapping[str, Any]) -> None:
        """Report that the run is complete, and write the summary if the run ended before writing it."""
        if not (self.folder / "summary.json").exists():
            self.write_summary(summary)
        longer = "; raise trainer.total_training_steps to train longer" if self.is_complete(resumption) else ""
        step = max(resumption.step, self.steps) if longer else resumption.step
        self.display.say(f"the run is complete: step {step} was its last{longer}")

    def start(
        self, worker: str, arguments: tuple[Any, ...], environment: dict[str, str]
    ) -> tuple[Tracker, WorkerGroup]:
        """Start an attempt: drop records of steps to be repeated, open the tracker and start the workers."""
        trainer = self.config.trainer
        workers = f"{self.world_size} {self.device_type} worker{'s' * (self.world_size > 1)}"
        self.display.say(f"{trainer.experiment_name}: {self.steps} steps on {workers}, into {self.folder}")
        if self.device_type == "cpu" and not cluster_address():
            self._check_crowding(available_cores())
        if trainer.saves_nothing(self.steps):
            self.display.say(
                "warning: trainer.save_freq=-1: the model is lost when the run ends; set it to 0 to keep it"
            )
        last_step = None if self.resumption is None else self.resumption.step
        if not self._holds(self.resumption) and not self.restarts:
            set_aside_records(self.folder)
        for note in drop_records(self.folder, last_step):
            self.display.say(f"warning: {note}")
        names = (trainer.project_name, trainer.experiment_name)
        self.tracker = tracker = Tracker(self.folder, trainer.logger, *names, self.config, last_step, self.attempt)
        tracker.add(self.page.backend())
        self.resources.callback(tracker.close)
        # Called after Ray has stopped, because workers may still be writing until then.
        self.resources.callback(remove_unfinished, self.folder, self.attempt.number)
        self.resources.callback(self.display.end_stages)
        config = self.config
        models = [*config.models.values()] if isinstance(config, PPOConfig) else [config.model]
        watched = (self._supervision("worker"), self._check_devices)
        judged = isinstance(config, PPOConfig) and config.reward_score.judge.is_frozen
        device = {"device_share": 1 - JUDGE_SHARE} if judged else {}
        group = self.start_workers(worker, config, arguments, environment, [m.path for m in models], *watched, device)
        self.resources.callback(group.close)
        self.display.begin(last_step or 0)
        self.resources.enter_context(self.display)
        return tracker, group

    def start_engines(
        self, worker: str, arguments: tuple[Any, ...], environment: dict[str, str], workers_per_engine: int
    ) -> EnginePool:
        """Start the separate engines. Call this after :meth:`start`."""
        config: Any = self.config
        supervision = self._supervision("engine worker", "engines")
        started = (worker, config, arguments, environment, [config.model.path], supervision)
        # An engine holds the hidden states of its unfinished conversations, which would be lost if it died.
        holds_states = config.rollout.multi_turn.enable and config.calculator.measured_by("rollout")
        goes_on = not (config.trainer.deals_by_counts(self.device_type) or holds_states)
        pool: dict[str, Any] = {"workers_per_world": workers_per_engine, "goes_on": goes_on, "say": self.display.say}
        group = cast(EnginePool, self.start_workers(*started, **pool))
        self.resources.callback(group.close)
        return group

    def start_judge(self, worker: str, environment: dict[str, str], beside: WorkerGroup) -> WorkerGroup:
        """Start the engines of a frozen judge on the devices of ``beside``, whose engines must be asleep."""
        config: Any = self.config
        supervision = self._supervision("judge", "judge")
        device = {"beside": beside, "device_share": JUDGE_SHARE}
        device |= {"workers_per_world": config.rollout.tensor_parallel_size}
        models = [config.reward_score.judge.model.path]
        group = self.start_workers(worker, config, (), environment, models, supervision, device=device)
        self.resources.callback(group.close)
        return group

    def _check_crowding(self, cores: int) -> None:
        """Warn if this machine has fewer cores than workers, each of which is a process with its own model.

        Raises ``ConfigError`` if there are more than ``MAX_WORKERS_PER_CORE`` workers per core.
        """
        engines = math.prod(self.pool)
        count, options = self.world_size + engines, f"trainer.n_gpus_per_node={self.workers_per_node}"
        if count <= cores:
            return
        fix = f"set trainer.n_gpus_per_node={max(1, cores)}"
        if engines:
            options += f" rollout.nnodes={self.pool[0]} rollout.n_gpus_per_node={self.pool[1]}"
            fix = "lower both, or set both options of rollout to 0"
        line = f"{options}: {count} workers on {cores} core{'s' * (cores > 1)}, "
        if count > MAX_WORKERS_PER_CORE * cores:
            raise ConfigError(f"{line}of which at most {MAX_WORKERS_PER_CORE} can share one; {fix}")
        self.display.say(
            f"warning: {line}each a process with models and an engine of its own: minutes to start, and perhaps all "
            f"memory; {fix}"
        )

    def _supervision(self, kind: str, folder: str = "") -> Supervision:
        """Return the supervision options for a kind of worker. Logs go to ``folder`` in the attempt's log folder."""
        trainer, logs = self.config.trainer, self.folder / "logs" / f"attempt_{self.attempt.number}"
        times = (trainer.detection_s, trainer.phase_timeout_s, trainer.nccl_timeout_s)
        return Supervision(*times, logs / folder, kind, self.display.stage, self.preemption.check)

    def _check_devices(self, sizes: list[int]) -> None:
        """Warn if the models may not fit on the devices. ``sizes`` are GPU memory sizes in bytes, or 0 for a CPU."""
        config = self.config
        # A run that only validates needs neither gradients nor moments.
        if isinstance(config, PPOConfig) and min(sizes) and not config.trainer.val_only:
            if warning := memory_warning(config, min(sizes) / GB):
                self.display.say(warning)

    def attempts(self, train: Callable[[], T]) -> T:
        """Call ``train`` and return its result. After machine failures, retry from the latest checkpoint.

        Raises:
            WorkerError: If the program failed, or if machines failed too often or twice in the same way and step.
            RequeueError: If too few machines are left.
            Preempted: If the scheduler reclaims the machines.
        """
        before: tuple[int, str] | None = None
        with self.preemption.listening():
            while True:
                try:
                    return train()
                except Exception as raised:
                    error = self._machine_error(raised)
                    if error is None or (isinstance(error, NoRoom) and not self.restarts):
                        raise
                    failure = self._end_attempt(error)
                    if error.where and failure == before:
                        message = f"{error}\nthe attempt before this one ended in the same step with the same failure"
                        raise WorkerError(message) from error
                    if self.restarts == self.config.trainer.max_restarts:
                        raise error from error.__cause__
                before = failure
                self._begin_attempt()

    def _machine_error(self, error: Exception) -> MachineError | None:
        """Return a machine failure for an error that a new attempt may avoid, or None for other errors."""
        if isinstance(error, MachineError):
            return error
        resumed = 0 if self.resumption is None else self.resumption.step
        # Errors raised by Ray itself, such as the loss of a machine, but not errors raised in tasks.
        lost = isinstance(error, RayError) and not isinstance(error, RayTaskError)
        # The previous attempt may not yet have released its GPU memory.
        full = isinstance(error, OutOfMemory) and self.restarts > 0 and self._step_reached() <= resumed
        if not lost and not full:
            return None
        lost_machine = MachineError(str(error))
        lost_machine.__cause__ = error
        return lost_machine

    def _end_attempt(self, error: MachineError) -> tuple[int, str]:
        """Release all resources, and return the step that failed and the worker on which it failed."""
        self.display.say(f"attempt {self.attempt.number} ended: {error}")
        # Ray may wait forever for a lost head.
        give_up = threading.Timer(RELEASE_S, os._exit, (REQUEUE,))
        give_up.daemon = True
        if isinstance(error, HeadLost):
            give_up.start()
        self.resources.close()
        give_up.cancel()
        self.preemption.check()
        if isinstance(error, HeadLost):
            raise RequeueError(str(error)) from error
        return self._step_reached() + 1, error.where

    def _begin_attempt(self) -> None:
        """Wait for machines and find the checkpoint to resume from."""
        trainer = self.config.trainer
        self.restarts += 1
        self.attempt.check(self.folder)
        self.attempt = Attempt.claim(self.folder)
        self.nnodes = trainer.nnodes
        try:
            self.start_ray()
        except (ConfigError, ConnectionError, RuntimeError) as error:
            raise RequeueError(f"the Ray cluster does not answer any more: {error}") from error
        fewest = self.nnodes if trainer.min_nnodes is None else trainer.min_nnodes
        place = (self.workers_per_node, self.device_type, trainer.machines_timeout_s)
        self.nnodes = gather_machines(self.nnodes, fewest, *place, self.display.say, self.preemption.check)
        try:
            self.wait_for_pool(self.display.say, self.preemption.check)
        except NoRoom as error:
            raise RequeueError(str(error)) from error
        # From here on, a missing machine is a failure rather than a mistake in the options.
        self.machines_gathered = True
        self.display.say(f"restart {self.restarts} of at most {trainer.max_restarts}")
        if checkpoints(self.folder):
            trainer = replace(trainer, resume_mode="auto", resume_from_path=None)
        config: Any = self.config
        self.resumption = find_resumption(replace(config, trainer=trainer), self.display.say)

    def _step_reached(self) -> int:
        return 0 if self.tracker is None else self.tracker.step

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self.attempt.check(self.folder / "summary.json")
        write_summary(self.folder, summary)

    def report(self, seconds_by_phase: Mapping[str, float]) -> None:
        """Show the time by phase and the paths of the model, the metrics and the report."""
        self.display.table("Time by phase", ["phase", "seconds", "share"], share_rows(seconds_by_phase))
        checkpoint = latest_checkpoint(self.folder)
        if checkpoint is not None:
            exported, adapters = (checkpoint / "actor" / name for name in ("huggingface", "lora_adapter"))
            self.display.say(f"model: {exported if exported.is_dir() else checkpoint}")
            if not exported.is_dir():
                self.display.say(
                    "to have it as transformers and vLLM load it: python -m verl.trainer.main_export "
                    f"{checkpoint} --out NEW_FOLDER"
                )
            if adapters.is_dir():
                self.display.say(f"adapters: {adapters}")
        self.display.say(f"metrics: {self.folder}/metrics.jsonl")
        self.page.finish()
