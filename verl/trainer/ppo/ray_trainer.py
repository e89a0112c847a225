"""The training loop: GRPO with rank shaping (arXiv 2509.23808) over a group of hybrid workers.

Legend: B responses of a step, R response columns.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from verl.config.ppo import PPOConfig, SamplingConfig
from verl.data.prompts import PromptSample
from verl.protocol import PolicyBatch, RolloutBatch, layer_metrics
from verl.rewards.pool import PendingScores, VerifierPool
from verl.single_controller import WorkerGroup, concat
from verl.trainer.checkpoints import save_checkpoint
from verl.trainer.metrics_calculator import RepresentationMetricsCalculator
from verl.trainer.ppo.core_algos import (
    ADVANTAGE_ESTIMATORS,
    EstimatorOptions,
    kl_controller,
    kl_penalised_rewards,
)
from verl.trainer.progress import RunDisplay
from verl.trainer.reward_manager_versions import RewardManager
from verl.trainer.rollout_metrics import (
    dataset_scalars,
    group_metrics,
    length_metrics,
    logprob_agreement,
    rank_scalars,
)
from verl.trainer.steps import is_due, numbered_batches
from verl.trainer.timing import PhaseTimer
from verl.trainer.tracking import Tracker
from verl.trainer.validation import validate

VALIDATION_STEP = 1 << 20
"""Stands for the step in the seed of validation's draws: the same at every validation, none of them training's."""


class RayPPOTrainer:
    """Drives the workers through the steps of training; holds no tensor larger than a batch of tokens."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        train_loader: StatefulDataLoader,
        val_batches: list[PromptSample],
        workers: WorkerGroup,
        verifiers: VerifierPool,
        calculator: RepresentationMetricsCalculator | None,
        tracker: Tracker,
        display: RunDisplay,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.train_loader = train_loader
        self.val_batches = val_batches
        self.workers = workers
        self.verifiers = verifiers
        self.calculator = calculator
        self.tracker = tracker
        self.display = display
        self.reward_manager = RewardManager(config.reward_manager)
        control = config.algorithm.kl_ctrl
        self.kl_control = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
        self.timer = PhaseTimer(display.phase)
        self.total_steps = config.trainer.num_steps(len(train_loader))
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.validations: dict[int, dict[str, float]] = {}

    def fit(self) -> None:
        """Train from the first step to the last."""
        if self.config.trainer.val_before_train:
            self._validate()
            self._log()
        for step, prompts in numbered_batches(self.train_loader, self.total_steps):
            self.step = step
            rollout = self._generate(prompts)
            pending = self._submit_scores(prompts, rollout)
            logprobs, ref_logprobs = self._compute_logprobs(rollout)
            scores = self._collect_scores(rollout, pending)
            advantages = self._compute_advantages(rollout, scores, logprobs, ref_logprobs)
            self._update_actor(rollout, logprobs, ref_logprobs, advantages)
            self._update_baselines(rollout, scores)
            self._sync_weights()
            if self._due(self.config.trainer.test_freq):
                self._validate()
            if self._due(self.config.trainer.save_freq):
                self._save()
            self._log()

    def _due(self, frequency: int) -> bool:
        return is_due(self.step, self.total_steps, frequency)

    def _generate(self, prompts: PromptSample) -> RolloutBatch:
        with self.timer.phase("generate"):
            rollout = self._sample(prompts, self.config.rollout.train_kwargs, self.step)
        self.metrics |= length_metrics(rollout)
        return rollout

    def _sample(self, prompts: PromptSample, sampling: SamplingConfig, step: int) -> RolloutBatch:
        """Responses whose random draws depend on the run's seed, the step and the prompt alone."""
        return concat(self.workers.run_split("generate", prompts.tokens, sampling, (self.config.seed << 32) + step))

    def _submit_scores(self, prompts: PromptSample, rollout: RolloutBatch) -> PendingScores:
        """Start verifying the responses in the background."""
        n = len(rollout) // len(prompts.records)
        records = [record for record in prompts.records for _ in range(n)]
        tokens = [ids[mask.bool()] for ids, mask in zip(rollout.responses, rollout.response_mask, strict=True)]
        return self.verifiers.submit_batch(
            [record.data_source for record in records],
            self.tokenizer.batch_decode(tokens, skip_special_tokens=True),
            [record.ground_truth for record in records],
            [record.extra_info for record in records],
        )

    def _compute_logprobs(self, rollout: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B, R] under the policy and under the reference."""
        batch = rollout.exclude("rank_metrics", "mean_states")
        with self.timer.phase("logprobs"):
            logprobs, entropy = concat(self.workers.run_split("compute_logprobs", batch))
        mask = rollout.response_mask
        self.metrics |= logprob_agreement(rollout.rollout_logprobs, logprobs, mask)
        self.metrics["actor/rollout_entropy"] = (entropy.double().sum() / mask.sum()).item()
        if not self.config.uses_reference:
            return logprobs, logprobs
        with self.timer.phase("reference"):
            return logprobs, concat(self.workers.run_split("compute_ref_logprobs", batch))

    def _collect_scores(self, rollout: RolloutBatch, pending: PendingScores) -> Tensor:
        """Wait for the verifiers; scores [B]."""
        with self.timer.phase("verify"):
            scores, correct, counts = score_tensors(pending)
        self.metrics |= group_metrics(scores, correct, rollout.group_ids) | rank_scalars(rollout, correct)
        self.metrics |= {f"verifier/{reason}": float(count) for reason, count in counts.items()}
        self.metrics |= self._dataset_scalars(rollout, self.config.calculator.global_diff_stride_train)
        return scores

    def _dataset_scalars(self, rollout: RolloutBatch, diff_stride: int) -> dict[str, float]:
        return {} if self.calculator is None else dataset_scalars(rollout, self.calculator, diff_stride)

    def _compute_advantages(
        self, rollout: RolloutBatch, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor
    ) -> Tensor:
        """Advantages [B, R] float32, rank shaping included."""
        with self.timer.phase("advantages"):
            mask = rollout.response_mask
            token_rewards = torch.zeros(mask.shape, dtype=torch.float64)
            token_rewards[torch.arange(len(mask)), mask.sum(dim=1) - 1] = scores.double()
            algorithm = self.config.algorithm
            if algorithm.use_kl_in_reward:
                token_rewards = self._penalise(token_rewards, logprobs, ref_logprobs, mask)
            shaping = None
            if self.config.reward_manager.active:
                shaping = self.reward_manager.shape(token_rewards, mask, layer_metrics(rollout.rank_metrics))
                token_rewards = shaping.token_rewards
                self.metrics |= shaping.metrics
            estimate = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator]
            options = EstimatorOptions(algorithm.norm_adv_by_std_in_grpo, algorithm.gamma)
            advantages = estimate(token_rewards, mask, rollout.group_ids, options)
            if shaping is not None:
                advantages, metrics = self.reward_manager.shape_advantages(advantages, mask, shaping.phi)
                self.metrics |= metrics
        return advantages.float()

    def _penalise(self, token_rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Token rewards less the weighted KL divergence; the weight is then adapted to the divergence found."""
        control = self.kl_control
        rewards, mean_kl = kl_penalised_rewards(
            token_rewards, logprobs, ref_logprobs, mask, control.coef, self.config.algorithm.kl_penalty
        )
        self.metrics |= {"actor/reward_kl_penalty": mean_kl.item(), "actor/reward_kl_penalty_coeff": control.coef}
        control.update(mean_kl.item(), len(mask))
        return rewards

    def _update_actor(self, rollout: RolloutBatch, logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor) -> None:
        """Optimizer steps on consecutive mini-batches; their metrics are averaged."""
        batch = PolicyBatch(
            rollout.input_ids,
            rollout.attention_mask,
            rollout.response_mask,
            logprobs,
            rollout.rollout_logprobs,
            ref_logprobs,
            advantages,
            batch_size=[len(rollout)],
        )
        size = self.config.actor.ppo_mini_batch_size * self.config.rollout.n
        with self.timer.phase("update"):
            updates = [
                # All ranks report the same totals of the mini-batch.
                self.workers.run_split("update_actor", mini, int(mini.response_mask.sum()), len(mini))[0]
                for _ in range(self.config.actor.ppo_epochs)
                for mini in batch.split(size)
            ]
        self.metrics |= {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}

    def _update_baselines(self, rollout: RolloutBatch, scores: Tensor) -> None:
        if self.config.reward_manager.active:
            self.reward_manager.update(scores, layer_metrics(rollout.rank_metrics))

    def _sync_weights(self) -> None:
        with self.timer.phase("sync"):
            self.workers.run("sync_weights")

    def _validate(self) -> None:
        if not self.val_batches:
            return
        sampling = self.config.rollout.val_kwargs
        with self.timer.phase("validate"):
            metrics = validate(
                self.val_batches,
                lambda prompts: self._sample(prompts, sampling, VALIDATION_STEP),
                lambda prompts, rollout: score_tensors(self._submit_scores(prompts, rollout)),
                lambda rollout: self._dataset_scalars(rollout, self.config.calculator.global_diff_stride_val),
            )
        self.metrics |= metrics
        self.validations[self.step] = metrics

    def _save(self) -> None:
        root = Path(self.config.trainer.default_local_dir)
        with self.timer.phase("save"):
            save_checkpoint(root, self.step, lambda folder: self.workers.run("save_actor", folder), self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "reward_manager": self.reward_manager.state_dict(),
            "kl_control": self.kl_control.state_dict(),
        }

    def _log(self) -> None:
        """Hand the step's metrics to the trackers and the display."""
        timing = self.timer.take_step()
        generating = timing.get("timing_s/generate", 0.0)
        if generating:
            tokens = self.metrics["response_length/mean"] * self.config.data.train_batch_size * self.config.rollout.n
            timing |= {
                "perf/throughput": tokens / timing["timing_s/step"],
                "perf/rollout_throughput": tokens / generating,
            }
        self.tracker.log(self.step, self.metrics | timing)
        self.display.step(self.step, self.metrics | timing)
        self.metrics = {}


def score_tensors(pending: PendingScores) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Scores [B] float32, correctness [B] bool, and how often each reason for a verdict occurred."""
    results = pending.result()
    counts: dict[str, int] = {}
    for result in results:
        counts[result["reason"]] = counts.get(result["reason"], 0) + 1
    scores = torch.tensor([result["score"] for result in results])
    return scores, torch.tensor([result["correctness"] for result in results]), counts
