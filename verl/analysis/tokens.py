"""Metrics of the tokens and words of responses. Pure functions; logarithms are natural.

A response's distribution is the share of each token among its own tokens, end-of-sequence token included. Several
responses are stacked by counting their tokens together.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from statistics import fmean

import numpy as np
from scipy.stats import entropy

Tokens = Sequence[int]


def token_shares(tokens: Tokens) -> dict[int, float]:
    """Token -> its share of the response."""
    return {token: count / len(tokens) for token, count in Counter(tokens).items()}


def frequency_entropy(tokens: Tokens) -> float:
    """Entropy of the response's distribution; 0 for an empty response.

    It is also the mean surprise -log(share) of the response's tokens: the release gives the number both names.
    """
    return float(entropy(list(Counter(tokens).values()))) if tokens else 0.0


def top_confidence(tokens: Tokens, k: int) -> float:
    """Mean of -log(share) over the ``k`` most frequent tokens, or all if there are fewer; 0 for an empty response.

    By its name a confidence, it falls as the response concentrates on few tokens.
    """
    top = Counter(tokens).most_common(k)
    return fmean(-math.log(count / len(tokens)) for _, count in top) if top else 0.0


def repetition_rate(responses: Sequence[Tokens], n: int) -> float:
    """Share of the n-grams of ``responses`` that are repetitions of others among them; 0 without any n-gram.

    No n-gram reaches from one response into the next.
    """
    grams = [tuple(tokens[i : i + n]) for tokens in responses for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def jensen_shannon(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Jensen-Shannon divergence of two distributions, in [0, log 2]."""
    a, b = _aligned(p, q)
    middle = (a + b) / 2
    return float((entropy(a, middle) + entropy(b, middle)) / 2)


def symmetric_kl(p: Mapping[int, float], q: Mapping[int, float], floor: float) -> float:
    """(KL(p || q) + KL(q || p)) / 2, where a share below ``floor`` counts as ``floor``.

    The release hands probabilities to a function that expects their logarithms; its numbers are no divergences.
    """
    a, b = _aligned(p, q)
    logs_a, logs_b = np.log(np.maximum(a, floor)), np.log(np.maximum(b, floor))
    return float(((a - b) * (logs_a - logs_b)).sum() / 2)


def mean_over_pairs(items: Sequence[object], compare: Callable[..., float]) -> float:
    """Mean of ``compare`` over all pairs; NaN for fewer than two items."""
    pairs = [compare(a, b) for a, b in combinations(items, 2)]
    return fmean(pairs) if pairs else math.nan


def _aligned(p: Mapping[int, float], q: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """The shares of all tokens that one of the two has."""
    support = sorted(p.keys() | q.keys())
    return np.array([p.get(t, 0.0) for t in support]), np.array([q.get(t, 0.0) for t in support])


def count_words(text: str, wanted: Sequence[str]) -> int:
    """Count the words and phrases in the text, in any case and only whole; where two overlap, the longer."""
    return len(_pattern(tuple(wanted)).findall(text)) if wanted else 0


@cache
def _pattern(wanted: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(map(re.escape, wanted), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
