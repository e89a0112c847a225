"""Synthetic arithmetic task with worked solutions that a 1M-parameter character model can learn on a laptop CPU.

A solution repeats the operands, zero-padded to the same width, then computes the result digit by digit in a fixed
layout, least significant digit first, and ends with ``\\boxed{ANSWER}``::

    4821 + 377   ->  4821+0377:1+7+0=08,2+7+0=09,8+3+0=11,4+0+1=05;05198 \\boxed{5198}
    4821 - 377   ->  4821-0377:1-7-0=4-10,2-7-1=4-10,8-3-1=4-00,4-0-0=4-00;4444 \\boxed{4444}
    347 * 6      ->  347*6:7*6+0=42+0=42,4*6+4=24+4=28,3*6+2=18+2=20;2082 \\boxed{2082}

The third number of a step is the carry or borrow from the previous step. Because the layout is fixed, the model only
needs to copy digits over a few fixed distances. It learns the task in a few hundred steps.
"""

import random
from dataclasses import dataclass

from verl.config.checks import require
from verl.data.generated import GeneratedProblem, draw_split

MAX_DIGITS = 9
"""Maximum number of digits per operand."""

MIXTURE = {"sum": 0.8, "difference": 1.4, "product": 1.4}
"""Relative frequency of each kind of problem."""

SIGNS = {"sum": "+", "difference": "-", "product": "*"}


@dataclass(frozen=True)
class ArithmeticTask:
    """Distribution of arithmetic problems.

    The number of decimal digits of an operand is drawn uniformly from a range ``(fewest, most)``, which includes both
    bounds. An invalid range raises a ``ValueError`` that names its field.
    """

    sum_digits: tuple[int, int] = (3, 4)
    """Range for the number of digits of each operand in a sum."""
    difference_digits: tuple[int, int] = (3, 4)
    """Range for the number of digits of each operand in a difference. The larger operand comes first."""
    product_digits: tuple[int, int] = (2, 3)
    """Range for the number of digits of the first factor in a product. The second factor is from 2 to 9."""

    def __post_init__(self) -> None:
        for name, (low, high) in vars(self).items():
            require(1 <= low <= high <= MAX_DIGITS, name, (low, high), f"must satisfy 1 <= low <= high <= {MAX_DIGITS}")

    def draw(self, rng: random.Random) -> GeneratedProblem:
        kind = rng.choices(list(MIXTURE), weights=list(MIXTURE.values()))[0]
        digits: tuple[int, int] = getattr(self, f"{kind}_digits")
        a = _draw_operand(rng, digits)
        b = rng.randint(2, 9) if kind == "product" else _draw_operand(rng, digits)
        return arithmetic_problem(kind, *((max(a, b), min(a, b)) if kind == "difference" else (a, b)))

    def split(self, name: str, size: int, seed: int) -> list[GeneratedProblem]:
        """Draw a dataset split of ``size`` problems; see :func:`draw_split`."""
        return draw_split("arithmetic", self.draw, name, size, seed)


def arithmetic_problem(kind: str, a: int, b: int) -> GeneratedProblem:
    """Return the problem ``a + b``, ``a - b`` (a >= b) or ``a * b`` (b has one digit). Operands are nonnegative."""
    assert 0 <= b <= {"sum": b, "difference": a, "product": 9}[kind] and a >= 0, (kind, a, b)
    sign, width = SIGNS[kind], max(len(str(a)), len(str(b)))
    left, right = f"{a:0{width}d}", f"{b:0{width}d}"
    steps, digits, carry = [], "", 0
    # Iterate from the least significant digit; in a product, each digit is multiplied by the whole second factor.
    for x, y in zip(
        map(int, reversed(left)), map(int, str(b) * width if sign == "*" else reversed(right)), strict=True
    ):
        step, digit, carry = _STEPS[kind](x, y, carry)
        steps.append(step)
        digits = f"{digit}{digits}"
    if sign != "-":
        digits = f"{carry}{digits}"
    answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert int(digits) == answer, (kind, a, b, digits)
    restated = f"{left}{sign}{b if sign == '*' else right}"
    solution = f"{restated}:{','.join(steps)};{digits} \\boxed{{{answer}}}"
    return GeneratedProblem(f"What is {a} {sign} {b}?", solution, str(answer), kind)


def _sum_step(x: int, y: int, carry: int) -> tuple[str, int, int]:
    total = x + y + carry
    return f"{x}+{y}+{carry}={total:02d}", total % 10, total // 10


def _difference_step(x: int, y: int, borrow: int) -> tuple[str, int, int]:
    lent = int(x - y - borrow < 0)
    digit = x - y - borrow + 10 * lent
    return f"{x}-{y}-{borrow}={digit}-{lent}0", digit, lent


def _product_step(x: int, y: int, carry: int) -> tuple[str, int, int]:
    total = x * y + carry
    return f"{x}*{y}+{carry}={x * y:02d}+{carry}={total:02d}", total % 10, total // 10


_STEPS = {"sum": _sum_step, "difference": _difference_step, "product": _product_step}
"""Maps each kind to a function from two digits and a carry to the step's text, the result digit and the next carry."""


def _draw_operand(rng: random.Random, digits: tuple[int, int]) -> int:
    count = rng.randint(*digits)
    return rng.randrange(10 ** (count - 1), 10**count)
