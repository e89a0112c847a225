"""The training loop: PPO and its relatives with rank shaping (arXiv 2509.23808) over a group of hybrid workers.

Legend: B responses of a step, R response columns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.algorithms.pf_ppo import resampled_rows
from verl.algorithms.rollout_correction import rejection_mask
from verl.checkpoint.resume import Resumption, best_validation, saved_validations
from verl.checkpoint.saver import CheckpointSaver
from verl.config.actor import ActorConfig
from verl.config.ppo import CriticConfig, PPOConfig
from verl.data.prompts import TokenizedPrompts
from verl.data.samplers import CustomSampler
from verl.protocol import PolicyBatch, PolicyScores, RankMetrics, RolloutBatch, ValueBatch
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import with_token_metrics
from verl.run.session import TrainingRun
from verl.run.tracking import Tracker
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.logging.release_names import release_names
from verl.trainer.logging.rollout_metrics import (
    dataset_scalars,
    filtered_length_metrics,
    learning_metrics,
    length_metrics,
    policy_metrics,
    rank_scalars,
    response_metrics,
    with_prefix,
)
from verl.trainer.logging.source_metrics import metrics_by_source, response_figures
from verl.trainer.logging.speed import BATCH, step_metrics
from verl.trainer.logging.step_profiler import StepProfiler
from verl.trainer.logging.timing import PhaseTimer, Work
from verl.trainer.ppo.adapt import CriticWorkers, PolicyWorkers, ReferenceWorkers, flat_policy_batch
from verl.trainer.ppo.batches import LearningSignal, ModelOutputs, mini_batches, policy_batch
from verl.trainer.ppo.core_algos import StepSize, kl_controller, kl_penalised_rewards, mean_rollout_weight
from verl.trainer.ppo.estimation import SignalEstimation, kl_penalty
from verl.trainer.ppo.recompose import behaviour_logprobs
from verl.trainer.ppo.sampled import Sampled
from verl.trainer.ppo.samples import SampleKeeper
from verl.trainer.ppo.sampling import Sampler, StepSample, score_tensors, step_outcome, verdict_metrics
from verl.trainer.schedule import endless, is_due
from verl.trainer.skipped_updates import SkippedUpdates
from verl.trainer.validation import Validator
from verl.utils.json_state import from_json, to_json
from verl.workers.policy_loss import PolicyLoss

BEST_BY = "val/pass@1"
"""The validation metric of which the highest value makes a checkpoint the best."""


class RayPPOTrainer:
    """Drives the workers through the steps of training; holds no tensor larger than a batch of tokens."""

    def __init__(
        self,
        config: PPOConfig,
        train_loader: StatefulDataLoader,
        val_batches: list[TokenizedPrompts],
        workers: WorkerGroup,
        sampler: Sampler,
        calculator: RepresentationMetricsCalculator | None,
        tracker: Tracker,
        samples: SampleKeeper,
        run: TrainingRun,
    ) -> None:
        self.config = config
        self.loader = train_loader
        self.prompts = endless(train_loader)
        self.workers = workers
        self.loss = PolicyLoss(config.actor)
        self.policy = PolicyWorkers(workers, config, self.loss.needs.whole_groups)
        self.reference = ReferenceWorkers(workers, config) if config.uses_reference else None
        self.critic = CriticWorkers(workers, config) if config.uses_critic else None
        self.actor_skipped = SkippedUpdates("actor", "actor.optim", config.actor.optim)
        self.critic_skipped = SkippedUpdates("critic", "critic.optim", config.critic.optim)
        self.sampler = sampler
        self.calculator = calculator
        self.tracker = tracker
        self.samples = samples
        self.display = run.display
        self.preemption = run.preemption
        self.reward_manager = RewardManager(config.reward_manager)
        self.validator = Validator(val_batches, sampler, self.policy, calculator, self.reward_manager)
        control = config.algorithm.kl_ctrl
        self.kl_control = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
        self.kl_penalty = kl_penalty(config.algorithm)
        self.timer = PhaseTimer(run.display.phase, workers.take_peak_memory)
        self.step_metrics = step_metrics(config, workers.world_size, workers.device_name)
        trainer = config.trainer
        folder = Path(trainer.default_local_dir)
        self.profiler = StepProfiler(workers, trainer.profile_steps, folder, run.display.say)
        self.total_steps = trainer.num_steps(len(train_loader))
        self.estimation = SignalEstimation(config, self.total_steps)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.validations: dict[int, dict[str, float]] = {}
        newest, always = trainer.max_ckpt_to_keep, trainer.except_save
        background = trainer.saves_in_background(workers.device_type)
        self.saver = CheckpointSaver(run.attempt, workers, background, trainer.save_hf_model, newest, always)

    def fit(self) -> None:
        """Train from the step after the one reached, 0 at first, to the last."""
        trainer = self.config.trainer
        if self.validator.batches and (trainer.val_only or (trainer.val_before_train and self.step == 0)):
            self._validate()
            self._log()
        if trainer.val_only:
            return
        with self.preemption.finishing_steps():
            self._train()
        with self.timer.phase("save_checkpoint"):
            self.saver.finish()

    def _train(self) -> None:
        """The steps that are left."""
        trainer = self.config.trainer
        for step in range(self.step + 1, self.total_steps + 1):
            self.step = step
            self.profiler.begin(step)
            sample = self._sample()
            outputs = self._compute_outputs(sample.sampled.rollout, sample.sampled.replayed)
            scores = self._collect_scores(sample, outputs.rank_metrics)
            signal = self._compute_advantages(sample, scores, outputs)
            self._update_critic(sample.sampled.rollout, outputs, signal)
            self._update_actor(sample.sampled, outputs, signal)
            self._compare_policies(sample.sampled, outputs.scores)
            self.samples.keep_training(step, sample.sampled, outputs, signal)
            self._update_baselines(sample, outputs.rank_metrics)
            self._update_sampler(sample.fresh)
            self._sync_weights()
            self.profiler.end(step)
            if self._due(trainer.test_freq):
                self._validate()
            # Before the checkpoint, so that a resumed run has the record of its step.
            self._log()
            if self._due(trainer.save_freq) or self.step in trainer.except_save:
                self._save()
            self.saver.poll()
            if step < self.total_steps:
                self.preemption.after_step(step, self._save_now)

    def restore(self, resumption: Resumption) -> None:
        """Restore the state of a checkpoint, and give the rollout engines its weights."""
        state = resumption.state
        self.workers.run("load", resumption.folder, resumption.step)
        self._sync_weights()
        self.step = resumption.step
        self.loader.load_state_dict(from_json(state["loader"]))
        self.sampler.hooks.load_state(state.get("hooks", {}))  # Earlier versions had none.
        self.reward_manager.load_state_dict(state["reward_manager"])
        self.kl_control.load_state_dict(state["kl_control"])
        # Checkpoints of earlier versions were written without code of the user's own.
        self.estimation.load_state(state.get("signal", {}))
        self.validations = saved_validations(state)
        self.timer.totals.update(state["seconds_by_phase"])

    def _due(self, frequency: int) -> bool:
        return is_due(self.step, self.total_steps, frequency)

    def _sample(self) -> StepSample:
        """The step's responses."""
        sample = self.sampler.sample_step(self.prompts, self.step, self.timer)
        self.metrics |= sample.metrics | length_metrics(sample.fresh.rollout)
        return sample

    def _compute_outputs(self, rollout: RolloutBatch, replayed: Tensor | None = None) -> ModelOutputs:
        """Log-probabilities under policy and reference, the critic's values, and rank metrics."""
        work = Work.of(rollout.attention_mask.sum(dim=1))
        self.timer.count(BATCH, work)
        scores_first = self.config.scores_before_update or self.loss.needs.of_old_policy
        scores = self._score(rollout, self._num_scored_in_update) if scores_first else None
        old_logprobs = rollout.rollout_logprobs
        if not self.config.actor.bypass_mode:
            assert scores is not None, "without bypass_mode the policy always scores"
            old_logprobs = scores.logprobs
            if self.config.actor.tis_level == "none":
                old_logprobs = behaviour_logprobs(old_logprobs, rollout.rollout_logprobs, replayed)
        ref_logprobs, values = old_logprobs, None
        if self.reference is not None:
            with self.timer.phase("ref"):
                ref_logprobs = self.reference.compute_logprobs(rollout)
            self.timer.count("ref", work)
        if self.critic is not None:
            with self.timer.phase("values"):
                values = self.critic.compute_values(rollout)
            self.timer.count("values", work)
        calculator, rank_metrics = self.config.calculator, rollout.rank_metrics
        if scores is not None and calculator.measured_by("actor"):
            rank_metrics = scores.rank_metrics
        rank_metrics = with_token_metrics(rank_metrics, calculator.token_metrics, rollout, scores)
        return ModelOutputs(scores, old_logprobs, ref_logprobs, values, rank_metrics)

    @property
    def _num_scored_in_update(self) -> int:
        """How many of a step's first rows the policy scores as it learns from them, at no cost."""
        updates = self.step > self.config.trainer.critic_warmup
        num_rows = self.config.actor.ppo_mini_batch_size * self.config.rollout.n
        in_update = self.config.scores_in_update and not self.loss.needs.before_update
        return num_rows if in_update and updates else 0

    def _score(self, rollout: RolloutBatch, num_later: int) -> PolicyScores:
        """What the policy says of its responses, but for the first ``num_later``, of which that is NaN."""
        later, rest = rollout[:num_later], rollout[num_later:]
        scores = [PolicyScores.unknown(later)] if num_later else []
        if len(rest):
            with self.timer.phase("old_log_prob"):
                scores.append(self.policy.compute_logprobs(rest))
            self.timer.count("old_log_prob", Work.of(rest.attention_mask.sum(dim=1)))
        return cast(PolicyScores, torch.cat(cast(Any, scores)))

    def _collect_scores(self, sample: StepSample, rank_metrics: RankMetrics) -> Tensor:
        """Wait for the verifiers; their scores [B]."""
        sampled, fresh, rollout = sample.sampled, sample.fresh, sample.sampled.rollout
        with self.timer.phase("reward"):
            scores, correct, _ = score_tensors(sampled.pending)
        logged, results = self.sampler.sources, fresh.first_results

        def describe(rows: Tensor) -> dict[str, float]:
            figures = response_figures(rollout[rows], rank_metrics[rows], correct[rows])
            return figures | self._dataset_scalars(rank_metrics[rows])

        with self.timer.phase("rank_metrics"):
            verdicts = verdict_metrics(results, fresh.rollout.group_ids, fresh.sources, logged)
            by_source = with_prefix("train", metrics_by_source(sampled.sources, logged, describe))
            # With dynamic sampling, the verdicts on everything sampled are already there.
            self.metrics = by_source | verdicts | self.metrics
            self.metrics |= rank_scalars(rank_metrics, correct) | response_metrics(rollout, correct)
            self.metrics |= self._dataset_scalars(rank_metrics)
        return scores

    def _dataset_scalars(self, rank_metrics: RankMetrics) -> dict[str, float]:
        stride = self.config.calculator.global_diff_stride_train
        return dataset_scalars(rank_metrics.mean_states, self.calculator, stride)

    def _compute_advantages(self, sample: StepSample, scores: Tensor, outputs: ModelOutputs) -> LearningSignal:
        """From the verifiers' ``scores`` [B] to what the updates learn from."""
        rollout, algorithm = sample.sampled.rollout, self.config.algorithm
        mask, learned_mask = rollout.response_mask, self._learned_mask(sample.sampled, outputs.scores)
        with self.timer.phase("reward"):
            rewards, metrics = self.sampler.rewards(sample.sampled)
            greedy_scores = None if sample.greedy is None else self._greedy_scores(sample.greedy)
            rewards, changes = self.estimation.transformed(self.step, sample.sampled, outputs, rewards)
            self.metrics |= metrics | changes
        with self.timer.phase("adv"):
            token_scores = torch.zeros(mask.shape, dtype=torch.float64)
            token_scores[torch.arange(len(mask)), mask.sum(dim=1) - 1] = rewards
            phi = None
            if self.config.reward_manager.active:
                phi, metrics = self.reward_manager.compute_phi(outputs.rank_metrics)
                token_scores = self.reward_manager.shape_rewards(token_scores, mask, phi)
                self.metrics |= metrics
            token_rewards = token_scores
            if algorithm.use_kl_in_reward:
                token_rewards = self._penalise(token_scores, outputs, mask)
            unshaped, returns = self.estimation.advantages(
                self.step, sample.sampled, outputs, rewards, token_rewards, learned_mask, greedy_scores
            )
            returns = None if returns is None else returns.float()
            advantages = unshaped
            if phi is not None:
                advantages, metrics = self.reward_manager.shape_advantages(unshaped, mask, phi)
                self.metrics |= metrics
        self.metrics |= learning_metrics(
            scores, token_scores, token_rewards, unshaped, advantages, returns, outputs.values, learned_mask
        )
        sums = token_rewards.double().sum(dim=1)
        means = metrics_by_source(
            sample.sampled.sources, self.sampler.sources, lambda rows: {"rewards/mean": sums[rows].mean().item()}
        )
        self.metrics |= with_prefix("train", means)
        rows = sample.sampled.updated
        if algorithm.use_pf_ppo:
            rows = self._resampled(token_scores.sum(dim=1), sample.sampled.learned)
        return LearningSignal(learned_mask, advantages.float(), returns, unshaped, sums, phi, rows)

    def _resampled(self, rewards: Tensor, learned: Tensor) -> Tensor:
        """[B'] int64, the responses that PF-PPO learns from; the draw depends on the run's seed and the step alone."""
        options = self.config.algorithm.pf_ppo
        # A generator of torch uses only the low 32 bits of its seed.
        (seed,) = np.random.SeedSequence([self.config.seed, self.step]).generate_state(1)
        generator = torch.Generator().manual_seed(int(seed))
        return resampled_rows(rewards, learned, options.reweight_method, options.weight_pow, generator)

    def _greedy_scores(self, greedy: Sampled) -> Tensor:
        """The reward of the greedy response to each response's prompt, [B]."""
        rewards, _ = self.sampler.rewards(greedy)
        self.metrics["train/greedy_score/mean"] = rewards.mean().item()
        return rewards.repeat_interleave(self.config.rollout.n)

    def _penalise(self, token_rewards: Tensor, outputs: ModelOutputs, mask: Tensor) -> Tensor:
        """Token rewards less the weighted KL divergence; the weight is then adapted to the divergence found."""
        control = self.kl_control
        rewards, mean_kl = kl_penalised_rewards(
            token_rewards,
            outputs.old_logprobs,
            outputs.ref_logprobs,
            mask,
            control.coef,
            self.kl_penalty,
        )
        self.metrics |= {"actor/reward_kl_penalty": mean_kl.item(), "actor/reward_kl_penalty_coeff": control.coef}
        control.update(mean_kl.item(), len(mask))
        return rewards

    def _learned_mask(self, sampled: Sampled, scores: PolicyScores | None) -> Tensor:
        """[B, R] int64, 1 on the tokens that enter the losses and their denominators."""
        learned, rollout = sampled.learned, sampled.rollout
        if self.config.trainer.remove_clip:
            learned = learned & ~rollout.truncated
        mask = rollout.response_mask * learned.long()[:, None]
        rules = self.config.algorithm.rollout_correction.rejections
        if rules:
            assert scores is not None, "rules compare the engine with the policy before the update"
            keep, metrics = rejection_mask(scores.logprobs, rollout.rollout_logprobs, rollout.response_mask, rules)
            self.metrics |= with_prefix("rollout_corr", metrics)
            mask = mask * keep.long()
        return mask

    def _update_critic(self, rollout: RolloutBatch, outputs: ModelOutputs, signal: LearningSignal) -> None:
        """Optimizer steps of the critic on consecutive mini-batches."""
        critic, config, values = self.critic, self.config.critic, outputs.values
        if critic is None:
            return
        assert values is not None and signal.returns is not None, "only gae has a critic, and it gives returns"
        batch = ValueBatch(
            rollout.input_ids, rollout.attention_mask, signal.mask, values, signal.returns, batch_size=[len(rollout)]
        )

        def update(mini: ValueBatch, num_tokens: int, _: int) -> dict[str, float]:
            return critic.update(mini, num_tokens)

        with self.timer.phase("update_critic"):
            self._update("update_critic", signal.taken(batch), config, update, self.critic_skipped)

    def _update_actor(self, sampled: Sampled, outputs: ModelOutputs, signal: LearningSignal) -> None:
        """Optimizer steps of the policy on consecutive mini-batches, once the critic is warm.

        The first fills in those of ``outputs.scores`` that are not known yet.
        """
        if self.step <= self.config.trainer.critic_warmup:
            return
        config, rollout, advantages = self.config.actor, sampled.rollout, signal.advantages
        if config.tis_normalize and config.tis_level != "none":
            assert outputs.scores is not None, "see PPOConfig.scores_before_update"
            pair = (outputs.scores.logprobs, rollout.rollout_logprobs)
            mean = mean_rollout_weight(*pair, rollout.response_mask, config.tis_level, config.tis_cap)
            self.metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
            advantages = advantages / mean
        batch = policy_batch(sampled, outputs, signal, advantages, config.tis_level != "none", self.loss.needs)
        self.metrics |= filtered_length_metrics(signal.mask, self.config.data.max_response_length)
        later = self._num_scored_in_update
        if later and not signal.mask[:later].any():
            # An update that teaches nothing is left out, and with it the scores.
            outputs.fill(self._score(rollout[:later], 0))
            later = 0

        def update(mini: PolicyBatch, num_tokens: int, num_sequences: int) -> dict[str, float]:
            nonlocal later
            size = StepSize(num_tokens, num_sequences, self.config.data.max_response_length)
            batch = self.loss.prepared(flat_policy_batch(mini), size)
            if not later:
                return self.policy.update(batch, num_tokens, num_sequences)
            later = 0
            metrics, scores = self.policy.update_on_policy(batch, num_tokens, num_sequences)
            outputs.fill(scores)
            return metrics

        with self.timer.phase("update_actor"):
            self._update("update_actor", signal.taken(batch), config, update, self.actor_skipped)

    def _update(
        self,
        phase: str,
        batch: Any,
        config: ActorConfig | CriticConfig,
        update: Callable[[Any, int, int], dict[str, float]],
        skipped: SkippedUpdates,
    ) -> None:
        """Update on ``batch`` in mini-batches; logs the mean of their metrics."""
        updates = []
        for _ in range(config.ppo_epochs):
            num_rows = config.ppo_mini_batch_size * self.config.rollout.n
            for mini, num_tokens, num_sequences in mini_batches(batch, num_rows):
                updates.append(update(mini, num_tokens, num_sequences))
                self.timer.count(phase, Work.of(mini.attention_mask.sum(dim=1)))
        self.metrics |= skipped.summarise(updates, self.step)

    def _compare_policies(self, sampled: Sampled, scores: PolicyScores | None) -> None:
        """Log how far the engine was from the policy, on what both did in this step."""
        rollout, actor = sampled.rollout[sampled.fresh], self.config.actor
        if scores is not None and len(rollout):
            self.metrics |= policy_metrics(rollout, scores[sampled.fresh], actor.tis_level, actor.tis_cap)

    def _update_baselines(self, sample: StepSample, rank_metrics: RankMetrics) -> None:
        """From everything sampled for the step."""
        metrics = rank_metrics[sample.sampled.fresh]
        if self.config.reward_manager.active and len(metrics):
            scores = torch.cat([score_tensors(sample.fresh.pending)[0], sample.dropped_scores])
            self.reward_manager.update(scores, metrics)

    def _update_sampler(self, sampled: Sampled) -> None:
        """Tell classes of the user's own how the step's prompts went."""
        sampler, hooks = self.loader.sampler, self.sampler.hooks
        if isinstance(sampler, CustomSampler) or hooks.listens:
            outcome = step_outcome(self.step, sampled, self.metrics)
            hooks.update(outcome)
            if isinstance(sampler, CustomSampler):
                sampler.update(outcome)

    def _sync_weights(self) -> None:
        with self.timer.phase("update_weights"):
            self.policy.sync_weights()

    def _validate(self) -> None:
        if self.validator.batches:
            with self.timer.phase("testing"):
                metrics, sampled = self.validator.validate()
                self.samples.keep_validation(self.step, sampled)
            self.metrics |= metrics
            self.validations[self.step] = metrics

    def _save(self) -> None:
        scores = {step: metrics[BEST_BY] for step, metrics in self.validations.items()}
        with self.timer.phase("save_checkpoint"):
            # A resumed run does not sample these steps again.
            self.samples.store.flush()
            self.saver.save(self.step, self._state(), scores)

    def _save_now(self) -> None:
        """Have a complete checkpoint of this step."""
        self.saver.finish()
        if self.saver.saved_step != self.step:
            self._save()
            self.saver.finish()

    def _state(self) -> dict[str, Any]:
        """The trainer's own state as JSON; see :meth:`restore`."""
        return {
            "job": "ppo",
            "step": self.step,
            "num_examples": len(self.loader.dataset),
            "shuffle": self.config.data.shuffle,
            "order": self.config.data.order,
            # It cannot be derived from the step: dynamic sampling draws as many batches as it needs.
            "loader": to_json(self.loader.state_dict()),
            "hooks": self.sampler.hooks.state(),
            "reward_manager": self.reward_manager.state_dict(),
            "kl_control": self.kl_control.state_dict(),
            "signal": self.estimation.state(),
            "best": best_validation(self.validations, BEST_BY),
            "validations": self.validations,
            "seconds_by_phase": self.timer.totals,
        }

    def _log(self) -> None:
        """Log the step's metrics to the trackers and the display."""
        record = self.timer.take_step()
        timing = self.step_metrics(record)
        if "gen" in record.work:
            timing["perf/generated_tokens"] = record.work["gen"].tokens
        metrics = self.metrics | timing
        if self.config.trainer.log_release_names:
            manager = self.reward_manager
            metrics |= release_names(metrics, manager.config, manager.baselines, self.validator.sources)
        self.tracker.log(self.step, metrics)
        self.display.step(self.step, metrics)
        self.metrics = {}
