"""Verifier of open-ended answers: as mathematics, but decimal fractions may be rounded."""

from collections.abc import Mapping
from typing import Any

from verl.verifiers.math import Tolerance, decide_math, find_answer
from verl.verifiers.verdict import Verdict

ROUNDING = "1e-4"
"""Largest relative error of a correct decimal fraction, as is usual in evaluations; whole numbers must be exact."""


def verify_open_answer(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """As ``verify_math``, but a number with a fractional part is correct up to ``ROUNDING``.

    ``extra_info`` may widen that: ``relative_tolerance`` is a fraction of the ground truth, ``tolerance`` a number.
    """
    answer, boxed = find_answer(solution, ground_truth)
    return decide_math(answer, boxed, ground_truth, quick, Tolerance(ROUNDING, extra_info))
