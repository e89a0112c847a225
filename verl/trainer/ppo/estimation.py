"""From the rewards of a step to its advantages: built-in estimators, and a researcher's own code.

Legend: B responses, R response columns.
"""

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages import AdvantageEstimate
from verl.algorithms.advantages.groups import on_response_tokens
from verl.algorithms.kl import KLEstimator
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.signal import AlgorithmConfig
from verl.data.signal_inputs import AdvantageInputs, RewardInputs
from verl.protocol import PolicyScores, RolloutBatch
from verl.rank.token_metrics import check_token_metrics
from verl.trainer.ppo.batches import ModelOutputs
from verl.trainer.ppo.core_algos import ADVANTAGE_ESTIMATORS, EstimatorOptions, rollout_weights, token_variances
from verl.trainer.ppo.sampled import Sampled
from verl.trainer.ppo.sampling import score_tensors
from verl.utils.own import OwnCall
from verl.utils.user_code import is_import_path, kl_estimator


class SignalEstimation:
    """``algorithm.reward_transform`` and ``algorithm.adv_estimator``, the latter built in or the user's own.

    Raises:
        ConfigError: the user's code cannot be loaded, or does not take what it would be called with.
    """

    def __init__(self, config: PPOConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        algorithm = config.algorithm
        self.transform: OwnCall | None = None
        if algorithm.reward_transform is not None:
            path, options = algorithm.reward_transform, algorithm.reward_transform_kwargs
            self.transform = OwnCall("algorithm.reward_transform", path, options, ["inputs"])
        self.estimator: OwnCall | None = None
        if is_import_path(algorithm.adv_estimator):
            path, options = algorithm.adv_estimator, algorithm.adv_estimator_kwargs
            self.estimator = OwnCall("algorithm.adv_estimator", path, options, ["inputs"])

    def transformed(
        self, step: int, sampled: Sampled, outputs: ModelOutputs, rewards: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """``rewards [B]`` float64 as the user's transform has them, and what it changed; without one as they are."""
        own = self.transform
        if own is None:
            return rewards, {}
        found = own(RewardInputs(**self._responses(step, sampled, outputs), rewards=rewards.clone()))
        after = _checked(own, found, [rewards.shape], torch.ones_like(rewards))
        change = (after - rewards).mean().item()
        return after, {"train/reward_transform/mean": after.mean().item(), "train/reward_transform/change": change}

    def advantages(
        self,
        step: int,
        sampled: Sampled,
        outputs: ModelOutputs,
        rewards: Tensor,
        token_rewards: Tensor,
        learned_mask: Tensor,
        greedy_scores: Tensor | None,
    ) -> AdvantageEstimate:
        """From ``token_rewards [B, R]``, and for the user's estimator the ``rewards [B]`` they come from."""
        rollout, algorithm, own = sampled.rollout, self.config.algorithm, self.estimator
        mask = rollout.response_mask
        if own is None:
            options = EstimatorOptions(
                norm_by_std=algorithm.norm_adv_by_std_in_grpo,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                learned_mask=learned_mask,
                values=outputs.values,
                greedy_scores=greedy_scores,
                variances=self._variances(rollout, outputs.scores),
            )
            return ADVANTAGE_ESTIMATORS[algorithm.adv_estimator](token_rewards, mask, rollout.group_ids, options)
        inputs = AdvantageInputs(
            **self._responses(step, sampled, outputs),
            rewards=rewards.clone(),
            token_rewards=token_rewards.clone(),
            learned_mask=learned_mask,
        )
        found = _checked(own, own(inputs), [rewards.shape, mask.shape], mask)
        return AdvantageEstimate(on_response_tokens(found, mask) if found.dim() == 1 else found)

    def state(self) -> dict[str, Any]:
        """The state of the user's code as JSON."""
        return {own.field: own.state() for own in (self.transform, self.estimator) if own is not None}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned. Raises ``ConfigError`` if it is other code's."""
        for own in (self.transform, self.estimator):
            if own is not None:
                own.load_state(state.get(own.field))

    def _responses(self, step: int, sampled: Sampled, outputs: ModelOutputs) -> dict[str, Any]:
        """The fields of :class:`verl.data.signal_inputs.StepResponses`."""
        rollout, scores = sampled.rollout, score_tensors(sampled.pending)
        records = sampled.prompts.records
        return {
            "step": step,
            "total_steps": self.total_steps,
            "max_response_length": self.config.data.max_response_length,
            "records": [record for record in records for _ in range(len(rollout) // len(records))],
            "texts": sampled.texts,
            "verdicts": sampled.pending.result(),
            "responses": rollout.responses,
            "response_mask": rollout.response_mask,
            "rollout_logprobs": rollout.rollout_logprobs,
            "lengths": rollout.response_mask.sum(dim=1),
            "truncated": rollout.truncated,
            "group_ids": rollout.group_ids,
            "learned": sampled.learned,
            "scores": scores[0].double(),
            "correct": scores[1],
            "rank_metrics": outputs.rank_metrics,
        }

    def _variances(self, rollout: RolloutBatch, scores: PolicyScores | None) -> Tensor | None:
        """[B, R], of each token, for the estimators that need it; with truncated importance sampling those of the
        weighted tokens."""
        if scores is None or not self.config.needs_sum_pi_squared:
            return None
        assert scores.statistics is not None, "the policy computes what PPOConfig.needs_sum_pi_squared asks for"
        actor, variances = self.config.actor, token_variances(scores.logprobs, scores.statistics["sum_pi_squared"])
        if actor.tis_level == "none":
            return variances
        pair = (scores.logprobs, rollout.rollout_logprobs)
        weights, _ = rollout_weights(*pair, rollout.response_mask, actor.tis_level, actor.tis_cap)
        return variances * weights.square()


def kl_penalty(algorithm: AlgorithmConfig) -> str | KLEstimator:
    """``algorithm.kl_penalty``, built in or the user's own."""
    return kl_estimator(algorithm.kl_penalty, "algorithm.kl_penalty", algorithm.kl_penalty_kwargs)


def check_own_code(config: PPOConfig, total_steps: int) -> None:
    """Raise ``ConfigError`` for code of the user's own in the learning signal that cannot be loaded or called."""
    SignalEstimation(config, total_steps)
    kl_penalty(config.algorithm)
    check_token_metrics(config.calculator.token_metrics)
    kl_estimator(config.actor.kl_loss_type, "actor.kl_loss_type", config.actor.kl_loss_type_kwargs)


def _checked(own: OwnCall, found: Any, shapes: list[torch.Size], mask: Tensor) -> Tensor:
    """What the user's code returned, in float64 and 0 outside ``mask``; ``ConfigError`` unless it has one of the shapes
    and is finite where ``mask``, of the last shape, is not 0."""
    expected = " or ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes)
    fits = isinstance(found, Tensor) and found.is_floating_point() and found.shape in shapes
    if not fits:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"{own.where}: returned {what}; expected a tensor of floating point numbers, {expected}")
    values: Tensor = found.detach().cpu().double()
    if values.shape == mask.shape:
        values = torch.where(mask.bool(), values, 0.0)
    wrong = (~values.isfinite()).reshape(len(values), -1).any(dim=1).nonzero()
    if len(wrong):
        raise ConfigError(
            f"{own.where}: returned NaN or infinity for response {int(wrong[0])}; expected finite numbers"
        )
    return values
