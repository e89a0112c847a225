"""EAD (arXiv 2510.05251): explore early tokens, exploit late ones, by a temperature that falls along the response.

    tau_t = max(1 + tau_max - exp((t - first) / (scale d_s)), tau_min)    d_s = min(d_0 + 5 s, d_max) at step s

with tau_max at the first tokens. The paper's formula has no ``scale``; its code divides by 20 d, which is the default
here. Assumed: "not annealed" means tau_max for the first ``first`` tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl.data.prompt_rows import PromptRecord
from verl.method import Method


class Annealed(Method):
    """Samples every response with the temperatures above."""

    def __init__(
        self,
        tau_max: float = 1.2,
        tau_min: float = 0.1,
        d0: float = 25.0,
        d_max: float = 40000.0,
        scale: float = 20.0,
        first: int = 10,
    ) -> None:
        self.tau_max, self.tau_min, self.d0, self.d_max, self.scale, self.first = (
            tau_max,
            tau_min,
            d0,
            d_max,
            scale,
            first,
        )

    def sampling(self, records: list[PromptRecord]) -> Mapping[str, Any]:
        """The temperature at each position of every response."""
        t = np.maximum(np.arange(self.max_response_length) - self.first, 0)
        d = min(self.d0 + 5 * self.step, self.d_max)
        # Where the exponential is above, the temperature is tau_min anyway.
        growth = np.exp(np.minimum(t / (self.scale * d), 50.0))
        return {"temperatures": np.maximum(1 + self.tau_max - growth, self.tau_min)}
