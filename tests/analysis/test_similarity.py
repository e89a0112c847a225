"""Similarities of responses against figures by hand and against rouge-score's own, slow scorer."""

import math
from itertools import combinations

import pytest
from rouge_score.rouge_scorer import RougeScorer

from verl.analysis.similarity import levenshtein_similarity, pairwise_similarity, rouge_l, rouge_n, words

TOKENS = [[1, 2, 3, 4, 5, 2], [2, 3, 9, 5], [7, 8], [1, 2, 3, 4, 5, 2]]
TEXTS = [
    "First we add 3 and 4, giving 7; adding numbers is easy.",
    "We added 3 and 4 and gave 7. Easily done!",
    "\u7b54\u6848\u662f 7",
    "",
]


def test_by_hand():
    # Shared unigrams 2, 3, 5 of 6 and 4; bigram (2, 3) of 5 and 3; subsequence 2, 3, 5; 4 edits at the longer length 6.
    a, b = TOKENS[:2]
    assert rouge_n(a, b, 1) == pytest.approx(0.6) and rouge_n(a, b, 2) == pytest.approx(0.25)
    assert rouge_l(a, b) == pytest.approx(0.6)
    assert levenshtein_similarity(a, b) == pytest.approx(0.5)
    assert rouge_l([], []) == rouge_n([1], [1], 2) == 0 and levenshtein_similarity([], []) == 1


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
