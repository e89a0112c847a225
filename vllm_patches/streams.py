"""Streams of random numbers that belong to requests: counter-based, so any number of any stream is computed directly.

A stream is named by a whole number. Its number at a position depends on the name and the position alone: not on the
device, nor on what else is computed, or in which order. Needs NumPy alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY = "stream"
"""Key of a request's stream in ``SamplingParams.extra_args``, a whole number."""

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def substream(stream: int, number: int) -> int:
    """Return the name of stream ``number`` below ``stream``, 64 bits: a prompt below a seed, a response below a prompt.

    For one ``stream``, different numbers modulo 2^64 have different names.
    """
    names = _derive(np.array([stream & _MASK], dtype=np.uint64), np.array([number & _MASK], dtype=np.uint64))
    return int(names[0])


def uniforms(streams: Any, positions: Any) -> NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits for arrays of streams and positions, which are broadcast."""
    bits = _derive(np.asarray(streams, dtype=np.uint64), np.asarray(positions).astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _derive(stream: NDArray[np.uint64], number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The number is mixed on its own first: were it added, two streams could be one shifted.
    return _mix(stream ^ _mix(number + _GAMMA))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014), a bijection in which each bit depends on all; wraps."""
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
