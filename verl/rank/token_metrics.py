"""Computes token metrics that rank shaping uses in addition to rank metrics (``calculator.metric_indices_add``).

Shapes: B responses, R response columns, L layers.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from verl.batch import RANK, Batch
from verl.config.calculator import name_of
from verl.utils.user_code import UserFunction, check_finite, check_tensor, is_import_path

FIELD = "calculator.metric_indices_add"


def fill_token_metrics(batch: Batch, names: Sequence[str]) -> None:
    """Add the token metrics ``names`` to a batch's rank metrics, with equal values in every layer.

    If ``calculator.on_nonfinite`` masks a response in a layer with NaN, its token metrics in that layer are masked too.
    Probability metrics use ``logprobs`` and ``entropy`` from the policy's forward pass (``calculator.needs_policy``).
    """
    if not names:
        return
    masked = torch.stack(list(batch.rank_metrics.values())).isnan().all(dim=0)
    of_tokens = {RANK + name_of(name): _token_metric(name, batch)[:, None] for name in names}
    batch.fill(**{name: torch.where(masked, torch.nan, values) for name, values in of_tokens.items()})


def check_token_metrics(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` if a custom metric cannot be loaded or called."""
    for name in filter(is_import_path, names):
        _load(name)


@cache
def _load(path: str) -> UserFunction:
    return UserFunction(FIELD, path, ["batch"])


def _user_metric(path: str, batch: Batch) -> Tensor:
    """Return the custom metric of each response as float64, averaging a per-token result ``[B, R]`` over tokens."""
    function, shape = _load(path), (len(batch), batch.width)
    returned = function(batch)
    check_tensor(function.where, returned, shape, shape[:1])
    values: Tensor = returned.double()
    if values.shape == shape:
        values = _mean_over_tokens(values, batch.policy_mask)
    check_finite(function.where, values)
    return values


def _token_metric(name: str, batch: Batch) -> Tensor:
    """Compute a token metric as float64 ``[B]``; built-in metrics are 0 for responses without tokens."""
    if name == "avg_response_entropy":
        return frequency_entropy(batch.padded("response_tokens"), batch.policy_mask)
    if is_import_path(name):
        return _user_metric(name, batch)
    return _mean_over_tokens(
        batch.padded("logprobs" if name == "avg_log_probs" else "entropy").double(), batch.policy_mask
    )


def _mean_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean ``[B]`` of ``values [B, R]`` over each response's tokens, or 0 for empty responses."""
    return torch.where(mask.bool(), values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def frequency_entropy(tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy ``[B]`` in nats of each response's token frequencies; ``tokens`` and ``mask`` are ``[B, R]``.

    The entropy equals the mean over tokens of -log(frequency of the token in the response).
    """
    entropies = []
    for row, kept in zip(tokens, mask.bool(), strict=True):
        counts = row[kept].unique(return_counts=True)[1].double()
        shares = counts / counts.sum()
        entropies.append(torch.special.entr(shares).sum())
    return torch.stack(entropies) if entropies else torch.zeros(0, dtype=torch.float64)
