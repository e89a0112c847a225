"""GDPO (arXiv 2601.05242): normalise each of several rewards within its group before they are added.

GRPO adds first, so that different combinations of rewards may get the same advantage. GDPO normalises each reward r_k
within the group of a prompt, adds, and normalises the sum over the batch:

    A_k = (r_k - mean_group r_k) / (std_group r_k + eps)
    S = sum_k w_k A_k
    A = (S - mean_batch S) / (std_batch S + eps)

The rewards are the scores that ``reward_score.custom_functions`` keeps under the names of its functions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_responses
from verl.batch import Batch
from verl.config.errors import ConfigError

EPS = 1e-6


def gdpo(batch: Batch, weights: Mapping[str, float]) -> Tensor:
    """Return GDPO's advantages, [B] float64.

    A reward that a response lacks, because its function returned None, adds nothing and enters no mean; so does one
    that a single response of a group has. Standard deviations are unbiased.

    Args:
        weights: Weight of each reward, by the name of its function.

    Raises:
        ConfigError: If no weight differs from 0, or no response has any of these rewards.
    """
    if not any(weights.values()):
        raise ConfigError(
            "algorithm.adv_estimator_kwargs.weights: name rewards with their weights, {right: 1, short: 0.5}"
        )
    found = False
    total = torch.zeros(len(batch), dtype=torch.float64)
    for name, weight in weights.items():
        values = [verdict.extras.get(name) for verdict in batch.verdicts]
        rows = torch.tensor([i for i, value in enumerate(values) if isinstance(value, int | float)], dtype=torch.long)
        if not len(rows):
            continue
        found = True
        rewards = torch.tensor([float(values[i]) for i in rows.tolist()], dtype=torch.float64)
        groups = group_responses(batch.group[rows])
        relative = groups.centred(rewards) / (groups.deviations(rewards) + EPS)[groups.index]
        total[rows] += weight * torch.where(groups.counts[groups.index] > 1, relative, 0.0)
    if not found:
        known = sorted({key for verdict in batch.verdicts for key in verdict.extras})
        raise ConfigError(
            f"algorithm.adv_estimator_kwargs.weights={dict(weights)}: no response has such rewards; add functions in "
            f"reward_score.custom_functions, and name some of {', '.join(known) or 'them'}"
        )
    whole = group_responses(torch.zeros(len(batch), dtype=torch.long))
    return whole.centred(total) / (whole.deviations(total) + EPS)[whole.index]
