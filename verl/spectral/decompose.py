"""Reference methods for singular values and ranks, which decompose each requested prefix separately.

``eigh`` computes the eigenvalues of the float64 Gram matrix of the rows' contrasts (D x D when a prefix has more rows
than D), batched over responses. Squaring loses half the digits, so singular values below about 3e-8 of the largest
cannot be distinguished from rounding errors and are set to 0. ``svd`` decomposes the centred rows directly or, for
prefixes with more than D rows, the triangular factor of their contrasts. ``svd`` is slow but fully accurate.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.bounds import BLOCK_ROWS
from verl.spectral.factor import add_product
from verl.spectral.functions import SpectralFunction, traditional_rank
from verl.spectral.responses import Chunk
from verl.utils.device import to_device


def noise_share(rows: int) -> float:
    """Return the fraction of the trace below which eigenvalues count as rounding errors, for ``rows`` contrasts.

    For matrices of exact rank 1 to 10, measured rounding errors were at most 2.6 machine epsilons for up to 1500 rows,
    and 26 for 20000 rows. The errors grow with the square root of the number of terms.
    """
    return max(4.0, 0.25 * math.sqrt(rows)) * torch.finfo(torch.float64).eps


class Spectra(NamedTuple):
    """Spectra of n prefixes of k rows each."""

    rows: int
    """Number of rows k in each prefix."""
    response: Tensor
    """Index of each prefix's response in the chunk, ``[n]``."""
    column: Tensor
    """Column index in ``prefixes``, ``[n]``."""
    singular_values: Tensor
    """Singular values in descending order, float64 ``[n, min(k, D, svd_rank)]``."""


def spectra(chunk: Chunk, prefixes: Tensor, method: str, svd_rank: int | None) -> Iterator[Spectra]:
    """Yield the spectra of all prefixes with at least 2 rows, grouped by the number of rows k.

    Args:
        chunk: Chunk of b responses.
        prefixes: Row counts k ``[b, P]`` of the prefixes, on the CPU.
        method: ``svd`` or ``eigh``.
        svd_rank: Maximum number of singular values to return, largest first, or None for all.
    """
    leading, longer = {"svd": (_centred, _triangular), "eigh": (_gram, _scatter)}[method]
    device = chunk.hidden.device
    sizes = [k for k in prefixes.unique().tolist() if k >= 2]
    narrow = [k for k in sizes if k <= chunk.width]

    def having(k: int) -> slice | Tensor:
        """Return an index of the responses with a prefix of k rows. If all have one, a slice avoids a copy."""
        present = (prefixes == k).any(dim=1)
        return slice(None) if bool(present.all()) else to_device(present.nonzero()[:, 0], device)

    for kind, some in ((leading, narrow), (longer, sizes[len(narrow) :])):
        for k, singular_values in kind(chunk, some, having) if some else ():
            response, column = (prefixes == k).nonzero(as_tuple=True)
            inverse = response.unique(return_inverse=True)[1]
            response, column, inverse = (to_device(part, device) for part in (response, column, inverse))
            yield Spectra(k, response, column, singular_values[inverse, :svd_rank])


_Having = Callable[[int], slice | Tensor]

_Parts = Iterator[tuple[int, Tensor]]
"""Pairs (k, singular values of all prefixes of k rows). Responses without such a prefix are omitted."""


def _gram(chunk: Chunk, sizes: Sequence[int], having: _Having) -> _Parts:
    """Decompose prefixes of at most D rows, using the leading k x k blocks of a single Gram matrix."""
    rows = chunk.all_contrasts(sizes[-1])
    gram = rows.new_zeros(len(rows), sizes[-1], sizes[-1])
    add_product(gram, rows, rows.mT)
    del rows
    for k in sizes:
        yield k, _singular_values(gram[:, :k, :k][having(k)], k)


