"""Verifier of open-ended answers: numbers with units, expressions, sets, intervals, lists of answers, words.

For English and Chinese. math-verify decides what text, numbers and units do not, so run it in a ``VerifierPool``.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from verl.rewards.algebra import compare_latex
from verl.rewards.answers import MAX_ALGEBRA_CHARS, boxes_in, extract_answer, quick_equal
from verl.rewards.lexicon import Quantity, arcs_in, modifiers_in, read_quantity, units_in, with_factors
from verl.rewards.notation import split_answers, squeeze, unify, words_in
from verl.rewards.score import Verdict, decide
from verl.rewards.truths import read_tolerance

ROUNDING = Decimal("1e-4")
"""Largest relative error of a correct decimal fraction, as is usual in evaluations; whole numbers must be exact."""

MAX_CHARS = 2000
"""Longer answers are correct only if their text is that of the ground truth."""

MAX_LISTED = 12
"""Longer lists of answers are compared as one expression."""

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_]*=")
_BETWEEN_BOXES = re.compile(
    r"[\s$,;.、，；()\\]{0,20}(?:(?:and|or|和|或|与)[\s$]{0,5})?(?:\\?[A-Za-z][A-Za-z0-9_{}]{0,10}\s{0,3}=\s{0,3})?[\s$]{0,5}"
)


def verify_open_answer(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on a response; with ``quick``, None if it needs algebra.

    A missing unit, wrappers such as ``\\text{}``, full-width signs and the order of a list's entries do not matter.
    Different units of measure do, and so does the order of answers that the ground truth separates with semicolons. A
    number with a fractional part is correct up to ``ROUNDING``. ``extra_info`` may widen that: ``relative_tolerance``
    is a fraction of the ground truth, ``tolerance`` a number. An answer that math-verify cannot parse is wrong for the
    reason ``unparsed``.
    """
    answer, boxed = _find_answer(solution, ground_truth)
    tolerance = Tolerance(extra_info or {})

    def algebra(answer: str) -> bool | None:
        equal = _same(unify(answer), unify(ground_truth), tolerance)
        if not equal and units_in(answer):
            # Without its \\text{}, a unit after an expression would be a product of variables.
            equal = compare_latex(answer, ground_truth, tolerance.allows) or equal
        return equal

    equal = _quick_same(answer, ground_truth, tolerance) if answer else None
    return decide(answer, boxed, equal, quick, algebra)


class Tolerance:
    """How far a number may be off."""

    def __init__(self, extra_info: Mapping[str, Any]) -> None:
        self.relative = read_tolerance(extra_info, "relative_tolerance") or Decimal(0)
        self.absolute = read_tolerance(extra_info, "tolerance") or Decimal(0)

    def allows(self, value: Decimal, truth: Decimal) -> bool:
        """Whether ``value`` is close enough to ``truth``."""
        try:
            error = abs(value - truth)
            whole = truth == truth.to_integral_value()
            relative = max(self.relative, Decimal(0) if whole else ROUNDING)
            return error <= self.absolute or error <= relative * abs(truth)
        except ArithmeticError:  # an exponent beyond Decimal's
            return False


def _find_answer(solution: str, ground_truth: str) -> tuple[str | None, bool]:
    """As ``extract_answer``; if the ground truth is a list, the answer is all boxes side by side at the end."""
    answer, boxed = extract_answer(solution, equation="=" in ground_truth)
    if not boxed or answer is None or len(ground_truth) > MAX_CHARS:
        return answer, boxed
    wanted = len(split_answers(unify(ground_truth))[0])
    if wanted < 2 or len(answer) > MAX_CHARS or len(split_answers(unify(answer))[0]) > 1:
        return answer, boxed
    spans = sorted(boxes_in(solution))
    first = len(spans) - 1
    while first and _BETWEEN_BOXES.fullmatch(solution, spans[first - 1].end, spans[first].start):
        first -= 1
    return "; ".join(solution[span.content : span.end - 1] for span in spans[first:]), True


