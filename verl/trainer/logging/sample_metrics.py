"""What several validation responses to a prompt achieve together: pass@k, best@k and maj@k.

Legend: P prompts, n responses to each, B = P n responses, neighbours where they share a prompt.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from torch import Tensor

from verl.rewards import Score
from verl.rewards.majority import answer_classes, majority_at_k
from verl.rewards.pass_at_k import best_at_k, k_grid, pass_at_k


class _Answer(NamedTuple):
    correct: bool
    answer: str


def sample_figures(score: Tensor, correct: Tensor, results: Sequence[Score], n: int) -> dict[str, float]:
    """Means over prompts of figures of k responses, for k = 2, 4, 8, ... and ``n``; nothing for ``n`` = 1.

    ``pass@k``, the chance that one of them is correct; ``best@k/mean`` and ``worst@k/mean``, their highest and lowest
    score; ``maj@k/mean``, the chance that a vote elects the correct answer, left out where verifiers name no answers.
    Each is the exact mean over all choices of k of the n responses.

    Args:
        score: the verifiers' ``[B]``.
        correct: ``[B]`` bool.
        results: the verdicts, B.
        n: responses per prompt.
    """
    grouped_score, grouped_correct = score.view(-1, n), correct.view(-1, n)
    answers = [_Answer(result["correctness"], result["answer"]) for result in results]
    votes = [answer_classes(answers[i : i + n]) for i in range(0, len(answers), n)]
    num_correct = grouped_correct.sum(dim=1)
    num_samples = num_correct.new_full(num_correct.shape, n)
    figures = {}
    for k in k_grid(n)[1:]:
        figures[f"pass@{k}"] = pass_at_k(num_samples, num_correct, k).mean().item()
        figures[f"best@{k}/mean"] = best_at_k(grouped_score, k).mean().item()
        figures[f"worst@{k}/mean"] = -best_at_k(-grouped_score, k).mean().item()
        if any(answer.answer for answer in answers):
            figures[f"maj@{k}/mean"] = fmean(majority_at_k(*vote, k) for vote in votes)
    return figures
