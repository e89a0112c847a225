"""Loads custom rank metrics, which are user-supplied functions of a spectrum (``calculator.own_metrics``).

The functions are loaded in the process that measures hidden states: the rollout engine, or the worker that recomputes
them.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from verl.config.calculator import name_of
from verl.spectral import SpectralMeasure, SpectrumBatch
from verl.utils.user_code import UserFunction, check_finite, check_tensor

FIELD = "calculator.own_metrics"

SAMPLE = SpectrumBatch(torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.0, 0.0]], dtype=torch.float64), 3, 8)
"""Example input for testing custom functions before training."""


def own_measures(paths: Sequence[str]) -> dict[str, SpectralMeasure]:
    """Load and test the functions at ``paths`` and return them keyed by ``CalculatorConfig.own_names``.

    Raises ``ConfigError`` if a function cannot be loaded, or does not return a finite number for each spectrum.
    """
    measures: dict[str, SpectralMeasure] = {}
    for path in paths:
        measures[name_of(path)] = measure = partial(_measure, UserFunction(FIELD, path, ["spectra"]))
        measure(SAMPLE)
    return measures


def _measure(function: UserFunction, spectra: SpectrumBatch) -> Tensor:
    """Return the custom metric of each spectrum as float64 ``[n]``."""
    values = function(spectra)
    check_tensor(function.where, values, [len(spectra.singular_values)], what=", one number for each spectrum")
    check_finite(function.where, values, f" for {spectra.rows} rows (some singular values may be 0)")
    numbers: Tensor = values.double()
    return numbers
