"""Cost model to select the faster method. The constants were measured once per device type."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.bounds import MAX_BYTES, block_rows, factor_operations
from verl.spectral.factor import PANEL, head_columns


class Rates(NamedTuple):
    """Measured speeds of one device type."""

    products: float
    """Floating-point operations per second of batched float64 matrix products."""
    panel: float
    """Seconds to factor the diagonal block of one panel, excluding matrix products."""
    eigen_call: float
    """Constant overhead in seconds of computing the eigenvalues of a k x k matrix."""
    eigen_square: float
    """Additional seconds per k^2 to compute the eigenvalues of a k x k matrix."""
    eigen_cube: float
    """Additional seconds per k^3 to compute the eigenvalues of a k x k matrix."""

    def eigen_seconds(self, size: Tensor) -> Tensor:
        """Return the time in seconds needed to compute the eigenvalues of a k x k matrix, for each k in ``size``."""
        return self.eigen_call + self.eigen_square * size**2 + self.eigen_cube * size**3


RATES = {
    # Measured on two cores of an AMD EPYC (Zen 4, AVX-512) with MKL.
    "cpu": Rates(products=7e10, panel=4e-5, eigen_call=2e-6, eigen_square=4e-8, eigen_cube=8e-11),
    # Derived from a prototype's timings on one H200 (64 x 512 x 3584, 32 x 1536 x 3584).
    "cuda": Rates(products=1e13, panel=5e-7, eigen_call=1e-3, eigen_square=0.0, eigen_cube=7e-11),
}


def cheapest_method(
    lengths: Tensor, prefixes: Tensor, width: int, shifts: int, max_bytes: int = MAX_BYTES, device: str = "cpu"
) -> str:
    """Return the faster method, ``nested`` or ``eigh``, for responses of ``lengths [B]`` and D = ``width``.

    ``prefixes [B, P]`` are the row counts of the prefixes, ``shifts`` is the number of nodes in the fit, ``max_bytes``
    is the memory bound for one response, and ``device`` (``cpu`` or ``cuda``) is the device of the hidden states.
    """
    rates = RATES[device]
    # ``nested`` needs one factorisation per response and shift, regardless of the prefixes.
    sizes, counts = (part.tolist() for part in lengths[lengths >= 2].unique(return_counts=True))
    nested = sum(
        count * _nested_seconds(rows, width, shifts, device, max_bytes)
        for rows, count in zip(sizes, counts, strict=True)
    )
    # ``eigh`` needs one decomposition per prefix, of size min(k, D).
    size = prefixes[prefixes >= 2].clamp(max=width).double()
    return "nested" if nested <= float(rates.eigen_seconds(size).sum()) else "eigh"


def _nested_seconds(rows: int, width: int, shifts: int, device: str, max_bytes: int) -> float:
    rates, panel = RATES[device], PANEL[device]
    size = block_rows(rows, width, max_bytes)
    blocks = math.ceil(rows / size)
    # With several blocks, each one also factors a D x D system.
    panels = math.ceil(size / panel) if blocks == 1 else blocks * (math.ceil(width / panel) + math.ceil(size / panel))
    # The cost of a partial panel scales with the square of its share.
    share = min(1.0, size / panel) ** 2
    per_shift = factor_operations(rows, width, size) / rates.products + panels * share * rates.panel
    shared = rows * rows * width / rates.products
    # Decomposing a head takes twice as long as computing its eigenvalues, but saves solves (half as fast as products).
    head = head_columns(rows, device) if blocks == 1 else 0
    if head:
        per_shift -= 2 * (rows - head) * head**2 / rates.products
        shared += 2 * float(rates.eigen_seconds(torch.tensor(head)))
    return shifts * per_shift + shared
