"""EAD's temperatures, against numbers by hand."""

import math

import pytest

from verl.config import PPOConfig, load_config
from verl.data.schedule import SamplingRequest
from verl.recipes.ead import annealed


def test_the_temperature_falls_along_the_response():
    base = load_config(PPOConfig, "ppo_trainer").rollout.train_kwargs
    request = SamplingRequest(5, 100, [], 4, base, 4000)
    found = annealed(request)["temperatures"]
    assert found.shape == (4000,)
    # d = 25 + 5 * 5 = 50, and 20 d = 1000: the first ten tokens have 2.2 - 1.
    assert found[:11].tolist() == [pytest.approx(1.2)] * 11
    assert found[510] == pytest.approx(2.2 - math.exp(0.5))
    assert found[1010] == 0.1 and found[3999] == 0.1  # 2.2 - e < 0
    # As the paper writes it: d at its limit of 40, at once annealed.
    found = annealed(request, scale=1.0, first=0, d_max=40.0)["temperatures"]
    assert found[20] == pytest.approx(2.2 - math.exp(0.5)) and found[0] == pytest.approx(1.2)
