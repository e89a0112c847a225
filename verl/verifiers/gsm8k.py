"""Verifier for GSM8K, whose answers are numbers, often with units."""

import re
import unicodedata
from decimal import Decimal

from verl.verifiers.answers import NUMBER, SEPARATORS, TAIL_CHARS, WIDE_DIGITS, extract_answer, quick_equal
from verl.verifiers.context import is_stated
from verl.verifiers.equations import is_name
from verl.verifiers.lexicon import SHORT_UNITS, UNITS, is_unit, modifiers_in, numerals_in, with_factors
from verl.verifiers.math import decide_math, same_measure
from verl.verifiers.numerals import WHOLE, in_digits
from verl.verifiers.verdict import Info, Verdict, decide

MAX_CHARS = 1000
"""Maximum length of answers that may contain words. Longer answers are compared only as mathematics."""

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
"""Pattern of a single letter that is not an English word."""

_DROPPED = {"So": set("➖➕✖➗❌❎🚫⛔✗✘👎"), "Pi": set(), "Pf": set()}
"""Unicode categories whose characters are removed, such as ticks and quotation marks. Maps each category to the
characters to keep."""

_VARIANTS = "\ufe0e\ufe0f\u20e3"
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:[ \u00a0\u202f][0-9]{3})+(?![0-9])")
_DASH = re.compile(r"\s[-–—]\s(?!(?:sin|cos|tan|log|sqrt)(?![A-Za-z]))(?=[A-Za-z]{3})")
"""Pattern of a dash before words, as in 18 - good luck."""

_THOUSANDS = re.compile("(?<=[0-9])k(?![A-Za-z])")
_REASON = re.compile(r",?\s(?:since|because|as|so|out\sof)\s|\s\([-0-9\s+*/×÷·=.$]{1,80}\)$")
"""Pattern of an explanation that follows a stated answer."""

_NUMERAL_BEFORE = re.compile(rf"(?<![A-Za-z-]){WHOLE}\W+(?:(?:or|to|from|and)\W+)?\Z", re.IGNORECASE)
_CHANGED_AFTER = re.compile(
    rf"\A[^\w(]*(?:(?:or|and|to|over|by)\W+)?{WHOLE}(?!-)|\A\s?(?:st|nd|rd|th)s?(?![A-Za-z])|\A\s*grand(?![A-Za-z])"
    rf"|(?:%|percent)\s+of\s+{WHOLE}(?!-)|\?(?=[^A-Za-z?]*+[A-Za-z])|(?<![A-Za-z])below\Z"
    r"|(?<![A-Za-z])is\s+(?:less|more|greater|smaller|larger|fewer|above|below|under|over)(?![A-Za-z])|\A[\s)\]}*]*!",
    re.IGNORECASE,
)
_CHANGING = re.compile(r"[万亿千百倍负不非半]")


_HUNDREDTHS = re.compile(
    r"(?:(?:\$([0-9]{1,9})|(?<![0-9.])([0-9]{1,9})\s{1,3}dollars?),?\s{1,3}(?:and\s{1,3})?)?(?<![0-9.])([0-9]{1,9}(?:\.[0-9]{1,9})?)"
    r"\s{0,3}(?:\\text\s?\{\s?)?(?:¢|\\cent|\\?%|(?:cents?|penn(?:y|ies)|percent)(?![A-Za-z]))",
    re.IGNORECASE,
)
"""Pattern of a percentage, or of an amount in cents that may follow an amount in dollars."""

_CENTS_IN_WORDS = re.compile(r"(?:[a-z]{1,9}[ -]){1,9}(?:cents?|penn(?:y|ies))(?![A-Za-z])", re.IGNORECASE)
_CONVERTED = re.compile(r"([^()]{1,60})\(([^()]{1,60})\)")
_RESTATED = re.compile(r"([0-9][0-9.,]{0,20})([^0-9()]{0,20})\s?\(\s?([0-9][0-9.,]{0,20})\s?\)")
_PRIME = re.compile("[0-9]\\s?\\^?\\{?\\s?(?:[\"'“”‘’′″]|\\\\prime)")
_QUOTED = re.compile("[\"'“”‘’]{1,2}[^\"'“”‘’]{1,99}[\"'“”‘’]{1,2}")


