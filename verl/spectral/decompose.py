"""Singular values of chosen prefixes by one decomposition each: the reference methods, also used to count ranks.

``eigh`` takes the eigenvalues of the float64 Gram matrix of the rows' contrasts (D x D when a prefix has more rows
than D), batched over responses. Squaring costs half the digits: a singular value below about 3e-8 of the largest
cannot be told from rounding and is returned as exactly 0. ``svd`` decomposes the centred rows themselves: slow, but
accurate to float64's last digits.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.functions import SpectralFunction, traditional_rank


def noise_share(rows: int) -> float:
    """Eigenvalues below this share of the trace of ``rows`` contrasts are rounding.

    For matrices of exact rank 1 to 10, the rounding measured was at most 2.6 machine epsilons up to 1500 rows and 26 at
    20000 rows: it grows as the square root of the number of terms.
    """
    return max(4.0, 0.25 * math.sqrt(rows)) * torch.finfo(torch.float64).eps


class Spectra(NamedTuple):
    """Spectra of n prefixes of k rows each."""

    response: Tensor
    """``[n]`` positions in the chunk."""
    column: Tensor
    """``[n]`` columns of ``prefixes``."""
    singular_values: Tensor
    """float64 ``[n, min(k, D, svd_rank)]``, descending."""


def spectra(matrices: Tensor, prefixes: Tensor, method: str, svd_rank: int | None) -> Iterator[Spectra]:
    """Spectra of all prefixes of 2 or more rows, one group for each number of rows k.

    Args:
        matrices: ``[b, n, D]``, the rows themselves if ``method`` is ``svd``, their contrasts if it is ``eigh``.
        prefixes: ``[b, P]`` rows k of each prefix.
        method: ``svd`` or ``eigh``.
        svd_rank: number of the largest singular values to return; None for all.
    """
    batch, _, width = matrices.shape
    sizes = [k for k in prefixes.unique().tolist() if k >= 2]
    # The leading k x k block of one Gram matrix serves every prefix with k <= D.
    if method == "eigh":
        largest = max((k for k in sizes if k <= width), default=0)
        gram = matrices[:, :largest] @ matrices[:, :largest].mT
    scatter, summed = matrices.new_zeros(()), 0
    for k in sizes:
        response, column = (prefixes == k).nonzero(as_tuple=True)
        source, inverse = response.unique(return_inverse=True)
        # Usually all responses have the prefix; then nothing is copied.
        chosen = slice(None) if len(source) == batch else source
        if method == "svd":
            leading = matrices[chosen, :k]
            values = torch.linalg.svdvals(leading - leading.mean(1, keepdim=True))
        elif k <= width:
            values = _singular_values(gram[chosen, :k, :k], k)
        else:
            # k > D: the D x D scatter. Contrasts do not depend on later rows, so each block of D rows is summed once.
            while summed + width <= k:
                block = matrices[:, summed : summed + width]
                scatter, summed = scatter + block.mT @ block, summed + width
            rest = matrices[chosen, summed:k]
            values = _singular_values(scatter[chosen] + rest.mT @ rest, k)
        yield Spectra(response, column, values[inverse, :svd_rank])


class DecomposedSums(NamedTuple):
    """Sums over the singular values of each prefix, divided by the largest of them."""

    sums: Tensor
    """float64 ``[F, b, P]``."""
    scale: Tensor
    """float64 ``[b, P]``, the largest singular value; 1 where there is none."""
    ranks: Tensor
    """Traditional ranks ``[b, P]``."""


def decomposed_sums(
    matrices: Tensor,
    prefixes: Tensor,
    functions: Sequence[SpectralFunction],
    method: str,
    svd_rank: int | None,
    eps: float,
) -> DecomposedSums:
    """Sums of ``functions`` over the spectra of prefixes, and traditional ranks.

    Arguments as in :func:`spectra`; ``eps`` is the relative precision of the entries, see :func:`traditional_rank`.
    """
    sums = matrices.new_zeros(len(functions), *prefixes.shape)
    scale, ranks = matrices.new_ones(prefixes.shape), matrices.new_zeros(prefixes.shape)
    for part in spectra(matrices, prefixes, method, svd_rank):
        at = part.response, part.column
        ranks[at] = traditional_rank(part.singular_values, prefixes[at], matrices.shape[2], eps)
        largest = part.singular_values[:, 0]
        scale[at] = torch.where(largest > 0, largest, 1.0)
        scaled = part.singular_values / scale[at][:, None]
        for row, function in enumerate(functions):
            sums[row][at] = function(scaled).sum(-1)
    return DecomposedSums(sums, scale, ranks)


def decomposition_bytes(rows: int, width: int) -> int:
    """Bytes of one response: the rows with two temporaries; a Gram matrix, its copy and the decomposition's memory."""
    return 8 * 3 * rows * (width + min(rows, width))


def _singular_values(squared: Tensor, rows: int) -> Tensor:
    """Singular values, descending, from ``squared [n, m, m]``, the Gram or scatter matrix of ``rows`` contrasts.

    Eigenvalues below the noise become 0.
    """
    trace = squared.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)
    eigenvalues = torch.linalg.eigvalsh(squared).flip(-1)
    return torch.where(eigenvalues > noise_share(rows) * trace, eigenvalues, 0.0).sqrt()
