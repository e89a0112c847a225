"""Registers verifiers and custom reward functions, runs them in a process pool, and scores their verdicts.

Verifiers are lazily imported, so importing this package loads neither sympy nor math-verify.
"""

from verl.rewards.registry import check_ground_truth, compute_score, use_custom_functions
from verl.verifiers.verdict import Verdict

__all__ = [
    "Verdict",
    "check_ground_truth",
    "compute_score",
    "use_custom_functions",
]