def _scatter(chunk: Chunk, sizes: Sequence[int], having: _Having) -> _Parts:
    """Decompose prefixes of more than D rows, using a D x D scatter matrix that accumulates the contrasts."""
    scatter = chunk.scale.new_zeros(len(chunk), chunk.width, chunk.width)
    for start, block, ends in _blocks_with_ends(chunk, sizes):
        for k in ends:
            chosen, rest = having(k), block[:, : k - start]
            yield k, _singular_values(torch.baddbmm(scatter[chosen], rest[chosen].mT, rest[chosen]), k)
        add_product(scatter, block.mT, block)


def _centred(chunk: Chunk, sizes: Sequence[int], having: _Having) -> _Parts:
    """Decompose prefixes of at most D rows, using the centred rows."""
    rows = chunk.rows(0, sizes[-1])
    for k in sizes:
        chosen = rows[:, :k][having(k)]
        yield k, torch.linalg.svdvals(chosen - chosen.mean(1, keepdim=True))


def _triangular(chunk: Chunk, sizes: Sequence[int], having: _Having) -> _Parts:
    """Decompose prefixes of more than D rows, using the triangular factor R of earlier contrasts, R^T R = S."""
    factor = chunk.scale.new_zeros(len(chunk), 0, chunk.width)
    for start, block, ends in _blocks_with_ends(chunk, sizes):
        for k in ends:
            chosen = having(k)
            yield k, torch.linalg.svdvals(torch.cat([factor[chosen], block[:, : k - start][chosen]], dim=1))
        factor = torch.linalg.qr(torch.cat([factor, block], dim=1), mode="r").R


def _blocks_with_ends(chunk: Chunk, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor, list[int]]]:
    """Yield the start row and contrasts ``[b, s, D]`` of each block, and the prefix ``sizes`` that end in it."""
    size = min(chunk.width, BLOCK_ROWS)
    for index, block in enumerate(chunk.contrasts(size, sizes[-1])):
        start = index * size
        yield start, block, [k for k in sizes if start < k <= start + block.shape[1]]


class DecomposedSums(NamedTuple):
    """Sums over the singular values of each prefix, after division by the largest singular value."""

    sums: Tensor
    """Sums, float64 ``[F, b, P]``."""
    scale: Tensor
    """Largest singular value, or 1 if all singular values of a prefix are 0, float64 ``[b, P]``."""
    ranks: Tensor
    """Traditional ranks ``[b, P]``."""


def decomposed_sums(
    chunk: Chunk,
    prefixes: Tensor,
    functions: Sequence[SpectralFunction],
    method: str,
    svd_rank: int | None,
    eps: float,
) -> DecomposedSums:
    """Compute sums of ``functions`` over the spectra of prefixes, and the prefixes' traditional ranks.

    ``eps`` is the relative precision of the entries (see :func:`traditional_rank`). See :func:`spectra` for all other
    arguments.
    """
    sums = chunk.scale.new_zeros(len(functions), *prefixes.shape)
    scale, ranks = chunk.scale.new_ones(prefixes.shape), chunk.scale.new_zeros(prefixes.shape)
    for part in spectra(chunk, prefixes, method, svd_rank):
        at = part.response, part.column
        ranks[at] = traditional_rank(part.singular_values, part.rows, chunk.width, eps)
        largest = part.singular_values[:, 0]
        scale[at] = torch.where(largest > 0, largest, 1.0)
        scaled = part.singular_values / scale[at][:, None]
        for row, function in enumerate(functions):
            sums[row][at] = function(scaled).sum(-1)
    return DecomposedSums(sums, scale, ranks)


def _singular_values(squared: Tensor, rows: int) -> Tensor:
    """Return descending singular values from Gram or scatter matrices ``squared [n, m, m]`` of ``rows`` contrasts.

    Eigenvalues below the noise level are set to 0.
    """
    trace = squared.diagonal(dim1=1, dim2=2).sum(-1, keepdim=True)
    eigenvalues = torch.linalg.eigvalsh(squared).flip(-1)
    return torch.where(eigenvalues > noise_share(rows) * trace, eigenvalues, 0.0).sqrt()
