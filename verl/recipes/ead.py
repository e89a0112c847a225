"""EAD (arXiv 2510.05251): explore early tokens, exploit late ones, by a temperature that falls along the response.

    tau_t = max(1 + tau_max - exp((t - first) / (scale d_s)), tau_min)    d_s = min(d_0 + 5 s, d_max) at step s

with tau_max at the first tokens. The paper's formula has no ``scale``; its code divides by 20 d, which is the default
here. Assumed: "not annealed" means tau_max for the first ``first`` tokens.
"""

import numpy as np
from numpy.typing import NDArray

from verl.data.schedule import SamplingRequest


def annealed(
    request: SamplingRequest,
    tau_max: float = 1.2,
    tau_min: float = 0.1,
    d0: float = 25.0,
    d_max: float = 40000.0,
    scale: float = 20.0,
    first: int = 10,
) -> dict[str, NDArray[np.float64]]:
    """The temperature at each position of every response."""
    t = np.maximum(np.arange(request.max_response_length) - first, 0)
    d = min(d0 + 5 * request.step, d_max)
    # Where the exponential is above, the temperature is tau_min anyway.
    growth = np.exp(np.minimum(t / (scale * d), 50.0))
    return {"temperatures": np.maximum(1 + tau_max - growth, tau_min)}
