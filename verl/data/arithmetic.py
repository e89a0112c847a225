"""Synthetic arithmetic with worked solutions: a task that a 1M-parameter character model learns on a laptop CPU.

A solution restates the operands zero-padded to one width. It then works through the digits, least significant first, in
steps of a fixed layout, each of them a true equation, and ends in ``\\boxed{ANSWER}``::

    4821 + 377   ->  4821+0377:1+7+0=08,2+7+0=09,8+3+0=11,4+0+1=05;05198 \\boxed{5198}
    4821 - 377   ->  4821-0377:1-7-0=4-10,2-7-1=4-10,8-3-1=4-00,4-0-0=4-00;4444 \\boxed{4444}
    347 * 6      ->  347*6:7*6+0=42+0=42,4*6+4=24+4=28,3*6+2=18+2=20;2082 \\boxed{2082}

The third number of a step is the carry (or borrow) and equals a digit of the step before it. The fixed layout makes the
task learnable in a few hundred steps: everything that the model must copy is at one of a few distances.
"""

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from verl.config.checks import require

SPLIT_SHARES = {"train": 12, "sft_train": 12, "test": 4, "sft_val": 4}
"""Split name -> its share of all questions, in 32nds."""

MAX_DIGITS = 9
"""Maximum number of digits of an operand."""


@dataclass(frozen=True)
class ArithmeticProblem:
    """One question with its worked solution."""

    question: str
    """For example ``What is 4821 + 377?``."""
    solution: str
    """The worked steps, ending in ``\\boxed{answer}``; one line of printable ASCII."""
    answer: str
    """The result, a non-negative integer in decimal without leading zeros."""
    kind: str
    """``sum``, ``difference`` or ``product``."""


@dataclass(frozen=True)
class ArithmeticTask:
    """The distribution of problems.

    The digit ranges are ``(fewest, most)`` decimal digits of an operand, both included; each operand draws its number
    of digits uniformly from its range. Raises ``ValueError`` naming the field if a value is out of range.
    """

    sum_digits: tuple[int, int] = (3, 4)
    """Digits of both operands of a sum."""
    difference_digits: tuple[int, int] = (3, 4)
    """Digits of both operands of a difference; the larger one comes first."""
    product_digits: tuple[int, int] = (2, 3)
    """Digits of the first factor of a product; the second is one digit, 2 to 9."""
    mixture: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"sum": 0.8, "difference": 1.4, "product": 1.4})
    )
    """Kind -> relative weight, at least 0; missing kinds are not drawn."""

    def __post_init__(self) -> None:
        for name in ("sum_digits", "difference_digits", "product_digits"):
            low, high = getattr(self, name)
            require(1 <= low <= high <= MAX_DIGITS, name, (low, high), f"must satisfy 1 <= low <= high <= {MAX_DIGITS}")
        known = set(self.mixture) <= set(KINDS)
        require(known, "mixture", dict(self.mixture), f"kinds are {', '.join(KINDS)}")
        weights = list(self.mixture.values())
        require(
            min(weights, default=0) >= 0 and sum(weights) > 0, "mixture", dict(self.mixture), "needs a weight above 0"
        )

    def draw(self, rng: random.Random) -> ArithmeticProblem:
        """One problem; consumes ``rng``."""
        kinds = list(self.mixture)
        kind = rng.choices(kinds, weights=[self.mixture[kind] for kind in kinds])[0]
        return KINDS[kind](self, rng)

    def split(self, name: str, size: int, seed: int) -> list[ArithmeticProblem]:
        """``size`` problems with distinct questions, of the split ``name``, a key of ``SPLIT_SHARES``.

        The split of a question depends on the question alone (``split_of``), so two splits never share a question,
        whatever their seeds, sizes and tasks. A larger ``size`` extends the list of a smaller one. Raises
        ``ValueError`` for an unknown split or if the task has too few distinct questions.
        """
        require(name in SPLIT_SHARES, "split", name, f"must be one of {', '.join(SPLIT_SHARES)}")
        require(size >= 0, "size", size, "must be at least 0")
        rng = random.Random(f"arithmetic/{name}/{seed}")
        problems: dict[str, ArithmeticProblem] = {}
        misses = 0
        while len(problems) < size:
            problem = self.draw(rng)
            if split_of(problem.question) == name and problem.question not in problems:
                problems[problem.question] = problem
                misses = 0
            else:
                misses += 1
                fix = f"only {len(problems)} distinct questions found; raise the operands' digits or ask for fewer"
                require(misses < 10_000, f"size of {name}", size, fix)
        return list(problems.values())


