"""Verifier for Countdown, whose answers are expressions that reach the target and use every number exactly once.

Expressions are evaluated in exact rational arithmetic on a syntax tree. No part of a response is executed as code.
"""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple
from unicodedata import category

from verl.verifiers.answers import extract_boxed, extract_stated, extract_tagged
from verl.verifiers.equations import is_name
from verl.verifiers.lexicon import plain_number
from verl.verifiers.verdict import Info, Verdict

MAX_CHARS = 400
"""Maximum length of a correct expression. An expression with four numbers has about 20 characters."""

MAX_NUMBERS = 32
"""Maximum number of numbers in a problem."""

MAX_NUMBER = 10**12
"""Maximum absolute value of the numbers and the target."""

MAX_NESTED = 16
"""Maximum nesting depth of fractions."""

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_WRAPPING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|q?quad|(?:text|math)(?:rm|bf|it)?(?=\s?\{)|[hv]space\*?\s?\{[^{}]{0,20}\})(?![A-Za-z])"
    r"|\\[()\[\],;! ]|\\(?=[{}])|\{\}|[\"'“”‘’]|\\?\$|`|\A\s*\*\*|\*\*\s*\Z|[.,;✅✓✔]\s*\Z"
)
_LABEL = re.compile(
    r"\A(?:(?:so|thus|hence|let|the|my|our|one|final|correct|valid)[\s,]{1,3}){0,3}"
    r"(?:(?:[a-z]|ans|answer|expression|equation|solution|result|value|total)\s?(?::(?!=)|\sis\s))?",
    re.IGNORECASE,
)
_TIMES = re.compile(r"([0-9)}])\s{0,9}[xX](?=\s{0,9}[-+0-9({\\])")
_EQUALS = re.compile(
    r":?=+|←|→|≡|\\(?:to|rightarrow|equiv)(?![A-Za-z])|(?<=[0-9)}\s])(?:,?\s{0,9}which\s)?(?:is|equals|gives|yields)(?=\s{1,3}[0-9])"
    r"|\(=(?=[\s0-9.]{1,20}\)\s*\Z)"
)
_ARGUMENT = r"\s?(?:\{([^{}]*)\}|([0-9]))"
_FRACTION = re.compile(rf"\\[dt]?frac{_ARGUMENT}{_ARGUMENT}")
_COMMANDS = {"\\times": "*", "\\cdot": "*", "\\ast": "*", "\\div": "/", ":": "/", "{": "(", "}": ")"}
_COMMANDS |= {" times ": "*", " plus ": "+", " minus ": "-", " divided by ": "/"}
_PLAIN = str.maketrans("[]×·⋅∙•∗✕✖⨯÷∕⁄−–⋆", "()*********///--*") | {
    code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)
}
_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}


def verify_countdown(solution: str, ground_truth: Any, extra_info: Info = None, quick: bool = False) -> Verdict:
    """Verify a response without algebra. ``extra_info`` and ``quick`` are unused.

    The answer is read from the last ``<answer>`` tag, otherwise from the last box, otherwise from the text after the
    last "the answer is". The expression may contain the four operations, brackets and signs, and may end with ``=`` and
    the target. Anything else is ``unparsed``. ``boxed`` is true if the expression is in tags or a box.

    Raises ``ValueError`` if the ground truth has no numbers or no target.
    """
    target, numbers = read_truth(ground_truth)
    marked = extract_tagged(solution, "answer")
    marked = (extract_boxed(marked) or marked) if marked else extract_boxed(solution)
    answer = marked or extract_stated(solution)
    if answer is None:
        return Verdict(False, False, "missing")
    plain = "".join(" " if category(sign) == "Cf" else sign for sign in answer[: MAX_CHARS + 1].translate(_PLAIN))
    plain = _TIMES.sub(r"\1*", _LABEL.sub("", _WRAPPING.sub("", plain).strip()))
    # Remove the target and names, as in 4 * 6 = 24 or x = 4 * 6.
    sides = [side.strip() for side in _EQUALS.split(plain)]
    sides = [side for side in sides if not is_name(side.strip("{}"))]
    rest = [side for side in sides if plain_number(side.rstrip(")")) != target] or sides[:1]
    tokens = [tokenise(side) for side in rest if len(answer) <= MAX_CHARS]
    if not tokens or None in tokens or (len(rest) > 1 and any(map(str.isdigit, rest))):
        return Verdict(False, bool(marked), "unparsed", answer)
    # Check the numbers before evaluating, because this bounds the size of the result.
    if not any(uses(side or [], numbers) for side in tokens):
        return Verdict(False, bool(marked), "different", answer)
    try:
        correct = all(evaluate(side or []) == target for side in tokens)
    except (ValueError, SyntaxError):
        return Verdict(False, bool(marked), "unparsed", answer)
    except ZeroDivisionError:
        correct = False
    return Verdict(correct, bool(marked), "exact" if correct else "different", answer)


