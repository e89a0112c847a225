"""Rewards for short correct responses: LASER, LASER-D and LASER-DE (arXiv 2505.15612).

    reward = (1 if correct else -0.5) + (0.5 if correct and length <= L)

LASER has one target length L. LASER-D has one target per difficulty band. A prompt's band depends on its fraction of
correct responses: hard up to 1/3, medium up to 2/3, and easy above. Let coverage(L) be the fraction of a band's
responses with at most L tokens. The target is the smallest L on a grid with floor(c coverage(L)) >= 1, so that at least
one of c correct responses is expected to be complete. Here, c is int(2n/3) for easy, int(n/3) for medium and 1 for hard
prompts with n responses. If c = 0, as for medium prompts with n = 2, the target is the maximum length. As in the
paper's code, the grid is 1/8, 3/16, 1/4, ..., 1 times the maximum length.

LASER-DE also gives an exploration reward of 0.5 to wrong but complete and non-repetitive responses above their target.

We assume that LASER's L is half of the maximum length. The paper computes LASER-D's targets on a monitoring set; we
compute them from the training responses of the last ``every`` steps. Before the first update, and for bands without
responses, the target is the maximum length.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_means
from verl.batch import Batch
from verl.method import Method
from verl.recipes.common import Saving

BANDS = ("hard", "medium", "easy")


class Laser(Method):
    """LASER, with L = ``target_share`` times the maximum length."""

    def __init__(self, target_share: float) -> None:
        self.target_share = target_share

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return LASER's rewards, [B]."""
        targets = torch.full_like(rewards, self.target_share * self.max_response_length)
        return stepped(batch.correct, batch.response_lengths, targets)


class LaserD(Saving):
    """LASER-D, or LASER-DE if ``explore`` is set; targets are updated every ``every`` steps."""

    saved = ("targets", "lengths")

    def __init__(self, every: int, explore: bool = False) -> None:
        self.every = every
        self.explore = explore
        self.targets: dict[str, int] = {}
        self.lengths: dict[str, list[int]] = {band: [] for band in BANDS}

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the rewards, [B], and update the targets for later steps."""
        # 1. Look up the targets of this step by the difficulty of each prompt.
        bands = [band_of(accuracy) for accuracy in group_means(batch.correct, batch.group).tolist()]
        longest, lengths = self.max_response_length, batch.response_lengths
        targets = torch.tensor([self.targets.get(band, longest) for band in bands])
        # 2. Update the targets for later steps from the lengths since the last update.
        for band, length in zip(bands, lengths.tolist(), strict=True):
            self.lengths[band].append(length)
        if self.step % self.every == 0:
            num_correct = dict(zip(BANDS, expected_correct(self.config.rollout.n), strict=True))
            latest = {band: target_length(self.lengths[band], c, longest) for band, c in num_correct.items()}
            self.targets |= {band: target for band, target in latest.items() if target is not None}
            self.lengths = {band: [] for band in BANDS}
        # 3. Compute the rewards.
        shaped = stepped(batch.correct, lengths, targets)
        return shaped + 0.5 * self._explores(batch, targets).double() if self.explore else shaped

    def _explores(self, batch: Batch, targets: Tensor) -> Tensor:
        """Return a mask of the wrong responses that earn the exploration reward, [B] bool."""
        longer = ~batch.correct & ~batch.truncated & (batch.response_lengths > targets)
        pairs = zip(longer.tolist(), batch.response_tokens.split(batch.response_lengths.tolist()), strict=True)
        return torch.tensor([is_longer and not repeats(tokens.tolist()) for is_longer, tokens in pairs])


def stepped(correct: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """Return LASER's rewards [B] for ``correct [B]``, with ``lengths [B]`` and ``targets [B]`` in tokens."""
    base = torch.where(correct, 1.0, -0.5).double()
    return base + 0.5 * (correct & (lengths <= targets)).double()


def expected_correct(n: int) -> tuple[int, int, int]:
    """Return c, the minimum number of correct responses among ``n``, for the hard, medium and easy bands."""
    return 1, n // 3, 2 * n // 3


def band_of(accuracy: float) -> str:
    """Return the difficulty band of a prompt, given its fraction of correct responses."""
    return "hard" if accuracy <= 1 / 3 else "medium" if accuracy <= 2 / 3 else "easy"


def target_length(lengths: list[int], c: int, longest: int) -> int | None:
    """Return the smallest grid length that fits at least 1 in ``c`` responses, or None if there are no responses."""
    if not lengths:
        return None
    for sixteenths in range(2, 17):
        target = math.ceil(longest * sixteenths / 16)
        if c * sum(length <= target for length in lengths) >= len(lengths):
            return target
    return longest


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether a response repeats itself, following LASER-DE's code (github.com/hkust-nlp/Laser).

    A response is repetitive if an n-gram occurs at least m times and two occurrences start less than a third of the
    response apart. A response is also repetitive if it has at least 4n tokens and a 2n-gram occurs twice. The value of
    n is 2 below 30 tokens, 3 below 100, and 4 otherwise; m is 2 below 200 tokens and 3 otherwise. If n > 2, the first
    rule ignores n-grams of one repeated token. Responses of up to 8 tokens are never repetitive.
    """
    length = len(tokens)
    if length <= 8:
        return False
    n, m = (2 if length < 30 else 3 if length < 100 else 4), (2 if length < 200 else 3)
    starts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i in range(length - n + 1):
        starts[tuple(tokens[i : i + n])].append(i)
    frequent = [at for gram, at in starts.items() if len(at) >= m and (n == 2 or len(set(gram)) > 1)]
    near = any(after - before < length // 3 for at in frequent for before, after in pairwise(at))
    double = [tuple(tokens[i : i + 2 * n]) for i in range(length - 2 * n + 1)]
    return near or (length >= 4 * n and len(set(double)) < len(double))
