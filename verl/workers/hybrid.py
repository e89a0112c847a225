"""Hybrid worker, one per device, which contains all models of a run and the rollout engine."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from verl.batch import EPISODE, TEACHER_RANK, TRAINER_RANK, Batch
from verl.batch.serialization import PackedWeight, weight_buckets
from verl.checkpoint.shards import CheckpointWorker, TrainedPart
from verl.config.ppo import PPOConfig
from verl.models.fsdp import WeightDtype
from verl.models.huggingface import checkpoint_parameters
from verl.models.lora import adapters_disabled
from verl.models.micro_batches import scored_by_teachers
from verl.models.noise import add_noise, restore_parameters
from verl.models.offload import reshard
from verl.models.policy import Policy, copy_policy
from verl.models.tokenizer import load_tokenizer, num_ids
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.turns import measure_responses
from verl.rollout.queue import EngineCapacity
from verl.utils.distributed import WorkerPlace, join_world, seed_everything
from verl.utils.process import set_stage
from verl.workers.actor import Actor
from verl.workers.critic import Critic, RewardModel
from verl.workers.rollout import EngineWorker
from verl.workers.teacher import UpdateTeacher, load_teachers, update_average


class HybridWorker(CheckpointWorker, EngineWorker):
    """One of the processes that share the actor, reference, critic, reward model, teacher and rollout engines.

    The rollout engines may instead run in a pool of :class:`verl.workers.rollout.RolloutWorker` processes.

    Each method must be called on all workers at once, because FSDP gathers parameters collectively. Only models that
    the configuration uses are loaded. An offloaded model is on the device only during methods that need it.
    """

    def __init__(self, config: PPOConfig, place: WorkerPlace, total_steps: int, stop_strings: list[str]) -> None:
        """Load the models. ``stop_strings`` are the strings that end a response in training and validation."""
        set_stage("loading the model")
        seed_everything(config.seed)
        mesh = join_world(place)
        self.is_first = place.rank == 0
        path, trust = config.model.path, config.model.trust_remote_code
        self.tokenizer = load_tokenizer(path, trust, needs_chat_template=False)
        temperature, max_length = config.rollout.temperature, config.data.max_response_length
        actor_updates = config.actor_updates(total_steps)
        correction = config.algorithm.rollout_correction
        self.actor = Actor(config.actor, correction, config.model, mesh, temperature, actor_updates, max_length)
        self.reference: Policy | None = None
        self.lora = config.model.trains_adapters
        if config.uses_reference and not self.lora:
            self.reference = copy_policy(self.actor, config, mesh, config.ref.param_offload, trainable=False)
        self.teachers = load_teachers(config, mesh, self.actor, self.tokenizer)
        if config.uses_teacher and config.teacher.loss is not None:
            teachers = (self.teachers, self.actor, num_ids(self.tokenizer))
            self.actor.teacher = UpdateTeacher(config.teacher, *teachers)
        critic_updates = config.critic_updates(total_steps)
        self.critic = Critic(config.critic, mesh, critic_updates) if config.uses_critic else None
        self.reward_model = RewardModel(config.reward_model, mesh) if config.uses_reward_model else None
        estimated = ["sum_pi_squared"] if config.needs_sum_pi_squared else []
        # Statistics of the policy before the update, without duplicates.
        self.statistics = list(dict.fromkeys([*estimated, *self.actor.loss.needs.old_statistics]))
        measures = config.calculator.measured_by("actor")
        self.teacher_calculator: RepresentationMetricsCalculator | None = None
        if config.uses_teacher and config.teacher.rank_metrics:
            self.teacher_calculator = RepresentationMetricsCalculator(config.calculator)
        self.max_turns = config.rollout.multi_turn.max_assistant_turns
        self.calculator = RepresentationMetricsCalculator(config.calculator) if measures else None
        self.has_engine = not config.rollout.has_pool
        if self.has_engine:
            self.start_engine(config, place, self.tokenizer, stop_strings, self.actor)
        self.bucket_bytes = config.rollout.update_weights_bucket_megabytes << 20
        parts = [TrainedPart("actor", self.actor.learner, self.actor.parameters, config.model, self.tokenizer)]
        if self.critic is not None:
            learner, model = self.critic.learner, config.critic.model
            parts.append(TrainedPart("critic", learner, self.critic.parameters, model, self.tokenizer))
        for part in parts:
            part.learner.deterministic = config.trainer.deterministic is True
        averages = {"teacher": self.teachers[0]} if config.teacher.is_average else {}
        super().__init__(parts, config.seed, averages)

    def not_deterministic(self) -> list[str]:
        """Return the names of torch operations used in updates so far that have no deterministic implementation."""
        return sorted(set().union(*(part.learner.not_deterministic for part in self._parts)))

    def start_generation(self) -> EngineCapacity:
        """Prepare the engine, loading weights if it has none, and return its capacity."""
        if self.rollout.needs_weights:
            self.sync_weights(self.version)
        return super().start_generation()

    def finish_generation(self) -> None:
        """Free the engine's memory until the next call of ``sync_weights`` or ``start_generation``."""
        if self.has_engine:
            super().finish_generation()

    def save(self, folder: Path, background: bool, huggingface: bool) -> None:
        """Save a checkpoint like :meth:`CheckpointWorker.save` after freeing the engine's memory."""
        self.finish_generation()
        super().save(folder, background, huggingface)

    def load(self, folder: Path, step: int) -> None:
        """Load a checkpoint like :meth:`CheckpointWorker.load` after freeing the engine's memory."""
        self.finish_generation()
        super().load(folder, step)

    def compute_logprobs(self, batch: Batch) -> Batch:
        """Return ``logprobs``, ``entropy``, statistics and, with ``calculator.source=actor``, rank metrics."""
        if self.calculator is None:
            return self.actor.compute_logprobs(batch, statistics=self.statistics)
        layers, measure = self.calculator.config.layers, partial(measure_responses, self.calculator, self.max_turns)
        scored = self.actor.compute_logprobs(batch, layers, measure, self.statistics)
        if not self.calculator.config.compare_versions:
            return scored
        beside = {TRAINER_RANK + name: values for name, values in scored.rank_metrics.items()}
        return scored.columns("logprobs", "entropy", *self.statistics).fill(EPISODE, **beside)

    def compute_ref_logprobs(self, batch: Batch) -> Batch:
        """Return ``logprobs`` under the reference policy. With LoRA, this is the policy with its adapters disabled."""
        if self.lora:
            with adapters_disabled(self.actor.model):
                return self.actor.compute_logprobs(batch).columns("logprobs")
        assert self.reference is not None, "a reference policy is held only for a KL divergence in loss or reward"
        return self.reference.compute_logprobs(batch).columns("logprobs")

    def compute_teacher_logprobs(self, batch: Batch) -> Batch:
        """Return ``logprobs`` under each row's teacher, and its rank metrics if ``teacher.rank_metrics`` is true."""
        return scored_by_teachers(batch, lambda index, rows: self._scored_by(self.teachers[index], rows))

    def _scored_by(self, teacher: Policy, batch: Batch) -> Batch:
        if self.teacher_calculator is None:
            return teacher.compute_logprobs(batch).columns("logprobs")
        measure = partial(measure_responses, self.teacher_calculator, self.max_turns)
        scored = teacher.compute_logprobs(batch, self.teacher_calculator.config.layers, measure)
        if teacher is not self.actor:
            reshard(teacher.model)  # only the update needs the head to stay gathered
        metrics = {TEACHER_RANK + name: values for name, values in scored.rank_metrics.items()}
        return scored.columns("logprobs").fill(EPISODE, **metrics)

    def update_teacher(self, rate: float) -> None:
        """Update the teacher, a moving average of the policy, with the policy's weights."""
        (average,) = self.teachers
        update_average(average, self.actor, rate)

    def perturb_weights(self) -> None:
        """Add noise to all parameters of the policy until :meth:`restore_weights` is called."""
        with self.actor.parameters.loaded():
            self._unperturbed = add_noise(self.actor.model)

    def restore_weights(self) -> None:
        """Restore the policy's parameters exactly as they were before :meth:`perturb_weights`."""
        with self.actor.parameters.loaded():
            restore_parameters(self.actor.model, self._unperturbed)
        del self._unperturbed

    def sync_weights(self, version: int) -> None:
        """Load the policy's weights into the rollout engine and record their ``version``."""
        with self.actor.parameters.loaded():
            weights = checkpoint_parameters(self.actor.model, self.rollout.weight_dtype, self.bucket_bytes)
            self.rollout.load_weights(weights)
        self.version = version

    def publish_weights(self, dtype: WeightDtype, version: int) -> Iterator[list[PackedWeight]]:
        """Yield the policy's weights for external engines, on the first worker only. All workers must iterate together.

        Args:
            dtype: Function that returns the dtype in which the engines accept a parameter.
            version: Version of these weights, which the engines report with their responses.
        """
        with self.actor.parameters.loaded():
            weights = checkpoint_parameters(self.actor.model, dtype, self.bucket_bytes)
            if self.is_first:
                yield from weight_buckets(weights, self.bucket_bytes, version)
            for _ in weights:
                pass  # join the collective gathers of the first worker
