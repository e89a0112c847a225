"""Spectral functionals of the prefix-centred rows of hidden states, exact to float64 (arXiv 2509.23808, section 3).

For one response Z ``[T, D]`` and a prefix of k rows, the mean of those k rows is subtracted and
s_1 >= s_2 >= ... are the singular values of what is left.

Method: the Gram matrix of the response's rows is formed once in float64; its leading k x k block, centred on
both sides, has the eigenvalues s_i^2. When k exceeds D the D x D scatter matrix has the same ones and is smaller.
Squaring costs half the digits: a singular value below about 3e-8 of the largest cannot be told from rounding and
is returned as exactly 0.

Shapes: B responses, T padded rows, D hidden size, P prefixes asked for per response.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 256 * 2**20
"""Upper bound on the float64 blocks held at once; a single response may exceed it."""

NOISE_EPS = 4 * torch.finfo(torch.float64).eps
"""Eigenvalues below ``NOISE_EPS * trace`` are rounding: for matrices of exact rank 1 to 10 the rounding seen was
at most 2.3 machine epsilons of the trace, for any offset and length."""


class PrefixFunctionals(NamedTuple):
    """Spectral functionals of each prefix, all float64 ``[B, P]``."""

    effective_rank: Tensor
    response_entropy: Tensor
    traditional_rank: Tensor


def effective_rank(singular_values: Tensor) -> Tensor:
    """Effective rank exp(-sum p log p) with p = s / sum(s), in ``[1, number of nonzero s]``.

    Roy and Vetterli 2007, as used in arXiv 2509.23808. ``singular_values [..., N]`` -> ``[...]``; zeros do not
    contribute. A spectrum without any nonzero value (0 or 1 rows, or all rows equal) has effective rank 1.
    """
    return _entropy(singular_values).exp()


def response_entropy(singular_values: Tensor) -> Tensor:
    """Entropy in nats of the energy shares q = s^2 / sum(s^2), "Response Entropy 1" of arXiv 2509.23808.

    ``singular_values [..., N]`` -> ``[...]``. A spectrum without any nonzero value has entropy 0.
    """
    top = singular_values.amax(-1, keepdim=True) if singular_values.shape[-1] else singular_values
    # Dividing by the largest value first keeps the squares of very large or small spectra in range.
    return _entropy((singular_values / torch.where(top > 0, top, 1.0)).square())


def traditional_rank(singular_values: Tensor, rows: int, width: int, eps: float) -> Tensor:
    """Number of singular values above ``s_max * max(rows, width) * eps``, the usual numerical rank.

    ``singular_values [..., N]`` of a ``rows x width`` matrix -> float64 ``[...]``; ``eps`` is the relative
    precision of its entries. A spectrum without any nonzero value has rank 0.
    """
    if singular_values.shape[-1] == 0:
        return singular_values.new_zeros(singular_values.shape[:-1], dtype=torch.float64)
    threshold = singular_values.amax(-1, keepdim=True) * (max(rows, width) * eps)
    return (singular_values > threshold).sum(-1).double()


def rank_eps(dtype: torch.dtype) -> float:
    """Relative precision that the numerical rank assumes for hidden states stored as ``dtype``.

    It is the machine epsilon of ``dtype``, but of float32 at most: with bfloat16's 2^-7 and D >= 128 the threshold
    would reach s_max and every rank would be 0.
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def prefix_functionals(hidden: Tensor, lengths: Tensor, prefix_rows: Tensor) -> PrefixFunctionals:
    """Effective rank, response entropy and numerical rank of chosen prefixes of every response.

    Args:
        hidden: ``[B, T, D]`` floating point, row j the state from which response token j was sampled; rows at or
            past the response's length are ignored, whatever they hold.
        lengths: ``[B]`` integer, valid rows of each response, 0 <= length <= T.
        prefix_rows: ``[B, P]`` integer, rows k of each prefix asked for, 0 <= k <= length.

    Returns:
        Functionals ``[B, P]`` in float64 on the device of ``hidden``. Prefixes of 0 or 1 rows, or of equal rows,
        have effective rank 1, entropy 0, rank 0.

    Raises:
        ValueError: shapes or ranges do not fit, or a valid row holds NaN or infinity (names the response).
    """
    out = [torch.zeros(prefix_rows.shape, dtype=torch.float64, device=hidden.device) for _ in PrefixFunctionals._fields]
    result = PrefixFunctionals(*out)
    result.effective_rank.fill_(1.0)
    eps = rank_eps(hidden.dtype)
    for response, column, rows, singular_values, _ in _spectra(hidden, lengths, prefix_rows):
        result.effective_rank[response, column] = effective_rank(singular_values)
        result.response_entropy[response, column] = response_entropy(singular_values)
        result.traditional_rank[response, column] = traditional_rank(singular_values, rows, hidden.shape[2], eps)
    return result


def prefix_singular_values(hidden: Tensor, lengths: Tensor, prefix_rows: Tensor) -> Tensor:
    """Singular values of the prefix-centred rows, descending and padded with zeros: float64 ``[B, P, min(T, D)]``.

    Arguments and errors as in :func:`prefix_functionals`, which needs far less memory.
    """
    _, padded_rows, width = hidden.shape
    shape = (*prefix_rows.shape, min(padded_rows, width))
    values = torch.zeros(shape, dtype=torch.float64, device=hidden.device)
    for response, column, _, singular_values, scale in _spectra(hidden, lengths, prefix_rows):
        values[response, column, : singular_values.shape[-1]] = singular_values * scale[:, None]
    return values


