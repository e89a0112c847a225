"""Metrics of responses against figures by hand, slow formulas, and rouge-score's own, slow scorer."""

import math
from itertools import combinations

import pytest
from rouge_score.rouge_scorer import RougeScorer

from verl.analysis.metrics import (
    count_words,
    frequency_entropy,
    jensen_shannon,
    pairwise_similarity,
    repetition_rate,
    rouge_l,
    rouge_n,
    symmetric_kl,
    token_shares,
    top_confidence,
    words,
)

LOG2, LOG3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    ("tokens", "entropy", "confidence"),
    [
        ([5, 5, 5, 5], 0.0, 0.0),
        ([1, 2], LOG2, LOG2),
        # Shares 1/2, 1/4 and 1/4; the top two are 1/2 and 1/4.
        ([7, 8, 7, 9], 1.5 * LOG2, 1.5 * LOG2),
        ([], 0.0, 0.0),
    ],
)
def test_entropy_and_confidence_by_hand(tokens: list[int], entropy: float, confidence: float):
    assert frequency_entropy(tokens) == pytest.approx(entropy)
    assert top_confidence(tokens, 2) == pytest.approx(confidence)
    # The mean surprise of the tokens is the same number.
    surprise = [-math.log(tokens.count(token) / len(tokens)) for token in tokens]
    assert frequency_entropy(tokens) == pytest.approx(sum(surprise) / max(1, len(surprise)))


def test_the_top_k_are_the_most_frequent():
    assert top_confidence([1, 1, 1, 2, 2, 3], 1) == pytest.approx(LOG2)
    assert top_confidence([1, 1, 1, 2, 2, 3], 9) == pytest.approx((LOG2 + LOG3 + math.log(6)) / 3)


@pytest.mark.parametrize(
    ("responses", "n", "rate"),
    [
        ([[1, 2, 1, 2, 1]], 2, 0.5),
        ([[1, 2, 3]], 4, 0.0),
        ([[1, 2], [1, 2]], 2, 0.5),
        # 2, 1 would be a third bigram across the border.
        ([[1, 2], [1, 2], [2, 1]], 2, 1 / 3),
        ([], 4, 0.0),
    ],
)
def test_repeated_n_grams(responses: list[list[int]], n: int, rate: float):
    assert repetition_rate(responses, n) == pytest.approx(rate)


def test_divergences_of_distributions_by_hand():
    p, q = token_shares([1, 1, 2, 2]), token_shares([1, 2, 2, 2])
    assert (p, q) == ({1: 0.5, 2: 0.5}, {1: 0.25, 2: 0.75})
    # KL(p || q) = log(2) / 2 + log(2/3) / 2 and KL(q || p) = log(1/2) / 4 + 3 log(3/2) / 4.
    assert symmetric_kl(p, q, 1e-20) == pytest.approx(0.125 * LOG3)
    assert symmetric_kl(p, p, 1e-20) == 0
    disjoint = token_shares([3])
    assert jensen_shannon(p, disjoint) == pytest.approx(LOG2)
    # KL(disjoint || p) = log(1 / floor); KL(p || disjoint) = log(1/2) - log(floor).
    assert symmetric_kl(p, disjoint, 1e-4) == pytest.approx((8 * math.log(10) - LOG2) / 2, abs=1e-2)


@pytest.mark.parametrize(
    ("text", "count"),
    [("Wait, wait. Awaiting", 2), ("Let me check again", 1), ("let me\ncheck", 0), ("RE-CHECK", 1), ("", 0)],
)
def test_reflection_words_are_whole(text: str, count: int):
    assert count_words(text, ["wait", "check again", "let me check again", "re-check", "check"]) == count + (
        text == "let me\ncheck"
    )
    assert count_words(text, []) == 0


TOKENS = [[1, 2, 3, 4, 5, 2], [2, 3, 9, 5], [7, 8], [1, 2, 3, 4, 5, 2]]
TEXTS = [
    "First we add 3 and 4, giving 7; adding numbers is easy.",
    "We added 3 and 4 and gave 7. Easily done!",
    "\u7b54\u6848\u662f 7",
    "",
]


def test_similarity_by_hand():
    # Shared unigrams 2, 3, 5 of 6 and 4; bigram (2, 3) of 5 and 3; subsequence 2, 3, 5; 4 edits at the longer length 6.
    a, b = TOKENS[:2]
    assert rouge_n(a, b, 1) == pytest.approx(0.6) and rouge_n(a, b, 2) == pytest.approx(0.25)
    assert rouge_l(a, b) == pytest.approx(0.6)
    assert rouge_l([], []) == rouge_n([1], [1], 2) == 0
    similarity = [pairwise_similarity(pair, ["", ""])["pairwise_textual_similarity"] for pair in ([a, b], [[], []])]
    assert similarity == [pytest.approx(0.5), 1]


def test_rouge_is_that_of_the_package():
    found = pairwise_similarity(TOKENS, TEXTS)
    ids = [" ".join(map(str, tokens)) for tokens in TOKENS]
    for suffix, texts, stemmer in (("_token", ids, False), ("_text", TEXTS, True)):
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=stemmer)
        pairs = [scorer.score(a, b) for a, b in combinations(texts, 2)]
        for name in ("rouge1", "rouge2", "rougeL"):
            own = f"pairwise_{name}{suffix}" if name != "rougeL" else "pairwise_rouge_l" + suffix.removesuffix("_token")
            expected = sum(pair[name].fmeasure for pair in pairs) / 6
            assert expected > 0 and found[own] == pytest.approx(expected), own


def test_one_response_has_no_pairs():
    found = pairwise_similarity(TOKENS[:1], TEXTS[:1])
    assert len(found) == 7 and all(map(math.isnan, found.values()))
    assert words("Adding numbers, easily") == ["ad", "number", "easili"]
