"""GDPO (arXiv 2601.05242): normalise each of several rewards within the group before adding them.

GRPO adds rewards before normalising, so different combinations of rewards may get the same advantage. GDPO normalises
each reward r_k within the group of a prompt, then adds the results and normalises the sum over the batch:

    A_k = (r_k - mean_group r_k) / (std_group r_k + eps)
    S = sum_k w_k A_k
    A = (S - mean_batch S) / (std_batch S + eps)

The rewards are the scores of the individual ``reward_score.custom_functions``, stored under the functions' names.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_responses
from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.rewards import is_sum, summands
from verl.rewards.combined import summand_names
from verl.rewards.registry import CUSTOM_FUNCTIONS


def gdpo(batch: Batch, weights: Mapping[str, float]) -> Tensor:
    """Return GDPO's advantages, [B] float64.

    If a function returns None for a response, its reward adds nothing to the advantage and is excluded from the mean. A
    reward that is defined for only one response in the group also adds nothing. Standard deviations are unbiased.

    Args:
        weights: Weight of each reward, by the name of its function.

    Raises ``ConfigError`` if all weights are 0, or if a name belongs to neither a function nor a response's reward.
    """
    if not any(weights.values()):
        raise ConfigError(
            "algorithm.adv_estimator_kwargs.weights: name rewards with their weights, {right: 1, short: 0.5}"
        )
    scores = [
        {name: float(value) for name, value in verdict.extras.items() if isinstance(value, int | float)}
        for verdict in batch.verdicts
    ]
    # A function may apply to no response of this batch, but a name that is no function's either is a mistake.
    sums = [summands(path) for path in CUSTOM_FUNCTIONS.values() if is_sum(path)]
    known = {name for parts in sums for name in summand_names(parts)}
    known |= {key for verdict in batch.verdicts for key in verdict.extras}
    if unknown := [name for name in weights if name not in known]:
        raise ConfigError(
            f"algorithm.adv_estimator_kwargs.weights={dict(weights)}: no function or response has the reward "
            f"{', '.join(unknown)}; add functions in reward_score.custom_functions, and name some of "
            f"{', '.join(sorted(known)) or 'them'}"
        )
    total = torch.zeros(len(batch), dtype=torch.float64)
    for name, weight in weights.items():
        rows = torch.tensor([i for i, of_response in enumerate(scores) if name in of_response], dtype=torch.long)
        rewards = torch.tensor([scores[i][name] for i in rows.tolist()], dtype=torch.float64)
        groups = group_responses(batch.group[rows])
        alone = groups.counts[groups.index] == 1
        total[rows] += weight * groups.normalised(rewards).masked_fill(alone, 0.0)
    return group_responses(torch.zeros(len(batch), dtype=torch.long)).normalised(total)
