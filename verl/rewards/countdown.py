"""Verifier of Countdown: an expression that uses every given number exactly once and has the target as its value.

In exact rational arithmetic with a parser of its own: nothing of the response is evaluated as code.
"""

import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from verl.rewards.answers import extract_boxed, extract_stated, extract_tagged
from verl.rewards.score import Verdict

MAX_CHARS = 400
"""Longer expressions are wrong; four numbers need about twenty characters."""

MAX_NUMBERS = 32
"""Given numbers of one problem."""

MAX_NUMBER = 10**12
"""Limit of the given numbers and of the target's absolute value."""

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_SIGNS = {"\\times": "*", "\\cdot": "*", "×": "*", "·": "*", "\\div": "/", "÷": "/", "−": "-", "–": "-"}
_WRAPPING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[()\[\],;!]|\\?\$|`|\A\s*\*\*|\*\*\s*\Z|\.\s*\Z")
_FRACTION = re.compile(r"\\[dt]?frac\s?\{([^{}]*)\}\s?\{([^{}]*)\}")
MAX_NESTED = 16
"""Depth of fractions."""

_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_BRACKETS = str.maketrans("[]", "()")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


def verify_countdown(
    solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict:
    """The verdict on a response, which is always immediate. ``extra_info`` and ``quick`` are not used.

    The expression is read from the last ``<answer>``, else from the last box, else from the last "the answer is". It
    may end in ``=`` and the target. Allowed are the four operations, brackets and signs. ``boxed`` says whether it was
    in tags or a box; ``unparsed`` is what is not such an expression.

    Raises ``ValueError`` if the ground truth does not give numbers and a target.
    """
    target, numbers = read_truth(ground_truth)
    marked = extract_tagged(solution, "answer")
    marked = (extract_boxed(marked) or marked) if marked else extract_boxed(solution)
    answer = marked or extract_stated(solution)
    if answer is None:
        return Verdict(False, False, "missing")
    plain = _WRAPPING.sub("", answer[: MAX_CHARS + 1]).translate(_BRACKETS)
    expression, _, value = (part.strip() for part in plain.partition("="))
    tokens = tokenise(expression) if len(answer) <= MAX_CHARS and value in ("", str(target)) else None
    if tokens is None:
        return Verdict(False, bool(marked), "unparsed", answer)
    # Before the evaluation: it bounds how large a value can become.
    used = Counter(int(token) for token in tokens if token.isdigit() and len(token) <= len(str(MAX_NUMBER)))
    if used != Counter(numbers) or sum(token.isdigit() for token in tokens) != len(numbers):
        return Verdict(False, bool(marked), "different", answer)
    try:
        correct = evaluate(tokens) == target
    except ValueError:
        return Verdict(False, bool(marked), "unparsed", answer)
    except ZeroDivisionError:
        correct = False
    return Verdict(correct, bool(marked), "exact" if correct else "different", answer)


class Problem(NamedTuple):
    """A ground truth."""

    target: int
    numbers: list[int]


def read_truth(ground_truth: Any) -> Problem:
    """Target and given numbers, from ``{"target": 24, "numbers": [3, 3, 8, 8]}`` or the same as JSON text.

    Raises ``ValueError`` if it has another form.
    """
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            truth = None
    target, numbers = (truth.get("target"), truth.get("numbers")) if isinstance(truth, Mapping) else (None, None)
    listed = list(numbers) if isinstance(numbers, Iterable) and not isinstance(numbers, str | Mapping) else []
    whole = [_whole(number) for number in [target, *listed]]
    goal, given = whole[0], [number for number in whole[1:] if number is not None and number >= 0]
    if goal is None or not 1 <= len(given) <= MAX_NUMBERS or len(given) < len(listed):
        raise ValueError(
            f"{ground_truth!r:.200} must give a target and 1 to {MAX_NUMBERS} numbers, all whole and up to "
            f'{MAX_NUMBER:.0e}, for example {{"target": 24, "numbers": [3, 3, 8, 8]}}'
        )
    return Problem(goal, given)


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return number if number is not None and abs(number) <= MAX_NUMBER else None


def tokenise(expression: str) -> list[str] | None:
    """Numbers, operators and brackets; None if there is anything else."""
    for _ in range(MAX_NESTED):
        expression = _FRACTION.sub(r"((\1)/(\2))", expression)
    for sign, plain in _SIGNS.items():
        expression = expression.replace(sign, plain)
    tokens = _TOKEN.findall(expression)
    blank = sum(map(len, tokens)) + sum(map(str.isspace, expression))
    return tokens if tokens and blank == len(expression) else None


def evaluate(tokens: Iterable[str]) -> Fraction:
    """The value of an expression in tokens, without recursion (Dijkstra's two stacks).

    Raises ``ValueError`` if it is not an expression, ``ZeroDivisionError`` if it divides by zero.
    """
    values: list[Fraction] = []
    waiting: list[str] = []
    after_value = False
    for token in tokens:
        if token == "(" or token.isdigit():
            if after_value:
                raise ValueError("two values side by side")
            if token == "(":
                waiting.append(token)
            else:
                values.append(Fraction(int(token)))
                after_value = True
        elif token == ")":
            if not after_value:
                raise ValueError("a bracket closes before a value")
            while waiting and waiting[-1] != "(":
                _apply(waiting.pop(), values)
            if not waiting:
                raise ValueError("a bracket was never opened")
            waiting.pop()
        elif after_value:
            while waiting and waiting[-1] != "(" and _PRECEDENCE[waiting[-1]] >= _PRECEDENCE[token]:
                _apply(waiting.pop(), values)
            waiting.append(token)
            after_value = False
        elif token == "-":
            waiting.append("negate")
        elif token != "+":
            raise ValueError("an operator without a value before it")
    if not after_value or "(" in waiting:
        raise ValueError("the expression does not end")
    while waiting:
        _apply(waiting.pop(), values)
    (value,) = values
    return value


def _apply(name: str, values: list[Fraction]) -> None:
    last = values.pop()
    values.append(-last if name == "negate" else _OPERATORS[name](values.pop(), last))
