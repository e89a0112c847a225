"""maj@k against literal chances, counted exactly in integers."""

import math

import pytest

from verl.algorithms.votes import DRAWS, answer_classes, majority_at_k
from verl.verifiers.answers import vote_key


def of_64(supporters: int, *rivals: int) -> list[int]:
    """Classes of 64 samples: so many are correct, so many share each wrong answer, the others have none."""
    classes = [0] * supporters + [i for i, size in enumerate(rivals, start=1) for _ in range(size)]
    return classes + [-1] * (64 - len(classes))


@pytest.mark.parametrize(
    ("classes", "correct", "k", "chance"),
    [
        # Ties are broken at random.
        ([0, 1, 2], 0, 3, 1 / 3),
        ([0, 0, 1, 1, 2], 0, 5, 1 / 2),
        # One vote is the mean correctness.
        ([0, 0, 0, 1, 2, 3, -1, -1], 0, 1, 3 / 8),
        # A sample without an answer does not vote.
        ([0, -1, -1, -1], 0, 4, 1.0),
        ([-1, -1], None, 2, 0.0),
        ([1, 1, 2], None, 2, 0.0),
        # Two classes of 2048, more than a float's binomials can hold: by symmetry each wins half the votes.
        ([0, 1] * 2048, 0, 64, 0.5),
        # 256 different answers never agree: the winner is one of the k at random, so the correct one in 1 of 256.
        (list(range(256)), 0, 128, 1 / 256),
        (of_64(1, *[1] * 20), 0, 8, 0.046058968699349584),
        (of_64(1, *[1] * 20), 0, 47, 0.047619047619047616),
        (of_64(5, 3, 3, 2, 2, 1, 1, 1), 0, 3, 0.17729134664618534),
        (of_64(5, 3, 3, 2, 2, 1, 1, 1), 0, 24, 0.4918832007642146),
        (of_64(12, 12, 12, 12, 12), 0, 24, 0.2),
        (of_64(20, 30, 6), 0, 2, 0.3521825396825397),
        (of_64(20, 30, 6), 0, 47, 0.008108982178667842),
        (of_64(30, 20, 5, 1), 0, 24, 0.8625054051741023),
        (of_64(64), 0, 8, 1.0),
    ],
)
def test_literal_chances(classes: list[int], correct: int | None, k: int, chance: float):
    exact = k == 1 or chance == 1.0 or math.comb(len(classes), k) <= DRAWS
    error = 1e-12 if exact else 4 * (chance * (1 - chance) / DRAWS) ** 0.5
    assert majority_at_k(classes, correct, k) == pytest.approx(chance, abs=error)
    # The same votes in another order, or under other names, draw the same numbers.
    renamed = [answer if answer < 0 else 10_000 - answer for answer in reversed(classes)]
    assert majority_at_k(renamed, None if correct is None else 10_000 - correct, k) == majority_at_k(
        classes, correct, k
    )


@pytest.mark.parametrize("k", [0, 4])
def test_majority_k_out_of_range(k: int):
    with pytest.raises(ValueError, match=f"k={k}: must be between 1 and the number of samples"):
        majority_at_k([0, 0, 1], 0, k)


def test_classes_of_answers():
    answers = ["1/2", "0.5", "3.0", " $3$ ", "x + 1", "x+1", "", "3.0"]
    correct = [True, True, *[False] * 6]
    assert answer_classes(correct, [vote_key(answer) for answer in answers]) == ([0, 0, 1, 1, 2, 2, -1, 1], 0)
    assert answer_classes([False], ["7"]) == ([1], None)
    assert answer_classes([], []) == ([], None)
