"""Verifier of mathematical answers: equal text, equal numbers, or the same expression according to math-verify."""

from collections.abc import Mapping
from typing import Any

from verl.rewards.algebra import compare_latex
from verl.rewards.answers import extract_answer, normalise, plain_number, quick_equal
from verl.rewards.lexicon import modifiers_in, read_quantity
from verl.rewards.notation import unify
from verl.rewards.score import Verdict

REASONS = {True: "equivalent", False: "different", None: "unparsed"}
"""Result of ``compare_latex`` -> the reason of the verdict."""


def verify_math(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on a response; with ``quick``, None if it needs algebra. ``extra_info`` is not used."""
    answer, boxed = extract_answer(solution, equation="=" in ground_truth)
    if answer is None:
        return Verdict(False, boxed, "missing")
    return verdict_of(answer, boxed, ground_truth, compare_plainly(answer, ground_truth), quick)


def compare_plainly(answer: str, ground_truth: str) -> bool | None:
    """As ``quick_equal``; a number with a unit, ``5 dollars``, also counts as the number if the truth has no unit."""
    equal = quick_equal(answer, ground_truth)
    if equal is None and plain_number(normalise(ground_truth)) is not None:
        quantity = read_quantity(unify(answer))
        if quantity and quantity.known and quantity.unit != "%" and not modifiers_in(answer):
            return quick_equal(str(quantity.value), ground_truth)
    return equal


def verdict_of(answer: str, boxed: bool, ground_truth: str, equal: bool | None, quick: bool) -> Verdict | None:
    """The verdict on an answer whose quick comparison gave ``equal``; if that is None, algebra decides."""
    if equal is not None:
        return Verdict(equal, boxed, "exact" if equal else "different", answer)
    if quick:
        return None
    equal = compare_latex(answer, ground_truth)
    return Verdict(equal is True, boxed, REASONS[equal], answer)
