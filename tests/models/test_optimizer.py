"""The learning-rate schedule; how models are held is met in test_sharding.py."""

from dataclasses import replace

import pytest

from verl.config import OptimConfig
from verl.models.learner import lr_multiplier


def optim_config(kind: str, warmup: int = 3, floor: float = 0.1) -> OptimConfig:
    return OptimConfig(
        0.5, [0.9, 0.99], 1e-6, 0.25, kind, warmup, 0.0, min_lr_ratio=floor, grad_clip=1.0, max_skipped_updates=0
    )


@pytest.mark.parametrize(
    ("kind", "warmup", "floor", "total_steps", "expected"),
    [
        # After the last step the rate stays at its floor.
        ("constant", 3, 0.1, 7, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 3, 0.1, 7, [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        # 0.1 + 0.45 * (1 + cos(pi * i / 4))
        ("cosine", 3, 0.1, 7, [0.25, 0.5, 0.75, 1.0, 0.8681981, 0.55, 0.2318019, 0.1, 0.1]),
        ("linear", 0, 0.0, 4, [1.0]),
        # A warm-up longer than the run never reaches the peak.
        ("linear", 3, 0.1, 2, [0.25, 0.5]),
    ],
)
def test_warm_up_then_decay(kind: str, warmup: int, floor: float, total_steps: int, expected: list[float]):
    multiplier = lr_multiplier(optim_config(kind, warmup, floor), total_steps)
    assert [multiplier(step) for step in range(len(expected))] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "ratio", "total_steps", "expected"),
    [(-1, 0.1, 39, 3), (-1, 0.0, 39, 0), (-1, 1.0, 39, 39), (4, 0.0, 39, 4)],
)
def test_warm_up_in_steps_or_as_a_share(steps, ratio, total_steps, expected):
    config = replace(optim_config("constant"), lr_warmup_steps=steps, lr_warmup_steps_ratio=ratio)
    multiplier = lr_multiplier(config, total_steps)
    assert [multiplier(step) for step in (0, max(0, expected - 1), expected)] == pytest.approx(
        [1 / (expected + 1), max(1, expected) / (expected + 1), 1.0]
    )
