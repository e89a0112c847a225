"""Corrections for noisy verifiers (arXiv 2510.00915).

The verifier reports the true reward r* in {0, 1} as r. A wrong response passes with probability p0 (false positive),
and a correct response fails with probability p1 (false negative), where p0 + p1 < 1.

Backward: the reward (r - p0) / (1 - p0 - p1) has mean r*. With constant rates, this reward is an affine function of r,
so it has no effect on estimators that divide by the group's standard deviation.

Forward: weight the score function of each response by w = p1 if r = 1 and by w = p1 - 1 if r = 0. The mean of w is p1
(1 - p1) + (p1 - 1) p1 = 0 given r* = 1, and -(1 - p0 - p1) given r* = 0. Since the score function has mean 0, the
expected gradient is (1 - p0 - p1) times the gradient for r*, for any p0. This holds only without a baseline.

Appeals: during the run, a second, better verifier rechecks some of the negatives to estimate p1 for the forward
correction. Since only an outline is public, we assume that all P positives are correct. If u of m rechecked negatives
are correct, then N u / m of the N negatives are false negatives, and

    p1 = (N u / m) / (P + N u / m)

where P and N u / m are sums over steps that decay with a half-life of ``half_life`` steps. Verdicts do not change.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, Batch
from verl.config.checks import require
from verl.config.errors import ConfigError
from verl.method import Method
from verl.recipes.common import Saving
from verl.rewards.pool import VerifierPool


class Backward(Method):
    """Backward correction, which replaces the reward model's scores and the overlong penalty."""

    def __init__(self, false_positive: float, false_negative: float) -> None:
        if not (0 <= false_positive and 0 <= false_negative and false_positive + false_negative < 1):
            raise ConfigError(
                f"trainer.method_kwargs: false_positive={false_positive} and false_negative={false_negative} must be "
                "at least 0, and their sum below 1"
            )
        self.false_positive, self.false_negative = false_positive, false_negative

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the unbiased rewards, [B]."""
        return (batch.correct.double() - self.false_positive) / (1 - self.false_positive - self.false_negative)


def forward(batch: Batch, false_negative: float) -> Tensor:
    """Return the weight of each response's score function, [B]."""
    field = "algorithm.adv_estimator_kwargs.false_negative"
    require(0 <= false_negative < 1, field, false_negative, "must be at least 0 and below 1")
    return batch.correct.double() - 1 + false_negative


class Appeals(Saving):
    """Method that fills the column ``false_negative`` [B] with an estimate of p1 for :func:`appealed`."""

    saved = ("failed", "passed")

    def __init__(self, verifier: str, share: float = 0.25, half_life: float = 10.0) -> None:
        """Configure the appeals.

        Args:
            verifier: Import path of the second reward function, as in ``reward_score.custom_functions``.
            share: Fraction of the negatives to recheck in each step, drawn at random; at least one is rechecked.
            half_life: Half-life of the sums in steps.
        """
        if not 0 < share <= 1 or half_life <= 0:
            raise ConfigError(
                f"trainer.method_kwargs: share={share} must be in (0, 1], and half_life={half_life} positive"
            )
        self.verifier, self.share, self.memory = verifier, share, 0.5 ** (1 / half_life)
        self.failed, self.passed = 0.0, 0.0
        """Checkpointed decaying counts of correct responses that the verifier rejected (estimated) and accepted."""

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Update the estimate of p1 and return the rewards unchanged."""
        # 1. Recheck a random subset of the negatives.
        negatives = (~batch.correct).nonzero().flatten()
        draws = torch.Generator().manual_seed((self.config.seed << 32) + self.step)
        order = negatives[torch.randperm(len(negatives), generator=draws)]
        rechecked = order[: max(1, round(self.share * len(order)))]
        correct = self.recheck(batch[rechecked]) if len(rechecked) else []
        # 2. Update the sums and the rate.
        failed = len(negatives) * sum(correct) / max(1, len(correct))
        self.failed = self.memory * self.failed + failed
        self.passed = self.memory * self.passed + len(batch) - len(negatives)
        rate = self.failed / (self.failed + self.passed) if self.failed else 0.0
        batch.fill(EPISODE, false_negative=torch.full((len(batch),), rate, dtype=torch.float64))
        return rewards

    def recheck(self, batch: Batch) -> list[bool]:
        """Return whether each response is correct according to the second verifier."""
        config = replace(self.config.reward_score, custom_functions=[f"*={self.verifier}"], num_workers=1)
        with VerifierPool(config) as pool:
            sources, truths, infos = zip(
                *((record.data_source, record.ground_truth, record.extra_info) for record in batch.records), strict=True
            )
            return [verdict.correct for verdict in pool.score_batch(sources, batch.texts, truths, infos)]


def appealed(batch: Batch) -> Tensor:
    """Return the weights of :func:`forward` with the rate estimated by :class:`Appeals`, [B]."""
    weights: Tensor = batch.correct.double() - 1 + batch.false_negative
    return weights


def last_word(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> bool:
    """Return whether the last word of the response, ignoring punctuation, is the ground truth."""
    words = solution_str.split()
    return bool(words) and words[-1].strip(".,;:!$*\\{}()[]") == str(ground_truth)
