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

from verl.algorithms.advantages.grpo import grpo_advantages
from verl.data.signal_inputs import AdvantageInputs

EPS = 1e-3


class Reweighted:
    """GRPO's advantages, weighted by data source; checkpoints hold the losses of the last 2 W steps of each."""

    def __init__(self, window: int = 10, temperature: float = 5.0) -> None:
        if window < 1 or temperature <= 0:
            raise ValueError(f"window={window}, temperature={temperature}: must be at least 1, and positive")
        self.window = window
        self.temperature = temperature
        self.losses: dict[str, list[float]] = {}

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """[B, R]."""
        sources = [str(record.data_source) for record in inputs.records]
        for source in sorted(set(sources)):
            correct = [float(c) for c, s in zip(inputs.correct.tolist(), sources, strict=True) if s == source]
            kept = [*self.losses.get(source, []), 1 - statistics.fmean(correct)]
            self.losses[source] = kept[-2 * self.window :]
        weights = self.weights()
        of_responses = torch.tensor([weights[source] for source in sources], dtype=torch.float64)
        mask = inputs.response_mask
        return of_responses[:, None] * grpo_advantages(inputs.token_rewards, mask, inputs.group_ids, norm_by_std=True)

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
        """The losses."""
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self.losses = state["losses"]