def _quick_same(answer: str, ground_truth: str, tolerance: Tolerance) -> bool | None:
    """Whether the two are the same by text, words, numbers and units; None if these do not decide it."""
    if quick_equal(answer, ground_truth):
        return True
    if len(answer) > MAX_CHARS or len(ground_truth) > MAX_CHARS:
        return False
    arcs = [arcs_in(text) for text in (answer, ground_truth)]
    if all(arcs) and arcs[0] != arcs[1]:
        return False
    equal = _plainly_same(unify(answer), unify(ground_truth), tolerance)
    if equal is None and max(len(answer), len(ground_truth)) > MAX_ALGEBRA_CHARS:
        return False
    return equal


def _plainly_same(answer: str, truth: str, tolerance: Tolerance) -> bool | None:
    """As ``_quick_same``, for unified text."""
    if not answer or not truth:
        return False
    if squeeze(answer) == squeeze(truth):
        return True
    if _labels_differ(answer, truth):
        return None
    b = read_quantity(truth)
    a = read_quantity(answer, short=b is not None)
    if a and b:
        return _same_quantity(a, b, tolerance) and modifiers_in(answer) == modifiers_in(truth)
    words = words_in(truth)
    if words is not None and b is None and with_factors(truth) == truth:
        return words_in(answer) == words
    return None


def _labels_differ(answer: str, truth: str) -> bool:
    """Whether one is the value of x and the other that of y."""
    labels = [_LABEL.match(squeeze(text)) for text in (answer, truth)]
    return all(labels) and len({label.group() for label in labels if label}) > 1


def _same_quantity(a: Quantity, b: Quantity, tolerance: Tolerance) -> bool:
    percent = [a.unit == "%", b.unit == "%"]
    if a.known and b.known and a.unit != b.unit and not any(percent):
        return False
    if tolerance.allows(a.value, b.value):
        return True
    # 25% is 0.25, whichever of the two is the ground truth.
    if percent == [True, False]:
        return tolerance.allows(a.value / 100, b.value)
    return percent == [False, True] and tolerance.allows(a.value, b.value / 100)


def _same(answer: str, truth: str, tolerance: Tolerance) -> bool | None:
    """Whether unified texts mean the same; None if the answer cannot be parsed. May take forever."""
    for thousands in (True, False):
        ours, _ = split_answers(answer, thousands)
        theirs, ordered = split_answers(truth, thousands)
        if len(ours) == len(theirs) and 2 <= len(ours) <= MAX_LISTED:
            return _same_list(ours, theirs, ordered, tolerance)
    return _same_single(answer, truth, tolerance)


def _same_list(ours: list[str], theirs: list[str], ordered: bool, tolerance: Tolerance) -> bool | None:
    if ordered:
        verdicts = [_same_single(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)]
        return all(verdicts) or (None if None in verdicts and False not in verdicts else False)
    labels = [[_LABEL.match(squeeze(part)) for part in parts] for parts in (ours, theirs)]
    left = list(ours)
    for truth in theirs:
        # If all entries are labelled (x=1, y=2), x is compared with x.
        named = all(map(all, labels)) and squeeze(truth).partition("=")[0] + "="
        candidates = [a for a in left if not named or squeeze(a).startswith(named)]
        # Text first: algebra on every pair would be quadratic in the length of the list.
        match = next((a for a in candidates if squeeze(a) == squeeze(truth)), None)
        match = match or next((a for a in candidates if _same_single(a, truth, tolerance)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_single(answer: str, truth: str, tolerance: Tolerance) -> bool | None:
    equal = _plainly_same(answer, truth, tolerance)
    if equal is not None:
        return equal
    if _labels_differ(answer, truth):
        return compare_latex(answer, truth, tolerance.allows)
    a, b = read_quantity(answer), read_quantity(truth)
    # Algebra gets the number without its unit: math-verify knows fewer units.
    return compare_latex(str(a.value) if a else answer, str(b.value) if b else truth, tolerance.allows)
