"""Computes the spectra of all prefixes of a matrix. The package is pure linear algebra and depends only on torch.

The entry points are :func:`prefix_functionals` (effective ranks and entropies) and :func:`prefix_spectral_sums` (sums
of powers of singular values). See docs/spectral.md for the derivation of the method and its errors.
"""

from verl.spectral.functions import (
    ENERGY,
    ENERGY_LOG_S,
    SUM_S,
    SUM_S_LOG_S,
    SpectralFunction,
    effective_rank,
    response_entropy,
    traditional_rank,
)
from verl.spectral.prefixes import (
    METHODS,
    SpectralMeasure,
    SpectralOptions,
    SpectrumBatch,
    prefix_functionals,
    prefix_singular_values,
    prefix_spectral_sums,
)

__all__ = [
    "ENERGY",
    "ENERGY_LOG_S",
    "METHODS",
    "SUM_S",
    "SUM_S_LOG_S",
    "SpectralFunction",
    "SpectralMeasure",
    "SpectralOptions",
    "SpectrumBatch",
    "effective_rank",
    "prefix_functionals",
    "prefix_singular_values",
    "prefix_spectral_sums",
    "response_entropy",
    "traditional_rank",
]
