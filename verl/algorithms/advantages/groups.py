"""Helpers for shape checks, scores and group statistics. Each of the G groups contains the responses to one prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_STD_EPS = 1e-6
"""Constant added to a group's standard deviation, to avoid division by 0 if all scores in the group are equal."""


def check_shapes(per_token: dict[str, Tensor], per_response: dict[str, Tensor] | None = None) -> None:
    """Raise ``ValueError`` unless all ``per_token`` tensors are ``[B, R]`` and all ``per_response`` tensors ``[B]``."""
    per_response = per_response or {}
    shape = next(iter(per_token.values())).shape
    fits = (
        len(shape) == 2
        and all(tensor.shape == shape for tensor in per_token.values())
        and all(tensor.shape == shape[:1] for tensor in per_response.values())
    )
    if not fits:
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in (per_token | per_response).items()]
        expected = ["[B, R]"] * len(per_token) + ["[B]"] * len(per_response)
        raise ValueError(f"{', '.join(shapes)}: expected {', '.join(expected[:-1])} and {expected[-1]}")


def rewards_to_go(token_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return the undiscounted sum of rewards from each token to the end of the response as float64 ``[B, R]``."""
    return torch.where(response_mask.bool(), token_rewards.double(), 0.0).flip(1).cumsum(1).flip(1)


def on_response_tokens(values: Tensor, response_mask: Tensor) -> Tensor:
    """Broadcast ``values [B]`` to all response tokens. The result ``[B, R]`` is 0 outside the mask."""
    return torch.where(response_mask.bool(), values[:, None], 0.0)


@dataclass(frozen=True)
class Groups:
    """Assignment of responses to prompts.

    Statistics are computed in float64, so that the order of responses does not affect them at float32 precision.
    """

    index: Tensor
    """Group index of each response, ``[B]`` int64 in 0..G-1."""
    counts: Tensor
    """Number of responses in each group, ``[G]`` int64."""

    def sums(self, values: Tensor) -> Tensor:
        """Sum ``values [B, ...]`` within each group and return the sums as float64 ``[G, ...]``."""
        zeros = torch.zeros(len(self.counts), *values.shape[1:], dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.index, values.double())

    def centred(self, values: Tensor) -> Tensor:
        """Subtract the group mean (0 for a group of one) from ``values [B]`` and return float64 ``[B]``."""
        means = torch.where(self.counts > 1, self.sums(values) / self.counts, 0.0)
        return values.double() - means[self.index]

    def normalised(self, values: Tensor) -> Tensor:
        """Divide ``centred(values)`` by the group's standard deviation plus ``GROUP_STD_EPS``, in float64."""
        return self.centred(values) / (self.deviations(values) + GROUP_STD_EPS)[self.index]

    def deviations(self, values: Tensor) -> Tensor:
        """Return the unbiased standard deviation (1 for a group of one) of each group's values as float64 ``[G]``."""
        variances = self.sums(self.centred(values).square()) / (self.counts - 1).clamp(min=1)
        return torch.where(self.counts > 1, variances.sqrt(), 1.0)


def scored_groups(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> tuple[Groups, Tensor]:
    """Return the groups and the responses' scores, float64 ``[B]``. Raises ``ValueError`` like :func:`check_shapes`."""
    check_shapes({"token_rewards": token_rewards, "response_mask": response_mask}, {"group_ids": group_ids})
    scores = torch.where(response_mask.bool(), token_rewards.double(), 0.0).sum(1)
    return group_responses(group_ids), scores


def group_responses(group_ids: Tensor) -> Groups:
    """Group responses by ``group_ids`` (``[B]`` int64), which are equal for responses to the same prompt."""
    _, index, counts = group_ids.unique(return_inverse=True, return_counts=True)
    return Groups(index, counts)


def group_means(values: Tensor, group_ids: Tensor) -> Tensor:
    """Return the group mean of ``values [B]`` for each response as float64 ``[B]``."""
    groups = group_responses(group_ids)
    means: Tensor = (groups.sums(values) / groups.counts)[groups.index]
    return means
