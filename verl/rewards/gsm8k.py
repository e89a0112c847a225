"""Verifier of GSM8K: the answer is one number, often written with its unit."""

import re
from collections.abc import Mapping
from typing import Any

from verl.rewards.answers import extract_answer, numbers_in, quick_equal
from verl.rewards.math import judge
from verl.rewards.score import Verdict

_FORMULA = re.compile(r"\\(?!text|mathrm)[A-Za-z]|[\^!*]|/\s*[0-9]")
"""What makes the only number of an answer a part of a formula: a LaTeX command, a power, a factorial, a product."""


def verify_gsm8k(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on a response; with ``quick`` None where deciding needs algebra. ``extra_info`` is not used.

    An answer with text around its only number, as in ``18 dollars``, counts as that number.
    """
    answer, boxed = extract_answer(solution)
    if answer is None:
        return Verdict(False, boxed, "missing")
    equal = quick_equal(answer, ground_truth)
    if equal is None:
        numbers = numbers_in(answer)
        if len(numbers) == 1 and not _FORMULA.search(answer):
            equal = quick_equal(numbers[0], ground_truth)
    return judge(answer, boxed, ground_truth, equal, quick)
