"""RECAP (arXiv 2510.21978): while general data is replayed, objectives that have converged weigh less.

An objective k whose loss had the mean mu and the deviation sigma in its last W steps, and the mean mu' in the W before,
weighs

    lambda_k = K softmax((c + i) / T)_k     with c = mu / mu' and i = sigma / (mu + mu')         (eq. 1; T = 5)

of K objectives, 1 on average: c falls while it improves, i is large where it varies. General data is replayed by mixing
its files into ``data.train_files``. Assumed: an objective is a data source, its loss in a step 1 less the mean
correctness of its responses, and its weight multiplies their GRPO advantages; W = 10; ``EPS`` is added to the means;
objectives of fewer than 2 W steps weigh 1, and one that no longer comes keeps its share.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages.estimators import grpo_advantages
from verl.batch import EPISODE, Batch
from verl.method import Method

EPS = 1e-3


def weighted_grpo(batch: Batch) -> Tensor:
    """[B, R], GRPO's advantages times the weight that :class:`Reweighted` gives each response."""
    advantages = grpo_advantages(batch.padded("token_rewards"), batch.policy_mask.long(), batch.group, norm_by_std=True)
    weights: Tensor = batch.source_weight[:, None]
    return weights * advantages


class Reweighted(Method):
    """Weighs data sources, for :func:`weighted_grpo`; checkpoints hold the losses of the last 2 W steps of each."""

    def __init__(self, window: int = 10, temperature: float = 5.0) -> None:
        if window < 1 or temperature <= 0:
            raise ValueError(f"window={window}, temperature={temperature}: must be at least 1, and positive")
        self.window = window
        self.temperature = temperature
        self.losses: dict[str, list[float]] = {}

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Fill the column ``source_weight`` [B]; the rewards are unchanged."""
        sources = [str(record.data_source) for record in batch.records]
        for source in sorted(set(sources)):
            correct = [float(c) for c, s in zip(batch.correct.tolist(), sources, strict=True) if s == source]
            kept = [*self.losses.get(source, []), 1 - statistics.fmean(correct)]
            self.losses[source] = kept[-2 * self.window :]
        weights = self.weights()
        batch.fill(EPISODE, source_weight=torch.tensor([weights[s] for s in sources], dtype=torch.float64))
        return rewards

    def weights(self) -> dict[str, float]:
        """Source -> lambda, of all sources so far."""
        ready = {source: kept for source, kept in self.losses.items() if len(kept) == 2 * self.window}
        priorities = torch.tensor([self._priority(kept) for kept in ready.values()], dtype=torch.float64)
        found = len(ready) * (priorities / self.temperature).softmax(dim=0)
        return dict.fromkeys(self.losses, 1.0) | dict(zip(ready, found.tolist(), strict=True))

    def _priority(self, losses: Sequence[float]) -> float:
        """c + i."""
        before, latest = losses[: self.window], losses[self.window :]
        mean_before, mean = statistics.fmean(before) + EPS, statistics.fmean(latest) + EPS
        return mean / mean_before + statistics.pstdev(latest) / (mean + mean_before)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses."""
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.losses = state["losses"]