def split_of(question: str) -> str:
    """The split of ``question``, decided by a hash of its text."""
    bucket = hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % sum(SPLIT_SHARES.values())
    for name, share in SPLIT_SHARES.items():
        if bucket < share:
            return name
        bucket -= share
    raise AssertionError("buckets cover all shares")


def sum_problem(a: int, b: int) -> ArithmeticProblem:
    """The problem ``a + b``; both at least 0."""
    width = max(len(str(a)), len(str(b)))
    steps, digits, carry = [], "", 0
    for x, y in _columns(a, b, width):
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total:02d}")
        carry, digits = total // 10, str(total % 10) + digits
    return _problem("sum", f"{a} + {b}", f"{a:0{width}d}+{b:0{width}d}", steps, f"{carry}{digits}", a + b)


def difference_problem(a: int, b: int) -> ArithmeticProblem:
    """The problem ``a - b``; ``a >= b >= 0``."""
    assert a >= b >= 0, (a, b)
    width = len(str(a))
    steps, digits, borrow = [], "", 0
    for x, y in _columns(a, b, width):
        lent = int(x - y - borrow < 0)
        digit = x - y - borrow + 10 * lent
        steps.append(f"{x}-{y}-{borrow}={digit}-{lent}0")
        borrow, digits = lent, f"{digit}{digits}"
    return _problem("difference", f"{a} - {b}", f"{a:0{width}d}-{b:0{width}d}", steps, digits, a - b)


def product_problem(a: int, b: int) -> ArithmeticProblem:
    """The problem ``a * b``; ``a >= 0`` and ``b`` is one digit."""
    assert a >= 0 and 0 <= b <= 9, (a, b)
    steps, digits, carry = [], "", 0
    for x in reversed([int(digit) for digit in str(a)]):
        total = x * b + carry
        steps.append(f"{x}*{b}+{carry}={x * b:02d}+{carry}={total:02d}")
        carry, digits = total // 10, str(total % 10) + digits
    return _problem("product", f"{a} * {b}", f"{a}*{b}", steps, f"{carry}{digits}", a * b)


def _columns(a: int, b: int, width: int) -> list[tuple[int, int]]:
    """The digit pairs of two numbers, least significant first."""
    return [(int(x), int(y)) for x, y in zip(reversed(f"{a:0{width}d}"), reversed(f"{b:0{width}d}"), strict=True)]


def _problem(
    kind: str, expression: str, restated: str, steps: list[str], digits: str, answer: int
) -> ArithmeticProblem:
    assert int(digits) == answer, (expression, digits, answer)
    solution = f"{restated}:{','.join(steps)};{digits} \\boxed{{{answer}}}"
    return ArithmeticProblem(f"What is {expression}?", solution, str(answer), kind)


def _draw_operand(rng: random.Random, digits: tuple[int, int]) -> int:
    count = rng.randint(*digits)
    return rng.randrange(10 ** (count - 1), 10**count)


def _draw_sum(task: ArithmeticTask, rng: random.Random) -> ArithmeticProblem:
    return sum_problem(_draw_operand(rng, task.sum_digits), _draw_operand(rng, task.sum_digits))


def _draw_difference(task: ArithmeticTask, rng: random.Random) -> ArithmeticProblem:
    a, b = _draw_operand(rng, task.difference_digits), _draw_operand(rng, task.difference_digits)
    return difference_problem(max(a, b), min(a, b))


def _draw_product(task: ArithmeticTask, rng: random.Random) -> ArithmeticProblem:
    return product_problem(_draw_operand(rng, task.product_digits), rng.randint(2, 9))


KINDS: dict[str, Callable[[ArithmeticTask, random.Random], ArithmeticProblem]] = {
    "sum": _draw_sum,
    "difference": _draw_difference,
    "product": _draw_product,
}
"""Kind -> function that draws one problem of this kind."""
