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

    A reward that a response lacks, because its function returned None, adds nothing and enters no mean. Standard
    deviations are unbiased; those of a group or a batch of one are 1.

    Args:
        weights: Weight of each reward, by the name of its function.

    Raises:
        ConfigError: If no response has a reward of one of these names.
    """
    total = torch.zeros(len(batch), dtype=torch.float64)
    for name, weight in weights.items():
        values = [verdict.extras.get(name) for verdict in batch.verdicts]
        rows = torch.tensor([i for i, value in enumerate(values) if isinstance(value, int | float)], dtype=torch.long)
        if not len(rows):
            known = sorted({key for verdict in batch.verdicts for key in verdict.extras})
            raise ConfigError(
                f"algorithm.adv_estimator_kwargs.weights.{name}: no response has such a reward; add functions in "
                f"reward_score.custom_functions, and name one of {', '.join(known) or 'them'}"
            )
        rewards = torch.tensor([float(values[i]) for i in rows.tolist()], dtype=torch.float64)
        groups = group_responses(batch.group[rows])
        total[rows] += weight * groups.centred(rewards) / (groups.deviations(rewards) + EPS)[groups.index]
    whole = group_responses(torch.zeros(len(batch), dtype=torch.long))
    return whole.centred(total) / (whole.deviations(total) + EPS)[whole.index]
