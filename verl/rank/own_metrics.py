"""Rank metrics of a researcher's own: functions of a spectrum (``calculator.own_metrics``).

They are loaded wherever hidden states are measured: in the rollout engine, or in the worker whose policy reads the
responses again.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from verl.config.calculator import name_of
from verl.config.errors import ConfigError
from verl.spectral import SpectralMeasure, SpectrumBatch
from verl.utils.own import OwnCall

FIELD = "calculator.own_metrics"

SAMPLE = SpectrumBatch(torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.0, 0.0]], dtype=torch.float64), 3, 8)
"""What a function is tried on before training."""


def own_measures(paths: Sequence[str]) -> dict[str, SpectralMeasure]:
    """The functions with these import paths, by the names that ``CalculatorConfig.own_names`` gives them, with checks.

    Raises:
        ConfigError: one cannot be loaded, has state, or does not give a finite number for each spectrum.
    """
    measures: dict[str, SpectralMeasure] = {}
    for path in paths:
        own = OwnCall(FIELD, path, {}, ["spectra"])
        own.refuse_state()
        measure = partial(_measured, own)
        measure(SAMPLE)
        measures[name_of(path)] = measure
    return measures


def _measured(own: OwnCall, spectra: SpectrumBatch) -> Tensor:
    """The user's value of each spectrum, ``[n]`` float64."""
    found = own(spectra)
    size = len(spectra.singular_values)
    if not isinstance(found, Tensor) or found.shape != (size,) or found.is_complex():
        what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"{own.where}: returned {what}; expected a tensor of {size} numbers, one for each spectrum")
    if not bool(found.isfinite().all()):
        worst = spectra.singular_values[int((~found.isfinite()).nonzero()[0])]
        raise ConfigError(
            f"{own.where}: returned NaN or infinity for {spectra.rows} rows with singular values "
            f"{worst[:3].tolist()}...; expected finite numbers (some singular values may be 0)"
        )
    return found.double()
