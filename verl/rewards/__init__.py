"""Rewards: the registry of verifiers and custom functions, the pool of processes that they run in, and scores.

Importing this package loads neither sympy nor math-verify; a verifier's module is loaded on first use.
"""

from verl.rewards.registry import check_ground_truth, compute_score, use_custom_functions
from verl.verifiers.verdict import Verdict

__all__ = [
    "Verdict",
    "check_ground_truth",
    "compute_score",
    "use_custom_functions",
]
