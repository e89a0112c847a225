"""Rewards, advantages, and the mask of tokens to train on.

Legend: B responses, R padded response length.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl.algorithms.advantages.estimators import token_variances
from verl.algorithms.advantages.groups import on_response_tokens
from verl.algorithms.kl import KLController, kl_penalised_rewards
from verl.algorithms.rollout_correction import rejection_mask, rollout_weights
from verl.algorithms.scores import overlong_penalty, resampled_rows
from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.models.tokenizer import reward_model_batch
from verl.rank.reward_manager import RewardManager
from verl.single_controller.roles import ModelWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.logging.rollout_metrics import learning_metrics, with_prefix
from verl.utils.user_code import UserFunction, check_finite, check_tensor, is_import_path, kl_estimator


@dataclass(eq=False)
class ResponseRewards:
    """Reward computation from verifier scores, reward model scores and the overlong penalty."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the reward model, or None if there is no reward model."""
    workers: WorkerGroup
    """Workers that run the reward model."""

    def compute(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Return the reward of each response, [B] float64, and metrics.

        A reward is the verifier's score, or its weighted sum with the reward model's score, plus the overlong penalty.
        """
        config = self.config
        metrics: dict[str, float] = {}
        rewards = batch.scores.double()
        if config.uses_reward_model:
            scores, metrics = self._reward_model_scores(batch)
            rewards = config.reward_model.rule_weight * rewards + config.reward_model.weight * scores
        overlong = config.reward_score.overlong_buffer
        if overlong.enable:
            limit = config.data.max_response_length
            penalty = overlong_penalty(batch.response_lengths, limit, overlong.len, overlong.penalty_factor)
            rewards = rewards + penalty
            metrics["train/overlong_penalty/mean"] = penalty.mean().item()
        return rewards, metrics

    def _reward_model_scores(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        assert self.tokenizer is not None, "a run with a reward model loads its tokenizer"
        chats = [record.messages for record in batch.records]
        texts, too_long = reward_model_batch(chats, batch.texts, self.tokenizer, self.config.reward_model.max_length)
        judge = ModelWorkers(self.workers, self.config.reward_model.model.ulysses_sequence_parallel_size)
        scores = judge.map_rows("reward_model.compute_scores", texts).scores.double()
        return scores, {
            "reward_model/score/mean": scores.mean().item(),
            "reward_model/score/std": scores.std(correction=0).item(),
            "reward_model/clip_ratio": too_long,
        }


class AdvantageEstimation:
    """Advantage estimation with a built-in or custom estimator, rank shaping, and a KL penalty in the reward.

    Raises ``ConfigError`` if a custom function cannot be loaded or does not accept its arguments.
    """

    def __init__(self, config: PPOConfig, reward_manager: RewardManager) -> None:
        self.config = config
        self.reward_manager = reward_manager
        algorithm, control = config.algorithm, config.algorithm.kl_ctrl
        self.kl_control = KLController(control.type, control.kl_coef, control.target_kl, control.horizon)
        self.kl_penalty = kl_estimator(algorithm.kl_penalty, "algorithm.kl_penalty", algorithm.kl_penalty_kwargs)
        self.function: UserFunction | None = None
        if is_import_path(algorithm.adv_estimator):
            path, kwargs = algorithm.adv_estimator, algorithm.adv_estimator_kwargs
            self.function = UserFunction("algorithm.adv_estimator", path, ["batch"], kwargs)

    def fill_learn_mask(self, batch: Batch) -> dict[str, float]:
        """Fill ``learn_mask``, the mask of tokens to include in the losses, and return metrics of rejected tokens."""
        mask = batch.policy_mask & learned_responses(batch, self.config)[:, None]
        metrics: dict[str, float] = {}
        rules = self.config.algorithm.rollout_correction.rejections
        if rules:
            pair = (batch.padded("logprobs"), batch.padded("rollout_logprobs"))
            keep, shares = rejection_mask(*pair, batch.policy_mask, rules)
            mask, metrics = mask & keep, with_prefix("rollout_corr", shares)
        batch.fill(learn_mask=mask)
        return metrics

    def estimate(self, batch: Batch, rewards: Tensor, greedy_rewards: Tensor | None) -> dict[str, float]:
        """Fill the reward, advantage and return columns from ``rewards`` [B] float64, and return metrics.

        ``greedy_rewards`` [B] contains the reward of the greedy response to each response's prompt, for ReMax.
        """
        mask, manager = batch.policy_mask.long(), self.reward_manager
        metrics: dict[str, float] = {}
        # 1. Assign the reward to the last token, which the policy always samples.
        token_scores = torch.zeros(mask.shape, dtype=torch.float64)
        token_scores[torch.arange(len(mask)), batch.response_lengths - 1] = rewards
        # 2. Apply rank shaping and the KL penalty to rewards.
        if manager.config.active:
            phi, metrics = manager.compute_phi(batch.rank_metrics)
            token_scores = manager.shape_rewards(token_scores, mask, phi)
            batch.fill(phi=phi)
        token_rewards = token_scores
        if self.config.algorithm.use_kl_in_reward:
            token_rewards, penalty = self._penalise(token_scores, batch)
            metrics |= penalty
        batch.fill(token_rewards=token_rewards, rewards=token_rewards.double().sum(dim=1))
        # 3. Estimate advantages and apply rank shaping to them.
        unshaped, returns = self._advantages(batch, token_rewards, greedy_rewards)
        returns = None if returns is None else returns.float()
        advantages = unshaped
        if manager.config.active:
            advantages, changes = manager.shape_advantages(unshaped, mask, batch.phi)
            metrics |= changes
        # 4. Add the teacher's advantages, or replace the task's advantages with them.
        if self.config.teacher.in_advantage:
            of_teacher = self._teacher_advantages(batch)
            if self.config.teacher.use_task_rewards:
                advantages = advantages + of_teacher
            else:
                unshaped = advantages = of_teacher
        # 5. Fill the columns and log them.
        of_responses = {"score_0": batch.scores, "score": token_scores.sum(dim=1), "rewards": batch.rewards}
        of_tokens = {"advantages_0": unshaped, "advantages": advantages}
        if returns is not None:
            of_tokens["returns"] = returns
        if "values" in batch:
            of_tokens["values"] = batch.padded("values")
        metrics |= learning_metrics(of_responses, of_tokens, batch.padded("learn_mask"))
        batch.fill(unshaped_advantages=unshaped, advantages=advantages.float(), returns=returns)
        batch.fill(scores_with_phi=of_responses["score"])
        return metrics

    def resampled_rows(self, batch: Batch, step: int) -> Tensor:
        """Draw the indices of responses that PF-PPO trains on, [B'] int64, seeded by the run's seed and the step."""
        options = self.config.algorithm.pf_ppo
        # Hash the seed and the step, because torch generators use only the low 32 bits of a seed.
        (seed,) = np.random.SeedSequence([self.config.seed, step]).generate_state(1)
        generator = torch.Generator().manual_seed(int(seed))
        rewards, method = batch.scores_with_phi, options.reweight_method
        return resampled_rows(rewards, batch.learned, method, options.weight_pow, generator)

    def _advantages(
        self, batch: Batch, token_rewards: Tensor, greedy_rewards: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the advantages and, if there is a critic, the returns, both [B, R]."""
        algorithm, function, mask = self.config.algorithm, self.function, batch.policy_mask.long()
        if function is None:
            return ADVANTAGE_ESTIMATORS[algorithm.adv_estimator](
                token_rewards,
                mask,
                batch.group,
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                learned_mask=batch.padded("learn_mask").long(),
                values=batch.padded("values") if "values" in batch else None,
                greedy_scores=greedy_rewards,
                variances=self._variances(batch),
            )
        returned = function(batch)
        check_tensor(function.where, returned, [len(batch)], mask.shape)
        if not returned.is_floating_point():
            raise ConfigError(f"{function.where}: returned {returned.dtype}; expected floating point numbers")
        values = returned.detach().cpu().double()
        values = on_response_tokens(values, mask) if values.dim() == 1 else torch.where(batch.policy_mask, values, 0.0)
        check_finite(function.where, values)
        return values, None

    def _teacher_advantages(self, batch: Batch) -> Tensor:
        """Return ``teacher.coef`` times the clamped log q - log p of the sampled tokens, [B, R] float64.

        Here q is the teacher and p is the policy before the update. On the policy's own samples, the mean of log p -
        log q is the reverse KL divergence, so learning from these advantages reduces the divergence.
        """
        options, limit = self.config.teacher, self.config.teacher.loss_max_clamp or math.inf
        ratios = batch.padded("teacher_logprobs").double() - batch.padded("old_logprobs").double()
        terms = ratios.clamp(-limit, limit)
        taught = batch.policy_mask & batch.taught[:, None] if "taught" in batch else batch.policy_mask
        return torch.where(taught, options.coef * terms, 0.0)

    def _variances(self, batch: Batch) -> Tensor | None:
        """Return token variances, [B, R], with importance weights if enabled, or None if no estimator needs them."""
        if not self.config.needs_sum_pi_squared:
            return None
        config, logprobs = self.config.algorithm.rollout_correction, batch.padded("logprobs")
        variances = token_variances(logprobs, batch.padded("sum_pi_squared"))
        if config.rollout_is is None:
            return variances
        pair = (logprobs, batch.padded("rollout_logprobs"))
        weights, _ = rollout_weights(*pair, batch.policy_mask.long(), config.rollout_is, **config.weight_bounds)
        return variances * weights.square()

    def _penalise(self, token_rewards: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Subtract the weighted KL divergence from rewards, adapt the weight, and return the rewards and metrics."""
        control, pair = self.kl_control, (batch.padded("old_logprobs"), batch.padded("ref_logprobs"))
        coef = control.coef
        rewards, mean_kl = kl_penalised_rewards(token_rewards, *pair, batch.policy_mask.long(), coef, self.kl_penalty)
        control.update(mean_kl.item(), len(batch))
        return rewards, {"actor/reward_kl_penalty": mean_kl.item(), "actor/reward_kl_penalty_coeff": coef}


def learned_responses(batch: Batch, config: PPOConfig) -> Tensor:
    """Return which responses to learn from, [B] bool. Rollout correction may still reject their tokens."""
    learned: Tensor = batch.learned
    if config.trainer.remove_clip:
        learned = learned & ~batch.truncated
    if "taught" in batch and not config.teacher.use_task_rewards:
        learned = learned & batch.taught
    return learned
