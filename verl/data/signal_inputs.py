"""What a researcher's own reward transforms and advantage estimators are told about the responses of a step.

Shapes: B responses, R padded response columns, L captured layers. Responses to one prompt are neighbours, unless
``algorithm.recompose`` orders them otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from verl.algorithms.advantages.groups import group_responses
from verl.data.prompt_rows import PromptRecord
from verl.protocol import RankMetrics
from verl.rewards import Score


@dataclass(frozen=True, kw_only=True)
class StepResponses:
    """The responses that a step learns from. All tensors are on the CPU; leave them as they are."""

    step: int
    """The training step, from 1."""
    total_steps: int
    """Steps of the whole run."""
    max_response_length: int
    """``data.max_response_length``, in tokens."""
    records: Sequence[PromptRecord]
    """The prompt of each response, B: ``data_source``, ``ground_truth``, ``extra_info``, ``messages``, and ``uid``, its
    place in the training data."""
    texts: Sequence[str]
    """What the verifiers read of each response, B."""
    verdicts: Sequence[Score]
    """What the verifier said of each response, B: ``boxed``, ``reason``, ``answer``, and in ``reward_extra_info``
    whatever else a function of ``reward_score.custom_functions`` returned."""
    responses: Tensor
    """[B, R] int64, the token ids."""
    response_mask: Tensor
    """[B, R] int64, 1 on response tokens, the end-of-sequence token included."""
    rollout_logprobs: Tensor
    """[B, R] float32, the engine's log-probability of each token in nats; 0 on padding."""
    lengths: Tensor
    """[B] int64, response tokens."""
    truncated: Tensor
    """[B] bool, the response was cut at its maximal length."""
    group_ids: Tensor
    """[B] int64, the same for the responses to one prompt; the numbers have no order."""
    learned: Tensor
    """[B] bool, false for responses that only fill up a batch of dynamic sampling."""
    scores: Tensor
    """[B] float64, the verifiers' scores."""
    correct: Tensor
    """[B] bool, the verifiers' verdicts."""
    rank_metrics: RankMetrics
    """``by_name["Effective Rank"]`` and so on, [B, L] float64; no names where ``calculator.enable`` is false."""

    def group_means(self, values: Tensor) -> Tensor:
        """The mean of ``values [B]`` over the responses to the same prompt, for each response: [B] float64."""
        groups = group_responses(self.group_ids)
        means: Tensor = (groups.sums(values) / groups.counts)[groups.index]
        return means


@dataclass(frozen=True, kw_only=True)
class RewardInputs(StepResponses):
    """What ``algorithm.reward_transform`` is called with."""

    rewards: Tensor
    """[B] float64, the rewards so far: scores, with the reward model's and the overlong penalty."""


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs(StepResponses):
    """What your own ``algorithm.adv_estimator`` is called with."""

    rewards: Tensor
    """[B] float64, the rewards after ``algorithm.reward_transform``."""
    token_rewards: Tensor
    """[B, R] float64, what built-in estimators see: the reward on the last token, with Phi where
    ``reward_manager.add_reward`` adds it, less the KL divergence where ``algorithm.use_kl_in_reward`` subtracts it."""
    learned_mask: Tensor
    """[B, R] int64, 1 on the tokens that enter the loss: those of ``response_mask`` less what was rejected."""
