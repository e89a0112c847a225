"""Pure functions for token and word metrics of responses and for similarities between them. Logarithms are natural.

A response's distribution is the relative frequency of each token in the response, including the end-of-sequence token.
For stacked responses, token counts are summed over the responses. Similarities are ROUGE F1 on tokens and on words, and
Levenshtein similarity on tokens. Words are tokenized and stemmed with the ``rouge-score`` package. The longest common
subsequence is computed by rapidfuzz, which gives identical results hundreds of times faster than ``rouge-score``.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import combinations
from statistics import fmean

import numpy as np
from rapidfuzz.distance import LCSseq, Levenshtein
from rouge_score.tokenizers import DefaultTokenizer
from scipy.stats import entropy

Tokens = Sequence[int]
Items = Sequence[Hashable]

_WORDS = DefaultTokenizer(use_stemmer=True)


def token_shares(tokens: Tokens) -> dict[int, float]:
    """Return the relative frequency of each token in the response."""
    return {token: count / len(tokens) for token, count in Counter(tokens).items()}


def frequency_entropy(tokens: Tokens) -> float:
    """Return the entropy of the response's token distribution, or 0 for an empty response.

    The paper's released code also reports the mean of -log(share) over the response's tokens, the same quantity.
    """
    return float(entropy(list(Counter(tokens).values()))) if tokens else 0.0


def top_confidence(tokens: Tokens, k: int) -> float:
    """Return the mean of -log(share) over the ``k`` most frequent tokens, or 0 for an empty response.

    Despite its name, this metric decreases as the response concentrates on fewer tokens.
    """
    top = Counter(tokens).most_common(k)
    return fmean(-math.log(count / len(tokens)) for _, count in top) if top else 0.0


def repetition_rate(responses: Sequence[Tokens], n: int) -> float:
    """Return the share of n-grams in ``responses`` that repeat an earlier n-gram, or 0 if there are no n-grams.

    N-grams do not span responses.
    """
    grams = [tuple(tokens[i : i + n]) for tokens in responses for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def jensen_shannon(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Return the Jensen-Shannon divergence of two distributions, which is in [0, log 2]."""
    a, b = _aligned(p, q)
    middle = (a + b) / 2
    return float((entropy(a, middle) + entropy(b, middle)) / 2)


def symmetric_kl(p: Mapping[int, float], q: Mapping[int, float], floor: float) -> float:
    """Return (KL(p || q) + KL(q || p)) / 2, with shares clamped to at least ``floor``.

    The paper's release passes probabilities where log-probabilities are expected, so its values are not divergences.
    """
    a, b = _aligned(p, q)
    logs_a, logs_b = np.log(np.maximum(a, floor)), np.log(np.maximum(b, floor))
    return float(((a - b) * (logs_a - logs_b)).sum() / 2)


def mean_over_pairs(items: Sequence[object], compare: Callable[..., float]) -> float:
    """Return the mean of ``compare`` over all pairs, or NaN for fewer than two items."""
    pairs = [compare(a, b) for a, b in combinations(items, 2)]
    return fmean(pairs) if pairs else math.nan


def _aligned(p: Mapping[int, float], q: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return both distributions as arrays over the union of their tokens."""
    support = sorted(p.keys() | q.keys())
    return np.array([p.get(t, 0.0) for t in support]), np.array([q.get(t, 0.0) for t in support])


def count_words(text: str, wanted: Sequence[str]) -> int:
    """Count case-insensitive matches of whole words and phrases. If matches overlap, only the longest is counted."""
    return len(_pattern(tuple(wanted)).findall(text)) if wanted else 0


@cache
def _pattern(wanted: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(map(re.escape, wanted), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)


def words(text: str) -> list[str]:
    """Return the stemmed words of a text, tokenized as in ROUGE."""
    return list(_WORDS.tokenize(text))


def rouge_n(a: Items, b: Items, n: int) -> float:
    """Return the n-gram F1 score of two sequences, or 0 if either has no n-grams."""
    counts = [Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1)) for items in (a, b)]
    total = counts[0].total() + counts[1].total()
    return 2 * (counts[0] & counts[1]).total() / total if total else 0.0


def rouge_l(a: Items, b: Items) -> float:
    """Return the F1 score of the longest common subsequence, or 0 if either sequence is empty."""
    total = len(a) + len(b)
    return 2 * LCSseq.similarity(a, b) / total if total else 0.0


def pairwise_similarity(tokens: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, float]:
    """Return mean pairwise similarities of responses (NaN for a single response), named as in the paper's release."""
    stems = [words(text) for text in texts]
    means = {
        "pairwise_rouge_l": mean_over_pairs(tokens, rouge_l),
        "pairwise_rouge_l_text": mean_over_pairs(stems, rouge_l),
    }
    for n in (1, 2):
        means[f"pairwise_rouge{n}_token"] = mean_over_pairs(tokens, lambda a, b, n=n: rouge_n(a, b, n))
        means[f"pairwise_rouge{n}_text"] = mean_over_pairs(stems, lambda a, b, n=n: rouge_n(a, b, n))
    means["pairwise_textual_similarity"] = mean_over_pairs(tokens, Levenshtein.normalized_similarity)
    return means
