"""Metrics of token frequencies against figures by hand and slow formulas."""

import math

import pytest

from verl.analysis.tokens import (
    frequency_entropy,
    jensen_shannon,
    repetition_rate,
    symmetric_kl,
    token_shares,
    top_confidence,
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
