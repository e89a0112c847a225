"""Corrections for a verifier that errs (arXiv 2510.00915).

The verifier sees r* in {0, 1} as r: with probability p0 a wrong response passes (false positive), with p1 a right one
fails (false negative). p0 + p1 < 1.

Backward: the reward (r - p0) / (1 - p0 - p1) has the mean r*. With constant rates it is an affine function of r, so an
estimator that divides by the group's standard deviation undoes it; it needs one that does not.

Forward: weight each response's score function with w = p1 if r = 1, p1 - 1 if r = 0. Given r* = 1 the mean of w is
p1 (1 - p1) + (p1 - 1) p1 = 0, given r* = 0 it is -(1 - p0 - p1). As the score function has mean 0, the expected
gradient is (1 - p0 - p1) times that of r*, whatever p0 is. Assumed: there is no baseline.
"""

from torch import Tensor

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.method import Method


class Backward(Method):
    """The unbiased reward; reward model and overlong penalty, which it has no place for, are dropped."""

    def __init__(self, false_positive: float, false_negative: float) -> None:
        if not (0 <= false_positive and 0 <= false_negative and false_positive + false_negative < 1):
            raise ConfigError(
                f"trainer.method_kwargs: false_positive={false_positive} and false_negative={false_negative} must be "
                "at least 0 and below 1 together"
            )
        self.false_positive, self.false_negative = false_positive, false_negative

    def change_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """[B]."""
        return (batch.correct.double() - self.false_positive) / (1 - self.false_positive - self.false_negative)


def forward(batch: Batch, false_negative: float) -> Tensor:
    """The weight of each response's score function, [B]."""
    if not 0 <= false_negative < 1:
        raise ConfigError(
            f"algorithm.adv_estimator_kwargs.false_negative={false_negative}: must be at least 0 and below 1"
        )
    return batch.correct.double() - 1 + false_negative
