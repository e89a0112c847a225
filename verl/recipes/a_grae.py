"""A-GRAE (arXiv 2602.05548): asymmetric advantages that explore early and move from easy to hard prompts.

Let A be GRPO's advantage, p the mean reward of the prompt, and P the mean of p over the prompts in the batch:

    B = (1 - P) A / (2 (1 - sqrt p + 1e-6)) + P A / (2 (sqrt p + 1e-6))
    A-GRAE = B min(1, P / alpha) if B > 0, else B

While the policy is weak (small P), easy prompts get more weight and positive advantages are damped. As the policy
improves, hard prompts get more weight and the damping ends. The formula follows the authors' code, where alpha is 1 for
mathematics and 0.5 for other tasks.
"""

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import GROUP_STD_EPS, group_responses
from verl.batch import Batch
from verl.config.checks import require
from verl.config.errors import ConfigError


def a_grae(batch: Batch, alpha: float = 1.0) -> Tensor:
    """Return A-GRAE's advantages, [B] float64.

    Args:
        alpha: Mean reward P at which positive advantages are no longer damped, above 0.

    Raises ``ConfigError`` if ``alpha`` is not above 0, or a reward is not in [0, 1].
    """
    require(alpha > 0, "algorithm.adv_estimator_kwargs.alpha", alpha, "must be above 0")
    rewards = batch.rewards.double()
    if (rewards < 0).any() or (rewards > 1).any():
        raise ConfigError(
            "algorithm.adv_estimator=verl.recipes.a_grae:a_grae: reads mean rewards as success rates, and one reward "
            f"is {rewards[(rewards - 0.5).abs().argmax()]:g}; use rewards from 0 to 1"
        )
    groups = group_responses(batch.group)
    by_prompt = groups.sums(rewards) / groups.counts
    root, mean = by_prompt.sqrt()[groups.index], by_prompt.mean()
    # 1. Weight prompts by their difficulty.
    easy, hard = 0.5 / (1 - root + GROUP_STD_EPS), 0.5 / (root + GROUP_STD_EPS)
    weighted = groups.normalised(rewards) * ((1 - mean) * easy + mean * hard)
    # 2. Damp positive advantages.
    return torch.where(weighted > 0, weighted * (mean / alpha).clamp(max=1), weighted)
