"""Verifier of open-ended answers: mathematics with rounded decimals."""

from collections.abc import Mapping
from typing import Any

from verl.verifiers.math import Tolerance, decide_math, find_answer
from verl.verifiers.verdict import Verdict

ROUNDING = "1e-4"
"""Largest relative error of a correct decimal, as is usual in evaluations. Whole numbers must be exact."""


def verify_open_answer(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """Verify a response like :func:`verify_math`, with the tolerance ``ROUNDING`` for decimals.

    ``extra_info`` may have a larger ``relative_tolerance``, a fraction of the ground truth, or an absolute
    ``tolerance``.
    """
    answer, boxed = find_answer(solution, ground_truth)
    return decide_math(answer, boxed, ground_truth, quick, Tolerance(ROUNDING, extra_info))
