"""EAD (arXiv 2510.05251): anneal the temperature so that early tokens explore and late tokens exploit.

    tau_t = max(1 + tau_max - exp(t / (scale d_s)), tau_min)    d_s = min(d_0 + 5 s, d_max) at step s

The formula applies to tokens t >= ``first``; earlier tokens are sampled at temperature 1. The paper's formula has no
``scale``, but its code uses 20 d_s instead of d_s, hence our default of 20.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl.data.prompt_record import PromptRecord
from verl.method import Method


class Annealed(Method):
    """Method that samples all responses with annealed temperatures."""

    def __init__(
        self,
        tau_max: float = 1.2,
        tau_min: float = 0.1,
        d0: float = 25.0,
        d_max: float = 40000.0,
        scale: float = 20.0,
        first: int = 10,
    ) -> None:
        self.tau_max, self.tau_min = tau_max, tau_min
        self.d0, self.d_max = d0, d_max
        self.scale, self.first = scale, first

    def sampling(self, records: list[PromptRecord]) -> Mapping[str, Any]:
        """Return the temperature of each token position."""
        t = np.arange(self.max_response_length)
        d = min(self.d0 + 5 * self.step, self.d_max)
        # Clip the exponent to avoid overflow; at 50, the temperature has already reached tau_min.
        growth = np.exp(np.minimum(t / (self.scale * d), 50.0))
        annealed = np.maximum(1 + self.tau_max - growth, self.tau_min)
        return {"temperatures": np.where(t < self.first, 1.0, annealed)}
