"""Extracts answers from responses and compares them with ground truths without algebra.

Responses are untrusted input: a policy in training may write megabytes of braces. Functions in this module therefore
run in linear time, never raise, and never convert long digit strings to numbers.
"""

import re
from collections import deque
from collections.abc import Hashable, Iterator
from decimal import Decimal
from typing import NamedTuple

from verl.verifiers.context import formula_before, is_one_number, is_stated, with_context
from verl.verifiers.equations import last_equation, leaves_open
from verl.verifiers.lexicon import plain_number

MAX_ALGEBRA_CHARS = 400
"""Maximum length of answers that are compared algebraically. Longer answers are compared only as text."""

MAX_RAW_CHARS = 2000
"""Maximum length, before normalisation, of answers that are compared algebraically. The original text is parsed."""

TAIL_CHARS = 4096
"""Number of characters at the end of a response that are searched for an unboxed answer."""

DECIMAL_TOLERANCE = Decimal("1e-6")

SENTENCE_END = re.compile(r"\n|。|\.(?=\s|$)")
"""Pattern of the end of a sentence. A full stop inside a number does not match."""

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)[ \t\n]*\{|\\[{}]|[{}]")
_AFTER_HASHES = re.compile(r"[\s$]*+(-?)\$?([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)[ \t.]*(?:\n|\Z)")
_ANSWER_IS = re.compile(r"answer[ \t]*(?:is|:|=)|答案[ \t]*(?:[是为][ \t]*[:：]?|[:：])", re.IGNORECASE)
_REJECTED = re.compile(r"(?:,\s|\s\()(?:and |but )?not\b")
"""Pattern of a rejected alternative that follows an answer, as in "18, not 17"."""

_NEGATIVE = re.compile(r"\A(?:negative|minus)\s{1,3}(?=[$0-9])", re.IGNORECASE)
NUMBER = re.compile(
    r"(?<![0-9.])(?:(?<![0-9A-Za-z_)])-)?(?:[0-9]{1,3}(?:\{?,\}?[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
WIDE_DIGITS = {0xFF10 + digit: str(digit) for digit in range(10)}
SEPARATORS = str.maketrans("", "", "{},")
"""Translation table that removes thousands separators from a match of ``NUMBER``."""

_IGNORED = re.compile(
    # Keep decimal commas and spaces between digits.
    r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!,;: ]|\\?\$|\{,\}(?=[0-9]{3}(?![0-9]))|~"
    r"|(?<![0-9\s])\s+|(?<=[0-9])\s++(?![0-9])"
)
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")

_STRUCK = re.compile(
    r"(?<![^\s(>*:])~~(?=\S)[^~]{1,400}~~(?![A-Za-z0-9\\])|<(del|strike)>[^<]{0,400}</\1>"
    r"|\\(?:[bx]?cancel|sout)\s?\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,99}+\}){0,99}+\}){0,400}+\}",
)
"""Pattern of struck-through text. ``~~`` between LaTeX formulas does not match, because it is spacing."""

THINK, END_OF_THINK = "<think>", "</think>"
"""Tags around a reasoning model's thoughts. Chat templates may put the opening tag at the end of the prompt."""


def after_thinking(text: str) -> str:
    """Return the part of a response to grade: the text after the last ``</think>``, without struck-through text.

    A response without thoughts is graded as a whole. The result is empty if the last ``<think>`` is not closed.
    """
    end = text.rfind(END_OF_THINK)
    rest = text if end < 0 else text[end + len(END_OF_THINK) :]
    return "" if THINK in rest else _STRUCK.sub(" ", rest)


def extract_answer(text: str, equation: bool = False) -> tuple[str | None, bool]:
    """Return a response's answer (None if absent) and whether it was in a box.

    In order of preference, the answer is the content of the last box, the number after the last ``####``, the rest of
    the sentence after the last "answer is" (or "answer:", 答案是), or the last number. Context that changes the value
    is added: ``-\\boxed{5}`` yields -5, and "it costs 5 million" yields ``5 million``. If ``equation`` is set, the last
    number includes its equation, so that ``2x = 5`` does not match the ground truth ``x = 5``.
    """
    boxed = boxed_with_context(text)
    if boxed is not None:
        return boxed, True
    answer = extract_gsm8k(text)
    if answer is None:
        answer = extract_stated(text) if _ANSWER_IS.search(text[-TAIL_CHARS:]) else extract_number(text, equation)
    return answer, False


def extract_number(text: str, equation: bool = False) -> str | None:
    """Return the last number in the final ``TAIL_CHARS`` characters, with context that changes its value.

    Return None if there is no number or if it is not stated as the answer (``is_stated``, ``is_one_number``).
    """
    tail = text[-TAIL_CHARS:].translate(WIDE_DIGITS)
    number = deque(NUMBER.finditer(tail), maxlen=1)
    if not number:
        return None
    start, end = number[0].span()
    formula = formula_before(tail, start, end)
    if not is_stated(tail, start, end) or not (formula or is_one_number(tail, start, end)):
        return None
    if formula and not re.search("[A-Za-z]", formula):
        return f"{formula} = {number[0].group()}"
    chain = last_equation(tail, end)
    if chain and (equation or leaves_open(tail[:end], chain)):
        return chain
    return with_context(tail, start, end, number[0].group().translate(SEPARATORS))


class Box(NamedTuple):
    """Position of a ``\\boxed{...}`` in a text."""

    start: int
    content: int
    """Start index of the content."""
    end: int
    """Index after the closing brace."""


def boxes_in(text: str) -> Iterator[Box]:
    """Yield each balanced ``\\boxed{...}`` (or ``\\fbox``, ``\\framebox``), in the order of their closing braces."""
    open_braces: list[re.Match[str] | None] = []
    for token in _BOX_OR_BRACE.finditer(text):
        symbol = token.group()
        if symbol == "{":
            open_braces.append(None)
        elif symbol == "}":
            opening = open_braces.pop() if open_braces else None
            if opening is not None:
                yield Box(opening.start(), opening.end(), token.end())
        elif len(symbol) > 2:
            open_braces.append(token)


def extract_boxed(text: str) -> str | None:
    """Return the stripped content of the box that starts last, or None if it is blank or there is no box."""
    box = max(boxes_in(text), default=None)
    return text[box.content : box.end - 1].strip() or None if box else None


def boxed_with_context(text: str) -> str | None:
    """Return the content of the last box with context that changes its value (see :func:`with_context`)."""
    box = max(boxes_in(text), default=None)
    content = text[box.content : box.end - 1].strip() if box else ""
    return with_context(text, box.start, box.end, content, boxed=True) if box and content else None


def extract_gsm8k(text: str) -> str | None:
    """Return the number after the last ``####`` without thousands separators, or None if there is no such number.

    The rest of the line must be empty, unlike in Markdown headings such as ``#### 2. Solve for x``.
    """
    position = text.rfind("####")
    if position < 0:
        return None
    match = _AFTER_HASHES.match(text[position + 4 : position + 4 + TAIL_CHARS].translate(WIDE_DIGITS))
    return match.group(1) + match.group(2).replace(",", "") if match else None


def extract_stated(text: str) -> str | None:
    """Return the rest of the sentence after the last "answer is" (or "answer:"), or None if blank or absent.

    Only the final ``TAIL_CHARS`` characters are searched.
    """
    tail = text[-TAIL_CHARS:]
    matches = deque(_ANSWER_IS.finditer(tail), maxlen=1)
    if not matches:
        return None
    start = end = matches[0].end()
    answer = SENTENCE_END.split(tail[end:].lstrip(" \t\n:=*"), maxsplit=1)[0]
    if not is_stated(tail, start, end):
        return None
    return _NEGATIVE.sub("-", _REJECTED.split(answer, maxsplit=1)[0].strip().strip(" \t:=*").strip()) or None


def extract_tagged(text: str, tag: str) -> str | None:
    """Return the stripped content of the last closed ``<tag>``, or None if blank or absent."""
    start = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
    if start < 0:
        return None
    start += len(tag) + 2
    return text[start : text.find(f"</{tag}>", start)].strip() or None


def normalise(answer: str) -> str:
    """Normalise the notation of an answer.

    Remove dollar signs, LaTeX spacing, ``{,}``, ``\\left``, ``\\right``, a final full stop, a final percent sign, and
    whitespace that is not between digits. Replace ``\\dfrac`` and ``\\tfrac`` with ``\\frac``.
    """
    text = _FRACTION.sub(r"\\frac", _IGNORED.sub("", answer)).rstrip(".")
    return text.removesuffix("%").removesuffix("\\")


def vote_key(answer: str) -> Hashable:
    """Return a key that identifies equivalent answers: the value of a plain number, or else the normalised text."""
    text = normalise(answer.strip())
    number = plain_number(text)
    return text if number is None else number


def quick_equal(answer: str, ground_truth: str) -> bool | None:
    """Return whether answer and ground truth are equal as text or as plain numbers, or None if undecided.

    Integers must match exactly. If either number has a fractional part, the tolerance is 1e-6 times the absolute ground
    truth, but at most 1e-6.
    """
    a, b = normalise(answer), normalise(ground_truth)
    if a == b:
        return a != ""
    x, y = plain_number(a), plain_number(b)
    if x is not None and y is not None:
        if x == x.to_integral_value() and y == y.to_integral_value():
            return x == y
        return abs(x - y) <= DECIMAL_TOLERANCE * min(Decimal(1), abs(y))
    if not a or not b or len(a) > MAX_ALGEBRA_CHARS or len(b) > MAX_ALGEBRA_CHARS or len(answer) > MAX_RAW_CHARS:
        return False
    return None
