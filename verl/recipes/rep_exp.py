"""RepExp (arXiv 2510.11686): a bonus for responses whose mean hidden state differs from the rest of the group.

    h_i = P (s_i - mean_group s),    bonus_i = h_i^T (lambda I + sum_group h_j h_j^T)^-1 h_i,    r + beta bonus

s_i is the D-dimensional hidden state of the last layer, averaged over the response's tokens. P is a sparse random
projection to ``dim`` dimensions, redrawn in each step. Each entry of P is 0 with probability 1 - 1 / sqrt D, and
otherwise sqrt(sqrt D / dim) with a random sign. Groups without a correct response get no bonus. The authors' recipe in
veRL uses this form (``reward_type=leverage``) with lambda = 0.01, beta = 0.01, and dim = 32 for MATH and GSM8K.

The authors use the states of the frozen initial model at the positions of the response's tokens. This recipe uses the
states from which the policy sampled the tokens, in the last of ``calculator.layers`` (``mean_states``). A response
whose state is not finite gets no bonus.
"""

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch
from verl.config.checks import require
from verl.method import Method


class RepExp(Method):
    """Method that adds the RepExp bonus with weight ``beta``, lambda ``lam`` > 0, and ``dim`` projected dimensions."""

    def __init__(self, beta: float = 0.01, lam: float = 0.01, dim: int = 32) -> None:
        if not (lam > 0 and dim >= 1):
            raise ValueError(f"lam={lam}, dim={dim}: lam must be above 0, and dim at least 1")
        measures, fix = self.config.calculator.enable, "RepExp reads hidden states; set it to true"
        require(measures, "calculator.enable", measures, fix)
        self.beta, self.lam, self.dim = beta, lam, dim

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the rewards plus ``beta`` times the bonuses, [B]."""
        states = batch.mean_states[:, -1].double().cpu()
        projected = states @ sparse_projection(states.shape[1], self.dim, [self.config.seed, self.step]).T
        finite, bonuses = projected.isfinite().all(dim=1), torch.zeros(len(batch), dtype=torch.float64)
        for group in batch.group.unique():
            rows = (batch.group == group) & finite
            if rows.any() and batch.correct[batch.group == group].any():
                bonuses[rows] = leverages(projected[rows], self.lam)
        return rewards + self.beta * bonuses


def sparse_projection(width: int, dim: int, seed: list[int]) -> Tensor:
    """Return a sparse random matrix, [dim, width] float64, drawn like scikit-learn's ``SparseRandomProjection``."""
    generator, scale = np.random.default_rng(seed), width**0.5
    kept = generator.random((dim, width)) < 1 / scale
    signs = generator.choice((-1.0, 1.0), (dim, width))
    return torch.from_numpy(kept * signs * (scale / dim) ** 0.5)


def leverages(states: Tensor, lam: float) -> Tensor:
    """Return h_i^T (lam I + sum_j h_j h_j^T)^-1 h_i, [n], where h_i are the centred rows of ``states [n, dim]``."""
    centred = states - states.mean(dim=0)
    covariance = lam * torch.eye(states.shape[1], dtype=states.dtype) + centred.T @ centred
    found: Tensor = (centred * torch.linalg.solve(covariance, centred.T).T).sum(dim=1)
    return found
