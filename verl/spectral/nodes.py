"""Spectral functions as sums of logarithms: f(l) ~ sum_q w_q log(1 + l / t_q) + a l.

A determinant gives sum_i log(1 + l_i / t) without any eigenvalue, and the trace gives sum_i l_i, so a fit on the
interval that holds the eigenvalues turns determinants at a few shifts t_q into any spectral sum. The shifts are
spaced evenly in log t: scaling the spectrum by the spacing then shifts the nodes by one, and one fit serves every
prefix, whatever its scale (docs/spectral.md, "Nodes").
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.functions import SpectralFunction

MAX_CONDITION = 1e6
"""Largest ratio of singular values that may be asked for; beyond it the rounding of their squares decides."""

MAX_POWER = 4.0
"""Largest power of a singular value; with more, the fit's range of values exceeds float64's digits."""

FIRST_CONDITION = 1e4
"""Ratio of singular values that is tried first."""

CLUSTER = 4096
"""Number of equal small singular values for which a sum of powers below 2 stays within the tolerance."""

_BELOW = 4.5
"""The smallest shift is e^-4.5 of the smallest eigenvalue fitted; nearer or farther costs nodes."""

_CHECK_NODES = 2
"""A fit with this many nodes fewer, thus for about a third of the condition, must agree."""

_SAMPLES = 600
_MAX_NODES = 64


class NodeSet(NamedTuple):
    """A fit for eigenvalues in ``[lo, 1]``; below ``lo`` its error grows to that of counting them as 0."""

    functions: tuple[SpectralFunction, ...]
    shifts: Tensor
    """float64 ``[n]`` on the CPU, descending with a common ratio."""
    weights: Tensor
    """float64 ``[F, n]`` on the CPU: w_q of each function."""
    error: float
    """Largest error of the fit over [lo, 1], relative to s^power (for powers below 2: to s^power + 1/CLUSTER)."""

    def sums(self, logs: Tensor, trace: Tensor) -> Tensor:
        """Spectral sums ``[F, b, P]`` from log-determinants ``[b, n, P]`` and traces ``[b, P]``, at most 1.

        f(L) + sum_q w_q (log det(I + S / t_q) - log(1 + L / t_q)) with L = tr S: the fit's error at a spectrum of the
        one eigenvalue L is subtracted, and with it the term a L. So a spectrum of one eigenvalue is exact, and an
        entropy near 0 keeps its relative accuracy.
        """
        single = (trace[:, None] / self.shifts.to(logs.device)[:, None]).log1p()
        exact = torch.stack([function(trace.sqrt()) for function in self.functions])
        return torch.einsum("fq,bqp->fbp", self.weights.to(logs.device), logs - single) + exact


class Ladder(NamedTuple):
    """Fits on the same shifts for growing ranges: a response takes the next only if it needs it."""

    ratio: float
    """t_q / t_(q+1), above 1."""
    rungs: tuple[NodeSet, ...]
    """Fits of ascending number of nodes; each one's shifts begin with those of the one before."""
    checks: tuple[NodeSet, ...]
    """For each rung but the last: the same with two nodes fewer."""
    tolerance: float

    def plain(self, sums: Tensor) -> Tensor:
        """For every function's ``sums [F, ...]``, those of the same power without logarithm; 1 where they are 0.

        Functions with a logarithm need the one without in the set.
        """
        functions = self.rungs[0].functions
        plain = sums[[functions.index(SpectralFunction(function.power)) for function in functions]]
        return torch.where(plain > 0, plain, 1.0)


@lru_cache(maxsize=64)
def node_ladder(functions: tuple[SpectralFunction, ...], tolerance: float, condition: float) -> Ladder:
    """The fewest nodes that fit every function within ``tolerance`` for singular values in ``[1/condition, 1]``.

    Raises:
        ValueError: a power, the tolerance or the condition is out of range, or no set of at most 64 nodes reaches
            the tolerance.
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
    for count in range(8, _MAX_NODES + 1):
        fits = []
        for above in (0.5, 1.5, 2.5, 3.5):
            spacing = (above + 2 * math.log(condition) + _BELOW) / (count - 1)
            fits.append((_fit(functions, above, spacing, count), above, spacing))
        best, above, spacing = min(fits, key=lambda item: item[0].error)
        if best.error <= tolerance:
            break
    else:
        raise ValueError(f"tolerance={tolerance}: {_MAX_NODES} nodes do not reach it for {functions}")
    first = count - round(2 * math.log(max(condition / FIRST_CONDITION, 1.0)) / spacing)
    if first > count - _CHECK_NODES:
        return Ladder(math.exp(spacing), (best,), (), tolerance)
    rung, check = (_fit(functions, above, spacing, n) for n in (first, first - _CHECK_NODES))
    return Ladder(math.exp(spacing), (rung, best), (check,), tolerance)


def _fit(functions: tuple[SpectralFunction, ...], above: float, spacing: float, count: int) -> NodeSet:
    """Weighted least squares on log-spaced eigenvalues; log t runs from ``above`` down in steps of ``spacing``."""
    log_shifts = above - spacing * torch.arange(count, dtype=torch.float64)
    shifts = log_shifts.exp()
    eigenvalues = torch.linspace(float(log_shifts[-1]) + _BELOW, 0.0, _SAMPLES, dtype=torch.float64).exp()
    singular_values = eigenvalues.sqrt()
    basis = torch.cat([(eigenvalues[:, None] / shifts).log1p(), eigenvalues[:, None]], dim=1)
    columns, error = [], 0.0
    for function in functions:
        target = function(singular_values)
        floor = 1 / CLUSTER if function.power < 2 else 0.0
        weight = 1 / (singular_values**function.power + floor)
        weighted = basis * weight[:, None]
        norms = weighted.norm(dim=0)
        solution = torch.linalg.lstsq(weighted / norms, (target * weight)[:, None], driver="gelsd", rcond=1e-15)
        coefficients = solution.solution[:, 0] / norms
        columns.append(coefficients)
        error = max(error, float(((basis @ coefficients - target) * weight).abs().max()))
    return NodeSet(functions, shifts, torch.stack(columns)[:, :-1].contiguous(), error)
