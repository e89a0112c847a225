"""Functions of singular values, and metrics computed from sums of these functions over a spectrum.

Here s denotes singular values and l = s^2 eigenvalues of the scatter matrix. All sums run over nonzero singular values.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SpectralFunction(NamedTuple):
    """Function f(s) = s^power, or f(s) = s^power log s if ``log`` is set, with ``power`` in (0, 3]."""

    power: float
    log: bool = False

    def __call__(self, singular_values: Tensor) -> Tensor:
        """Return f(s) element-wise, with the limit 0 at s = 0."""
        values = singular_values**self.power
        if self.log:
            # Using log 1 instead of log 0 gives the limit instead of NaN.
            values = values * torch.where(singular_values > 0, singular_values, 1.0).log()
        return values

    def rescaled(self, sums: Tensor, plain_sums: Tensor, scale: Tensor) -> Tensor:
        """Return sum f(c s) for c = ``scale``, given ``sums`` = sum f(s) and ``plain_sums`` = sum s^power.

        This uses the identity (c s)^a log(c s) = c^a (s^a log s + (log c) s^a).
        """
        if self.log:
            sums = sums + scale.log() * plain_sums
        return sums * scale**self.power


SUM_S = SpectralFunction(1.0)
SUM_S_LOG_S = SpectralFunction(1.0, log=True)
ENERGY = SpectralFunction(2.0)
ENERGY_LOG_S = SpectralFunction(2.0, log=True)


def entropy_of_sums(total: Tensor, total_log: Tensor, power: float) -> Tensor:
    """Return the entropy in nats of p = s^power / sum(s^power), or 0 where ``total`` is 0. Inputs may have any shape.

    -sum p log p = log N - a M / N, with a = ``power``, N = ``total`` = sum s^a and M = ``total_log`` = sum s^a log s.
    """
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    return torch.where(empty, 0.0, safe.log() - power * total_log / safe)


def effective_rank(singular_values: Tensor) -> Tensor:
    """Return the effective rank exp(-sum p log p) with p = s / sum(s), in ``[1, number of nonzero s]``.

    The definition from Roy and Vetterli (2007) is used in arXiv 2509.23808. ``singular_values [..., N]`` -> ``[...]``;
    zeros do not contribute. A spectrum without nonzero values (0 or 1 rows, or equal rows) has effective rank 1.
    """
    return _entropy(singular_values).exp()


def response_entropy(singular_values: Tensor) -> Tensor:
    """Return the entropy -sum q log q in nats of the energy shares q = s^2 / sum(s^2).

    arXiv 2509.23808 calls this "Response Entropy 1". ``singular_values [..., N]`` -> ``[...]``, 0 if all are zero.
    """
    top = singular_values.amax(-1, keepdim=True) if singular_values.shape[-1] else singular_values
    # Dividing by the largest value first prevents overflow and underflow of the squares.
    return _entropy((singular_values / torch.where(top > 0, top, 1.0)).square())


def traditional_rank(singular_values: Tensor, rows: int, width: int, eps: float) -> Tensor:
    """Return the numerical rank: the number of singular values above ``s_max * max(rows, width) * eps``.

    ``singular_values [..., N]`` of a ``rows x width`` matrix -> float64 ``[...]``; ``eps`` is the relative precision of
    its entries. A spectrum without nonzero values has rank 0.
    """
    if singular_values.shape[-1] == 0:
        return singular_values.new_zeros(singular_values.shape[:-1], dtype=torch.float64)
    threshold = singular_values.amax(-1, keepdim=True) * (float(max(rows, width)) * eps)
    return (singular_values > threshold).sum(-1).double()


def rank_eps(dtype: torch.dtype) -> float:
    """Return the relative precision to assume for hidden states of ``dtype`` in computations of numerical ranks.

    The result is the machine epsilon of ``dtype``, but at most that of float32. With bfloat16's epsilon, 2^-7, and D >=
    128, the threshold would reach s_max, so every rank would be 0.
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _entropy(weights: Tensor) -> Tensor:
    """Return the entropy in nats of nonnegative ``weights [..., N]`` normalised to sum 1, or 0 if all are 0."""
    total = weights.sum(-1, keepdim=True)
    shares = weights / torch.where(total > 0, total, 1.0)
    entropy: Tensor = torch.special.entr(shares).sum(-1)
    return entropy