def clean_chunks(hidden: Tensor, lengths: Tensor, bytes_limit: int = CHUNK_BYTES) -> Iterator[tuple[Tensor, Tensor]]:
    """Split a batch into chunks of similar length whose float64 work stays within ``bytes_limit``.

    Yields ``(index [b], rows [b, t, D])``: indices into the batch and those responses in float64, cut to the
    chunk's longest response, with zeros past each response's length. Responses of length 0 are left out.

    Raises:
        ValueError: as :func:`prefix_functionals`.
    """
    _, _, width = _check_hidden(hidden, lengths)
    lengths = lengths.to(hidden.device)
    sorted_lengths, order = lengths.sort(descending=True)
    host_lengths = sorted_lengths.tolist()
    end = sum(length > 0 for length in host_lengths)
    start = 0
    while start < end:
        longest = host_lengths[start]
        # Rows and two temporaries, and on the smaller side a Gram matrix, its centred copy and eigh's copy.
        bytes_each = 8 * 3 * longest * (width + min(longest, width))
        stop = min(end, start + max(1, bytes_limit // bytes_each))
        index = order[start:stop]
        rows = hidden[index, :longest].double()
        valid = torch.arange(longest, device=hidden.device) < lengths[index, None]
        rows = torch.where(valid[:, :, None], rows, 0.0)
        finite = rows.isfinite().flatten(1).all(1)
        if not bool(finite.all()):
            first = int(index[~finite].min())
            raise ValueError(
                f"response {first}: hidden states hold NaN or infinity in its valid rows; "
                "check the model's weights and the capture"
            )
        yield index, rows
        start = stop


def _spectra(
    hidden: Tensor, lengths: Tensor, prefix_rows: Tensor
) -> Iterator[tuple[Tensor, Tensor, int, Tensor, Tensor]]:
    """Yield ``(response [n], column [n], k, s [n, min(k, D)], scale [n])``: all prefixes of k >= 2 rows, by k.

    The singular values are ``s * scale``; each response is scaled to a largest entry of 1, so that neither very
    large nor very small states leave float64's range when squared.
    """
    batch, _, width = _check_hidden(hidden, lengths)
    if prefix_rows.dim() != 2 or prefix_rows.shape[0] != batch or prefix_rows.is_floating_point():
        raise ValueError(f"prefix_rows: expected integers [{batch}, P], got {prefix_rows.dtype} {prefix_rows.shape}")
    prefix_rows, lengths = prefix_rows.to(hidden.device), lengths.to(hidden.device)
    if bool(((prefix_rows < 0) | (prefix_rows > lengths[:, None])).any()):
        raise ValueError("prefix_rows: every prefix must have between 0 rows and the response's length")
    for index, rows in clean_chunks(hidden, lengths):
        scale = rows.abs().amax((1, 2))
        rows = rows / torch.where(scale > 0, scale, 1.0)[:, None, None]
        # A constant shift changes no prefix's centred scatter; removing the common offset before squaring keeps
        # its rounding error out of the small eigenvalues. Padding rows become nonzero, but no prefix reads them.
        rows = rows - rows.sum(1, keepdim=True) / lengths[index, None, None]
        wanted = prefix_rows[index]
        sizes = [k for k in wanted.unique().tolist() if k >= 2]
        largest = max((k for k in sizes if k <= width), default=0)
        gram = rows[:, :largest] @ rows[:, :largest].mT
        for k in sizes:
            chunk_row, column = (wanted == k).nonzero(as_tuple=True)
            source, inverse = chunk_row.unique(return_inverse=True)
            if k <= width:
                centred, trace = _centred_gram(gram[source, :k, :k])
            else:
                centred, trace = _centred_scatter(rows[source, :k])
            singular_values = _singular_values(centred, trace)[inverse]
            yield index[chunk_row], column, k, singular_values, scale[chunk_row]


def _centred_gram(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix ``[n, k, k]`` of k rows centred on their mean, and the trace before centring ``[n]``."""
    mean = gram.mean(-1)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return gram - mean[:, None, :] - mean[:, :, None] + mean.mean(-1)[:, None, None], trace


def _centred_scatter(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scatter matrix ``[n, D, D]`` of rows ``[n, k, D]`` centred on their mean, and the trace before centring."""
    centred = rows - rows.mean(1, keepdim=True)
    return centred.mT @ centred, rows.square().sum((1, 2))


def _singular_values(squared: Tensor, trace: Tensor) -> Tensor:
    """Square roots, descending, of the eigenvalues of ``squared [n, m, m]``; what is below the noise becomes 0."""
    eigenvalues = torch.linalg.eigvalsh(squared).flip(-1)
    return torch.where(eigenvalues > NOISE_EPS * trace[:, None], eigenvalues, 0.0).sqrt()


def _entropy(weights: Tensor) -> Tensor:
    """Entropy in nats of nonnegative ``weights [..., N]`` normalised to sum 1; 0 where all weights are 0."""
    total = weights.sum(-1, keepdim=True)
    shares = weights / torch.where(total > 0, total, 1.0)
    entropy: Tensor = torch.special.entr(shares).sum(-1)
    return entropy


def _check_hidden(hidden: Tensor, lengths: Tensor) -> tuple[int, int, int]:
    if hidden.dim() != 3 or not hidden.is_floating_point():
        raise ValueError(f"hidden: expected floating point [B, T, D], got {hidden.dtype} {tuple(hidden.shape)}")
    batch, padded_rows, width = hidden.shape
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise ValueError(f"lengths: expected integers [{batch}], got {lengths.dtype} {tuple(lengths.shape)}")
    if bool(((lengths < 0) | (lengths > padded_rows)).any()):
        raise ValueError(f"lengths={lengths.tolist()}: must be between 0 and the {padded_rows} padded rows")
    return batch, padded_rows, width
