"""Numbers in English words, such as "twelve", "three hundred and five", "two and a half" and "half a dozen"."""

import re
from fractions import Fraction

from verl.verifiers.lexicon import FACTORS, plain_number

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMBERS = {word: Fraction(value) for value, word in enumerate(_SMALL.split())}
_NUMBERS |= {word: Fraction(10 * value) for value, word in enumerate(_TENS.split(), 2)}
_PARTS = {word: value for word, value in FACTORS.items() if value < 1} | {"half": Fraction(1, 2)}
_PARTS |= {word: Fraction(1, 4) for word in ("quarter", "fourth")}
_GROUPS = {word: value for word, value in FACTORS.items() if value >= 12 and word.isascii()} | {"score": Fraction(20)}
_GROUPS |= dict.fromkeys(("couple", "pair"), Fraction(2))

WHOLE = rf"(?:{'|'.join([*_NUMBERS, 'dozen|hundred|thousand|million|billion'])})(?![A-Za-z])"
_WORD = (
    rf"(?:{'|'.join([*_NUMBERS, *_GROUPS, 'halves'])}|(?:{'|'.join(_PARTS)})s?|(?:{'|'.join(_GROUPS)})s)(?![A-Za-z])"
)
_STEP = rf"(?:{_WORD}|(?:an?|and)(?![A-Za-z]))"
_NUMERAL = re.compile(
    rf"(?<![A-Za-z0-9.])(?<![A-Za-z0-9]-)(?:(minus\s|negative\s|-)\s{{0,3}})?"
    rf"((?:an?\s{{1,3}})?{_WORD}|[0-9][0-9.,]{{0,20}}(?=\s{{1,3}}and\s))((?:[\s-]{{1,3}}{_STEP}){{0,12}}+)",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    """Replace numbers in words with digits: "two and a half dozen eggs" becomes "30 eggs"."""
    return _NUMERAL.sub(_digits, text)


def _digits(match: re.Match[str]) -> str:
    words = re.split(r"[\s-]+", match[2] + match[3])
    end = len(words)
    while words[end - 1].lower() in ("a", "an", "and"):
        end -= 1
    value = _value(words[:end])
    if value is None:
        return match[0]
    number = str(value) if value.denominator == 1 else f"{float(value):.12g}"
    return " ".join(["-" * bool(match[1]) + number, *words[end:]])


def _value(words: list[str]) -> Fraction | None:
    """Return the value of a number in words, or None if the words are not one number, as in "two three"."""
    total = before = Fraction(0)  # Completed thousands; what stands before an "and".
    current: Fraction | None = None
    for word in map(str.lower, words):
        single = word.removesuffix("s")
        number = _NUMBERS.get(word, plain_number(word))
        if word == "and":
            before, current = before + (current or 0), None
        elif word in ("a", "an"):
            current = current or Fraction(1)
        elif number is not None:
            # 20 + 1 and 300 + 45, but not "two three".
            if current and current % (10 if number < 10 else 100) != 0 or current in range(1, 20):
                return None
            current = (current or 0) + Fraction(number)
        elif single in _GROUPS:
            current = (before + (1 if current is None and not before else current or 0)) * _GROUPS[single]
            before = Fraction(0)
            if current >= 1000:
                total, current = total + current, None
        else:
            part = _PARTS.get("half" if word == "halves" else single)
            if part is None:
                return None
            current = (1 if current is None else current) * part
    return total + before + (current or 0)
