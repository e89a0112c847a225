"""Verifier for GSM8K, whose answers are numbers, often with units."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from verl.verifiers.answers import NUMBER, SEPARATORS, WIDE_DIGITS, extract_answer, quick_equal
from verl.verifiers.equations import is_name
from verl.verifiers.lexicon import SHORT_UNITS, UNITS, is_unit, modifiers_in, numerals_in, with_factors
from verl.verifiers.math import decide_math
from verl.verifiers.verdict import Verdict, decide

MAX_CHARS = 1000
"""Maximum answer length; longer answers are only compared as mathematics."""

_WRAPPER = re.compile(
    r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf|mbox|boldsymbol|bm|underline)\s{0,3}(?=\{)|\\(?:text)?color\{[a-z]{1,12}\}"
    r"|\\(?:left|right|bf|rm|displaystyle|large|Large|huge|q?quad|checkmark|approx)(?![A-Za-z])"
    r"|\\[!,;: ()\[\]]|\\(?=[$%&])"
    r"|[≈`]|(?<=[a-z][a-z])[²³]|(?<=°)\s?[CF](?![A-Za-z])"
)
_BEFORE = re.compile(r"[A-Za-zÀ-ɏ\u4e00-\u9fff\s$£€¥:,.*_~'\"()\[{}-]*\+?")
_AFTER = re.compile(r"[A-Za-zÀ-ɏ\u4e00-\u9fff\s$£€¥:,.*_~'\")\]}{%°/?&(-]*!?")
_HYPHEN = re.compile(r"(?<![A-Za-z0-9])-|-(?![A-Za-z])")
_LETTERS = re.compile(r"[A-Za-z]+")
_SINGLE = re.compile(r"(?<![A-Za-z'])(?![aAI]\s+[A-Za-z])[A-Za-z](?![A-Za-z'])")
"""A single letter that is not an English word."""

_DROPPED = {"So": set("➖➕✖➗❌❎🚫⛔✗✘👎"), "Pi": set(), "Pf": set()}
"""Unicode category of insignificant characters, such as ticks and quotation marks -> its exceptions."""

_VARIANTS = "\ufe0e\ufe0f\u20e3"
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:[ \u00a0\u202f][0-9]{3})+(?![0-9])")
_DASH = re.compile(r"\s[-–—]\s(?!(?:sin|cos|tan|log|sqrt)(?![A-Za-z]))(?=[A-Za-z]{3})")
"""A dash before words, as in 18 - good luck."""

_THOUSANDS = re.compile("(?<=[0-9])k(?![A-Za-z])")
_REASON = re.compile(r",?\s(?:since|because|as|so)\s|\s\([-0-9\s+*/×÷·=.$]{1,80}\)$")
"""An explanation that follows a stated answer."""

_NUMERAL = (
    "(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    "|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|billion|dozen)"
)
_NUMERAL_BEFORE = re.compile(rf"(?<![A-Za-z-]){_NUMERAL}\W+(?:(?:or|to|from|and)\W+)?\Z", re.IGNORECASE)
_CHANGED_AFTER = re.compile(
    rf"\A[^\w(]*(?:(?:or|and|to|over|by)\W+)?{_NUMERAL}(?![A-Za-z-])|\A\s?(?:st|nd|rd|th)s?(?![A-Za-z])|\A\s*grand(?![A-Za-z])"
    rf"|(?:%|percent)\s+of\s+{_NUMERAL}(?![A-Za-z-])|\?(?=[^A-Za-z?]*+[A-Za-z])|(?<![A-Za-z])below\Z"
    r"|(?<![A-Za-z])is\s+(?:less|more|greater|smaller|larger|fewer|above|below|under|over)(?![A-Za-z])|\A[\s)\]}*]*!",
    re.IGNORECASE,
)
_CHANGING = re.compile(r"[万亿千百倍负不非半]")


def verify_gsm8k(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """Verify a response. With ``quick``, return None if this requires algebra. ``extra_info`` is unused.

    If words surround the only number of an answer, as in ``18 dollars``, the answer is compared as that number.
    """
    answer, boxed = extract_answer(solution, equation="=" in ground_truth)
    equal = quick_equal(answer or "", ground_truth)
    if not answer or equal is not None:
        return decide(answer, boxed, equal)
    if not boxed:
        reasoned = _REASON.split(answer, maxsplit=1)[0]
        answer = (reasoned if re.search("[0-9]", reasoned) else answer).rstrip("! ")
    answer = _THOUSANDS.sub(" thousand", answer)
    if numerals_in(answer) or modifiers_in(answer) != modifiers_in(ground_truth):
        return decide(answer, boxed, False)
    number = _only_number(answer)
    if number is not None:
        return decide(answer, boxed, quick_equal(number, ground_truth) is True)
    if "=" in answer:
        # Algebra checks the left side of an equation like 3 * 6 = 18 dollars.
        sides, _, last = answer.rpartition("=")
        number = _only_number(last) if re.search("[0-9]", sides) else None
        answer = answer if not number else f"{_WRAPPER.sub('', sides).replace('$', '')}={number}"
    return decide_math(answer, boxed, ground_truth, quick)


def _only_number(answer: str) -> str | None:
    """Return the only number of an answer with a name, currency or words, such as ``x = $18`` or ``18 dollars``.

    Return None if other characters may belong to a formula (``18x``, ``18 million``, ``-(18)``). Return an empty string
    if words that algebra would ignore change the number ("18 or nineteen").
    """
    if len(answer) > MAX_CHARS:
        return None
    text = "".join(map(_plain, _WRAPPER.sub("", answer).translate(WIDE_DIGITS)))
    text = _SPACED.sub(lambda match: "".join(re.findall("[0-9]", match[0])), text)
    numbers = list(NUMBER.finditer(text))
    if len(numbers) != 1 or with_factors(answer) != answer or with_factors(text) != text or _CHANGING.search(text):
        return None
    before, after = text[: numbers[0].start()], _DASH.sub(" ", text[numbers[0].end() :])
    name, is_equation, before = before.rpartition("=")
    if is_equation and name.strip() and not is_name(name):
        return None
    if not _BEFORE.fullmatch(before) or not _AFTER.fullmatch(after):
        return None
    if _NUMERAL_BEFORE.search(before) or _CHANGED_AFTER.search(after):
        return ""
    # A hyphen between words is not a minus.
    if _HYPHEN.search(before) or _HYPHEN.search(after[1:] if re.match("-[A-Za-z]", after) else after):
        return None
    if before[-1:].isalpha() or _SINGLE.search(before):
        return None
    if _keeps_variable(after):
        return None
    return numbers[0].group().translate(SEPARATORS)


def _plain(sign: str) -> str:
    """Replace a currency sign with a dollar sign, and an insignificant character with an empty string."""
    category = unicodedata.category(sign)
    if category == "Sc":
        return "$"
    return "" if sign in _VARIANTS or (category in _DROPPED and sign not in _DROPPED[category]) else sign


def _keeps_variable(after: str) -> bool:
    """Whether a factor follows the number, as in ``18x`` and ``18k``, but not in ``18 m`` and ``18 a day``."""
    after = re.sub("(?<![A-Za-z])L(?![A-Za-z])", "l", after)
    words = _LETTERS.findall(after)
    if any(len(word) == 1 and word not in {"a", "A", *SHORT_UNITS} for word in words):
        return True
    attached = _LETTERS.match(after)
    if attached and len(attached.group()) <= 2 and attached.group().lower() not in UNITS:
        return True
    # In a text of several words, even a short token counts as a word.
    return len(words) == 1 and len(words[0]) <= 2 and not is_unit(words[0], short=True)
