"""Verifier for open-ended mathematical answers that may be rounded decimals."""

from verl.verifiers.math import Tolerance, decide_math, find_answer
from verl.verifiers.verdict import Info, Verdict

ROUNDING = "1e-4"
"""Maximum relative error of a correct decimal. Many evaluations use this value. Integers must match exactly."""


def verify_open_answer(
    solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False
) -> Verdict | None:
    """Verify a response like :func:`verify_math`, but with the tolerance ``ROUNDING`` for decimals.

    ``extra_info`` may specify a larger ``relative_tolerance``, as a fraction of the ground truth, or an absolute
    ``tolerance``.
    """
    answer, boxed = find_answer(solution, ground_truth)
    return decide_math(answer, boxed, ground_truth, quick, Tolerance(ROUNDING, extra_info))
