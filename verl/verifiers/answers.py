"""Extracts the answer of a response, and compares answers where no algebra is needed.

Responses are hostile input: a policy under training writes megabytes of braces. Every function here takes time linear
in the length of the text, never raises, whatever the string, and never converts a long digit string to a number.
"""

import re
from collections import deque
from collections.abc import Hashable, Iterator
from decimal import Decimal
from typing import NamedTuple

from verl.verifiers.context import formula_before, in_place, is_one_number, is_stated
from verl.verifiers.equations import last_equation, leaves_open
from verl.verifiers.lexicon import plain_number

MAX_ALGEBRA_CHARS = 400
"""Longer answers are compared only as text; ground truths are much shorter."""

MAX_RAW_CHARS = 2000
"""The same for answers before presentation is removed, because algebra reads them whole."""

TAIL_CHARS = 4096
"""An unboxed answer is searched for in this many characters at the end of a response."""

DECIMAL_TOLERANCE = Decimal("1e-6")

SENTENCE_END = re.compile(r"\n|。|\.(?=\s|$)")
"""A full stop inside a number does not end a sentence."""

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)[ \t\n]*\{|\\[{}]|[{}]")
_AFTER_HASHES = re.compile(r"[\s$]*+(-?)\$?([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)[ \t.]*(?:\n|\Z)")
_ANSWER_IS = re.compile(r"answer[ \t]*(?:is|:|=)|答案[ \t]*(?:[是为][ \t]*[:：]?|[:：])", re.IGNORECASE)
_REJECTED = re.compile(r"(?:,\s|\s\()(?:and |but )?not\b")
"""After an answer: "18, not 17"."""

_NEGATIVE = re.compile(r"\A(?:negative|minus)\s{1,3}(?=[$0-9])", re.IGNORECASE)
NUMBER = re.compile(
    r"(?<![0-9.])(?:(?<![0-9A-Za-z_)])-)?(?:[0-9]{1,3}(?:\{?,\}?[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
WIDE_DIGITS = {0xFF10 + digit: str(digit) for digit in range(10)}
SEPARATORS = str.maketrans("", "", "{},")
"""Removes the separators of thousands from what ``NUMBER`` matches."""

_IGNORED = re.compile(
    # A decimal comma is not ignored, nor is any space between two digits.
    r"\\left(?![a-zA-Z])|\\right(?![a-zA-Z])|\\[!,;: ]|\\?\$|\{,\}(?=[0-9]{3}(?![0-9]))|~"
    r"|(?<![0-9\s])\s+|(?<=[0-9])\s++(?![0-9])"
)
_FRACTION = re.compile(r"\\[dt]frac(?![a-zA-Z])")

_STRUCK = re.compile(
    r"(?<![^\s(>*:])~~(?=\S)[^~]{1,400}~~(?![A-Za-z0-9\\])|<(del|strike)>[^<]{0,400}</\1>"
    r"|\\(?:[bx]?cancel|sout)\s?\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,99}+\}){0,99}+\}){0,400}+\}",
)
"""Text that an author has struck through. Two ``~`` between formulas are spaces."""

THINK, END_OF_THINK = "<think>", "</think>"
"""Between them reasoning models think. Templates may write the first at the end of the prompt."""


def after_thinking(text: str) -> str:
    """Return the part of a response that is graded: after its last ``</think>``, or all of it without thoughts.

    Text that is struck through is left out.

    Empty if the last thought does not end, so that such a response has no answer.
    """
    end = text.rfind(END_OF_THINK)
    rest = text if end < 0 else text[end + len(END_OF_THINK) :]
    return "" if THINK in rest else _STRUCK.sub(" ", rest)


def extract_answer(text: str, equation: bool = False) -> tuple[str | None, bool]:
    """Return the answer of a response, and whether it was in a box.

    The first that exists of: the last box; the number after the last ``####``; the rest of the sentence after the last
    "answer is" (or "answer:", 答案是); the last number. None if none of them does. A box and a number come with what
    changes their meaning where they stand: -5 for ``-\\boxed{5}``, ``5 million`` for "it costs 5 million". With
    ``equation``, for a truth like ``x = 5``, the last number comes with the equation that it ends: the 5 of ``2x = 5``
    alone would be right.
    """
    boxed = boxed_in_place(text)
    if boxed is not None:
        return boxed, True
    answer = extract_gsm8k(text)
    if answer is None:
        answer = extract_stated(text) if _ANSWER_IS.search(text[-TAIL_CHARS:]) else extract_number(text, equation)
    return answer, False


def extract_number(text: str, equation: bool = False) -> str | None:
    """Return the last number of the final ``TAIL_CHARS`` characters, with signs and words that change its meaning.

    None if there is none, or if it is not stated (``is_stated``, ``is_one_number``).
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
    return in_place(tail, start, end, number[0].group().translate(SEPARATORS))


class Box(NamedTuple):
    """Position of a ``\\boxed{...}`` in a text."""

    start: int
    content: int
    """Start of its content."""
    end: int
    """One past its closing brace."""


def boxes_in(text: str) -> Iterator[Box]:
    """Every ``\\boxed{...}`` (or ``\\fbox``, ``\\framebox``) whose braces balance, in the order in which they close."""
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
    """Return the content of the last balanced ``\\boxed{...}`` (or ``\\fbox``, ``\\framebox``), stripped.

    None if blank or absent.

    Of nested boxes the innermost counts, because it starts last.
    """
    box = max(boxes_in(text), default=None)
    return text[box.content : box.end - 1].strip() or None if box else None


def boxed_in_place(text: str) -> str | None:
    """As ``extract_boxed``, with what changes its meaning there (``in_place``)."""
    box = max(boxes_in(text), default=None)
    content = text[box.content : box.end - 1].strip() if box else ""
    return in_place(text, box.start, box.end, content, boxed=True) if box and content else None


def extract_gsm8k(text: str) -> str | None:
    """Return the number after the last ``####``, without thousands separators; None if there is none.

    It must be alone on its line, because Markdown headings such as ``#### 2. Solve for x`` begin the same way.
    """
    position = text.rfind("####")
    if position < 0:
        return None
    match = _AFTER_HASHES.match(text[position + 4 : position + 4 + TAIL_CHARS].translate(WIDE_DIGITS))
    return match.group(1) + match.group(2).replace(",", "") if match else None


def extract_stated(text: str) -> str | None:
    """Return the rest of the sentence after the last "answer is" (or "answer:") of the final ``TAIL_CHARS`` characters.

    None if blank or absent.
    """
    tail = text[-TAIL_CHARS:]
    stated = deque(_ANSWER_IS.finditer(tail), maxlen=1)
    if not stated:
        return None
    start = end = stated[0].end()
    answer = SENTENCE_END.split(tail[end:].lstrip(" \t\n:=*"), maxsplit=1)[0]
    if not is_stated(tail, start, end):
        return None
    return _NEGATIVE.sub("-", _REJECTED.split(answer, maxsplit=1)[0].strip().strip(" \t:=*").strip()) or None


def extract_tagged(text: str, tag: str) -> str | None:
    """Return the content of the last closed ``<tag>``, stripped; None if blank or absent."""
    start = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
    if start < 0:
        return None
    start += len(tag) + 2
    return text[start : text.find(f"</{tag}>", start)].strip() or None


def normalise(answer: str) -> str:
    """``answer`` without presentation.

    Removes whitespace except between digits, dollar signs, LaTeX spacing and ``{,}``, ``\\left`` and ``\\right``, a
    final full stop and a final percent sign; ``\\dfrac`` and ``\\tfrac`` become ``\\frac``.
    """
    text = _FRACTION.sub(r"\\frac", _IGNORED.sub("", answer)).rstrip(".")
    return text.removesuffix("%").removesuffix("\\")


def vote_key(answer: str) -> Hashable:
    """Return a key that equivalent answers share: the value of a plain number, otherwise the normalised text."""
    text = normalise(answer.strip())
    number = plain_number(text)
    return text if number is None else number


def quick_equal(answer: str, ground_truth: str) -> bool | None:
    """Whether the two are equal as text or as plain numbers; None if that does not decide it.

    Integers must be equal exactly. With a fractional part on either side, the tolerance is a millionth of the smaller
    of the ground truth and 1.
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
