"""Converts a padded batch of hidden states to chunks of scaled float64 rows.

Shapes: B responses, T padded rows, D hidden size, b responses of n rows per chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from verl.spectral.bounds import BLOCK_ROWS
from verl.utils.device import to_device

WORKSPACE_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}
"""Memory bound for float64 matrices of several responses or shifts at once, by device type. Matrices for one response
and shift may exceed the bound. A CPU is fastest if the matrices fit in its cache and tensors are below 32 MiB, since
glibc returns larger tensors to the system after each call. A GPU is fastest when fully occupied."""

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes of hidden states."""


@dataclass(frozen=True)
class Chunk:
    """Group of responses with similar lengths; their rows are converted to float64 in blocks."""

    hidden: Tensor
    """Hidden states of the whole batch, ``[B, T, D]``."""
    which: Tensor
    """Response indices in the batch, ``[b]`` on the CPU."""
    lengths: Tensor
    """Valid row counts, at least 1, ``[b]`` on the CPU."""
    scale: Tensor
    """Powers of 2, float64 ``[b]``, such that ``hidden / scale`` is exact and in [-1, 1]."""
    longest: int
    """Row count n of the longest response."""

    def __len__(self) -> int:
        return len(self.which)

    @property
    def width(self) -> int:
        """Hidden size D."""
        return self.hidden.shape[2]

    @cached_property
    def shortest(self) -> int:
        """Row count of the shortest response."""
        return int(self.lengths.min())

    @cached_property
    def index(self) -> Tensor:
        """Copy of ``which`` on the device of ``hidden``."""
        return to_device(self.which, self.hidden.device)

    @cached_property
    def _ends(self) -> Tensor:
        return to_device(self.lengths, self.hidden.device)

    def select(self, mask: Tensor) -> "Chunk":
        """Select responses with a bool ``mask [b]`` on the CPU."""
        scale = self.scale[to_device(mask.nonzero()[:, 0], self.scale.device)]
        return replace(self, which=self.which[mask], lengths=self.lengths[mask], scale=scale)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return ``hidden / scale`` minus each response's first row, ``[b, stop - start, D]``. Padding is arbitrary.

        Subtracting a constant row does not change the centred scatter. Since the first row belongs to every prefix,
        differences and rounding errors scale with the prefix's extent instead of its distance from the origin.
        """
        scale = self.scale[:, None, None]
        # On a CPU, index_select is five times as fast as indexing with a tensor and a slice.
        parts = self.hidden[:, start:stop], self.hidden[:, :1]
        rows, first = (part.index_select(0, self.index).double() for part in parts)
        return rows.div_(scale).sub_(first.div_(scale))

    def contrasts(self, size: int = BLOCK_ROWS, stop: int | None = None) -> Iterator[Tensor]:
        """Yield the Helmert contrasts of the first ``stop`` rows (default: all) in blocks of up to ``[b, size, D]``.

        z_1 = 0 and z_k = sqrt((k - 1) / k) (x_k - mean of x_1..x_(k-1)), eq. 1 in docs/spectral.md. Padding is 0.
        """
        stop = self.longest if stop is None else stop
        before: Tensor | None = None
        for start in range(0, stop, size):
            rows = self.rows(start, min(start + size, stop))
            # 1. Compute the sum of all rows before each row, starting with the previous block's total.
            sums = rows if before is None else torch.cat([before, rows], dim=1)
            sums = sums.cumsum(1) if before is None else sums.cumsum_(1)
            before = sums[:, -1:].clone()
            # 2. Subtract the mean of the previous rows from each row, and multiply by sqrt((k - 1) / k).
            first = max(start, 1)
            count = torch.arange(first, start + rows.shape[1], dtype=rows.dtype, device=rows.device)[:, None]
            later = rows[:, first - start :]
            later.addcdiv_(sums[:, : later.shape[1]], count, value=-1).mul_((count / (count + 1)).sqrt())
            if start == 0:
                rows[:, 0] = 0.0
            if start + rows.shape[1] > self.shortest:
                past_end = torch.arange(start, start + rows.shape[1], device=rows.device) >= self._ends[:, None]
                rows.masked_fill_(past_end[:, :, None], 0.0)
            yield rows

    def all_contrasts(self, stop: int | None = None) -> Tensor:
        """Return the contrasts ``[b, stop, D]`` of the first ``stop`` rows (default: all rows)."""
        stop = self.longest if stop is None else stop
        if stop <= BLOCK_ROWS:
            return next(self.contrasts(BLOCK_ROWS, stop))
        result = self.scale.new_empty(len(self), stop, self.width)
        for index, block in enumerate(self.contrasts(BLOCK_ROWS, stop)):
            result[:, index * BLOCK_ROWS : index * BLOCK_ROWS + block.shape[1]] = block
        return result


def check_hidden(hidden: Tensor, lengths: Tensor) -> None:
    """Raise ``ValueError`` unless ``hidden`` has float values [B, T, D] and ``lengths`` integers [B] from 0 to T."""
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
    """Return the largest absolute entry in each response's valid rows, float64 ``[B]`` on the CPU.

    The result is 0 for responses without rows, and NaN for responses with NaN or infinity. Raises ``ValueError`` if
    ``on_nonfinite`` is neither ``raise`` nor ``mask``, or if it is ``raise`` and a response contains NaN or infinity.
    The message identifies the first such response.
    """
    if on_nonfinite not in ("raise", "mask"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r}: must be 'raise' or 'mask'")
    if hidden.numel() == 0:
        return torch.zeros(hidden.shape[0], dtype=torch.float64)
    low, high = hidden.amin(2), hidden.amax(2)  # ten times as fast as aminmax on a CPU
    valid = torch.arange(hidden.shape[1], device=hidden.device) < to_device(lengths, hidden.device)[:, None]
    largest = torch.where(valid, torch.maximum(low.abs(), high.abs()), 0.0).amax(1).double()
    largest = torch.where(largest.isfinite(), largest, torch.nan).cpu()
    if on_nonfinite == "raise" and bool(largest.isnan().any()):
        first = int(largest.isnan().nonzero()[0])
        raise ValueError(
            f"response {first}: its hidden states hold NaN or infinity; check the model's weights and the capture, or "
            "set on_nonfinite=mask to leave the response out"
        )
    return largest


def masked_rows(largest: Tensor, device: torch.device) -> Tensor:
    """Return the indices of responses whose :func:`largest_entries` are NaN, as a tensor on ``device``."""
    return to_device(largest.isnan().nonzero()[:, 0], device)


def chunks(
    hidden: Tensor, lengths: Tensor, largest: Tensor, bytes_for: Callable[[int], float], bytes_limit: int
) -> Iterator[Chunk]:
    """Split a batch into chunks of responses of similar length, longest first.

    Responses without rows and responses whose ``largest`` entry is NaN are skipped. ``bytes_for(n)`` is the memory
    needed for one response of n rows. A chunk exceeds ``bytes_limit`` only if it is a single response that exceeds it.
    ``lengths`` and ``largest`` must be on the CPU.
    """
    # 1. Sort by decreasing length; skipped responses have length 0 and come last.
    sorted_lengths, order = torch.where(largest.isnan(), 0, lengths).sort(descending=True, stable=True)
    host_lengths = sorted_lengths.tolist()
    end = sum(length > 0 for length in host_lengths)
    start = 0
    while start < end:
        # 2. Take as many responses as fit.
        longest = host_lengths[start]
        stop = min(end, start + max(1, int(bytes_limit // bytes_for(longest))))
        index = order[start:stop]
        # 3. Scale each response by 2^e, where frexp gives |x| < 2^e; 2^1024 would overflow float64.
        exponent = torch.frexp(torch.where(largest[index] > 0, largest[index], 0.5)).exponent.clamp(max=1023)
        scale = torch.ldexp(torch.ones_like(largest[index]), exponent)
        yield Chunk(hidden, index, lengths[index], to_device(scale, hidden.device), longest)
        start = stop
