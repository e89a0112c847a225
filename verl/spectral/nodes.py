"""Approximates spectral functions by sums of logarithms: f(l) ~ sum_q w_q log(1 + l / t_q) + a l.

The sum of log(1 + l_i / t) over eigenvalues l_i is a log-determinant, and the sum of l_i is the trace, so neither needs
the eigenvalues. Given a fit on an interval that contains the eigenvalues, determinants at a few shifts t_q yield any
spectral sum. The shifts are evenly spaced in log t. Scaling a spectrum by one step is equivalent to moving all shifts
by one, so a single fit suits prefixes of any scale. The equations cited below are in docs/spectral.md.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.functions import SpectralFunction
from verl.utils.device import to_device

MAX_CONDITION = 1e6
"""Largest supported ratio of singular values. At larger ratios, rounding errors of the squares dominate."""

MAX_POWER = 3.0
"""Largest supported power of a singular value. Fits of higher powers span too wide a range for float64."""

CLUSTER = 4096
"""Maximum number of small, equal singular values for which sums of powers below 2 stay within the tolerance."""

_SAMPLES = 600
_MAX_NODES = 64


class NodeSet(NamedTuple):
    """Fit (eq. 4) for eigenvalues in ``[lo, 1]``. Contributions of smaller eigenvalues gradually vanish."""

    functions: tuple[SpectralFunction, ...]
    shifts: Tensor
    """Shifts in descending order with a common ratio, float64 ``[n]`` on the CPU."""
    weights: Tensor
    """Weights w_q of each function, float64 ``[F, n]`` on the CPU."""
    slopes: Tensor
    """Coefficient a of the trace for each function, float64 ``[F]`` on the CPU."""
    ratio: float
    """Ratio t_q / t_(q+1), greater than 1."""
    error: float
    """Maximum error of the fit on [lo, 1] relative to s^power, or to s^power + 1/CLUSTER for powers below 2."""

    def sums(self, logs: Tensor, trace: Tensor, norm: Tensor) -> Tensor:
        """Compute spectral sums ``[F, b, P]`` (eq. 5) from log-determinants ``[b, n, P]``, traces and norms ``[b, P]``.

        For L = tr S and N = sqrt(tr S^2) <= 1, the sum is f(N) + sum_q w_q (log det(I + S / t_q) - log(1 + N / t_q)) +
        a (L - N). This removes the fit's error for spectra with the single eigenvalue N. Sums of such spectra are
        therefore exact, and entropies near 0 stay accurate.
        """
        weights, slopes, shifts = (to_device(part, logs.device) for part in (self.weights, self.slopes, self.shifts))
        # Evaluate the fit's terms, and f itself, at the single eigenvalue N.
        single = (norm[:, None] / shifts[:, None]).log1p()
        exact = torch.stack([function(norm.sqrt()) for function in self.functions])
        return torch.einsum("fq,bqp->fbp", weights, logs - single) + exact + slopes[:, None, None] * (trace - norm)


@lru_cache(maxsize=64)
def node_set(functions: tuple[SpectralFunction, ...], tolerance: float, condition: float) -> NodeSet:
    """Find the fewest nodes that fit every function within ``tolerance`` for singular values in [1/condition, 1].

    Raises ``ValueError`` if there are no functions, if a power, the tolerance or the condition is out of range, or if
    64 nodes do not reach the tolerance.
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
    # For each number of nodes, use the best of several margins around the interval.
    for count in range(8, _MAX_NODES + 1):
        fits = (
            _fit(functions, condition, count, below, above) for below in (3.5, 4.5) for above in (0.5, 1.5, 2.5, 3.5)
        )
        best = min(fits, key=lambda fit: fit.error)
        if best.error <= tolerance:
            return best
    raise ValueError(f"tolerance={tolerance}: {_MAX_NODES} nodes do not reach it for {functions}")


def _fit(functions: tuple[SpectralFunction, ...], condition: float, count: int, below: float, above: float) -> NodeSet:
    """Fit by weighted least squares (eq. 4) at log-spaced eigenvalues. Shifts span ``lo * e^-below`` to ``e^above``."""
    cpu = torch.device("cpu")  # regardless of the default device, since the fit is small
    # 1. Set up the shifts, the sampled eigenvalues, and the basis log(1 + l / t_q), l.
    lowest = -2 * math.log(condition)
    shifts = torch.linspace(above, lowest - below, count, dtype=torch.float64, device=cpu).exp()
    eigenvalues = torch.linspace(lowest, 0.0, _SAMPLES, dtype=torch.float64, device=cpu).exp()
    singular_values = eigenvalues.sqrt()
    basis = torch.cat([(eigenvalues[:, None] / shifts).log1p(), eigenvalues[:, None]], dim=1)
    columns, error = [], 0.0
    for function in functions:
        # 2. Choose weights that make the error relative to s^power, or to s^power + 1/CLUSTER for powers below 2.
        target = function(singular_values)
        floor = 1 / CLUSTER if function.power < 2 else 0.0
        weight = 1 / (singular_values**function.power + floor)
        weighted = basis * weight[:, None]
        # 3. Normalise the columns and solve; gelsd drops directions that are lost to rounding.
        norms = weighted.norm(dim=0)
        solution = torch.linalg.lstsq(weighted / norms, (target * weight)[:, None], driver="gelsd", rcond=1e-15)
        coefficients = solution.solution[:, 0] / norms
        columns.append(coefficients)
        # 4. Record the largest error on the interval.
        error = max(error, float(((basis @ coefficients - target) * weight).abs().max()))
    ratio = math.exp((above - lowest + below) / (count - 1))
    fitted = torch.stack(columns)
    return NodeSet(functions, shifts, fitted[:, :-1].contiguous(), fitted[:, -1].contiguous(), ratio, error)
