"""Functions of a spectrum, and the metrics computed from their sums.

s are singular values, l = s^2 the eigenvalues of the scatter matrix. Every sum is over the nonzero singular values.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SpectralFunction(NamedTuple):
    """f(s) = s^power, or s^power log s if ``log`` is set; ``power`` in (0, 3]."""

    power: float
    log: bool = False

    def __call__(self, singular_values: Tensor) -> Tensor:
        """Return f(s) elementwise; 0 at s = 0, the limit."""
        values = singular_values**self.power
        if self.log:
            # log 1 in place of log 0 gives the limit instead of NaN.
            values = values * torch.where(singular_values > 0, singular_values, 1.0).log()
        return values

    def rescaled(self, sums: Tensor, plain_sums: Tensor, scale: Tensor) -> Tensor:
        """Return sum f(c s) for c = ``scale``, from ``sums`` = sum f(s) and ``plain_sums`` = sum s^power.

        (c s)^a log(c s) = c^a (s^a log s + log c s^a).
        """
        if self.log:
            sums = sums + scale.log() * plain_sums
        return sums * scale**self.power


SUM_S = SpectralFunction(1.0)
SUM_S_LOG_S = SpectralFunction(1.0, log=True)
ENERGY = SpectralFunction(2.0)
ENERGY_LOG_S = SpectralFunction(2.0, log=True)


def entropy_of_sums(total: Tensor, total_log: Tensor, power: float) -> Tensor:
    """Entropy in nats of the shares p = s^power / sum(s^power), any shape; 0 where ``total`` is 0.

    -sum p log p = log N - a M / N, with a = ``power``, N = ``total`` = sum s^a and M = ``total_log`` = sum s^a log s.
    """
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    return torch.where(empty, 0.0, safe.log() - power * total_log / safe)


def effective_rank(singular_values: Tensor) -> Tensor:
    """Effective rank exp(-sum p log p) with p = s / sum(s), in ``[1, number of nonzero s]``.

    Roy and Vetterli 2007, as used in arXiv 2509.23808. ``singular_values [..., N]`` -> ``[...]``; zeros do not
    contribute. A spectrum without a nonzero value (0 or 1 rows, or all rows equal) has effective rank 1.
    """
    return _entropy(singular_values).exp()


def response_entropy(singular_values: Tensor) -> Tensor:
    """Entropy -sum q log q in nats of the energy shares q = s^2 / sum(s^2), "Response Entropy 1" of arXiv 2509.23808.

    ``singular_values [..., N]`` -> ``[...]``. A spectrum without a nonzero value has entropy 0.
    """
    top = singular_values.amax(-1, keepdim=True) if singular_values.shape[-1] else singular_values
    # Dividing by the largest value first keeps the squares of very large or very small spectra in range.
    return _entropy((singular_values / torch.where(top > 0, top, 1.0)).square())


def traditional_rank(singular_values: Tensor, rows: int, width: int, eps: float) -> Tensor:
    """Count the singular values above ``s_max * max(rows, width) * eps``, the usual numerical rank.

    ``singular_values [..., N]`` of a ``rows x width`` matrix -> float64 ``[...]``; ``eps`` is the relative
    precision of its entries. A spectrum without a nonzero value has rank 0.
    """
    if singular_values.shape[-1] == 0:
        return singular_values.new_zeros(singular_values.shape[:-1], dtype=torch.float64)
    threshold = singular_values.amax(-1, keepdim=True) * (float(max(rows, width)) * eps)
    return (singular_values > threshold).sum(-1).double()


def rank_eps(dtype: torch.dtype) -> float:
    """Relative precision that the numerical rank assumes for hidden states stored as ``dtype``.

    The machine epsilon of ``dtype``, but at most float32's: with bfloat16's 2^-7 and D >= 128, the threshold would
    reach s_max and every rank would be 0.
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _entropy(weights: Tensor) -> Tensor:
    """Entropy in nats of the nonnegative ``weights [..., N]``, normalised to sum 1; 0 where all weights are 0."""
    total = weights.sum(-1, keepdim=True)
    shares = weights / torch.where(total > 0, total, 1.0)
    entropy: Tensor = torch.special.entr(shares).sum(-1)
    return entropy
