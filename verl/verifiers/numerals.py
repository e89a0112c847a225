"""Parses numbers in English words, such as "twelve", "three hundred and five", "two and a half", "half a dozen"."""

import re
from fractions import Fraction

from verl.verifiers.lexicon import FACTORS, WORDS, plain_number

_NUMBERS = {word: Fraction(value) for value, word in enumerate(WORDS["numerals"]["small"].split())}
_NUMBERS |= {word: Fraction(10 * value) for value, word in enumerate(WORDS["numerals"]["tens"].split(), 2)}
_FACTORS = FACTORS | {
    word: Fraction(value) for value, words in WORDS["numerals"]["parts"].items() for word in words.split()
}

WHOLE = rf"(?:{'|'.join([*_NUMBERS, 'dozen|hundred|thousand|million|billion'])})(?![A-Za-z])"
_WORD = rf"(?:{'|'.join(_NUMBERS)}|(?:{'|'.join(filter(str.isascii, _FACTORS))})s?)(?![A-Za-z])"
_NUMERAL = re.compile(
    r"(?<![A-Za-z0-9.])(?<![A-Za-z0-9]-)(?:(minus\s|negative\s|-)\s{0,3})?"
    rf"((?:(?:an?\s{{1,3}})?{_WORD}|[0-9][0-9.,]{{0,20}}(?=\s{{1,3}}and\s))"
    rf"(?:[\s-]{{1,3}}(?:{_WORD}|(?:an?|and)(?![A-Za-z]))){{0,12}}+)",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    """Convert numbers in words to digits: "two and a half dozen eggs" becomes "30 eggs"."""
    return _NUMERAL.sub(_digits, text)


def _digits(match: re.Match[str]) -> str:
    number, rest = re.fullmatch(r"(.*?)((?:[\s-]+(?:an?|and))*)", match[2], re.DOTALL | re.I).groups()  # type: ignore[union-attr]
    value = _value(re.split(r"[\s-]+", number.lower()))
    if value is None:
        return match[0]
    return "-" * bool(match[1]) + (str(value) if value.denominator == 1 else f"{float(value):.12g}") + rest


def _value(words: list[str]) -> Fraction | None:
    """Return the value of a number in words, or None if the words are not a single number, as in "two three"."""
    total = before = Fraction(0)  # Completed thousands; what stands before an "and".
    current: Fraction | None = None
    for word in words:
        number, factor = (
            _NUMBERS.get(word, plain_number(word)),
            _FACTORS.get(word, _FACTORS.get(word.removesuffix("s"))),
        )
        if word == "and":
            before, current = before + (current or 0), None
        elif word in ("a", "an"):
            current = current or Fraction(1)
        elif number is not None:
            # 20 + 1 and 300 + 45, but not "two three".
            if current and current % (10 if number < 10 else 100) != 0 or current in range(1, 20):
                return None
            current = (current or 0) + Fraction(number)
        elif factor is None:
            return None
        elif factor < 1:
            current = (1 if current is None else current) * factor
        else:
            before, current = Fraction(0), (before + (1 if current is None and not before else current or 0)) * factor
            if current >= 1000:
                total, current = total + current, None
    return total + before + (current or 0)
