import math
import pickle
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from verl.rewards.custom import extra_metrics, plain_extras


class Level(IntEnum):
    HIGH = 2


class Unbounded(str):
    def __getitem__(self, key: Any) -> "Unbounded":
        return self


class Meters(float): ...


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (0.5, 0.5),
        (True, True),
        (None, None),
        ("text", "text"),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (torch.tensor(3), 3),
        (Level.HIGH, 2),
        (Meters(2.5), 2.5),
        (Unbounded("x" * 10**6), "x" * 4000),
        (10**30, 1e30),
        (-(10**400), -math.inf),
        ({"a": [1, (2, None)]}, {"a": [1, [2, None]]}),
        ([[1] * 3] * 256, "<list>"),
        (object(), "<object>"),
        (b"bytes", "<bytes>"),
        (np.zeros(3), "<ndarray>"),
        ("x" * 10**6, "x" * 4000),
        (list(range(10**6)), "<list>"),
        ({(1, 2): 3, 4: 5}, {"4": 5}),
    ],
)
def test_values(value: Any, plain: Any):
    assert plain_extras({"key": value, "score": 1.0}, ["score"]) == {"key": plain}
    assert type(plain_extras({"key": value}, [])["key"]) is type(plain)


def test_keys_and_nan():
    assert math.isnan(plain_extras({"key": math.nan}, [])["key"])
    returned = {"a/b c": 1, "a/b/c": 2, 3: 3, "": 4, "é" * 100: 5, "k" * 100: 6}
    assert plain_extras(returned, []) == {"a_b_c": 1, "3": 3, "": 4, "_": 5, "k" * 64: 6}
    assert list(plain_extras({f"key_{i}": i for i in range(10**5)}, [])) == [f"key_{i}" for i in range(32)]


def test_all_extras_of_a_response_share_the_limits():
    hostile = {f"{i}": {f"{j}" * 100: ["y" * 100] * 100 for j in range(100)} for i in range(100)}
    assert len(pickle.dumps(plain_extras(hostile, []))) < 20_000


def test_means_over_the_responses_that_have_a_number():
    extras = [
        {"format": 1.0, "passed": True, "pred": "5", "loss": math.nan},
        {"format": 0.0, "passed": False, "loss": 2},
        {"format": 0.5, "lengths": [1, 2], "loss": math.inf, "broken": math.nan},
        {},
    ]
    assert extra_metrics(extras) == {
        "reward_extra/format/mean": 0.5,
        "reward_extra/format/count": 3.0,
        "reward_extra/passed/mean": 0.5,
        "reward_extra/passed/count": 2.0,
        "reward_extra/loss/mean": 2.0,
        "reward_extra/loss/count": 1.0,
        "reward_extra/loss/nonfinite": 2.0,
        "reward_extra/broken/count": 0.0,
        "reward_extra/broken/nonfinite": 1.0,
    }


def test_mean_of_finite_numbers_is_finite():
    assert extra_metrics([{"loss": 1.5e308}, {"loss": 1.7e308}]) == {
        "reward_extra/loss/mean": 1.6e308,
        "reward_extra/loss/count": 2.0,
    }
    assert extra_metrics([{"loss": 1e308}] * 3)["reward_extra/loss/mean"] == 1e308


def test_number_of_keys_is_bounded():
    extras = [{f"key_{i}_{j}": 1.0 for j in range(32)} | {"common": 1.0} for i in range(100)]
    metrics = extra_metrics(extras)
    assert len(metrics) == 64 and metrics["reward_extra/common/count"] == 100.0
