"""Sampler settings by step, prompt, response and token position: ``rollout.schedule``.

Legend: G prompts, n responses to each, T positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.config.common import check_temperature, check_truncation
from verl.config.errors import ConfigError
from verl.config.rollout import RolloutConfig
from verl.data.schedule import SamplingRequest
from verl.rollout.requests import ResponseSettings
from verl.utils.own import OwnCall

FIELDS = ("temperature", "top_p", "top_k", "min_p")
"""What a schedule may set for each response."""
TABLE = "temperatures"
"""What it may set for each position."""


class SamplingSchedule:
    """A user's function or class, with checks.

    Raises:
        ConfigError: it cannot be loaded or made, or takes other arguments.
    """

    def __init__(self, config: RolloutConfig) -> None:
        assert config.schedule is not None, "made only where one is named"
        self.own = OwnCall("rollout.schedule", config.schedule, config.schedule_kwargs, ["request"], {"update?": 1})
        self.where = self.own.where

    def settings(self, request: SamplingRequest) -> ResponseSettings | None:
        """How each of the G n responses is sampled; None: all as ``request.base`` says.

        Raises:
            ConfigError: the function raised, or did not return settings in their ranges and shapes.
        """
        found = self.own(request)
        names = (*FIELDS, TABLE)
        if found is None or (isinstance(found, Mapping) and not found):
            return None
        if not isinstance(found, Mapping) or not set(found) <= set(names):
            raise ConfigError(f"{self.where}: returned {str(found):.80}; it must map some of {', '.join(names)}")
        shape = (len(request.records), request.n)
        fields = {name: self._numbers(name, found[name], shape).ravel() for name in FIELDS if name in found}
        table = None
        if TABLE in found:
            positions = self._array(TABLE, found[TABLE], shape).shape or (1,)
            if len(positions) > 1 or not 1 <= positions[0] <= request.max_response_length:
                raise ConfigError(f"{self.where}: {TABLE} is {list(positions)}; give 1 to max_response_length numbers")
            table = self._numbers(TABLE, found[TABLE], positions).astype(np.float32)
            if not (np.isfinite(table) & (table >= 0.01) & (table <= 1000)).all():
                raise ConfigError(f"{self.where}: {TABLE} must be from 0.01 to 1000")
        return ResponseSettings(self._overrides(request, fields) if fields else None, table)

    def _overrides(self, request: SamplingRequest, fields: Mapping[str, NDArray[Any]]) -> list[Any]:
        num, base = len(request.records) * request.n, request.base
        made: dict[tuple[Any, ...], Any] = {}
        rows = list(zip(*(values.tolist() for values in fields.values()), strict=True))
        assert len(rows) == num, "one for each response"
        for row in set(rows):
            values = dict(zip(fields, row, strict=True))
            if "top_k" in values:
                if not values["top_k"].is_integer():
                    raise ConfigError(f"{self.where}: top_k={values['top_k']}: must be whole")
                values["top_k"] = int(values["top_k"])
            self._check({name: values.get(name, getattr(base, name)) for name in FIELDS})
            made[row] = replace(base, **values)
        return [made[row] for row in rows]

    def _check(self, values: Mapping[str, Any]) -> None:
        prefix = f"{self.where}: "
        if values["temperature"] == 0:
            raise ConfigError(f"{prefix}temperature=0: training needs sampling; return one above 0")
        check_temperature(f"{prefix}temperature", values["temperature"])
        check_truncation(prefix, values["top_p"], values["top_k"], values["min_p"], 1.0)

    def _numbers(self, name: str, given: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """``given`` in this shape: a number, or for prompts [G, 1], or responses [G, n]."""
        try:
            return np.array(np.broadcast_to(self._array(name, given, shape), shape))
        except ValueError as error:
            raise self._misfit(name, given, shape) from error

    def _array(self, name: str, given: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
        try:
            return np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise self._misfit(name, given, shape) from error

    def _misfit(self, name: str, given: Any, shape: tuple[int, ...]) -> ConfigError:
        what = f"{self.where}: {name} is {str(given):.80}"
        return ConfigError(f"{what}; it must be a number, or an array that broadcasts to {shape}")
