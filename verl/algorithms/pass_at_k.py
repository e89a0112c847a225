"""Unbiased estimates of pass@k, best@k and rm@k.

pass@k is the probability that at least one of k samples is correct, best@k is the expected highest score among k
samples, and rm@k is the probability that the sample with the highest reward-model score among k samples is correct.
"""

import math
from collections.abc import Sequence
from itertools import groupby, islice
from statistics import fmean

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Return the probability that at least one of k samples is correct, 1 - C(n-c, k) / C(n, k), for each problem.

    This is equation 1 of Chen et al. 2021 (arXiv 2107.03374), the exact mean over all subsets of k samples. The
    probability is computed as a product of k factors between 0 and 1 rather than from binomial coefficients. Raises
    ``ValueError`` if k or c is out of range.

    Args:
        num_samples: number of samples n ``[P]``, which may differ between problems.
        num_correct: number of correct samples c ``[P]``, from 0 to n.
        k: number of samples to draw, from 1 to the smallest n.

    Returns:
        float64 ``[P]``.
    """
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    fewest = int(num_samples.min()) if len(num_samples) else k
    if k > fewest:
        raise ValueError(f"k={k}: a problem has only {fewest} samples; set k<={fewest} or draw more samples")
    if bool(((num_correct < 0) | (num_correct > num_samples)).any()):
        raise ValueError("num_correct: must be between 0 and the number of samples")
    n, c = num_samples.double()[:, None], num_correct.double()[:, None]
    i = torch.arange(k, dtype=torch.float64)
    return 1 - ((n - c - i).clamp(min=0) / (n - i)).prod(dim=1)


def best_at_k(scores: Tensor, k: int) -> Tensor:
    """Return the expected maximum score of k out of n samples for each of P problems.

    This is the exact mean over all subsets of k samples. veRL's metric of the same name samples with replacement and is
    lower. Raises ``ValueError`` if k is out of range.

    Args:
        scores: scores of the samples ``[P, n]``.
        k: number of samples to draw, from 1 to n.

    Returns:
        float64 ``[P]``.
    """
    shares = torch.tensor(best_shares(scores.shape[1], k), dtype=torch.float64)
    return scores.double().sort(dim=1).values @ shares


def best_shares(n: int, k: int) -> list[float]:
    """Return the probability that the i-th lowest of n samples is the highest of k drawn samples, for i = 1, ..., n.

    This probability is C(i - 1, k - 1) / C(n, k). Raises ``ValueError`` unless 1 <= k <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be between 1 and the number of samples ({n})")
    return [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]


def k_grid(num_samples: int) -> list[int]:
    """Return the powers of two below ``num_samples``, followed by ``num_samples`` itself."""
    return [1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples] + [num_samples] * (num_samples > 0)


def rm_at_k(correct: Sequence[bool], scores: Sequence[float], k: int) -> float:
    """Return the probability that the highest-scoring of k samples, drawn without replacement, is correct.

    Ties are broken at random. Raises ``ValueError`` if k is out of range.

    Args:
        scores: score of each sample; NaN is treated as the lowest score.
        k: number of samples to draw, from 1 to the number of samples.
    """
    shares, total = iter(best_shares(len(scores), k)), 0.0
    ranked = sorted(zip(map(nan_lowest, scores), correct, strict=True))
    for _, group in groupby(ranked, key=lambda pair: pair[0]):
        right = [is_right for _, is_right in group]
        total += sum(islice(shares, len(right))) * fmean(right)
    return total


def nan_lowest(score: float) -> float:
    """Return ``score``, or minus infinity if it is NaN."""
    return -math.inf if math.isnan(score) else score
