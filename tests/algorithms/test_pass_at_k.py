import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch

from verl.algorithms.pass_at_k import best_at_k, k_grid, pass_at_k


def one(n: int, c: int, k: int) -> float:
    return pass_at_k(torch.tensor([n]), torch.tensor([c]), k).item()


@pytest.mark.parametrize("n", range(1, 10))
def test_pass_at_k_is_the_mean_over_all_subsets(n: int):
    for c in range(n + 1):
        for k in range(1, n + 1):
            passed = [any(subset) for subset in combinations([True] * c + [False] * (n - c), k)]
            assert one(n, c, k) == pytest.approx(sum(passed) / len(passed), abs=1e-14)


def test_pass_at_k_of_literal_counts():
    # 1 - C(3, 2) / C(5, 2) = 0.7; problems may have different numbers of samples
    values = pass_at_k(torch.tensor([5, 4, 2]), torch.tensor([2, 1, 0]), 2)
    assert values.dtype == torch.float64
    assert values.tolist() == pytest.approx([0.7, 0.5, 0.0], abs=1e-15)
    nothing = torch.tensor([], dtype=torch.long)
    assert pass_at_k(nothing, nothing, 3).shape == (0,)
    # Binomials that overflow.
    exact = 1 - Fraction(math.comb(19990, 10000), math.comb(20000, 10000))
    assert one(20000, 10, 10000) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "words"),
    [
        (4, 1, 5, "k=5: a problem has only 4 samples; set k<=4"),
        (4, 1, 0, "k=0: must be at least 1"),
        (4, 5, 1, "num_correct"),
        (4, -1, 1, "num_correct"),
        (0, 0, 1, "k=1: a problem has only 0 samples"),
    ],
)
def test_counts_out_of_range(n: int, c: int, k: int, words: str):
    with pytest.raises(ValueError, match=words):
        pass_at_k(torch.tensor([9, n]), torch.tensor([3, c]), k)


@pytest.mark.parametrize(
    ("n", "ks"), [(0, []), (1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16]), (17, [1, 2, 4, 8, 16, 17])]
)
def test_k_grid(n: int, ks: list[int]):
    assert k_grid(n) == ks


def test_best_at_k_of_literal_scores():
    # Pairs of (0, 1, 3): 1, 3 and 3; of (2, 2, -1): 2, 2 and 2. With replacement it would be 16 / 9 for the first.
    scores = torch.tensor([[1.0, 3.0, 0.0], [2.0, 2.0, -1.0]])
    assert best_at_k(scores, 1).tolist() == pytest.approx([4 / 3, 1.0])
    assert best_at_k(scores, 2).tolist() == pytest.approx([7 / 3, 2.0])
    assert best_at_k(scores, 3).tolist() == [3.0, 2.0]
    with pytest.raises(ValueError, match="k=4: must be between 1 and the number of samples \\(3\\)"):
        best_at_k(scores, 4)


@pytest.mark.parametrize("k", [1, 5, 32, 64])
def test_best_at_k_of_verdicts_is_pass_at_k(k: int):
    verdicts = (torch.arange(64) < 3).double()[None]
    assert best_at_k(verdicts, k).item() == pytest.approx(one(64, 3, k), abs=1e-12)
