"""Checks the relative error of expressions that math-verify considers equal.

math-verify rounds decimals to six places and ignores differences below its precision, and therefore would consider all
small numbers equal.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from sympy import Basic, Eq, Expr, Float, Integer, Rational, S, Symbol, Tuple, UnevaluatedExpr, im, re
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And
from sympy.matrices import MatrixBase
from sympy.sets import FiniteSet, Interval, Union

DIGITS = 30

DECIMAL_ERROR = Rational(1, 10**5)
"""Maximum relative error if either expression contains decimals."""

EXACT_ERROR = Rational(1, 10**20)
"""Maximum relative error of exact expressions, larger than the error of evaluating them."""

NOISE = Rational(1, 10**25)
"""Threshold, as a fraction of the absolute value, below which real or imaginary parts are ignored."""

PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
"""Values assigned to variables in alphabetical order. Integers ensure that sums and factorials are defined."""

Allows = Callable[[Decimal, Decimal], bool]


def agree(ours: Any, theirs: Any, allows: Allows | None = None) -> bool:
    """Return whether parsed expressions agree numerically, or True if they cannot be evaluated.

    ``allows`` is the problem's tolerance (see :func:`verl.verifiers.algebra.compare_latex`).
    """
    ours, theirs = _right_side(ours, theirs), _right_side(theirs, ours)
    if _is_number(ours) and _is_number(theirs):
        return numbers_agree(ours, theirs, allows)
    left, right = _entries(ours), _entries(theirs)
    if len(left) != len(right):
        return True
    if any(isinstance(side, FiniteSet | Union) for side in (ours, theirs)):
        return _match(left, right, allows)
    return all(agree(a, b, allows) for a, b in zip(left, right, strict=True))


def _match(left: Sequence[Any], right: Sequence[Any], allows: Allows | None) -> bool:
    """Return whether the entries agree in some order."""
    unmatched = list(left)
    for entry in right:
        index = next((i for i, other in enumerate(unmatched) if agree(other, entry, allows)), None)
        if index is None:
            return False
        del unmatched[index]
    return True


def _entries(value: Any) -> list[Any]:
    """Return the entries of a set, tuple, interval or matrix, ``[value]`` for a scalar, or ``[]`` for other types."""
    if isinstance(value, MatrixBase):
        return list(value.flat())
    if isinstance(value, Interval):
        return [value.start, value.end]
    if isinstance(value, FiniteSet | Tuple | Union):
        return list(value.args)
    return [value] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    """Return whether the value is a scalar expression."""
    return isinstance(value, Expr) and not isinstance(value, MatrixBase)


def relations(value: Any) -> list[Relational]:
    """Return the relations in a chain of equations or inequalities, or an empty list for any other value."""
    if isinstance(value, Relational):
        return [value]
    links = getattr(value, "_unsorted_args", value.args) if isinstance(value, And) else ()
    if not links or not all(isinstance(link, Relational) for link in links):
        return []
    # Reduce a = b = c to a = c.
    return [Eq(links[0].lhs, links[-1].rhs, evaluate=False)] if all(isinstance(a, Eq) for a in links) else list(links)


def _right_side(value: Any, other: Any) -> Any:
    """Reduce an equation to its right side if ``other`` is not a relation or has the same left side."""
    links, others = relations(value), relations(other)
    same = not others or (len(others) == 1 and links and others[0].lhs == links[0].lhs)
    return links[0].rhs if len(links) == 1 and same and isinstance(links[0], Eq) else value


def numbers_agree(ours: Expr, theirs: Expr, allows: Allows | None = None) -> bool:
    """Return whether scalar expressions have the same numerical value when variables are set to ``PRIMES``."""
    if isinstance(ours, Symbol) or isinstance(theirs, Symbol):
        return True  # math-verify compares names as text.
    decimal = ours.has(Float) or theirs.has(Float)
    # math-verify reads 9% as 9.
    percent = ours.has(UnevaluatedExpr) != theirs.has(UnevaluatedExpr)
    factors = [Integer(1), *([Integer(100), Rational(1, 100)] if percent else [])]
    # 1. Evaluate both. math-verify already compares exact expressions with variables exactly.
    ours, theirs = _plain(ours), _plain(theirs)
    symbols = ours.free_symbols | theirs.free_symbols
    names = sorted({str(symbol) for symbol in symbols})
    # Symbols with the same name may have different assumptions.
    point = {symbol: Integer(PRIMES[names.index(str(symbol)) % len(PRIMES)]) for symbol in symbols}
    value, truth = _evaluate(ours, point), _evaluate(theirs, point)
    if value is None or truth is None or (names and not decimal):
        return True
    # 2. Compare real and imaginary parts by their relative errors.
    if any(_close(value * factor, truth, DECIMAL_ERROR if decimal else EXACT_ERROR) for factor in factors):
        return True
    # 3. Apply the problem's tolerance.
    if allows is None or names or im(value) or im(truth):
        return False
    try:
        return allows(*(Decimal(str(Float(number, DIGITS))) for number in (value, truth)))
    except ArithmeticError:  # The exponent is too large for Decimal.
        return False


def _close(value: Expr, truth: Expr, error: Rational) -> bool:
    size = abs(truth)
    parts = [(re(value), re(truth)), (im(value), im(truth))]
    return all(bool(abs(a - b) <= error * abs(b)) or bool(abs(a - b) < NOISE * size) for a, b in parts)


def _plain(expression: Expr) -> Expr:
    """Replace decimals with exact fractions, and calls of undefined functions with symbols."""
    exact = {
        number: Rational(str(number))
        for number in expression.atoms(Float)
        if number.is_finite and (not number or abs(number._mpf_[2]) < 4096)
    }
    functions = {call: Symbol(str(call)) for call in expression.atoms(AppliedUndef)}
    plain: Expr = expression.xreplace(exact | functions)
    return plain


def _evaluate(expression: Expr, point: Mapping[Basic, Expr]) -> Expr | None:
    """Evaluate an expression to ``DIGITS`` digits, or return None if it has no finite value."""
    try:
        real, imaginary = expression.evalf(DIGITS, subs=point).as_real_imag()
    except (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    parts = [S.Zero if getattr(part, "_prec", DIGITS) == 1 else part for part in (real, imaginary)]
    if not all(part.is_Number and part.is_finite for part in parts):
        return None
    value: Expr = parts[0] + S.ImaginaryUnit * parts[1]
    return value
