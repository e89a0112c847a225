"""Verifier of mathematical answers: equal text, equal numbers, or the same expression according to math-verify.

Run it in a ``VerifierPool``: there is no time limit on sympy here, and it never finishes an answer like
``10^{10^{10}}``.
"""

import logging
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Expr, Float
from sympy.core.relational import Relational

from verl.rewards.agreement import agree, numbers_agree, relations
from verl.rewards.answers import extract_answer, normalise, plain_number, quick_equal
from verl.rewards.equations import unwrap_equations
from verl.rewards.measures import measures_differ, modifiers_in, with_factors, without_text
from verl.rewards.notation import has_variables, keep_variable, read_quantity, unify
from verl.rewards.score import Verdict

# math-verify warns once per process that its own time limit is off. That limit needs SIGALRM in the main thread and
# does not interrupt long C calls; the pool's limit does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig()]

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


def equivalent(answer: str, ground_truth: str) -> bool:
    """Whether two LaTeX expressions mean the same; False if one of them cannot be parsed. May take forever."""
    return compare_latex(answer, ground_truth) is True


def compare_latex(
    answer: str, ground_truth: str, allows: Callable[[Decimal, Decimal], bool] | None = None
) -> bool | None:
    """Whether two LaTeX expressions mean the same; None if the answer cannot be parsed. May take forever.

    Letters at the end of an expression are read as variables rather than units (``keep_variable``), especially if the
    ground truth has variables.

    ``allows(value, truth)`` decides whether a number is close enough to the ground truth if either is a decimal
    fraction; without it, they must agree to six decimals. Numbers must agree to five digits, however small they are
    (``agree``).
    """
    if measures_differ(answer, ground_truth):
        return False
    answer, ground_truth = (with_factors(without_text(text)) for text in (answer, ground_truth))
    truth = keep_variable(ground_truth)
    theirs = _parse(truth)
    is_equation = "=" in truth or any(isinstance(reading, Basic) and reading.has(Relational) for reading in theirs)
    text, has_equation = (answer, False) if is_equation else unwrap_equations(answer)
    ours = _parse(keep_variable(text, short=not has_variables(truth)))
    if ours and _is_identity(ours[0]):
        ours = [relations(ours[0])[-1].rhs]
    elif has_equation or (not is_equation and ours and isinstance(ours[0], Basic) and ours[0].has(Eq)):
        return False if ours and isinstance(ours[0], Basic) else None
    if verify(theirs, ours, allow_set_relation_comp=True, timeout_seconds=None):
        # A reading ends with its text; of what was parsed, the expression comes first.
        return ours[-1] == theirs[-1] or agree(ours[0], theirs[0], allows)
    # math-verify's parses end with the text itself; if that comes first, nothing was parsed.
    if not ours or isinstance(ours[0], str):
        return None
    if not allows or not theirs or not _has_decimals(ours[0], theirs[0]):
        return False
    value, right = _number(ours[0]), _number(theirs[0])
    return value is not None and right is not None and allows(value, right)


def _is_identity(reading: Any) -> bool:
    """Whether a chain of equations is true and without variables, such as 2 + 3 = 5."""
    links = relations(reading)
    return bool(links) and all(
        isinstance(link, Eq)
        and not link.free_symbols
        and isinstance(link.lhs, Expr)
        and isinstance(link.rhs, Expr)
        and numbers_agree(link.lhs, link.rhs)
        for link in links
    )


def _parse(latex: str) -> list[Any]:
    expressions: list[Any] = parse(f"${latex.replace('$', '')}$", extraction_config=_LATEX, parsing_timeout=None)
    return expressions


def _has_decimals(*readings: Any) -> bool:
    return any(isinstance(reading, Basic) and reading.has(Float) for reading in readings)


def _number(expression: Any) -> Decimal | None:
    """The value of an expression, or of an equation's right side, if it is a real number."""
    if isinstance(expression, Eq):
        expression = expression.rhs
    if not isinstance(expression, Expr) or not expression.is_number or not expression.is_real:
        return None
    try:
        return Decimal(str(expression.evalf()))
    except ArithmeticError:  # an exponent beyond Decimal's, or no number at all
        return None