def verify_gsm8k(solution: str, ground_truth: str, extra_info: Info = None, quick: bool = False) -> Verdict | None:
    """Verify a response. Return None if ``quick`` is set and algebra is required. ``extra_info`` is unused.

    An answer that contains a single number with words around it, such as ``18 dollars``, is compared as that number.
    The number may be spelled out ("twelve"). Amounts in cents and percentages may also be interpreted as hundredths.
    """
    verdict = _verify(solution, ground_truth, quick)
    tail = _CENTS_IN_WORDS.sub(lambda match: in_digits(match[0]), solution[-TAIL_CHARS:])
    whole = solution[:-TAIL_CHARS] + _HUNDREDTHS.sub(
        lambda match: f"{Decimal(match[1] or match[2] or 0) + Decimal(match[3]) / 100:f} dollars", tail
    )
    if verdict is None or verdict.correct or whole == solution:
        return verdict
    second = _verify(whole, ground_truth, quick)
    return second if second is None or second.correct else verdict


def _extract(solution: str, ground_truth: str) -> tuple[str | None, bool]:
    """Extract the answer, and convert numbers that are spelled out to digits."""
    # A "!" after a box outside of mathematics is punctuation rather than a factorial.
    solution = re.sub(r"\}!(?!\s?(?:\$|\\[)\]]))", "}", solution)
    answer, boxed = extract_answer(solution, equation="=" in ground_truth)
    start = solution.rfind("####") + 4
    line = solution[start:].strip()
    plain = len(NUMBER.findall(line)) == 1 and "\\" not in line
    if not boxed and start > 3 and line and "\n" not in line and not plain:
        # The last line is the answer, even if it is not a plain number.
        answer = line if is_stated(solution, start, start) else None
    if answer is None:
        # The last number may be in words, but "one" has other meanings.
        answer, _ = extract_answer(in_digits(solution[-TAIL_CHARS:]))
        return (None if answer == "1" else answer), False
    if (
        len(answer) <= MAX_CHARS
        and not re.search("[0-9]", answer)
        or re.search("[0-9] and (?:an?|one|two|three) ", answer)
    ):
        return in_digits(answer), boxed
    return answer, boxed


def _verify(solution: str, ground_truth: str, quick: bool) -> Verdict | None:
    answer, boxed = _extract(solution, ground_truth)
    equal = quick_equal(answer or "", ground_truth)
    if not answer or equal is not None:
        return decide(answer, boxed, equal)
    if not boxed:
        reasoned = _REASON.split(answer, maxsplit=1)[0]
        answer = (reasoned if re.search("[0-9]", reasoned) else answer).rstrip("! ")
    answer = _THOUSANDS.sub(" thousand", answer)
    converted = _CONVERTED.fullmatch(answer)
    if converted and same_measure(converted[1], converted[2]):
        answer = converted[1]
    restated = _RESTATED.search(in_digits(answer[:MAX_CHARS]))
    if restated and len(NUMBER.findall(answer)) == 1:
        equal = quick_equal(restated[1], restated[3]) and quick_equal(restated[1], ground_truth)
        return decide(answer, boxed, equal is True)
    is_prime = _PRIME.search(answer) and not _PRIME.search(ground_truth) and not _QUOTED.search(answer)
    if numerals_in(answer) or is_prime or modifiers_in(answer) != modifiers_in(ground_truth):
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
    """Return the only number in an answer that may also contain a name, currency or words, such as ``x = $18``.

    Return None if the other characters may belong to a formula (``18x``, ``18 million``, ``-(18)``). Return an empty
    string if words change the number but would be ignored by algebra ("18 or nineteen").
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
    """Return whether a factor follows the number, as in ``18x`` and ``18k`` but not in ``18 m`` and ``18 a day``."""
    after = re.sub("(?<![A-Za-z])L(?![A-Za-z])", "l", after)
    words = _LETTERS.findall(after)
    if any(len(word) == 1 and word not in {"a", "A", *SHORT_UNITS} for word in words):
        return True
    attached = _LETTERS.match(after)
    if attached and len(attached.group()) <= 2 and attached.group().lower() not in UNITS:
        return True
    # In a text of several words, even a short token counts as a word.
    return len(words) == 1 and len(words[0]) <= 2 and not is_unit(words[0], short=True)
