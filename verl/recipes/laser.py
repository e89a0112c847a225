"""Rewards for short correct responses: LASER, LASER-D and LASER-DE (arXiv 2505.15612).

    reward = (1 if correct else -0.5) + (0.5 if correct and length <= L)

LASER has one target length L. LASER-D has one for each band of difficulty, by the share of correct responses to the
prompt: hard up to 1/3, medium up to 2/3, easy above. Let coverage(L) be the share of a band's responses of at most L
tokens. The target is the smallest L of a grid with floor(c coverage(L)) >= 1, where c = int(2n/3) for easy, int(n/3)
for medium and 1 for hard prompts, of n responses: of so many right ones, at least one can be expected to be complete.
With c = 0, as at n = 2, it is the maximal length. The grid is that of the paper's code in
units of the maximal length: 1/8, 3/16, 1/4, ..., 1.

LASER-DE gives the 0.5 also to what explores: a wrong, complete response that is longer than its target and does not
repeat itself.

Assumed: L of LASER is half of the maximal length, and the targets of LASER-D, which the paper finds on a set of prompts
for monitoring, come from the training responses of the last ``every`` steps. Until then, and for a band without
responses ever, the target is the maximal length.
"""

import math
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_means
from verl.batch import Batch
from verl.method import Method
from verl.recipes.repetition import repeats

BANDS = ("hard", "medium", "easy")


class Laser(Method):
    """LASER's rewards, with L = ``target_share`` of the maximal length."""

    def __init__(self, target_share: float) -> None:
        self.target_share = target_share

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """[B]."""
        targets = torch.full_like(rewards, self.target_share * self.max_response_length)
        return stepped(batch.correct, batch.response_lengths, targets)


class LaserD(Method):
    """LASER-D's rewards; its targets are set again every ``every`` steps. LASER-DE's with ``explore``."""

    def __init__(self, every: int, explore: bool = False) -> None:
        self.every = every
        self.explore = explore
        self.targets: dict[str, int] = {}
        self.lengths: dict[str, list[int]] = {band: [] for band in BANDS}

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """[B]."""
        bands = [band_of(accuracy) for accuracy in group_means(batch.correct, batch.group).tolist()]
        longest, lengths = self.max_response_length, batch.response_lengths
        targets = torch.tensor([self.targets.get(band, longest) for band in bands])
        for band, length in zip(bands, lengths.tolist(), strict=True):
            self.lengths[band].append(length)
        if self.step % self.every == 0:
            expected_of = dict(zip(BANDS, right_responses(self.config.rollout.n), strict=True))
            latest = {band: target_length(self.lengths[band], c, longest) for band, c in expected_of.items()}
            self.targets |= {band: target for band, target in latest.items() if target is not None}
            self.lengths = {band: [] for band in BANDS}
        shaped = stepped(batch.correct, lengths, targets)
        return shaped + 0.5 * self._explores(batch, targets).double() if self.explore else shaped

    def _explores(self, batch: Batch, targets: Tensor) -> Tensor:
        """[B] bool, the wrong responses that are rewarded."""
        longer = ~batch.correct & ~batch.truncated & (batch.response_lengths > targets)
        responses = batch.tokens[batch.in_response].split(batch.response_lengths.tolist())
        pairs = zip(longer.tolist(), responses, strict=True)
        return torch.tensor([wanted and not repeats(tokens.tolist()) for wanted, tokens in pairs])

    def state_dict(self) -> dict[str, Any]:
        """Return the targets, and the lengths since they were set."""
        return {"targets": self.targets, "lengths": self.lengths}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.targets, self.lengths = state["targets"], state["lengths"]


def stepped(correct: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """Return the rewards [B] of responses ``correct [B]`` of ``lengths [B]``, with ``targets [B]`` in tokens."""
    base = torch.where(correct, 1.0, -0.5).double()
    return base + 0.5 * (correct & (lengths <= targets)).double()


def right_responses(n: int) -> tuple[int, int, int]:
    """c of the hard, medium and easy band: least right responses to a prompt of the band, of ``n``."""
    return 1, n // 3, 2 * n // 3


def band_of(accuracy: float) -> str:
    """Return the band of a prompt with this share of correct responses."""
    return "hard" if accuracy <= 1 / 3 else "medium" if accuracy <= 2 / 3 else "easy"


def target_length(lengths: list[int], expected_of: int, longest: int) -> int | None:
    """Return the smallest length of the grid up to ``longest`` within which enough correct responses are.

    At least one in ``expected_of`` responses keeps it; None without responses.
    """
    if not lengths:
        return None
    for sixteenths in range(2, 17):
        target = math.ceil(longest * sixteenths / 16)
        if expected_of * sum(length <= target for length in lengths) >= len(lengths):
            return target
    return longest
