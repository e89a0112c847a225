"""From a padded batch of hidden states to chunks of clean float64 rows.

Shapes: B responses, T padded rows, D hidden size; a chunk holds b responses of n rows.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

WORKSPACE_BYTES = {"cpu": 24 * 2**20, "cuda": 2**30}
"""Bound on the float64 matrices held at once, by device type. A CPU is fastest within its cache and below the 32 MiB
above which glibc returns memory to the system after each call; a GPU is fastest when full."""

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes of hidden states."""


class Chunk(NamedTuple):
    """Responses of similar length."""

    which: Tensor
    """``[b]`` positions in the batch."""
    lengths: Tensor
    """``[b]`` valid rows, at least 1."""
    rows: Tensor
    """float64 ``[b, n, D]``: ``hidden / scale`` minus its first row; unspecified past a response's length."""
    scale: Tensor
    """float64 ``[b]`` powers of 2, so that the division is exact; the entries of ``hidden / scale`` are at most 1."""


def check_hidden(hidden: Tensor, lengths: Tensor) -> None:
    """Raise ``ValueError`` unless ``hidden`` is floating ``[B, T, D]`` and ``lengths`` integers ``[B]`` in [0, T]."""
    if hidden.dim() != 3 or hidden.dtype not in FLOATING:
        raise ValueError(f"hidden: expected floating point [B, T, D], got {hidden.dtype} {tuple(hidden.shape)}")
    batch, padded_rows, width = hidden.shape
    if width == 0:
        raise ValueError(f"hidden: expected at least one column, got {tuple(hidden.shape)}")
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise ValueError(f"lengths: expected integers [{batch}], got {lengths.dtype} {tuple(lengths.shape)}")
    if bool(((lengths < 0) | (lengths > padded_rows)).any()):
        raise ValueError(f"lengths={lengths.tolist()}: must be between 0 and the {padded_rows} padded rows")


def largest_entries(hidden: Tensor, lengths: Tensor, on_nonfinite: str) -> Tensor:
    """Largest absolute entry of each response's valid rows: float64 ``[B]``; 0 without rows, NaN if not finite.

    Raises:
        ValueError: ``on_nonfinite`` is ``raise`` and a response holds NaN or infinity (names the first such response),
            or it is neither ``raise`` nor ``mask``.
    """
    if on_nonfinite not in ("raise", "mask"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: must be 'raise' or 'mask'")
    if hidden.numel() == 0:
        return torch.zeros(hidden.shape[0], dtype=torch.float64, device=hidden.device)
    low, high = torch.aminmax(hidden, dim=2)
    valid = torch.arange(hidden.shape[1], device=hidden.device) < lengths.to(hidden.device)[:, None]
    largest = torch.where(valid, torch.maximum(low.abs(), high.abs()), 0.0).amax(1).double()
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    if on_nonfinite == "raise" and bool(largest.isnan().any()):
        first = int(largest.isnan().nonzero()[0])
        raise ValueError(
            f"response {first}: its hidden states hold NaN or infinity; check the model's weights and the capture, or "
            "set on_nonfinite=mask to leave the response out"
        )
    return largest


def chunks(
    hidden: Tensor, lengths: Tensor, largest: Tensor, bytes_for: Callable[[int], float], bytes_limit: int
) -> Iterator[Chunk]:
    """Split a batch into chunks of similar length, longest responses first.

    Responses without rows and those whose ``largest`` entry is NaN are left out. ``bytes_for(n)`` is the memory that
    one response of n rows takes; a chunk stays within ``bytes_limit`` unless a single response exceeds it.
    """
    # 1. Longest first; skipped responses have length 0 and come last.
    lengths = lengths.to(hidden.device)
    sorted_lengths, order = torch.where(largest.isnan(), 0, lengths).sort(descending=True, stable=True)
    host_lengths = sorted_lengths.tolist()
    end = sum(length > 0 for length in host_lengths)
    start = 0
    while start < end:
        # 2. As many of the next responses as fit.
        longest = host_lengths[start]
        stop = min(end, start + max(1, int(bytes_limit // bytes_for(longest))))
        index = order[start:stop]
        # 3. Scale each response by a power of 2, e with |x| < 2^e from frexp; 2^1024 exceeds float64.
        exponent = torch.frexp(torch.where(largest[index] > 0, largest[index], 0.5)).exponent.clamp(max=1023)
        scale = torch.ldexp(torch.ones_like(largest[index]), exponent)
        rows = hidden[index, :longest].double().div_(scale[:, None, None])
        # 4. Subtract the first row: a constant changes no centred scatter. As it belongs to every prefix, the
        #    differences and their rounding stay within the prefix's extent, however far from the origin it lies.
        yield Chunk(index, lengths[index], rows.sub_(rows[:, :1].clone()), scale)
        start = stop
