"""MaxRL (arXiv 2602.02710): advantages that approximate the gradient of the log of a prompt's success rate.

    A = (r - mean_group r) / (mean_group r + 1e-6)

If rewards are 1 and 0, correct responses to a prompt with success rate p have A = (1 - p) / p and wrong responses have
A = -1. Hard prompts therefore have more weight than in GRPO. The formula follows the authors' code. Prompts without a
correct response do not contribute to the gradient. Groups of one response do not contribute either, unlike in the code.
"""

from torch import Tensor

from verl.algorithms.advantages.groups import GROUP_STD_EPS, group_means
from verl.batch import Batch
from verl.config.errors import ConfigError


def maxrl(batch: Batch) -> Tensor:
    """Return MaxRL's advantages, [B] float64. Raises ``ConfigError`` if a reward is negative."""
    if (batch.rewards < 0).any():
        raise ConfigError(
            f"algorithm.adv_estimator=verl.recipes.maxrl:maxrl: divides by mean rewards, and one is "
            f"{batch.rewards.min():g}; use rewards of at least 0, such as 1 and 0"
        )
    means = group_means(batch.rewards, batch.group)
    return (batch.rewards.double() - means) / (means + GROUP_STD_EPS)
