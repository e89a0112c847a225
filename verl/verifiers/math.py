"""Verifier for mathematical answers in English and Chinese: quantities, expressions, sets, lists and words.

The verifier must run in a ``VerifierPool``, because it calls math-verify if simpler comparisons are inconclusive.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from verl.verifiers.algebra import compare_latex
from verl.verifiers.answers import MAX_ALGEBRA_CHARS, boxes_in, extract_answer, normalise, quick_equal
from verl.verifiers.ground_truths import read_tolerance
from verl.verifiers.lexicon import (
    Quantity,
    in_base_units,
    marks_in,
    modifiers_in,
    numeral_of,
    plain_number,
    read_quantity,
    units_in,
    with_degrees,
    with_factors,
)
from verl.verifiers.notation import split_answers, squeeze, unify, words_in
from verl.verifiers.numerals import in_digits
from verl.verifiers.verdict import Info, Verdict, decide

MAX_CHARS = 2000
"""Maximum length of answers that are parsed. Longer answers must equal the ground truth as text."""

MAX_LISTED = 12
"""Maximum length of a list of answers. Longer lists are compared as one expression."""

FULL_TURN = 2 * math.pi
"""A full turn in radians. Larger angles without a unit are assumed to be in degrees."""

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_]*=")
_BETWEEN_BOXES = re.compile(
    r"[\s$,;.、，；()\\]{0,20}(?:(and|or|和|或|与)[\s$]{0,5})?(?:\\?[A-Za-z][A-Za-z0-9_{}]{0,10}\s{0,3}=\s{0,3})?[\s$]{0,5}"
)
_SEVERAL = re.compile(r"\A\s*\\?[({\[]|\\pm|[<>,]|\\(?:[lg]eq?|in|cup|neq)(?![A-Za-z])|\\begin")
"""Pattern of ground truths that can also be written as lists, such as sets, tuples and conditions."""


_MONEY = re.compile(r"(?:\\\$|\A\s?\$(?=[^$]*\Z))\s?([0-9][0-9.,]{0,20})")


class Tolerance:
    """Tolerances for numerical errors."""

    def __init__(self, rounding: str = "1e-6", extra_info: Mapping[str, Any] | None = None) -> None:
        """Set ``rounding``, the maximum relative error of decimals, and read the tolerances in ``extra_info``."""
        info = extra_info or {}
        self.rounding = Decimal(rounding)
        self.relative = read_tolerance(info, "relative_tolerance") or Decimal(0)
        self.absolute = read_tolerance(info, "tolerance") or Decimal(0)

    def allows(self, value: Decimal, truth: Decimal) -> bool:
        """Return whether ``value`` is close enough to ``truth``."""
        try:
            error = abs(value - truth)
            whole = truth == truth.to_integral_value() and value == value.to_integral_value()
            relative = max(self.relative, Decimal(0) if whole else self.rounding)
            return error <= self.absolute or error <= relative * abs(truth)
        except ArithmeticError:  # The exponent is too large for Decimal.
            return False


EXACT = Tolerance()


def verify_math(solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False) -> Verdict | None:
    """Verify a response. Return None if ``quick`` is set and algebra is required. ``extra_info`` is unused."""
    return decide_math(*find_answer(solution, ground_truth), ground_truth, quick)


def decide_math(
    answer: str | None, boxed: bool, ground_truth: str, quick: bool, tolerance: Tolerance = EXACT
) -> Verdict | None:
    """Compare an answer with the ground truth as text, words, numbers and units, and algebraically if necessary.

    The comparison ignores missing units, wrappers such as ``\\text{}``, full-width characters and the order of a list.
    Units are converted if possible. The order matters if the ground truth separates its parts with semicolons.
    """
    equal = _quick_same(answer, ground_truth, tolerance) if answer else None
    return decide(answer, boxed, equal, quick, partial(_same_by_algebra, truth=ground_truth, tolerance=tolerance))


def find_answer(solution: str, ground_truth: str) -> tuple[str | None, bool]:
    """Find the answer like ``extract_answer``, but join adjacent boxes at the end if the ground truth is a list.

    Different numbers in boxes connected by "or" form a single answer.
    """
    answer, boxed = extract_answer(solution, equation="=" in ground_truth)
    if not boxed or answer is None or len(answer) > MAX_CHARS or len(ground_truth) > MAX_CHARS:
        return answer, boxed
    spans = sorted(boxes_in(solution))
    if len(spans) == 1:
        return answer, True
    is_list = len(split_answers(unify(ground_truth))[0]) > 1 and len(split_answers(unify(answer))[0]) == 1
    first = len(spans) - 1
    while first:
        between = _BETWEEN_BOXES.fullmatch(solution, spans[first - 1].end, spans[first].start)
        # Alternatives are different numbers.
        a, b = (solution[span.content : span.end - 1] for span in spans[first - 1 : first + 1])
        if not between or not (is_list or (between[1] in ("or", "或") and quick_equal(a, b) is False)):
            break
        first -= 1
    if first == len(spans) - 1:
        return answer, True
    return "; ".join(solution[span.content : span.end - 1] for span in spans[first:]), True


def _quick_same(answer: str, ground_truth: str, tolerance: Tolerance) -> bool | None:
    """Return whether answer and ground truth are equal as text, words, numbers and units, or None if undecided."""
    equal = quick_equal(answer, ground_truth)
    if "%" not in answer + ground_truth and (equal or (equal is False and tolerance is EXACT)):
        return equal
    if len(answer) > MAX_CHARS or len(ground_truth) > MAX_CHARS:
        return False
    answer, ground_truth = _tidy(answer, ground_truth)
    if not re.search("[0-9]", answer) and plain_number(normalise(ground_truth)) is not None:
        answer = in_digits(unify(answer))
    marks = [marks_in(text) for text in (answer, ground_truth)]
    if not equal and _in_same_units(unify(answer), unify(ground_truth)):
        return None
    if equal or (all(marks) and marks[0] != marks[1]):
        return equal is True and (not all(marks) or marks[0] == marks[1])
    if marks == [{"radians"}, set()] and abs(plain_number(normalise(ground_truth)) or Decimal(0)) > FULL_TURN:
        return False
    numerals = [numeral_of(text) for text in (answer, ground_truth)]
    if all(numerals):
        return numerals[0] == numerals[1]
    number = plain_number(normalise(ground_truth))
    if numerals[0] and numerals[0][1] != 10 and number is not None:
        digits, base = numerals[0]
        return base <= 36 and int(max(digits), 36) < base and int(digits, base) == number
    equal = _plainly_same(unify(answer), unify(ground_truth), tolerance)
    if equal is None and max(len(answer), len(ground_truth)) > MAX_ALGEBRA_CHARS:
        return False
    return equal


def _tidy(answer: str, truth: str) -> tuple[str, str]:
    """Convert minutes of arc to degrees. Spell out both units if one amount is in cents and the other in dollars."""
    answer, truth = with_degrees(answer), with_degrees(truth)
    if marks_in(answer) ^ marks_in(truth) == {"dollars", "cents"}:
        answer, truth = (_MONEY.sub(r"\1 dollars", text).replace("¢", " cents") for text in (answer, truth))
    return answer, truth


def _in_same_units(answer: str, truth: str) -> tuple[str, str] | None:
    """Convert normalised texts to base units. Return None unless they have the same dimensions but different units."""
    ours = in_base_units(answer)
    theirs = in_base_units(truth) if ours and modifiers_in(answer) == modifiers_in(truth) else None
    return (ours[0], theirs[0]) if ours and theirs and ours[1] == theirs[1] and ours[2] != theirs[2] else None


def same_measure(answer: str, truth: str) -> bool | None:
    """Return whether two quantities in different units are equal, or None for texts that are not comparable."""
    same = _in_same_units(unify(answer), unify(truth))
    return compare_latex(*same) if same else None


def _plainly_same(answer: str, truth: str, tolerance: Tolerance) -> bool | None:
    """Implement :func:`_quick_same` for texts normalised by ``unify``."""
    if not answer or not truth:
        return False
    if squeeze(answer) == squeeze(truth):
        return True
    if _labels_differ(answer, truth):
        return None
    if _in_same_units(answer, truth):
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
    """Return whether ``answer`` and ``truth`` assign values to different variables."""
    labels = [_LABEL.match(squeeze(text)) for text in (answer, truth)]
    return all(labels) and len({label.group() for label in labels if label}) > 1


def _same_quantity(a: Quantity, b: Quantity, tolerance: Tolerance) -> bool:
    percent = [a.unit == "%", b.unit == "%"]
    if a.known and b.known and a.unit != b.unit and not any(percent):
        return False
    if tolerance.allows(a.value, b.value):
        return True
    # 25% equals 0.25.
    if percent == [True, False]:
        return tolerance.allows(a.value / 100, b.value)
    return percent == [False, True] and tolerance.allows(a.value, b.value / 100)


def _same_by_algebra(answer: str, truth: str, tolerance: Tolerance) -> bool | None:
    """Return whether answer and ground truth are equivalent, or None if unparsable. May never terminate."""
    answer, truth = _tidy(answer, truth)
    unified = unify(answer)
    equal = _same(unified, unify(truth), tolerance)
    if not equal and units_in(answer) and len(split_answers(unified)[0]) == 1:
        # Without its \\text{}, a unit after an expression would be parsed as variables.
        equal = compare_latex(answer, truth, tolerance.allows) or equal
    return equal


def _same(answer: str, truth: str, tolerance: Tolerance) -> bool | None:
    """Implement :func:`_same_by_algebra` for texts normalised by ``unify``."""
    answer, truth = _both_signs(answer), _both_signs(truth)
    for thousands in () if _in_same_units(answer, truth) else (True, False):
        ours, _ = split_answers(answer, thousands)
        theirs, ordered = split_answers(truth, thousands)
        if len(ours) == len(theirs) and 2 <= len(ours) <= MAX_LISTED:
            return _same_list(ours, theirs, ordered, tolerance)
        inner = split_answers(answer.strip("()[]{}\\ "), thousands)[0] if answer.strip()[-1:] in ")]}" else ours
        if thousands and len(inner) > len(theirs) == 1 and not _SEVERAL.search(truth):
            return False
    return _same_single(answer, truth, tolerance)


def _both_signs(text: str) -> str:
    """Expand an answer with a plus-minus sign into a list of two answers. Other answers are unchanged."""
    if text.count(r"\pm") != 1 or r"\mp" in text:
        return text
    return ", ".join(text.replace(r"\pm", sign) for sign in "+-")


def _same_list(ours: list[str], theirs: list[str], ordered: bool, tolerance: Tolerance) -> bool | None:
    if ordered:
        verdicts = [_same_single(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)]
        return all(verdicts) or (None if None in verdicts and False not in verdicts else False)
    labels = [[_LABEL.match(squeeze(part)) for part in parts] for parts in (ours, theirs)]
    unmatched = list(ours)
    for truth in theirs:
        # If all entries are labelled (x=1, y=2), compare entries with the same label.
        named = all(map(all, labels)) and squeeze(truth).partition("=")[0] + "="
        candidates = [a for a in unmatched if not named or squeeze(a).startswith(named)]
        # Try to match texts first, because algebra on every pair would be slow.
        match = next((a for a in candidates if squeeze(a) == squeeze(truth)), None)
        match = match or next((a for a in candidates if _same_single(a, truth, tolerance)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _same_single(answer: str, truth: str, tolerance: Tolerance) -> bool | None:
    equal = _plainly_same(answer, truth, tolerance)
    if equal is not None:
        return equal
    if same := _in_same_units(answer, truth):
        return compare_latex(*same, tolerance.allows)
    if _labels_differ(answer, truth):
        return compare_latex(answer, truth, tolerance.allows)
    if answer.count(":") != truth.count(":") and ":" in answer and ":" in truth:
        return False
    a, b = read_quantity(answer), read_quantity(truth)
    # Pass the number without its unit, because math-verify knows fewer units and reads 9% as 9.
    percents = [text.endswith("%") for text in (answer, truth)]
    answer, truth = (str(x.value) if x else text.rstrip("%") for x, text in ((a, answer), (b, truth)))
    if percents[0] != percents[1]:
        answer, truth = (f"\\frac{{{x}}}{{100}}" if p else x for x, p in zip((answer, truth), percents, strict=True))
    return compare_latex(answer, truth, tolerance.allows)
