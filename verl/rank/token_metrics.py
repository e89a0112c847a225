"""Metrics of a response's tokens, which enter rank shaping beside the rank metrics (``calculator.metric_indices_add``).

Shapes: B responses, R response columns, L layers.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.config.calculator import name_of
from verl.protocol import PolicyScores, RankMetrics, RolloutBatch
from verl.utils.user_code import UserFunction, check_finite, check_tensor, is_import_path

FIELD = "calculator.metric_indices_add"


class TokenInputs(NamedTuple):
    """What a metric of the user's own is told about the tokens of responses."""

    responses: Tensor
    """[B, R] int64, the token ids."""
    response_mask: Tensor
    """[B, R] int64, 1 on response tokens."""
    logprobs: Tensor
    """[B, R] float32, each token's log-probability under the policy in nats; 0 on padding."""
    entropy: Tensor
    """[B, R] float32, of the policy's distribution at each token in nats; 0 on padding."""


def with_token_metrics(
    rank_metrics: RankMetrics, names: Sequence[str], rollout: RolloutBatch, scores: PolicyScores | None
) -> RankMetrics:
    """The rank metrics of ``rollout`` and, the same in every layer, the metrics ``names`` of its tokens.

    A response that ``calculator.on_nonfinite`` masks in a layer, whose rank metrics are NaN, is masked for these too.
    ``scores`` are those of the policy that sampled; needed where ``calculator.needs_policy`` says so.
    """
    if not names:
        return rank_metrics
    by_name = {name: rank_metrics.by_name[name] for name in rank_metrics.metric_names}
    masked = torch.stack(list(by_name.values())).isnan().all(dim=0)
    for name in names:
        by_name[name_of(name)] = torch.where(masked, torch.nan, _token_metric(name, rollout, scores)[:, None])
    size = [len(rollout)]
    by_token = TensorDict(by_name, batch_size=size)
    return RankMetrics(by_token, rank_metrics.mean_states, rank_metrics.by_prefix, batch_size=size)


def check_token_metrics(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a metric of the user's own that cannot be loaded or called."""
    for name in filter(is_import_path, names):
        _own_metric(name)


@cache
def _own_metric(path: str) -> UserFunction:
    return UserFunction(FIELD, path, ["inputs"])


def _own_values(path: str, inputs: TokenInputs) -> Tensor:
    """What the user's function returned for each response, the mean over its tokens if that was [B, R]: float64."""
    function, mask = _own_metric(path), inputs.response_mask
    found = function(inputs)
    check_tensor(function.where, found, mask.shape, mask.shape[:1])
    values: Tensor = found.double()
    if values.shape == mask.shape:
        values = _mean_over_tokens(values, mask)
    check_finite(function.where, values)
    return values


def _token_metric(name: str, rollout: RolloutBatch, scores: PolicyScores | None) -> Tensor:
    """float64 ``[B]``; 0 for a response without tokens."""
    if name == "avg_response_entropy":
        return frequency_entropy(rollout.responses, rollout.response_mask)
    assert scores is not None, f"{name} is read from the policy's forward pass"
    if is_import_path(name):
        inputs = TokenInputs(rollout.responses, rollout.response_mask, scores.logprobs, scores.entropy)
        return _own_values(name, inputs)
    values = scores.logprobs if name == "avg_log_probs" else scores.entropy
    return _mean_over_tokens(values.double(), rollout.response_mask)


def _mean_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of ``values [B, R]`` over each response's tokens, ``[B]``; 0 without any."""
    return torch.where(mask.bool(), values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def frequency_entropy(tokens: Tensor, mask: Tensor) -> Tensor:
    """Entropy in nats of each response's own token frequencies, for ``tokens [B, R]`` and ``mask [B, R]`` -> ``[B]``.

    It is the mean over the tokens of -log(their share of the response).
    """
    entropies = []
    for row, kept in zip(tokens, mask.bool(), strict=True):
        counts = row[kept].unique(return_counts=True)[1].double()
        shares = counts / counts.sum()
        entropies.append(torch.special.entr(shares).sum())
    return torch.stack(entropies) if entropies else torch.zeros(0, dtype=torch.float64)
