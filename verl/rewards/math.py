"""Verifier of mathematical answers: equal text, equal numbers, or the same expression according to math-verify."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from verl.rewards.algebra import compare_latex
from verl.rewards.answers import extract_answer, normalise, plain_number, quick_equal
from verl.rewards.lexicon import modifiers_in, read_quantity
from verl.rewards.notation import unify
from verl.rewards.score import Verdict, decide


def verify_math(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on a response; with ``quick``, None if it needs algebra. ``extra_info`` is not used."""
    answer, boxed = extract_answer(solution, equation="=" in ground_truth)
    return decide_math(answer, boxed, ground_truth, quick)


def decide_math(answer: str | None, boxed: bool, ground_truth: str, quick: bool) -> Verdict | None:
    """The verdict on an answer, which is compared as text or number, else by algebra.

    A number with a unit, ``5 dollars``, also counts as the number if the truth has no unit.
    """
    equal = quick_equal(answer or "", ground_truth)
    if answer and equal is None and plain_number(normalise(ground_truth)) is not None:
        quantity = read_quantity(unify(answer))
        if quantity and quantity.known and quantity.unit != "%" and not modifiers_in(answer):
            equal = quick_equal(str(quantity.value), ground_truth)
    return decide(answer, boxed, equal, quick, partial(compare_latex, ground_truth=ground_truth))
