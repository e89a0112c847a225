"""Which method is cheaper: a model of time per method, with constants measured once per kind of device."""

from typing import NamedTuple

from torch import Tensor

from verl.spectral.nested import block_rows, factor_operations


class Rates(NamedTuple):
    """Speed of one kind of device."""

    products: float
    """Floating-point operations a second of float64 matrix products."""
    factors: float
    """The same of a blocked Cholesky factorisation."""
    eigenvalues: float
    """Matrix size cubed a second of batched ``eigvalsh``."""
    factor_call: float
    """Seconds that each small factorisation costs beyond its operations."""
    eigen_call: float
    """The same of ``eigvalsh`` for one matrix."""
    eigen_launch: float
    """Seconds that each call of ``eigvalsh`` for a batch costs."""


RATES = {
    "cpu": Rates(8e10, 4e10, 8e9, 4e-6, 1.5e-5, 5e-5),
    "cuda": Rates(3e13, 4e12, 1.4e10, 1e-7, 2e-6, 1e-3),
}


def cheapest_method(lengths: Tensor, prefixes: Tensor, width: int, shifts: int) -> str:
    """``nested`` or ``eigh`` for responses of ``lengths [B]``, their ``prefixes [B, P]`` and D = ``width``."""
    rates = RATES["cpu" if lengths.device.type == "cpu" else "cuda"]
    nested = 0.0
    for rows in lengths.tolist():
        if rows >= 2:
            factor = factor_operations(rows, width, block_rows(rows, width))
            nested += shifts * (factor / rates.factors + rates.factor_call) + rows * rows * width / rates.products
    size = prefixes.clamp(max=width).double()
    decomposed = prefixes >= 2
    eigen = float((size**3 / rates.eigenvalues + rates.eigen_call)[decomposed].sum())
    eigen += prefixes[decomposed].unique().numel() * rates.eigen_launch
    return "nested" if nested <= eigen else "eigh"
