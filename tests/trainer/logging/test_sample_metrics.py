import pytest
import torch

from verl.rewards.score import Score, Verdict, score_of
from verl.trainer.logging.sample_metrics import sample_figures

SCORES = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0])
CORRECT = torch.tensor([True, False, True, False, False, False, False, True])
"""Two of the first prompt's four responses are correct, and one of the second's."""


def verdicts(answers: list[str]) -> list[Score]:
    given = zip(CORRECT.tolist(), answers, strict=True)
    return [score_of(Verdict(right, True, "exact" if right else "different", answer), "mix") for right, answer in given]


def test_figures_of_four_responses():
    # The first prompt's wrong answers differ; the second's agree, and one response has none.
    figures = sample_figures(SCORES, CORRECT, verdicts(["7", "8", "7", "9", "5", "5", "", "3"]), 4)
    expected = {
        # 1 - C(2, 2) / C(4, 2) and 1 - C(3, 2) / C(4, 2)
        "pass@2": (5 / 6 + 1 / 2) / 2,
        "pass@4": 1.0,
        # Pairs of 0, 0, 0.5, 1: best 0, 0.5, 0.5, 1, 1, 1, worst once 0.5, else 0; of 0, 0, 0, 1: half have the 1.
        "best@2/mean": (4 / 6 + 1 / 2) / 2,
        "best@4/mean": 1.0,
        "worst@2/mean": (0.5 / 6 + 0.0) / 2,
        "worst@4/mean": 0.0,
        # Votes of two: 1 + 4 / 2 of 6; against the 5s 2 / 2, and 1 without a vote against it, of 6.
        "maj@2/mean": (3 / 6 + 2 / 6) / 2,
        # Two against one and one; one against two.
        "maj@4/mean": 0.5,
    }
    assert figures == pytest.approx(expected)


def test_k_of_other_numbers_and_no_answers():
    assert sample_figures(SCORES, CORRECT, verdicts([""] * 8), 1) == {}
    assert list(sample_figures(SCORES, CORRECT, verdicts([""] * 8), 8)) == [
        f"{name}@{k}{suffix}"
        for k in (2, 4, 8)
        for name, suffix in (("pass", ""), ("best", "/mean"), ("worst", "/mean"))
    ]
