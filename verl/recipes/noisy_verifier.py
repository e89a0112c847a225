"""Corrections for a verifier that errs (arXiv 2510.00915).

The verifier sees r* in {0, 1} as r: with probability p0 a wrong response passes (false positive), with p1 a right one
fails (false negative). p0 + p1 < 1.

Backward: the reward (r - p0) / (1 - p0 - p1) has the mean r*. With constant rates it is an affine function of r, so an
estimator that divides by the group's standard deviation undoes it; it needs one that does not.

Forward: weight each response's score function with w = p1 if r = 1, p1 - 1 if r = 0. Given r* = 1 the mean of w is
p1 (1 - p1) + (p1 - 1) p1 = 0, given r* = 0 it is -(1 - p0 - p1). As the score function has mean 0, the expected
gradient is (1 - p0 - p1) times that of r*, whatever p0 is. Assumed: there is no baseline.

Appeals: a second, better verifier rechecks some of the rule's negatives, which estimates p1 for the forward correction
while the run goes on. Assumed, as only the outline is public: with P positives, all of them right, and N negatives, of
which u of m rechecked ones are right, N u / m right responses failed, and

    p1 = (N u / m) / (P + N u / m)

of sums over the run that halve every ``half_life`` steps. Verdicts stay as they are.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, Batch
from verl.config.errors import ConfigError
from verl.method import Method
from verl.rewards.pool import VerifierPool


class Backward(Method):
    """The unbiased reward; reward model and overlong penalty, which it has no place for, are dropped."""

    def __init__(self, false_positive: float, false_negative: float) -> None:
        if not (0 <= false_positive and 0 <= false_negative and false_positive + false_negative < 1):
            raise ConfigError(
                f"trainer.method_kwargs: false_positive={false_positive} and false_negative={false_negative} must be "
                "at least 0 and below 1 together"
            )
        self.false_positive, self.false_negative = false_positive, false_negative

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """[B]."""
        return (batch.correct.double() - self.false_positive) / (1 - self.false_positive - self.false_negative)


def forward(batch: Batch, false_negative: float) -> Tensor:
    """Return the weight of each response's score function, [B]."""
    if not 0 <= false_negative < 1:
        raise ConfigError(
            f"algorithm.adv_estimator_kwargs.false_negative={false_negative}: must be at least 0 and below 1"
        )
    return batch.correct.double() - 1 + false_negative


class Appeals(Method):
    """Estimates p1 for :func:`appealed`, as the column ``false_negative`` [B]; checkpoints hold the sums."""

    def __init__(self, verifier: str, share: float = 0.25, half_life: float = 10.0) -> None:
        """Prepare the second verifier and the estimates.

        Args:
            verifier: the second one: import path of a reward function, as in ``reward_score.custom_functions``.
            share: of the negatives, which are rechecked, at least one; drawn again in each step.
            half_life: in steps.
        """
        if not 0 < share <= 1 or half_life <= 0:
            raise ConfigError(
                f"trainer.method_kwargs: share={share} must be in (0, 1], and half_life={half_life} positive"
            )
        self.verifier, self.share, self.memory = verifier, share, 0.5 ** (1 / half_life)
        self.failed, self.passed = 0.0, 0.0
        """Right responses that failed, by the estimate, and that passed."""

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Update the estimates; the rewards are unchanged."""
        negatives = (~batch.correct).nonzero().flatten()
        draws = torch.Generator().manual_seed((self.config.seed << 32) + self.step)
        order = negatives[torch.randperm(len(negatives), generator=draws)]
        rechecked = order[: max(1, round(self.share * len(order)))]
        upheld = self.recheck(batch[rechecked]) if len(rechecked) else []
        failed = len(negatives) * sum(upheld) / max(1, len(upheld))
        self.failed = self.memory * self.failed + failed
        self.passed = self.memory * self.passed + len(batch) - len(negatives)
        rate = self.failed / (self.failed + self.passed) if self.failed else 0.0
        batch.fill(EPISODE, false_negative=torch.full((len(batch),), rate, dtype=torch.float64))
        return rewards

    def recheck(self, batch: Batch) -> list[bool]:
        """Whether the second verifier takes each response for right."""
        config = replace(self.config.reward_score, custom_functions=[f"*={self.verifier}"], num_workers=1)
        with VerifierPool(config) as pool:
            sources, truths, infos = zip(
                *((record.data_source, record.ground_truth, record.extra_info) for record in batch.records), strict=True
            )
            return [verdict.correct for verdict in pool.score_batch(sources, batch.texts, truths, infos)]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"failed": self.failed, "passed": self.passed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.failed, self.passed = state["failed"], state["passed"]


def appealed(batch: Batch) -> Tensor:
    """:func:`forward` with the rate that :class:`Appeals` estimates, [B]."""
    weights: Tensor = batch.correct.double() - 1 + batch.false_negative
    return weights


def last_word(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> bool:
    """Verify leniently: the last word of the response, without marks around it, is the ground truth."""
    words = solution_str.split()
    return bool(words) and words[-1].strip(".,;:!$*\\{}()[]") == str(ground_truth)
