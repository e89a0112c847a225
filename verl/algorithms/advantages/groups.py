"""Shared by the estimators: shape checks, scores, and statistics over the responses to one prompt (G groups)."""

from dataclasses import dataclass

import torch
from torch import Tensor


def check_shapes(per_token: dict[str, Tensor], per_response: dict[str, Tensor] | None = None) -> None:
    """Raise ``ValueError`` unless the tensors, by argument name, are ``[B, R]`` and, of ``per_response``, ``[B]``."""
    per_response = per_response or {}
    first = next(iter(per_token.values()))
    fits = (
        first.dim() == 2
        and all(tensor.shape == first.shape for tensor in per_token.values())
        and all(tensor.shape == first.shape[:1] for tensor in per_response.values())
    )
    if not fits:
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in (per_token | per_response).items()]
        expected = ["[B, R]"] * len(per_token) + ["[B]"] * len(per_response)
        raise ValueError(f"{', '.join(shapes)}: expected {', '.join(expected[:-1])} and {expected[-1]}")


def response_scores(token_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Score of each response, ``[B]`` float64: the sum of ``token_rewards [B, R]`` over its response tokens."""
    return torch.where(response_mask.bool(), token_rewards.double(), 0.0).sum(1)


def rewards_to_go(token_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Undiscounted sum of the rewards from each column on, ``[B, R]`` float64; those outside the mask count 0."""
    return torch.where(response_mask.bool(), token_rewards.double(), 0.0).flip(1).cumsum(1).flip(1)


def on_response_tokens(values: Tensor, response_mask: Tensor) -> Tensor:
    """``values [B]`` repeated on every response token, ``[B, R]``; 0 outside the mask."""
    return torch.where(response_mask.bool(), values[:, None], 0.0)


@dataclass(frozen=True)
class Groups:
    """Which responses belong to the same prompt.

    Statistics are computed in float64, so that group sums do not depend on the responses' order to well below
    float32's resolution.
    """

    index: Tensor
    """Group of each response, ``[B]`` int64 in 0..G-1."""
    counts: Tensor
    """Responses in each group, ``[G]`` int64."""

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values [B, ...]`` over each group, ``[G, ...]`` float64."""
        zeros = torch.zeros(len(self.counts), *values.shape[1:], dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.index, values.double())

    def baselines(self, values: Tensor) -> Tensor:
        """Mean of ``values [B]`` over each group, ``[G]`` float64; 0 for a group of one, which keeps its own value."""
        return torch.where(self.counts > 1, self.sums(values) / self.counts, 0.0)

    def centred(self, values: Tensor) -> Tensor:
        """``values [B]`` minus the baseline of their group, ``[B]`` float64."""
        return values.double() - self.baselines(values)[self.index]

    def deviations(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation of ``values [B]`` in each group, ``[G]`` float64; 1 for a group of one."""
        variances = self.sums(self.centred(values).square()) / (self.counts - 1).clamp(min=1)
        return torch.where(self.counts > 1, variances.sqrt(), 1.0)


def scored_groups(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> tuple[Groups, Tensor]:
    """Return the responses to each prompt, and their scores, ``[B]`` float64; raises as :func:`check_shapes`."""
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"group_ids": group_ids})
    return group_responses(group_ids), response_scores(token_rewards, response_mask)


def group_responses(group_ids: Tensor) -> Groups:
    """Return the groups of ``group_ids [B]`` int64, equal for responses to the same prompt; in any order."""
    _, index, counts = group_ids.unique(return_inverse=True, return_counts=True)
    return Groups(index, counts)


def group_means(values: Tensor, group_ids: Tensor) -> Tensor:
    """Return the mean of ``values [B]`` over the responses to the same prompt, for each response: [B] float64."""
    groups = group_responses(group_ids)
    means: Tensor = (groups.sums(values) / groups.counts)[groups.index]
    return means
