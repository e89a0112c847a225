"""Spectral functions as sums of logarithms: f(l) ~ sum_q w_q log(1 + l / t_q) + a l.

A determinant gives sum_i log(1 + l_i / t) without computing eigenvalues, and the trace gives sum_i l_i. So a fit on the
interval that holds the eigenvalues turns determinants at a few shifts t_q into any spectral sum. The shifts are spaced
evenly in log t: scaling the spectrum by the spacing moves the nodes by one, so one fit serves every prefix, whatever
its scale. The equations cited below are those of docs/spectral.md.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.functions import SpectralFunction
from verl.utils.device import to_device

MAX_CONDITION = 1e6
"""Largest ratio of singular values that may be requested; beyond it the rounding of their squares dominates."""

MAX_POWER = 3.0
"""Largest power of a singular value; beyond it the range of the fitted values exceeds float64's digits."""

CLUSTER = 4096
"""Number of equal small singular values for which a sum of powers below 2 stays within the tolerance."""

_SAMPLES = 600
_MAX_NODES = 64


class NodeSet(NamedTuple):
    """A fit (eq. 4) for eigenvalues in ``[lo, 1]``; further below ``lo``, eigenvalues increasingly count as 0."""

    functions: tuple[SpectralFunction, ...]
    shifts: Tensor
    """float64 ``[n]`` on the CPU, descending with a common ratio."""
    weights: Tensor
    """float64 ``[F, n]`` on the CPU: w_q of each function."""
    slopes: Tensor
    """float64 ``[F]`` on the CPU: the coefficient a of the trace."""
    ratio: float
    """t_q / t_(q+1), above 1."""
    error: float
    """Largest error of the fit over [lo, 1], relative to s^power (for powers below 2: to s^power + 1/CLUSTER)."""

    def sums(self, logs: Tensor, trace: Tensor, norm: Tensor) -> Tensor:
        """Spectral sums ``[F, b, P]`` (eq. 5) from log-determinants ``[b, n, P]``, traces and norms ``[b, P]``.

        f(N) + sum_q w_q (log det(I + S / t_q) - log(1 + N / t_q)) + a (L - N), with L = tr S and N = sqrt(tr S^2) <= 1.
        This subtracts the fit's error at the spectrum of one eigenvalue N. Such a spectrum is exact, and an entropy
        near 0 keeps its digits.
        """
        weights, slopes, shifts = (to_device(part, logs.device) for part in (self.weights, self.slopes, self.shifts))
        # The fit's terms, and f itself, at the single eigenvalue N.
        single = (norm[:, None] / shifts[:, None]).log1p()
        exact = torch.stack([function(norm.sqrt()) for function in self.functions])
        return torch.einsum("fq,bqp->fbp", weights, logs - single) + exact + slopes[:, None, None] * (trace - norm)


@lru_cache(maxsize=64)
def node_set(functions: tuple[SpectralFunction, ...], tolerance: float, condition: float) -> NodeSet:
    """Find the fewest nodes that fit every function within ``tolerance`` for singular values in [1/condition, 1].

    Raises:
        ValueError: no function; a power, the tolerance or the condition out of range; or no set of at most 64 nodes
            reaches the tolerance.
    """
    if not functions:
        raise ValueError("functions: name at least one spectral function")
    for function in functions:
        if not 0 < function.power <= MAX_POWER:
            raise ValueError(f"{function}: the power must be positive and at most {MAX_POWER:g}")
    if not 1e-9 <= tolerance <= 1e-2:
        raise ValueError(f"tolerance={tolerance}: must be between 1e-9 and 1e-2")
    if not 10 <= condition <= MAX_CONDITION:
        raise ValueError(f"condition={condition}: must be between 10 and {MAX_CONDITION:g}, the limit of float64")
    # For each number of nodes, the best of several margins around the interval.
    for count in range(8, _MAX_NODES + 1):
        fits = (
            _fit(functions, condition, count, below, above) for below in (3.5, 4.5) for above in (0.5, 1.5, 2.5, 3.5)
        )
        best = min(fits, key=lambda fit: fit.error)
        if best.error <= tolerance:
            return best
    raise ValueError(f"tolerance={tolerance}: {_MAX_NODES} nodes do not reach it for {functions}")


def _fit(functions: tuple[SpectralFunction, ...], condition: float, count: int, below: float, above: float) -> NodeSet:
    """Weighted least squares (eq. 4) on log-spaced eigenvalues; shifts from ``e^above`` down to ``lo * e^-below``."""
    cpu = torch.device("cpu")  # whatever the default device: the fit is small
    # 1. The shifts, the eigenvalues that are fitted, and the basis log(1 + l / t_q), l.
    lowest = -2 * math.log(condition)
    shifts = torch.linspace(above, lowest - below, count, dtype=torch.float64, device=cpu).exp()
    eigenvalues = torch.linspace(lowest, 0.0, _SAMPLES, dtype=torch.float64, device=cpu).exp()
    singular_values = eigenvalues.sqrt()
    basis = torch.cat([(eigenvalues[:, None] / shifts).log1p(), eigenvalues[:, None]], dim=1)
    columns, error = [], 0.0
    for function in functions:
        # 2. The weights make the error relative to s^power, or to s^power + 1/CLUSTER for powers below 2.
        target = function(singular_values)
        floor = 1 / CLUSTER if function.power < 2 else 0.0
        weight = 1 / (singular_values**function.power + floor)
        weighted = basis * weight[:, None]
        # 3. Columns of unit length; gelsd cuts off the directions that are lost to rounding.
        norms = weighted.norm(dim=0)
        solution = torch.linalg.lstsq(weighted / norms, (target * weight)[:, None], driver="gelsd", rcond=1e-15)
        coefficients = solution.solution[:, 0] / norms
        columns.append(coefficients)
        # 4. The largest error on the interval.
        error = max(error, float(((basis @ coefficients - target) * weight).abs().max()))
    ratio = math.exp((above - lowest + below) / (count - 1))
    fitted = torch.stack(columns)
    return NodeSet(functions, shifts, fitted[:, :-1].contiguous(), fitted[:, -1].contiguous(), ratio, error)
