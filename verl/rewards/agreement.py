"""Whether two expressions that algebra calls equal also agree as numbers, however small these are.

math-verify rounds decimals to six places and cuts differences below about 1e-16, so that all small numbers are equal to
it. Here they are compared with 30 digits, entry by entry.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from sympy import Basic, Eq, Expr, Float, Integer, Rational, S, Symbol, Tuple, UnevaluatedExpr, im, re, solve
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And
from sympy.matrices import MatrixBase
from sympy.sets import FiniteSet, Interval, Set, Union

DIGITS = 30

DECIMAL_ERROR = Rational(1, 10**5)
"""Largest relative error where one of the two has a decimal fraction."""

EXACT_ERROR = Rational(1, 10**20)
"""The same without decimal fractions; covers what evaluation loses."""

NOISE = Rational(1, 10**25)
"""A real or imaginary part is lost below this fraction of the whole."""

PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
"""Values of variables, in alphabetical order; as whole numbers they suit sums and factorials too."""

SCALES = (Integer(1), Rational(1, 10**40), Integer(10) ** 40)
"""Factors of these values: next to x, a constant such as 1e-17 only counts if x is small. The extremes are for rational
functions alone."""

Allows = Callable[[Decimal, Decimal], bool]

_FAILURES = (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError)
"""What sympy raises for an expression that it cannot evaluate or solve."""


def agree(ours: Any, theirs: Any, allows: Allows | None = None) -> bool:
    """Whether parsed expressions that math-verify calls equal agree as numbers; True if they cannot be evaluated.

    ``allows`` is the problem's own tolerance, as in ``verl.rewards.math.compare_latex``.
    """
    if type(ours) is type(theirs) and ours == theirs:
        return True
    ours, theirs = _without_name(ours, theirs), _without_name(theirs, ours)
    chains = relations(ours), relations(theirs)
    if all(chains):
        pairs = zip(*chains, strict=False)
        return len(chains[0]) != len(chains[1]) or all(_relations_agree(a, b, allows) for a, b in pairs)
    if any(chains):
        ours, theirs = (_as_set(side) for side in (ours, theirs))
    ours_in, theirs_in = _entries(ours), _entries(theirs)
    if ours_in is None and theirs_in is None:
        return not (isinstance(ours, Expr) and isinstance(theirs, Expr)) or numbers_agree(ours, theirs, allows)
    left, right = ([side] if found is None else found for side, found in ((ours, ours_in), (theirs, theirs_in)))
    if len(left) != len(right):
        return True
    if any(isinstance(side, FiniteSet | Union) for side in (ours, theirs)):
        return _match(left, right, allows)
    return all(agree(a, b, allows) for a, b in zip(left, right, strict=True))


def _match(left: Sequence[Any], right: Sequence[Any], allows: Allows | None) -> bool:
    """Whether the entries of the two agree in some order."""
    rest = list(left)
    for entry in right:
        found = next((i for i, other in enumerate(rest) if agree(other, entry, allows)), None)
        if found is None:
            return False
        del rest[found]
    return True


def _entries(value: Any) -> list[Any] | None:
    """What a set, tuple, interval or matrix holds; None for anything else."""
    if isinstance(value, MatrixBase):
        return list(value.flat())
    if isinstance(value, Interval):
        return [value.start, value.end]
    return list(value.args) if isinstance(value, FiniteSet | Tuple | Union) else None


def relations(value: Any) -> list[Relational]:
    """The links of a chain of equations or inequalities; empty for anything else."""
    if isinstance(value, Relational):
        return [value]
    links = getattr(value, "_unsorted_args", value.args) if isinstance(value, And) else ()
    if not links or not all(isinstance(link, Relational) for link in links):
        return []
    # Of a = b = c, the first and the last count.
    return [Eq(links[0].lhs, links[-1].rhs, evaluate=False)] if all(isinstance(a, Eq) for a in links) else list(links)


def _without_name(value: Any, other: Any) -> Any:
    """The right side of an equation whose counterpart is none: 5 of x = 5."""
    links = relations(value)
    alone = len(links) == 1 and isinstance(links[0], Eq) and not relations(other)
    return links[0].rhs if alone and not isinstance(other, Set) else value


def _as_set(value: Any) -> Any:
    """The solutions of a relation, if sympy finds them; else the value itself."""
    try:
        return value.as_set() if relations(value) else value
    except _FAILURES:
        return value


def _relations_agree(ours: Relational, theirs: Relational, allows: Allows | None) -> bool:
    """Whether one difference of both sides is a multiple of the other, or both have the same solutions."""
    sides = ours.lhs, ours.rhs, theirs.lhs, theirs.rhs
    if not all(isinstance(side, Expr) for side in sides):
        return agree(ours.lhs, theirs.lhs, allows) and agree(ours.rhs, theirs.rhs, allows)
    if ours.lhs == theirs.lhs:
        return agree(ours.rhs, theirs.rhs, allows)
    values = list(_value_pairs(ours.lhs - ours.rhs, theirs.lhs - theirs.rhs))
    error = _largest_error(*sides)
    products = [(a * values[0][1], values[0][0] * b) for a, b in values]
    if all(_close(a, b, error) for a, b in products):
        return True
    symbols = sorted(ours.free_symbols & theirs.free_symbols, key=str)
    try:
        if len(symbols) == 1:
            return agree(ours.as_set(), theirs.as_set(), allows)
        solutions = [solve(relation, symbols[0]) for relation in (ours, theirs)] if symbols else [[], []]
    except _FAILURES:
        return False
    return len(solutions[0]) == len(solutions[1]) > 0 and _match(solutions[0], solutions[1], allows)


def numbers_agree(ours: Expr, theirs: Expr, allows: Allows | None = None) -> bool:
    """As ``agree``, for numbers and expressions."""
    if isinstance(ours, Symbol) or isinstance(theirs, Symbol):
        return True  # a name, which math-verify compares as text
    error = _largest_error(ours, theirs)
    # 9% is 9 to math-verify.
    factors = [Integer(1)]
    if ours.has(UnevaluatedExpr) != theirs.has(UnevaluatedExpr):
        factors += [Integer(100), Rational(1, 100)]
    pairs = list(_value_pairs(ours, theirs))
    if any(all(_close(a * factor, b, error) for a, b in pairs) for factor in factors):
        return True
    if allows is None or ours.free_symbols or theirs.free_symbols or any(im(value) for value in pairs[0]):
        return False
    try:
        value, truth = (Decimal(str(Float(number, DIGITS))) for number in pairs[0])
    except ArithmeticError:  # an exponent beyond Decimal's
        return False
    return allows(value, truth)


def _largest_error(*sides: Expr) -> Rational:
    return DECIMAL_ERROR if any(side.has(Float) for side in sides) else EXACT_ERROR


def _close(value: Expr, truth: Expr, error: Rational) -> bool:
    size = abs(truth)
    parts = [(re(value), re(truth)), (im(value), im(truth))]
    return all(bool(abs(a - b) <= error * abs(b)) or bool(abs(a - b) < NOISE * size) for a, b in parts)


def _value_pairs(ours: Expr, theirs: Expr) -> Iterable[tuple[Expr, Expr]]:
    """The values of both at each point at which both have one."""
    ours, theirs = _plain(ours), _plain(theirs)
    symbols = ours.free_symbols | theirs.free_symbols
    names = sorted({str(symbol) for symbol in symbols})
    rational = bool(symbols) and all(bool(side.is_rational_function(*symbols)) for side in (ours, theirs))
    for scale in SCALES if rational else SCALES[:1]:
        # Symbols of one name may differ in their assumptions.
        point = {symbol: PRIMES[names.index(str(symbol)) % len(PRIMES)] * scale for symbol in symbols}
        values = [_evaluate(side, point) for side in (ours, theirs)]
        if values[0] is not None and values[1] is not None:
            yield values[0], values[1]


def _plain(expression: Expr) -> Expr:
    """``expression`` with decimal fractions as they were written, and symbols for values of unknown functions."""
    exact = {
        number: Rational(str(number))
        for number in expression.atoms(Float)
        if number.is_finite and (not number or abs(number._mpf_[2]) < 4096)
    }
    functions = {call: Symbol(str(call)) for call in expression.atoms(AppliedUndef)}
    plain: Expr = expression.xreplace(exact | functions)
    return plain


def _evaluate(expression: Expr, point: Mapping[Basic, Expr]) -> Expr | None:
    """The value with ``DIGITS`` digits; None if there is none."""
    try:
        real, imaginary = expression.evalf(DIGITS, subs=point).as_real_imag()
    except _FAILURES:
        return None
    parts = [S.Zero if getattr(part, "_prec", DIGITS) == 1 else part for part in (real, imaginary)]
    if not all(part.is_Number and part.is_finite for part in parts):
        return None
    value: Expr = parts[0] + S.ImaginaryUnit * parts[1]
    return value
