"""Similarity of the responses to a prompt: ROUGE F1 on tokens and on words, and Levenshtein on tokens.

Words are those of the ``rouge-score`` package with its stemmer; the longest common subsequence is rapidfuzz's, which is
the same number hundreds of times faster.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from rapidfuzz.distance import LCSseq, Levenshtein
from rouge_score.tokenizers import DefaultTokenizer

from verl.analysis.tokens import mean_over_pairs

_WORDS = DefaultTokenizer(use_stemmer=True)

Items = Sequence[Hashable]


def words(text: str) -> list[str]:
    """The stemmed words of a text, as ROUGE counts them."""
    return list(_WORDS.tokenize(text))


def rouge_n(a: Items, b: Items, n: int) -> float:
    """F1 of the n-grams that two sequences share; 0 if either has none."""
    counts = [Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1)) for items in (a, b)]
    total = counts[0].total() + counts[1].total()
    return 2 * (counts[0] & counts[1]).total() / total if total else 0.0


def rouge_l(a: Items, b: Items) -> float:
    """F1 of the longest common subsequence; 0 if either sequence is empty."""
    total = len(a) + len(b)
    return 2 * LCSseq.similarity(a, b) / total if total else 0.0


def levenshtein_similarity(a: Items, b: Items) -> float:
    """1 minus the edit distance over the longer length; 1 for two empty sequences."""
    return float(Levenshtein.normalized_similarity(a, b))


def pairwise_similarity(tokens: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, float]:
    """Means over the pairs of the responses to a prompt, by the release's names; NaN for a single response."""
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
