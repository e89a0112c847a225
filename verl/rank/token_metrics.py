"""Metrics of a response's tokens, which enter rank shaping beside the rank metrics (``calculator.metric_indices_add``).

Shapes: B responses, R response columns, L layers.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.config.signal import TokenMetric
from verl.protocol import PolicyScores, RankMetrics, RolloutBatch


def with_token_metrics(
    rank_metrics: RankMetrics, names: Sequence[TokenMetric], rollout: RolloutBatch, scores: PolicyScores | None
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
        by_name[name] = torch.where(masked, torch.nan, _token_metric(name, rollout, scores)[:, None])
    size = [len(rollout)]
    by_token = TensorDict(by_name, batch_size=size)
    return RankMetrics(by_token, rank_metrics.mean_states, rank_metrics.by_prefix, batch_size=size)


def _token_metric(name: TokenMetric, rollout: RolloutBatch, scores: PolicyScores | None) -> Tensor:
    """float64 ``[B]``; 0 for a response without tokens."""
    if name == "avg_response_entropy":
        return frequency_entropy(rollout.responses, rollout.response_mask)
    assert scores is not None, f"{name} is read from the policy's forward pass"
    values = scores.logprobs if name == "avg_log_probs" else scores.entropy
    mask = rollout.response_mask.double()
    return (values.double() * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


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
