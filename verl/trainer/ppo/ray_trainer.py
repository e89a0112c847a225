"""Training loop for PPO and related algorithms, with rank shaping (arXiv 2509.23808).

Legend: B responses in a step, M tokens in these responses.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.checkpoint.resume import Resumption
from verl.config.ppo import PPOConfig
from verl.data.samplers import CustomSampler
from verl.method import StepOutcome
from verl.method.calls import MethodCalls
from verl.rank.reward_manager import RewardManager
from verl.rank.shuffling import shuffle_within_groups
from verl.rank.token_metrics import fill_token_metrics
from verl.rewards.custom import partial_scores_note
from verl.run.session import TrainingRun
from verl.run.setup import TrainingSetup
from verl.run.tracking import Tracker
from verl.single_controller.pooled_policy import PooledPolicyWorkers
from verl.single_controller.profiling import MemoryPeak
from verl.single_controller.roles import ModelWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.logging.rollout_metrics import (
    data_sources,
    lag_metrics,
    length_metrics,
    metrics_by_source,
    policy_metrics,
    response_metrics,
    score_tensors,
    verdict_metrics,
    with_prefix,
)
from verl.trainer.logging.speed import BATCH, Work, step_metrics
from verl.trainer.ppo.advantages import AdvantageEstimation
from verl.trainer.ppo.ahead import StepAhead
from verl.trainer.ppo.batch_check import FREQUENCY, check_batch, check_carried_over
from verl.trainer.ppo.resampled import FIRST, original
from verl.trainer.ppo.rollout_scheduler import RolloutScheduler, SampledStep
from verl.trainer.ppo.samples import SampleLogger
from verl.trainer.ppo.teaching import Teaching
from verl.trainer.ppo.updates import Updates, fill_first
from verl.trainer.training import Trainer, endless
from verl.trainer.validation import Validator
from verl.utils.json_state import from_json, to_json

BEST_BY = "val/pass@1"
"""Validation metric whose highest value marks the best checkpoint."""


class RayPPOTrainer(Trainer):
    """Trainer in the driver process, which stores the batches while the workers run all model computation."""

    best_by = BEST_BY

    def __init__(
        self,
        setup: TrainingSetup,
        workers: WorkerGroup,
        scheduler: RolloutScheduler,
        tracker: Tracker,
        samples: SampleLogger,
        run: TrainingRun,
    ) -> None:
        config, loader = setup.config, setup.new_loader()
        super().__init__(config, loader, workers, tracker, run, config.trainer.except_save)
        self.config = config
        self.prompts = endless(loader)
        self.scheduler = scheduler
        self.method: MethodCalls = scheduler.method
        self.calculator = setup.calculator
        self.samples = samples
        self.carried_over: dict[tuple[int, int], int] = {}
        """Responses that recent steps trained on, if responses are carried over (see :func:`check_carried_over`)."""
        self.logged_prefix_note = self.listed_operations = self.looked_at_scores = self.checked_batch = False
        self.loss = setup.loss
        self.policy = scheduler.policy
        critic = config.critic
        self.teaching: Teaching | None = None
        if config.uses_teacher:
            teachers = (setup.teacher_prompts, setup.teacher_servers)
            self.teaching = Teaching(config.teacher, *teachers, self.policy, self.timer)
        ranks_per_share = critic.model.ulysses_sequence_parallel_size
        self.critic = ModelWorkers(workers, ranks_per_share, critic.use_dynamic_bsz) if config.uses_critic else None
        self.reward_manager = RewardManager(config.reward_manager)
        self.advantages = AdvantageEstimation(config, self.reward_manager)
        self.updates = Updates(config, self.policy, self.critic, self.loss, self.timer)
        self.validator = Validator(setup.held_out, scheduler, self.policy, setup.calculator, self.reward_manager)
        pooled = self.policy if isinstance(self.policy, PooledPolicyWorkers) else None
        self.pool = None if pooled is None else pooled.pool
        """Engines on separate devices, or None if they share the policy's workers."""
        pool_size = 0 if self.pool is None else self.pool.world_size
        self.ahead = StepAhead(scheduler, pooled) if pooled is not None and config.samples_ahead else None
        self.step_metrics = step_metrics(config, workers.world_size, workers.device_name, pool_size)

    def fit(self) -> None:
        """Validate first if configured, then train the remaining steps."""
        trainer = self.config.trainer
        if self.validator.prompts and (trainer.val_only or (trainer.val_before_train and self.step == 0)):
            self.display.stage(f"step {self.step}: validating")
            self._validate()
            self._log()
        if not trainer.val_only:
            super().fit()

    def _train(self) -> None:
        trainer = self.config.trainer
        for step in range(self.step + 1, self.total_steps + 1):
            self.step = step
            self.profiler.begin(step)
            sampled = self._sample()
            batch = self._learn_from(sampled)
            self._compute_outputs(batch)
            self._collect_verdicts(sampled, batch)
            rows = self._compute_advantages(batch, sampled.greedy)
            self._check(batch, rows)
            self.metrics |= self.updates.update_critic(batch, rows, step)
            self._update_actor(batch, rows)
            self._compare_policies(batch)
            self.samples.log("train", step, batch)
            self._update_baselines(sampled, batch)
            self._sync_weights()
            if self.ahead is not None:
                self.ahead.finish(self.timer)
            self._after_step(sampled.batch)
            self.profiler.end(step)
            if self._due(trainer.test_freq):
                self._validate()
            # Log before saving the checkpoint, so that a resumed run has this step's metrics.
            self._log()
            if self._due(trainer.save_freq) or self.step in trainer.except_save:
                self._save()
            self.saver.poll()
            if step < self.total_steps:
                self.preemption.after_step(step, self._save_now)

    def restore(self, resumption: Resumption) -> None:
        """Restore a checkpoint and send its weights to the rollout engines."""
        super().restore(resumption)
        self._sync_weights()
        self.method.load_state(resumption.state["method"])
        self.reward_manager.load_state_dict(resumption.state["reward_manager"])
        self.advantages.kl_control.load_state_dict(resumption.state["kl_control"])
        state = from_json(resumption.state["sampler"])
        if self.ahead is not None:
            self.ahead.load_state(state)
            state = state["steps"]
        self.scheduler.load_state(state)

    def _sample(self) -> SampledStep:
        """Return the step's responses, whose verification may still be running."""
        self.method.begin_step(self.step)
        sample = self.scheduler.sample if self.ahead is None else self.ahead.take
        sampled = sample(self.prompts, self.step, self.timer)
        self._shuffle(sampled.batch)
        self.metrics |= sampled.metrics | length_metrics(sampled.batch, self.config.data.max_prompt_length)
        return sampled

    def _shuffle(self, batch: Batch, except_for: Collection[str] = ()) -> None:
        """Shuffle rank metrics within each group of responses if ``calculator.shuffle_within_groups`` is set."""
        if self.config.calculator.shuffle_within_groups:
            shuffle_within_groups(batch, self.config.seed, self.step, except_for)

    def _learn_from(self, sampled: SampledStep) -> Batch:
        """Return the batch to train on: the sampled responses, or the batch that the method selects."""
        if not self.method.overrides("learn_from"):
            return sampled.batch
        sampled.collect_verdicts(self.timer)
        with self.timer.phase("learn_from"):
            batch, metrics = self.method.learn_from(sampled.batch.without(*FIRST))
        self.metrics |= metrics
        return batch

    def _compute_outputs(self, batch: Batch) -> None:
        """Compute log-probabilities under policy, reference and teacher, the critic's values, and rank metrics."""
        config, work, measured = self.config, Work.of(batch.lengths), batch.names
        self.timer.count(BATCH, work)
        if config.needs_logprobs or self.loss.needs.old_policy:
            self._compute_logprobs(batch, self._num_scored_in_update)
        # Usually the same tensor as logprobs, whose missing values the first update fills in place.
        batch.fill(old_logprobs=batch.rollout_logprobs if config.actor.bypass_mode else self._old_logprobs(batch))
        if config.uses_reference:
            with self.timer.phase("ref"):
                scored = self.policy.map_rows("compute_ref_logprobs", batch.columns("tokens"))
                batch.fill(ref_logprobs=scored.logprobs)
            self.timer.count("ref", work)
        if self.teaching is not None and not self.teaching.reads_verdicts:
            self.teaching.score(batch)
        if self.critic is not None:
            with self.timer.phase("values"):
                scored = self.critic.map_rows("critic.compute_values", batch.columns("tokens"))
                batch.fill(values=scored.values)
            self.timer.count("values", work)
        fill_token_metrics(batch, config.calculator.token_metrics)
        self._shuffle(batch, except_for=measured)

    def _old_logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probabilities in the denominator of the policy ratio, [M].

        New responses use the policy's log-probabilities. Unless ``rollout_is`` is set, responses from earlier steps use
        the engine's log-probabilities. The ratio is then relative to the policy that sampled these responses.
        """
        current: Tensor = batch.logprobs
        replayed = batch.step < self.step
        if self.config.algorithm.rollout_correction.rollout_is is not None or not replayed.any():
            return current
        return torch.where(replayed.repeat_interleave(batch.response_lengths), batch.rollout_logprobs, current)

    @property
    def _num_scored_in_update(self) -> int:
        """Number of leading responses whose log-probabilities come from the first update, saving a forward pass."""
        config = self.config
        in_update = config.first_update_scores and not self.loss.needs.before_update
        other_rows = self.method.overrides("learn_from")
        updates = self.step > config.trainer.critic_warmup
        return config.actor.ppo_mini_batch_size * config.rollout.n if in_update and updates and not other_rows else 0

    def _compute_logprobs(self, batch: Batch, num_in_update: int) -> None:
        """Compute the policy's log-probabilities and statistics, with NaN for the first ``num_in_update`` responses."""
        unscored, rest = batch[:num_in_update], batch[num_in_update:]
        nan = torch.full((int(unscored.response_lengths.sum()),), torch.nan)
        parts = [unscored.columns().fill(logprobs=nan, entropy=nan)] if num_in_update else []
        if len(rest):
            with self.timer.phase("old_log_prob"):
                parts.append(self.policy.compute_logprobs(rest))
            self.timer.count("old_log_prob", Work.of(rest.lengths))
        batch.merge(Batch.join(parts))

    def _collect_verdicts(self, sampled: SampledStep, batch: Batch) -> None:
        """Wait for the verifiers, then add metrics of the verdicts and of the training batch.

        This fills the verdicts' columns of ``sampled.batch``, which is usually ``batch`` itself.
        """
        sampled.collect_verdicts(self.timer)
        if self.teaching is not None and self.teaching.reads_verdicts:
            self.teaching.score(batch)
        config, logged = self.config, self.scheduler.sources
        stride = config.calculator.global_diff_stride_train

        def metrics_of(rows: Tensor) -> dict[str, float]:
            chosen = batch[rows]
            lengths = length_metrics(chosen, config.data.max_prompt_length)
            return lengths | response_metrics(chosen, self.calculator, stride)

        with self.timer.phase("rank_metrics"):
            verdicts, sources = original(sampled.batch, "verdicts"), data_sources(sampled.batch)
            if not self.looked_at_scores and (note := partial_scores_note(verdicts)):
                self.display.say(note)
            self.looked_at_scores = True
            of_sampled = verdict_metrics(verdicts, config.rollout.n, sources, logged)
            by_source = with_prefix("train", metrics_by_source(data_sources(batch), logged, metrics_of))
            # self.metrics takes precedence, because its verdicts include any responses that dynamic sampling dropped.
            self.metrics = by_source | of_sampled | self.metrics | response_metrics(batch, self.calculator, stride)

    def _compute_advantages(self, batch: Batch, greedy: Batch | None) -> Tensor | None:
        """Compute rewards and advantages. ``greedy`` contains the greedy response to each prompt, for ReMax.

        Returns the indices of the responses to update on, [B'] int64, or None to use every response once.
        """
        self.metrics |= self.advantages.fill_learn_mask(batch)
        with self.timer.phase("reward"):
            rewards, metrics = self.scheduler.rewards.compute(batch)
            greedy_rewards = None
            if greedy is not None:
                greedy_rewards, _ = self.scheduler.rewards.compute(greedy)
                self.metrics["train/greedy_score/mean"] = greedy_rewards.mean().item()
                greedy_rewards = greedy_rewards.repeat_interleave(self.config.rollout.n)
            rewards, changes = self.method.shape_rewards(batch, rewards)
            self.metrics |= metrics | changes
        with self.timer.phase("adv"):
            self.metrics |= self.advantages.estimate(batch, rewards, greedy_rewards)

        def mean_reward(rows: Tensor) -> dict[str, float]:
            return {"rewards/mean": batch.rewards[rows].mean().item()}

        means = metrics_by_source(data_sources(batch), self.scheduler.sources, mean_reward)
        self.metrics |= with_prefix("train", means)
        if self.config.algorithm.use_pf_ppo:
            return self.advantages.resampled_rows(batch, self.step)
        # Skip responses that only contribute to the statistics of their group.
        return batch.learned.nonzero().flatten() if self.method.overrides("learn_from") else None

    def _check(self, batch: Batch, rows: Tensor | None) -> None:
        """Check the first batch of this process, then one batch every ``FREQUENCY`` steps."""
        if "stream" in batch and not self.method.overrides("learn_from"):
            check_carried_over(batch, self.carried_over, self.step)
        if self.checked_batch and self.step % FREQUENCY:
            return
        self.checked_batch, config, scheduler = True, self.config, self.scheduler
        group_size = None if self.method.overrides("learn_from") else config.rollout.n
        words = (scheduler.tokenizer, scheduler.stop_strings)
        staleness, repeats = config.async_training.max_staleness, config.algorithm.use_pf_ppo
        check_batch(batch, rows, self.step, group_size, *words, staleness, repeats)

    def _update_actor(self, batch: Batch, rows: Tensor | None) -> None:
        """Update the policy, except during the critic's warmup."""
        if self.step <= self.config.trainer.critic_warmup:
            return
        num_in_update = self._num_scored_in_update
        if num_in_update and not batch.columns("learn_mask")[:num_in_update].learn_mask.any():
            # The first update will be skipped, because it has nothing to learn from, so score its rows here.
            with self.timer.phase("old_log_prob"):
                fill_first(batch, self.policy.compute_logprobs(batch[:num_in_update]))
            self.timer.count("old_log_prob", Work.of(batch.lengths[:num_in_update]))
            num_in_update = 0
        self.metrics |= self.updates.update_actor(batch, rows, self.step, num_in_update)
        if self.teaching is not None:
            self.teaching.after_update(self.step)
        if self.config.trainer.deterministic and not self.listed_operations:
            self.listed_operations = True
            if names := ", ".join(self.workers.run("not_deterministic")[0]):
                self.display.say(f"warning: trainer.deterministic=true: torch has no deterministic form of {names}")

    def _compare_policies(self, batch: Batch) -> None:
        """Log the mismatch between engine and policy on newly sampled responses, and between policy and teacher."""
        if self.teaching is not None:
            self.metrics |= self.teaching.metrics(batch, self.scheduler.sources)
        correction, fresh = self.config.algorithm.rollout_correction, batch.step == self.step
        if "logprobs" in batch and fresh.any():
            current = batch if fresh.all() else batch[fresh]
            self.metrics |= policy_metrics(current, correction.rollout_is, **correction.weight_bounds)
            if "version" in batch:
                self.metrics |= lag_metrics(current, self.step, **correction.weight_bounds)

    def _update_baselines(self, sampled: SampledStep, batch: Batch) -> None:
        """Update the baselines of rank metrics and scores. The score baselines include dropped responses."""
        fresh = (batch.step == self.step).nonzero().flatten()
        if self.config.reward_manager.active and len(fresh):
            scores = torch.cat([sampled.batch.scores, sampled.dropped_scores])
            self.reward_manager.update(scores, {n: v[fresh] for n, v in batch.rank_metrics.items()})

    def _after_step(self, sampled: Batch) -> None:
        """Pass the step's outcome to the method and to a custom sampler."""
        records = original(sampled, "records")[:: self.config.rollout.n]
        scores, accuracy = (
            values.double().view(len(records), -1).mean(dim=1).tolist()
            for values in score_tensors(original(sampled, "verdicts"))
        )
        uids = [record.uid for record in records]
        outcome = StepOutcome(self.step, uids, scores, accuracy, dict(self.metrics), tuple(records))
        self.method.after_step(outcome)
        if isinstance(self.loader.sampler, CustomSampler):
            self.loader.sampler.update(outcome)

    def _take_peak(self) -> MemoryPeak | None:
        """Return the workers' peak memory, including the engines' peak unless they sample in another thread."""
        peak = super()._take_peak()
        if self.pool is None or self.config.samples_ahead:
            return peak
        engines = self.pool.take_peak_memory()
        return peak if engines is None else engines.joined(peak)

    def _sync_weights(self) -> None:
        with self.timer.phase("update_weights"):
            self.policy.sync_weights(self.step)

    def _validate(self) -> None:
        if self.validator.prompts:
            with self.timer.phase("testing"):
                metrics, batch = self.validator.validate()
                self.samples.log("val", self.step, batch)
            self.metrics |= metrics
            self.validations[self.step] = metrics

    def _save(self) -> None:
        with self.timer.phase("save_checkpoint"):
            # A resumed run does not repeat these steps, so write their samples to disk first.
            self.samples.store.flush()
        super()._save()

    def _state(self) -> dict[str, Any]:
        sampling = self.scheduler.state()
        return super()._state() | {
            "job": "ppo",
            "shuffle": self.config.data.shuffle,
            "order": prompt_order(self.config, self.method),
            "method": self.method.state(),
            "reward_manager": self.reward_manager.state_dict(),
            "kl_control": self.advantages.kl_control.state_dict(),
            "sampler": to_json(sampling if self.ahead is None else {"steps": sampling} | self.ahead.state()),
        }

    def _log(self) -> None:
        """Log the step's metrics to the trackers and the display."""
        record = self.timer.take_step()
        timing = self.step_metrics(record)
        if "gen" in record.work:
            timing["perf/generated_tokens"] = record.work["gen"].tokens
        metrics = self.metrics | timing
        self.tracker.log(self.step, metrics)
        if not self.logged_prefix_note and (note := prefix_note(metrics, self.config.calculator.diff_stride)):
            self.logged_prefix_note = True
            self.display.say(note)
        self.display.step(self.step, metrics, step_note(metrics, self.config.data.train_batch_size))
        self.metrics = {}


