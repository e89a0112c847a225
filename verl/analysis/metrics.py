"""Metrics of the tokens and words of responses, and of how alike responses are. Pure functions; logarithms are natural.

A response's distribution is the share of each token among its own tokens, end-of-sequence token included. Several
responses are stacked by counting their tokens together. Responses are compared by ROUGE F1 on tokens and on words, and
by Levenshtein on tokens: words are those of the ``rouge-score`` package with its stemmer; the longest common
subsequence is rapidfuzz's, which is the same number hundreds of times faster.
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
    """Return token -> its share of the response."""
    return {token: count / len(tokens) for token, count in Counter(tokens).items()}


def frequency_entropy(tokens: Tokens) -> float:
    """Return the entropy of the response's distribution; 0 for an empty response.

    It is also the mean surprise -log(share) of the response's tokens: the release gives the number both names.
    """
    return float(entropy(list(Counter(tokens).values()))) if tokens else 0.0


def top_confidence(tokens: Tokens, k: int) -> float:
    """Return the mean of -log(share) over the ``k`` most frequent tokens; 0 for an empty response.

    By its name a confidence, it falls as the response concentrates on few tokens.
    """
    top = Counter(tokens).most_common(k)
    return fmean(-math.log(count / len(tokens)) for _, count in top) if top else 0.0


def repetition_rate(responses: Sequence[Tokens], n: int) -> float:
    """Return the share of n-grams of ``responses`` that repeat others among them; 0 without any n-gram.

    No n-gram reaches from one response into the next.
    """
    grams = [tuple(tokens[i : i + n]) for tokens in responses for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def jensen_shannon(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Return the Jensen-Shannon divergence of two distributions, in [0, log 2]."""
    a, b = _aligned(p, q)
    middle = (a + b) / 2
    return float((entropy(a, middle) + entropy(b, middle)) / 2)


def symmetric_kl(p: Mapping[int, float], q: Mapping[int, float], floor: float) -> float:
    """Return (KL(p || q) + KL(q || p)) / 2, where a share below ``floor`` counts as ``floor``.

    The release hands probabilities to a function that expects their logarithms; its numbers are no divergences.
    """
    a, b = _aligned(p, q)
    logs_a, logs_b = np.log(np.maximum(a, floor)), np.log(np.maximum(b, floor))
    return float(((a - b) * (logs_a - logs_b)).sum() / 2)


def mean_over_pairs(items: Sequence[object], compare: Callable[..., float]) -> float:
    """Return the mean of ``compare`` over all pairs; NaN for fewer than two items."""
    pairs = [compare(a, b) for a, b in combinations(items, 2)]
    return fmean(pairs) if pairs else math.nan


def _aligned(p: Mapping[int, float], q: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of all tokens that either of the two has."""
    support = sorted(p.keys() | q.keys())
    return np.array([p.get(t, 0.0) for t in support]), np.array([q.get(t, 0.0) for t in support])


def count_words(text: str, wanted: Sequence[str]) -> int:
    """Count the words and phrases in the text, in any case and only whole; where two overlap, the longer."""
    return len(_pattern(tuple(wanted)).findall(text)) if wanted else 0


@cache
def _pattern(wanted: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(map(re.escape, wanted), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)


def words(text: str) -> list[str]:
    """Return the stemmed words of a text, as ROUGE counts them."""
    return list(_WORDS.tokenize(text))


def rouge_n(a: Items, b: Items, n: int) -> float:
    """Return F1 of the n-grams that two sequences share; 0 if either has none."""
    counts = [Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1)) for items in (a, b)]
    total = counts[0].total() + counts[1].total()
    return 2 * (counts[0] & counts[1]).total() / total if total else 0.0


def rouge_l(a: Items, b: Items) -> float:
    """Return F1 of the longest common subsequence; 0 if either sequence is empty."""
    total = len(a) + len(b)
    return 2 * LCSseq.similarity(a, b) / total if total else 0.0


def levenshtein_similarity(a: Items, b: Items) -> float:
    """Return 1 minus the edit distance over the longer length; 1 for two empty sequences."""
    return float(Levenshtein.normalized_similarity(a, b))


def pairwise_similarity(tokens: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, float]:
    """Return means over pairs of responses to a prompt, by the release's names; NaN for a single response."""
    stems = [words(text) for text in texts]
    means = {
        "pairwise_rouge_l": mean_over_pairs(tokens, rouge_l),
        "pairwise_rouge_l_text": mean_over_pairs(stems, rouge_l),
    }
    for n in (1, 2):
        means[f"pairwise_rouge{n}_token"] = mean_over_pairs(tokens, lambda a, b, n=n: rouge_n(a, b, n))
        means[f"pairwise_rouge{n}_text"] = mean_over_pairs(stems, lambda a, b, n=n: rouge_n(a, b, n))
    means["pairwise_textual_similarity"] = mean_over_pairs(tokens, levenshtein_similarity)
    return means
