"""Singular values of chosen prefixes, one decomposition each: the references, and what a rank needs.

``eigh`` takes the eigenvalues of the float64 Gram matrix of the rows' contrasts (D x D when a prefix has more rows
than D), batched over responses. Squaring costs half the digits: a singular value below about 3e-8 of the largest
cannot be told from rounding and is returned as exactly 0. ``svd`` decomposes the centred rows themselves: slow, and
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

    For matrices of exact rank 1 to 10 the rounding seen was at most 2.6 machine epsilons up to 1500 rows, and 26 at
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
    """Every prefix of 2 or more rows, grouped by its number of rows.

    ``matrices [b, n, D]`` are the rows themselves if ``method`` is ``svd``, their contrasts if it is ``eigh``;
    ``prefixes [b, P]`` are rows k of each prefix; only the ``svd_rank`` largest singular values are given, None for
    all.
    """
    batch, _, width = matrices.shape
    sizes = [k for k in prefixes.unique().tolist() if k >= 2]
    if method == "eigh":
        largest = max((k for k in sizes if k <= width), default=0)
        gram = matrices[:, :largest] @ matrices[:, :largest].mT
    scatter, summed = matrices.new_zeros(()), 0
    for k in sizes:
        response, column = (prefixes == k).nonzero(as_tuple=True)
        source, inverse = response.unique(return_inverse=True)
        # Mostly all responses have the prefix: then nothing need be copied.
        chosen = slice(None) if len(source) == batch else source
        if method == "svd":
            leading = matrices[chosen, :k]
            values = torch.linalg.svdvals(leading - leading.mean(1, keepdim=True))
        elif k <= width:
            values = _singular_values(gram[chosen, :k, :k], k)
        else:
            # Contrasts do not depend on later rows: each block of D rows is summed once for all prefixes.
            while summed + width <= k:
                block = matrices[:, summed : summed + width]
                scatter, summed = scatter + block.mT @ block, summed + width
            rest = matrices[chosen, summed:k]
            values = _singular_values(scatter[chosen] + rest.mT @ rest, k)
        yield Spectra(response, column, values[inverse, :svd_rank])


class DecomposedSums(NamedTuple):
    """Sums over the singular values of each prefix divided by ``scale``, the largest of them (1 if there is none)."""

    sums: Tensor
    """float64 ``[F, b, P]``."""
    scale: Tensor
    """float64 ``[b, P]``."""
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

    Arguments as in :func:`spectra`; ``eps`` is the relative precision that the rank assumes of the entries.
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
    """Memory of one response of ``rows`` rows: the rows and two temporaries, a Gram matrix, its copy and the
    decomposition's own."""
    return 8 * 3 * rows * (width + min(rows, width))


def _singular_values(squared: Tensor, rows: int) -> Tensor:
    """Square roots, descending, of the eigenvalues of ``squared [n, m, m]``, the scatter of ``rows`` contrasts; what is
    below the noise becomes 0."""
    trace = squared.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)
    eigenvalues = torch.linalg.eigvalsh(squared).flip(-1)
    return torch.where(eigenvalues > noise_share(rows) * trace, eigenvalues, 0.0).sqrt()
