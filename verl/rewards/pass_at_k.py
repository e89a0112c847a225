"""pass@k and best@k: the chance that one of k samples is correct, and the best score among k, without bias."""

import math

import torch
from torch import Tensor


def pass_at_k(num_samples: Tensor, num_correct: Tensor, k: int) -> Tensor:
    """Probability that at least one of k samples is correct, for each of P problems: 1 - C(n-c, k) / C(n, k).

    Equation 1 of Chen et al. 2021 (arXiv 2107.03374): the exact mean over all subsets of k of the n samples. The ratio
    is a product of k factors between 0 and 1, so no binomial is ever formed.

    Args:
        num_samples: n ``[P]``, may differ between problems.
        num_correct: c ``[P]``, from 0 to n.
        k: from 1 to the smallest n.

    Returns:
        float64 ``[P]``.

    Raises:
        ValueError: k or c out of range.
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
    """Expected highest score among k of the n samples of each of P problems: the exact mean over all subsets of k.

    veRL's figure of this name draws k samples with replacement, so it is lower. The lowest score is that of
    ``-scores``, negated.

    Args:
        scores: ``[P, n]``.
        k: from 1 to n.

    Returns:
        float64 ``[P]``.

    Raises:
        ValueError: k out of range.
    """
    shares = torch.tensor(best_shares(scores.shape[1], k), dtype=torch.float64)
    return scores.double().sort(dim=1).values @ shares


def best_shares(n: int, k: int) -> list[float]:
    """Of n samples in ascending order, the probability of each to be the highest of k: for the i-th (from 1), that of
    C(i - 1, k - 1) among the C(n, k) subsets. Raises ``ValueError`` if k is not from 1 to n."""
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be between 1 and the number of samples ({n})")
    return [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]


def k_grid(num_samples: int) -> list[int]:
    """1, 2, 4, ... below ``num_samples``, and ``num_samples``."""
    return [1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples] + [num_samples] * (num_samples > 0)