def step_note(metrics: Mapping[str, float], batch_size: int) -> str:
    """Return a note if dynamic sampling found no informative group, or an empty string otherwise."""
    return "no informative group, no update" if metrics.get("train/filler_groups") == batch_size else ""


def prefix_note(metrics: Mapping[str, float], stride: int) -> str:
    """Return a note if all responses were too short for velocity or acceleration, or an empty string otherwise."""
    for where in ("", "val/"):
        velocity, acceleration = (
            metrics.get(f"{where}cal/overall/layer_1/Effective Rank {name}/mean") for name in ("diff", "diff 2")
        )
        if acceleration == 0:
            what, needed = ("ERV and ERA are", "two") if velocity == 0 else ("ERA is", "three")
            return f"note: {what} 0: no response has {needed} prefixes, calculator.diff_stride={stride} tokens apart"
    return ""


def prompt_order(config: PPOConfig, method: MethodCalls) -> str:
    """Describe the options besides ``data.shuffle`` that affect the prompt order or the responses in checkpoints.

    A run can be resumed only if this description is unchanged. It is empty if none of these options is set.
    """
    num = method.candidates_per_prompt
    candidates = f"{method.where} with {num} candidates a prompt" if num > 1 else ""
    ahead = config.async_training.max_staleness
    sizes = (
        f" async_training.partial_rollout={config.async_training.partial_rollout} rollout.n={config.rollout.n}"
        f" data.train_batch_size={config.data.train_batch_size}"
        f" data.max_response_length={config.data.max_response_length}"
        f" rollout.multi_turn.enable={config.rollout.multi_turn.enable}"
    )
    admitted = f"async_training.max_staleness={ahead}{sizes}" if ahead else ""
    admitted += " with rollout.nnodes" if config.samples_ahead else ""
    admitted += " with agents" if ahead and config.rollout.multi_turn.agent.enabled else ""
    return " ".join(filter(None, (candidates, config.data.order, admitted)))