def uses(tokens: Iterable[str], numbers: list[int]) -> bool:
    """Return whether ``tokens`` contain each of ``numbers`` exactly once and no other number."""
    used = [token for token in tokens if token.isdigit()]
    short = [int(token) for token in used if len(token) <= len(str(MAX_NUMBER))]
    return Counter(short) == Counter(numbers) and len(used) == len(numbers)


class Problem(NamedTuple):
    """A parsed ground truth."""

    target: int
    numbers: list[int]


def read_truth(ground_truth: Any) -> Problem:
    """Parse ``{"target": 24, "numbers": [3, 3, 8, 8]}`` or its JSON text. Raises ``ValueError`` for other input."""
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            truth = None
    target, numbers = (truth.get("target"), truth.get("numbers")) if isinstance(truth, Mapping) else (None, None)
    entries = list(numbers) if isinstance(numbers, Iterable) and not isinstance(numbers, str | Mapping) else []
    goal, *integers = (_integer(number) for number in [target, *entries])
    valid = [number for number in integers if number is not None and number >= 0]
    if goal is None or not 1 <= len(valid) <= MAX_NUMBERS or len(valid) < len(entries):
        raise ValueError(
            f"{ground_truth!r:.200} must give a target and 1 to {MAX_NUMBERS} numbers, all whole and up to "
            f'{MAX_NUMBER:.0e}, for example {{"target": 24, "numbers": [3, 3, 8, 8]}}'
        )
    return Problem(goal, valid)


def _integer(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return number if number is not None and abs(number) <= MAX_NUMBER else None


def tokenise(expression: str) -> list[str] | None:
    """Split an expression into numbers, operators and brackets, inserting implicit ``*``. Return None if impossible."""
    for _ in range(MAX_NESTED):
        expression = _FRACTION.sub(r"((\1\2)/(\3\4))", expression)
    for command, sign in _COMMANDS.items():
        expression = expression.replace(command, sign)
    tokens = _TOKEN.findall(expression)
    if not tokens or sum(map(len, tokens)) + sum(map(str.isspace, expression)) < len(expression):
        return None
    pairs = zip(["+", *tokens], tokens, strict=False)
    return [part for before, token in pairs for part in (["*", token] if _is_product(before, token) else [token])]


def _is_product(before: str, token: str) -> bool:
    """Return whether multiplication is implied between two tokens, as in 4(6), (4)(6) and (4)6."""
    return (before[-1].isdigit() and token == "(") or (before == ")" and (token == "(" or token.isdigit()))


def evaluate(tokens: Iterable[str]) -> Fraction:
    """Evaluate a tokenised expression.

    Raises ``SyntaxError`` or ``ValueError`` for malformed expressions, and ``ZeroDivisionError`` on division by zero.
    """
    # Join with spaces, so that two "/" tokens do not become "//". Strip leading zeros, which Python rejects.
    source = " ".join(token.lstrip("0") or "0" if token.isdigit() else token for token in tokens)
    return _value(ast.parse(source, mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op, operand):
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left, op, right):
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not an expression of the four operations")
