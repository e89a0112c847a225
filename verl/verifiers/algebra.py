"""Compares LaTeX expressions with math-verify, and checks details that math-verify would ignore.

Comparisons must run in a ``VerifierPool``, because sympy would run forever on answers like ``10^{10^{10}}``.
"""

import logging
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Expr, Float, I, Symbol
from sympy.core.relational import Relational

from verl.verifiers.comparison import agree, numbers_agree, relations
from verl.verifiers.equations import unwrap_equations
from verl.verifiers.lexicon import TEXT, is_unit, marks_in, modifiers_in, numerals_in, units_in, with_factors

# Silence the warning that math-verify's time limit is off. That limit needs SIGALRM in the main thread and, unlike the
# pool's limit, cannot interrupt long C calls.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig()]

EXACT_DIGITS, DECIMAL_DIGITS = 30, 15
"""Numbers of digits to which math-verify compares values (``numeric_precision``). Smaller differences count as zero."""

_NUMBER_IN_TEXT = re.compile(rf"{TEXT}\{{([^{{}}A-Za-z\u4e00-\u9fff]{{1,99}})\}}")
_VARIABLE_IN_TEXT = re.compile(rf"(?<=[0-9}})])(?:\s|~){{0,9}}{TEXT}\{{\s{{0,9}}([abknpquvwxyz])\s{{0,9}}\}}")
_CONSTANT = re.compile(r"\\(?:mathrm|text|mathit|mathbf|rm)\s*\{\s*([ie])\s*\}")
_PRIME = re.compile(r"\^\s?\{?\s?(?:\\prime(?![A-Za-z])\s?){1,3}\}?")
_PRIMED = re.compile(r"[A-Za-z](?:'{1,3}(?![a-z])|\^\{?(?:\\prime\s?){1,3}\}?)")
_COMMANDS = re.compile(rf"{TEXT}\{{[^{{}}]{{0,99}}\}}|\\[A-Za-z]+")
_VARIABLE = re.compile("(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_HALF_OF_DAY = re.compile(r"(?<![A-Za-z])([ap])\.?m(?![A-Za-z])", re.IGNORECASE)
_LAST_LETTERS = re.compile(r"(?<=[0-9}\s])([A-Za-z]{1,2})\s*$")
_SUM = re.compile(r"(?<=[^\s({\[])\s*[+-]")


def compare_latex(
    answer: str, ground_truth: str, allows: Callable[[Decimal, Decimal], bool] | None = None
) -> bool | None:
    """Return whether LaTeX expressions are equivalent, or None if the answer cannot be parsed. May never terminate.

    Letters at the end of an expression count as variables rather than units (``keep_variable``). If the ground truth
    has variables, even letters in ``SHORT_UNITS`` count as variables. Decimals may differ if ``allows(value, truth)``
    is true. By default, decimals must agree to six decimal places and five significant digits.
    """
    if measures_differ(answer, ground_truth):
        return False
    # 1. Protect what math-verify would drop: factors, numbers in \text{}, variables that look like units.
    answer, ground_truth = (with_factors(without_text(text)) for text in (answer, ground_truth))
    truth = keep_variable(ground_truth)
    theirs = _parse(truth)
    # 2. Reduce an equation to its right side if its left side is a name or if it is an identity.
    is_equation = "=" in truth or any(isinstance(reading, Basic) and reading.has(Relational) for reading in theirs)
    text, has_equation = (answer, False) if is_equation else unwrap_equations(answer)
    ours = _parse(keep_variable(text, short=not has_variables(truth)))
    if ours and _is_identity(ours[0]):
        ours = [relations(ours[0])[-1].rhs]
    elif has_equation or (not is_equation and ours and isinstance(ours[0], Basic) and ours[0].has(Eq)):
        return False if ours and isinstance(ours[0], Basic) else None
    # 3. If math-verify accepts the answer, also compare the numbers. For decimals, additional digits are noise.
    decimal = bool(ours and theirs) and any(isinstance(x, Basic) and x.has(Float) for x in (ours[0], theirs[0]))
    digits = DECIMAL_DIGITS if decimal else EXACT_DIGITS
    if verify(theirs, ours, numeric_precision=digits, allow_set_relation_comp=True, timeout_seconds=None):
        # math-verify returns the parsed expression, if any, followed by the text.
        return ours[-1] == theirs[-1] or agree(ours[0], theirs[0], allows)
    # 4. Otherwise, apply the tolerance to decimals.
    if not ours or isinstance(ours[0], str):
        return None
    if not allows or not decimal:
        return False
    value, right = _number(ours[0]), _number(theirs[0])
    return value is not None and right is not None and allows(value, right)


def _parse(latex: str) -> list[Any]:
    expressions: list[Any] = parse(f"${latex.replace('$', '')}$", extraction_config=_LATEX, parsing_timeout=None)
    return [_with_imaginary_unit(reading) if isinstance(reading, Basic) else reading for reading in expressions]


def _with_imaginary_unit(reading: Basic) -> Basic:
    """Replace the variable ``i``, if any, with the imaginary unit, and make all other variables real."""
    if isinstance(reading, Relational):  # sympy would evaluate x = 2i to false for a real x.
        sides = (_with_imaginary_unit(side) for side in reading.args)
        equation: Basic = reading.func(*sides, evaluate=False)
        return equation
    names = {symbol: symbol.name for symbol in reading.free_symbols if isinstance(symbol, Symbol)}
    if "i" not in names.values():
        return reading
    units = {symbol: I if name == "i" else Symbol(name, real=True) for symbol, name in names.items()}
    complex_reading: Basic = reading.subs(units)
    return complex_reading


def _is_identity(reading: Any) -> bool:
    """Return whether a chain of equations, such as 2 + 3 = 5, is true and contains no variables."""
    links = relations(reading)
    return bool(links) and all(
        isinstance(link, Eq)
        and not link.free_symbols
        and isinstance(link.lhs, Expr)
        and isinstance(link.rhs, Expr)
        and numbers_agree(link.lhs, link.rhs)
        for link in links
    )


def _number(expression: Any) -> Decimal | None:
    """Return the value of an expression or of an equation's right side, or None unless it is a real number."""
    if isinstance(expression, Eq):
        expression = expression.rhs
    if not isinstance(expression, Expr) or not expression.is_number or not expression.is_real:
        return None
    try:
        return Decimal(str(expression.evalf()))
    except ArithmeticError:  # The exponent is too large for Decimal, or the value is not a number.
        return None


def measures_differ(answer: str, truth: str) -> bool:
    """Return whether answer and truth differ in their units, number bases or modifying words."""
    numerals = [numerals_in(text) for text in (answer, truth)]
    # Digits must be smaller than the base, so 18_5 is invalid.
    invalid = [any(int(digit, 36) >= base for digits, base in pairs for digit in digits) for pairs in numerals]
    if modifiers_in(answer) != modifiers_in(truth) or invalid[0] > invalid[1]:
        return True
    if ("=" in answer) == ("=" in truth) and _names_differ(answer, truth):
        return True
    measures = [[find(text) for text in (answer, truth)] for find in (units_in, marks_in, _HALF_OF_DAY.findall)]
    measures.append([[base for _, base in pairs] for pairs in numerals])
    return any(ours and theirs and ours != theirs for ours, theirs in measures)


def _names_differ(answer: str, truth: str) -> bool:
    """Return whether variables differ in their prime marks or, within expressions, in their case."""
    if len(_PRIMED.findall(answer)) != len(_PRIMED.findall(truth)):
        return True
    ours, theirs = (set(_VARIABLE.findall(_COMMANDS.sub(" ", text))) for text in (answer, truth))
    alone = len(answer.strip(" $()")) == 1 or len(truth.strip(" $()")) == 1
    return not alone and ours != theirs and {name.lower() for name in ours} == {name.lower() for name in theirs}


def without_text(latex: str) -> str:
    """Remove ``\\text{}`` and similar commands around numbers, signs and single variables, so that they are parsed.

    ``^{\\prime}`` is replaced with ``'``.
    """
    latex = _PRIME.sub(lambda match: "'" * match[0].count("prime"), latex)
    return _VARIABLE_IN_TEXT.sub(r" \1", _NUMBER_IN_TEXT.sub(r"\1", latex))


def has_variables(latex: str) -> bool:
    """Return whether LaTeX contains letters outside of commands and words."""
    return re.search("[A-Za-z]", _COMMANDS.sub("", latex)) is not None


def keep_variable(latex: str, short: bool = False) -> str:
    """Put braces around a variable at the end of ``latex``, because math-verify would drop it as a unit.

    Examples are ``2+3t``, ``5ab`` and ``5\\mathrm{i}``. Two-letter units in ``UNITS`` are left unchanged. If ``short``
    is set, the one-letter units in ``SHORT_UNITS`` after a single number also remain units.
    """
    latex = _CONSTANT.sub(r" \1 ", latex)
    match = _LAST_LETTERS.search(latex)
    if match is None or match[1] == "i":
        return latex
    letters, rest = match[1], latex[: match.start()].rstrip()
    if not rest or is_unit(letters, short and not has_variables(rest) and not _SUM.search(rest)):
        return latex
    # After an operator, braces would be parsed as a set.
    return rest + (letters if rest[-1] in "+-*/=<>(,;:|&" else f"{{{letters}}}")
