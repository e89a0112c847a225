"""Counter-based random number streams for requests, which provide random access to any position.

A stream is identified by an integer. The number at a position depends only on the stream and the position, not on the
device or other computations. This module requires only NumPy.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY = "stream"
"""Key in ``SamplingParams.extra_args`` whose value is the request's stream, an integer."""

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def substream(stream: int, number: int) -> int:
    """Return the 64-bit id of substream ``number`` of ``stream``, e.g. for one of the responses to a prompt.

    Within a ``stream``, substreams have different ids if their numbers differ modulo 2^64.
    """
    names = _derive(np.array([stream & _MASK], dtype=np.uint64), np.array([number & _MASK], dtype=np.uint64))
    return int(names[0])


def uniforms(streams: Any, positions: Any) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1) with 53 random bits for broadcastable arrays of streams and positions."""
    bits = _derive(np.asarray(streams, dtype=np.uint64), np.asarray(positions).astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _derive(stream: NDArray[np.uint64], number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Mix the number first: if it were simply added, one stream could be a shifted copy of another.
    return _mix(stream ^ _mix(number + _GAMMA))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the SplitMix64 finalizer (Steele et al. 2014), a bijection whose output bits depend on all input bits."""
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
