"""Sampler settings by prompt, response and position, as :meth:`verl.method.Method.sampling` returns them.

Legend: G prompts, n responses to each, T positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.config.common import check_temperature, check_truncation
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.rollout.requests import ResponseSettings

FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""What may be set for each response."""
TABLE = "temperatures"
"""What may be set for each position."""


def response_settings(settings: Any, num_prompts: int, config: PPOConfig, where: str) -> ResponseSettings | None:
    """The settings of the G n responses to ``num_prompts`` prompts; None: all as ``config`` says.

    Raises:
        ConfigError: they are not in their ranges and shapes; begins with ``where``.
    """
    names, base = (*FIELDS, TABLE), config.rollout.train_kwargs
    if settings is None or (isinstance(settings, Mapping) and not settings):
        return None
    if not isinstance(settings, Mapping) or not set(settings) <= set(names):
        raise ConfigError(f"{where} returned {str(settings):.80}; it must map some of {', '.join(names)}")
    shape = (num_prompts, base.n)
    fields = {name: _numbers(f"{where}: {name}", settings[name], shape) for name in FIELDS if name in settings}
    overrides = _overrides(fields, base, where) if fields else None
    table = _table(settings[TABLE], config.data.max_response_length, where) if TABLE in settings else None
    return ResponseSettings(overrides, table)


def _overrides(fields: Mapping[str, NDArray[Any]], base: SamplingConfig, where: str) -> list[SamplingConfig]:
    """The settings of each response; equal ones are one object."""
    made: dict[tuple[Any, ...], SamplingConfig] = {}
    rows = list(zip(*(values.ravel().tolist() for values in fields.values()), strict=True))
    for row in set(rows):
        values = dict(zip(fields, row, strict=True))
        if "top_k" in values:
            if not values["top_k"].is_integer():
                raise ConfigError(f"{where}: top_k={values['top_k']}: must be whole")
            values["top_k"] = int(values["top_k"])
        merged = {name: values.get(name, getattr(base, name)) for name in FIELDS}
        if merged["temperature"] == 0:
            raise ConfigError(f"{where}: temperature=0: training needs sampling; return one above 0")
        check_temperature(f"{where}: temperature", merged["temperature"])
        check_truncation(f"{where}: ", merged["top_p"], merged["top_k"], merged["min_p"], 1.0)
        made[row] = replace(base, **values)
    return [made[row] for row in rows]


def _table(values: Any, max_positions: int, where: str) -> NDArray[np.float32]:
    """Temperatures [T] float32, T at most ``max_positions``."""
    array = _array(f"{where}: {TABLE}", values, "[T]")
    if array.ndim != 1 or not 1 <= len(array) <= max_positions:
        raise ConfigError(f"{where}: {TABLE} has the shape {list(array.shape)}; give 1 to {max_positions} positions")
    table = array.astype(np.float32)
    if not (np.isfinite(table) & (table >= 0.01) & (table <= 1000)).all():
        raise ConfigError(f"{where}: {TABLE} must be from 0.01 to 1000")
    return table


def _numbers(what: str, values: Any, shape: tuple[int, int]) -> NDArray[np.float64]:
    """A number, or an array that broadcasts to [G, n], in this shape."""
    array = _array(what, values, f"[G, n]={list(shape)}")
    try:
        return np.array(np.broadcast_to(array, shape))
    except ValueError as error:
        raise ConfigError(f"{what} is {str(values):.80}; it must broadcast to [G, n]={list(shape)}") from error


def _array(what: str, values: Any, shape: str) -> NDArray[np.float64]:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is {str(values):.80}; it must be numbers of the shape {shape}") from error
