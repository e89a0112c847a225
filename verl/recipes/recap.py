"""RECAP (arXiv 2510.21978): replay general data and give less weight to converged objectives.

If the loss of objective k had mean mu and standard deviation sigma over its last W steps and mean mu' over the W steps
before that, its weight among K objectives, which is 1 on average, is

    lambda_k = K softmax((c + i) / T)_k     with c = mu / mu' and i = sigma / (mu + mu')         (eq. 1; T = 5)

where c is small if the loss falls and i is large if it varies. To replay general data, add its files to
``data.train_files``. We assume that each data source is an objective. Its weight multiplies the GRPO advantages of its
responses, and its loss is 1 minus their mean correctness in a step. We set W to 10 and add ``EPS`` to the means.
Objectives with fewer than 2 W steps have weight 1. Objectives that no longer occur stay in the softmax.
"""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.advantages.estimators import grpo_advantages
from verl.batch import EPISODE, Batch
from verl.recipes.common import Saving

EPS = 1e-3


def weighted_grpo(batch: Batch) -> Tensor:
    """Return GRPO advantages multiplied by the weights that :class:`Reweighted` computes, [B, R]."""
    advantages = grpo_advantages(batch.padded("token_rewards"), batch.policy_mask.long(), batch.group, norm_by_std=True)
    weights: Tensor = batch.source_weight[:, None]
    return weights * advantages


class Reweighted(Saving):
    """Method that weights data sources for :func:`weighted_grpo`; checkpoints contain each source's last 2 W losses."""

    saved = ("losses",)

    def __init__(self, window: int = 10, temperature: float = 5.0) -> None:
        if window < 1 or temperature <= 0:
            raise ValueError(f"window={window}, temperature={temperature}: must be at least 1, and positive")
        self.window = window
        self.temperature = temperature
        self.losses: dict[str, list[float]] = {}

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Fill the column ``source_weight`` [B] and return the rewards unchanged."""
        sources = [str(record.data_source) for record in batch.records]
        for source in sorted(set(sources)):
            correct = [float(c) for c, s in zip(batch.correct.tolist(), sources, strict=True) if s == source]
            kept = [*self.losses.get(source, []), 1 - statistics.fmean(correct)]
            self.losses[source] = kept[-2 * self.window :]
        weights = self.weights()
        batch.fill(EPISODE, source_weight=torch.tensor([weights[s] for s in sources], dtype=torch.float64))
        return rewards

    def weights(self) -> dict[str, float]:
        """Return the weight lambda of each data source seen so far."""
        ready = {source: kept for source, kept in self.losses.items() if len(kept) == 2 * self.window}
        priorities = torch.tensor([self._priority(kept) for kept in ready.values()], dtype=torch.float64)
        weights = len(ready) * (priorities / self.temperature).softmax(dim=0)
        return dict.fromkeys(self.losses, 1.0) | dict(zip(ready, weights.tolist(), strict=True))

    def _priority(self, losses: Sequence[float]) -> float:
        """Return c + i of eq. 1 for a data source, given its last 2 W losses."""
        before, latest = losses[: self.window], losses[self.window :]
        mean_before, mean = statistics.fmean(before) + EPS, statistics.fmean(latest) + EPS
        return mean / mean_before + statistics.pstdev(latest) / (mean + mean_before)
