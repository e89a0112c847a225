"""Sampler settings by prompt, response and position."""

import numpy as np
import pytest
from conftest import changed

from verl.config import ConfigError
from verl.method.settings import response_settings


@pytest.fixture
def settings(small_config):
    config = changed(small_config, rollout={"n": 2}, data={"max_response_length": 12})
    return lambda returned: response_settings(returned, 2, config, "here")


def test_settings_broadcast_over_prompts_and_responses(settings):
    overrides = settings({"temperature": [[0.5], [2.0]], "top_k": 3}).overrides
    assert [(each.temperature, each.top_k, each.top_p) for each in overrides] == [(0.5, 3, 1.0)] * 2 + [
        (2.0, 3, 1.0)
    ] * 2
    assert type(overrides[0].top_k) is int
    assert settings(None) is None and settings({}) is None


def test_temperatures_by_position(settings):
    made = settings({"temperatures": [1.5, 1.25, 1.0]})
    assert made.overrides is None and made.temperatures.dtype == np.float32
    assert made.temperatures.tolist() == [1.5, 1.25, 1.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"temperature": 0}, "here: temperature=0: training needs sampling; return one above 0"),
        ({"temperature": [1.0, 2.0, 3.0]}, r"here: temperature is \[1.0, 2.0, 3.0\]; it must broadcast to \[G, n\]="),
        (
            {"beams": 3},
            "here returned {'beams': 3}; it must map some of temperature, top_p, top_k, min_p, temperatures",
        ),
        (7, "here returned 7; it must map some of"),
        ({"top_p": 2.0}, r"here: top_p=2.0: must be in \(0, 1\]"),
        ({"top_k": float("nan")}, "here: top_k=nan: must be whole"),
        ({"temperatures": [[1.0, 2.0], [1.0]]}, "here: temperatures is .*; it must be numbers of the shape"),
        ({"temperatures": np.ones((2, 3))}, r"here: temperatures has the shape \[2, 3\]; give 1 to 12 positions"),
        ({"temperatures": np.ones(13)}, r"here: temperatures has the shape \[13\]; give 1 to 12 positions"),
        ({"temperatures": [1.0, float("inf")]}, "here: temperatures must be from 0.01 to 1000"),
    ],
)
def test_other_settings_are_refused(settings, returned, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        settings(returned)
