"""Verifiers: they extract the answer of a response and compare it with the ground truth.

Importing this package loads neither sympy nor math-verify; a verifier's module is loaded on first use.
"""

from verl.rewards.registry import check_ground_truth, compute_score, use_custom_functions
from verl.rewards.score import Score, Verdict

__all__ = [
    "Score",
    "Verdict",
    "check_ground_truth",
    "compute_score",
    "use_custom_functions",
]
