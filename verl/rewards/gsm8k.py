"""Verifier of GSM8K: the answer is one number, often written with its unit."""

import re
from collections.abc import Mapping
from typing import Any

from verl.rewards.answers import extract_answer, numbers_in, quick_equal
from verl.rewards.math import verdict_of
from verl.rewards.notation import keep_variable
from verl.rewards.score import Verdict

_FORMULA = re.compile(r"\\(?!text|mathrm)[A-Za-z]|[\^!*]|/\s*[0-9]")
"""Signs that the only number of an answer is part of a formula: a LaTeX command, a power, a factorial, a product."""

_TERM = re.compile(r"[0-9]\s*[A-Za-z]{1,2}\s*$")


def verify_gsm8k(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on a response; with ``quick``, None if it needs algebra. ``extra_info`` is not used.

    An answer with text around its only number, as in ``18 dollars``, counts as that number.
    """
    answer, boxed = extract_answer(solution)
    if answer is None:
        return Verdict(False, boxed, "missing")
    equal = quick_equal(answer, ground_truth)
    if equal is None:
        numbers = numbers_in(answer)
        if len(numbers) == 1 and not _FORMULA.search(answer) and not _ends_in_variable(answer):
            equal = quick_equal(numbers[0], ground_truth)
    return verdict_of(answer, boxed, ground_truth, equal, quick)


def _ends_in_variable(answer: str) -> bool:
    """Whether the number is multiplied by a variable: ``18x``, ``18k``, but not ``18 m``."""
    return _TERM.search(answer) is not None and keep_variable(answer, short=True) != answer
