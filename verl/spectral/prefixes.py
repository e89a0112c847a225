"""Public functions that compute spectral metrics of every prefix of a response (arXiv 2509.23808, section 3).

A prefix consists of the first k rows of a response Z ``[T, D]``. Its spectrum consists of the singular values s_1 >=
s_2 >= ... of these rows minus their mean.

There are three methods. ``nested`` computes sums over the spectra of all prefixes from about 27 Cholesky factorisations
per response (:mod:`verl.spectral.nested`). ``eigh`` and ``svd`` decompose each prefix (:mod:`verl.spectral.decompose`).
``auto`` selects the faster of ``nested`` and ``eigh`` using :mod:`verl.spectral.cost`.

Results are also defined for prefixes with 0 or 1 rows or with equal rows. The spectrum of such a prefix is empty, so
its sums, entropy and rank are 0, and its effective rank is 1. Results have no gradients.

Shapes: B responses, T padded rows, D hidden size, P prefixes per response, F functions, b responses per chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from verl.spectral.bounds import MAX_BYTES, block_rows, decomposition_bytes, response_bytes
from verl.spectral.cost import cheapest_method
from verl.spectral.decompose import decomposed_sums, spectra
from verl.spectral.factor import device_kind
from verl.spectral.functions import (
    ENERGY,
    ENERGY_LOG_S,
    SUM_S,
    SUM_S_LOG_S,
    SpectralFunction,
    entropy_of_sums,
    rank_eps,
)
from verl.spectral.nested import lost_to_underflow, nested_sums
from verl.spectral.nodes import NodeSet, node_set
from verl.spectral.responses import WORKSPACE_BYTES, check_hidden, chunks, largest_entries, masked_rows
from verl.utils.device import to_device

METHODS = ("auto", "nested", "eigh", "svd")


@dataclass(frozen=True)
class SpectralOptions:
    """Options for computing spectra. The defaults suit the hidden states of language models."""

    method: str = "auto"
    """Method for all prefixes: ``auto``, ``nested``, ``eigh`` or ``svd``."""
    tolerance: float = 3e-7
    """Bound on the relative error of each sum due to the fit in ``nested``, from 1e-9 to 1e-2."""
    condition: float = 1e6
    """Condition number from 10 to 1e6. ``nested`` resolves singular values down to about 2 / condition times r, the
    fourth root of the sum of s^4, and underestimates smaller values. With one nonzero value, r is s_max. With n equal
    values, r is n^(1/4) s_max. A condition ten times smaller saves 3 of 27 factorisations."""
    svd_rank: int | None = None
    """Maximum number of singular values per prefix, largest first, or None for all (only ``eigh`` and ``svd``)."""
    on_nonfinite: str = "raise"
    """Handling of responses with NaN or infinity: ``raise`` an error or ``mask`` their results with NaN."""
    workspace_bytes: int | None = None
    """Memory bound for float64 matrices of several responses or shifts at once, capped at ``max_bytes``. A single shift
    of one response may exceed this bound. None means 32 MiB on a CPU (about its cache) or 1 GiB on a GPU."""
    max_bytes: int = MAX_BYTES
    """Memory bound for one response, or for several at once. The bound is exceeded only if unavoidable (see
    :func:`verl.spectral.bounds.workspace_bound`). Lower bounds are slower."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r}: must be one of {METHODS}")
        if self.svd_rank is not None and (self.svd_rank < 1 or self.method == "nested"):
            raise ValueError(
                f"svd_rank={self.svd_rank}, method={self.method!r}: set svd_rank to at least 1, and not with 'nested'"
            )
        for name, value in (("workspace_bytes", self.workspace_bytes), ("max_bytes", self.max_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")


DEFAULTS = SpectralOptions()

ENTROPIES = {"effective_rank": (SUM_S, SUM_S_LOG_S), "response_entropy": (ENERGY, ENERGY_LOG_S)}
"""Maps each metric to the two sums that determine its entropy. The effective rank is the exponential of an entropy."""


class SpectrumBatch(NamedTuple):
    """Spectra of n centred prefixes with equal row counts, which may belong to different responses."""

    singular_values: Tensor
    """Descending singular values in the units of the states, float64 ``[n, min(rows, D)]``. The first is positive."""
    rows: int
    """Number of rows of each prefix, at least 2."""
    width: int
    """Hidden size D."""


SpectralMeasure = Callable[[SpectrumBatch], Tensor]
"""Function that maps the spectra of n prefixes to one value per prefix, ``[n]``."""


class _Piece(NamedTuple):
    """Results for one chunk of b responses."""

    which: Tensor
    """Response indices in the batch, ``[b]``, on the device of the states."""
    prefixes: Tensor
    """Row counts of the prefixes, ``[b, P]``."""
    sums: Tensor
    """Sums over singular values divided by ``scale``, ``[F, b, P]``."""
    scale: Tensor
    """Scales in the units of ``hidden``, ``[b, P]``."""
    ranks: Tensor | None
    """Traditional ranks ``[b, P]``, or None for ``nested``."""


@torch.no_grad()
def prefix_spectral_sums(
    hidden: Tensor,
    lengths: Tensor,
    prefix_rows: Tensor,
    functions: Sequence[SpectralFunction],
    options: SpectralOptions = DEFAULTS,
) -> Tensor:
    """Return sums of functions over the singular values of the requested prefixes of every response.

    Args:
        hidden: Floating-point states ``[B, T, D]``; row j is the state from which response token j was sampled. Rows
            past the response's length are ignored.
        lengths: Integer row counts ``[B]`` of the responses, 0 <= length <= T.
        prefix_rows: Integer row counts k ``[B, P]`` of the prefixes, 0 <= k <= length.
        functions: F functions to sum.
        options: Method, accuracy, memory bounds, and handling of NaN and infinity.

    Returns:
        Sums as float64 ``[F, B, P]`` on the device and in the units of ``hidden``.

    Raises:
        ValueError: A shape, range or option is invalid, or a response contains NaN or infinity (the message names it).
    """
    # Rescaling a sum with a logarithm needs the corresponding plain sum, so compute both.
    fitted = tuple(dict.fromkeys(g for f in functions for g in (SpectralFunction(f.power), f)))
    shape = (len(functions), *prefix_rows.shape)
    result = torch.zeros(shape, dtype=torch.float64, device=hidden.device)
    for piece in _pieces(hidden, lengths, prefix_rows, fitted, options):
        for row, function in enumerate(functions):
            sums, plain = (piece.sums[fitted.index(f)] for f in (function, SpectralFunction(function.power)))
            result[row, piece.which] = function.rescaled(sums, plain, piece.scale)
    return result


@torch.no_grad()
def prefix_functionals(
    hidden: Tensor,
    lengths: Tensor,
    prefix_rows: Tensor,
    names: Sequence[str],
    options: SpectralOptions = DEFAULTS,
) -> dict[str, Tensor]:
    """Return the effective rank, response entropy and numerical rank of the requested prefixes of each response.

    ``names`` may contain ``effective_rank``, ``response_entropy`` and ``traditional_rank``. See
    :func:`prefix_spectral_sums` for all other arguments and the errors. The traditional rank is not a sum of smooth
    functions, so if it is requested, ``auto`` selects ``eigh`` for all names, and ``nested`` raises an error.

    Returns:
        float64 ``[B, P]`` by name. Effective ranks are in [1, min(k - 1, D)], and response entropies are in [0, log
        min(k - 1, D)].
    """
    if not names:
        return {}
    known = [*ENTROPIES, "traditional_rank"]
    for name in names:
        if name not in known:
            raise ValueError(f"names: {name!r} is not one of {known}")
    if "traditional_rank" in names:
        options = _decomposing(options)
    functions = tuple(f for name in names if name in ENTROPIES for f in ENTROPIES[name])
    results = {name: torch.zeros(prefix_rows.shape, dtype=torch.float64, device=hidden.device) for name in names}
    if "effective_rank" in results:
        results["effective_rank"].fill_(1.0)
    for piece in _pieces(hidden, lengths, prefix_rows, functions, options):
        # Entropies are bounded, since a prefix of k rows has at most min(k - 1, D) nonzero singular values.
        most = (piece.prefixes - 1).clamp(max=min(hidden.shape[2], options.svd_rank or hidden.shape[2]))
        most = most.clamp(min=1).double().log()
        for name, result in results.items():
            if name == "traditional_rank":
                assert piece.ranks is not None
                result[piece.which] = piece.ranks
                continue
            total, total_log = (piece.sums[functions.index(f)] for f in ENTROPIES[name])
            entropy = entropy_of_sums(total, total_log, ENTROPIES[name][0].power)
            entropy = torch.minimum(entropy.clamp(min=0), most)
            result[piece.which] = entropy.exp() if name == "effective_rank" else entropy
    return results


@torch.no_grad()
def prefix_singular_values(
    hidden: Tensor, lengths: Tensor, prefix_rows: Tensor, options: SpectralOptions = DEFAULTS
) -> Tensor:
    """Return descending singular values of the centred prefixes, padded with zeros, float64 ``[B, P, min(T, D)]``.

    See :func:`prefix_spectral_sums` for the arguments and errors. ``auto`` selects ``eigh``. ``nested`` raises an error
    because it does not compute singular values.
    """
    options = _decomposing(options)
    lengths, prefix_rows, largest = _checked(hidden, lengths, prefix_rows, options)
    most = min(hidden.shape[1:])
    result = torch.zeros((*prefix_rows.shape, most), dtype=torch.float64, device=hidden.device)
    result[masked_rows(largest, hidden.device)] = torch.nan
    limit = _workspace_bytes(options, hidden.device)
    for chunk in chunks(hidden, lengths, largest, partial(decomposition_bytes, width=hidden.shape[2]), limit):
        for part in spectra(chunk, prefix_rows[chunk.which], options.method, options.svd_rank):
            values = part.singular_values * chunk.scale[part.response, None]
            result[chunk.index[part.response], part.column, : values.shape[1]] = values
    return result


@torch.no_grad()
def prefix_measures(
    hidden: Tensor,
    lengths: Tensor,
    prefix_rows: Tensor,
    measures: Sequence[SpectralMeasure],
    options: SpectralOptions = DEFAULTS,
) -> list[Tensor]:
    """Return custom measures of the singular values of the centred prefixes, float64 ``[B, P]`` per measure.

    See :func:`prefix_singular_values` for the arguments and errors. The result is 0 for prefixes without nonzero
    singular values (0 or 1 rows, or equal rows), and NaN for masked responses.
    """
    options = _decomposing(options)
    lengths, prefix_rows, largest = _checked(hidden, lengths, prefix_rows, options)
    results = [torch.zeros(prefix_rows.shape, dtype=torch.float64, device=hidden.device) for _ in measures]
    for result in results:
        result[masked_rows(largest, hidden.device)] = torch.nan
    width, limit = hidden.shape[2], _workspace_bytes(options, hidden.device)
    for chunk in chunks(hidden, lengths, largest, partial(decomposition_bytes, width=width), limit):
        prefixes = prefix_rows[chunk.which]
        for part in spectra(chunk, prefixes, options.method, options.svd_rank):
            spread = (part.singular_values[:, 0] > 0).cpu()
            if not bool(spread.any()):
                continue
            chosen = to_device(spread.nonzero()[:, 0], hidden.device)
            response, column = part.response[chosen], part.column[chosen]
            batch = SpectrumBatch(part.singular_values[chosen] * chunk.scale[response, None], part.rows, width)
            for result, measure in zip(results, measures, strict=True):
                result[chunk.index[response], column] = measure(batch)
    return results


def _pieces(
    hidden: Tensor,
    lengths: Tensor,
    prefix_rows: Tensor,
    functions: tuple[SpectralFunction, ...],
    options: SpectralOptions,
) -> list[_Piece]:
    """Compute the sums of each chunk. Skip responses without rows, and set the sums of masked responses to NaN."""
    lengths, prefix_rows, largest = _checked(hidden, lengths, prefix_rows, options)
    pieces: list[_Piece] = []
    if prefix_rows.numel() == 0:
        return pieces
    width = hidden.shape[2]
    # 1. Mask responses that contain NaN or infinity.
    masked = masked_rows(largest, hidden.device)
    if len(masked):
        nan = torch.full((len(masked), prefix_rows.shape[1]), torch.nan, dtype=torch.float64, device=hidden.device)
        nans = nan.expand(len(functions), -1, -1)
        rows = to_device(prefix_rows[largest.isnan()], hidden.device)
        pieces.append(_Piece(masked, rows, nans, torch.ones_like(nan), nan))
    # 2. Choose the method and estimate its memory per response.
    limit = _workspace_bytes(options, hidden.device)
    method, nodes = _method_and_nodes(lengths, prefix_rows, hidden, functions, options)
    if nodes is not None:
        bytes_for = partial(_nested_bytes, width=width, shifts=len(nodes.shifts), max_bytes=options.max_bytes)
    else:
        bytes_for = partial(decomposition_bytes, width=width)
    decomposed = partial(decomposed_sums, functions=functions, svd_rank=options.svd_rank, eps=rank_eps(hidden.dtype))
    # 3. Process chunks of responses of similar length, each response in its own scale.
    for chunk in chunks(hidden, lengths, largest, bytes_for, limit):
        prefixes = prefix_rows[chunk.which]
        ranks: Tensor | None = None
        failed = torch.zeros(len(chunk), dtype=torch.bool)
        if nodes is not None:
            sums, scale, failed = nested_sums(chunk, prefixes, nodes, limit, options.max_bytes)
        else:
            sums, scale, ranks = decomposed(chunk, prefixes, method=method)
            if method == "eigh":
                failed = lost_to_underflow(chunk)
        # 4. Use ``svd`` for responses whose squares are inaccurate.
        failed = failed.cpu()
        if bool(failed.any()):
            exact = decomposed(chunk.select(failed), prefixes[failed], method="svd")
            at = to_device(failed.nonzero()[:, 0], hidden.device)
            sums[:, at], scale[at] = exact.sums, exact.scale
            if ranks is not None:
                ranks[at] = exact.ranks
        rows = to_device(prefixes, hidden.device)
        pieces.append(_Piece(chunk.index, rows, sums, scale * chunk.scale[:, None], ranks))
    return pieces


def _method_and_nodes(
    lengths: Tensor,
    prefix_rows: Tensor,
    hidden: Tensor,
    functions: tuple[SpectralFunction, ...],
    options: SpectralOptions,
) -> tuple[str, NodeSet | None]:
    """Resolve ``auto`` to a method. Return the method and, if it is ``nested``, its nodes."""
    method, width = options.method, hidden.shape[2]
    if method == "auto" and options.svd_rank is not None:
        method = "eigh"
    if method not in ("auto", "nested"):
        return method, None
    nodes = node_set(functions, options.tolerance, options.condition)
    longest = int(lengths.max()) if lengths.numel() else 0
    if method == "auto" and decomposition_bytes(longest, width) > options.max_bytes:
        method = "nested"
    if method == "auto":
        device = device_kind(hidden.device)
        method = cheapest_method(lengths, prefix_rows, width, len(nodes.shifts), options.max_bytes, device)
    return method, nodes if method == "nested" else None


def _checked(
    hidden: Tensor, lengths: Tensor, prefix_rows: Tensor, options: SpectralOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Validate the inputs. Return the lengths, prefix row counts and each response's largest entry, on the CPU."""
    lengths, prefix_rows = lengths.cpu(), prefix_rows.cpu()
    check_hidden(hidden, lengths)
    batch = hidden.shape[0]
    integers = not prefix_rows.is_floating_point() and prefix_rows.dtype != torch.bool
    if prefix_rows.dim() != 2 or prefix_rows.shape[0] != batch or not integers:
        raise ValueError(f"prefix_rows: expected integers [{batch}, P], got {prefix_rows.dtype} {prefix_rows.shape}")
    prefix_rows = prefix_rows.long()
    if bool(((prefix_rows < 0) | (prefix_rows > lengths[:, None])).any()):
        raise ValueError("prefix_rows: every prefix must have between 0 rows and the response's length")
    largest = largest_entries(hidden, lengths, options.on_nonfinite)
    return lengths, prefix_rows, largest


def _decomposing(options: SpectralOptions) -> SpectralOptions:
    """Return ``options`` with ``auto`` replaced by ``eigh``, or raise ``ValueError`` for ``nested``."""
    if options.method == "nested":
        raise ValueError("method='nested': it computes sums, no singular values; set method to 'auto', 'eigh' or 'svd'")
    return replace(options, method="eigh") if options.method == "auto" else options


def _nested_bytes(rows: int, width: int, shifts: int, max_bytes: int) -> int:
    """Return the bytes needed to factor one response at all shifts at once."""
    return response_bytes(rows, width, block_rows(rows, width, max_bytes), shifts)


def _workspace_bytes(options: SpectralOptions, device: torch.device) -> int:
    several = WORKSPACE_BYTES[device_kind(device)] if options.workspace_bytes is None else options.workspace_bytes
    return min(several, options.max_bytes)
